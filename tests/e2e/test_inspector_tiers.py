"""The tiers of the inspector: the one that is wanted is the one that is there, and the weak one is never wrong the dear way."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.inspector import REST, Driver
from bench.operations import OPERATIONS
from e2e.box import Box, eventually
from e2e.leaks import clear
from e2e.roots import lean_root

import crab
from crab.daemon import requests as ask
from crab.daemon.service import Service
from crab.host import bpf, kernel_trials
from crab.model import Decision

pytestmark = [pytest.mark.kernel, pytest.mark.criu]
IMAGE = "lean"


def reasons(decision: Decision | None) -> str:
    assert decision is not None
    return "; ".join((*decision.reasons, *decision.notes))


@pytest.fixture(scope="module")
def folder(service: Service, image: str, state_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A state directory beside that of the other tests, whose owner has its tier already; with an image of Python and little else."""
    path, root = state_dir.parent / f"{state_dir.name}-other", tmp_path_factory.mktemp("other") / "root"
    lean_root(service._core.images.path(image), root)
    clear(path)
    with Service.open(path) as first:
        first.handle(ask.ImageAdd(name=IMAGE, source=f"dir:{root}"))
        first.close_down()
    yield path
    clear(path)


def closed(service: Service) -> None:
    for sandbox in service.handle(ask.SandboxList()):
        service.handle(ask.Remove(sandbox=sandbox.name, force=True))
    service.close_down()


@pytest.fixture
def weak(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Box]:
    """A sandbox that is watched by tier C."""
    monkeypatch.setenv("CRAB_INSPECTOR", "C")
    service = Service.open(folder)
    try:
        assert service._core.inspector.tier == "C", service._core.inspector.why_not
        service.handle(ask.Create(image=IMAGE, name="weak"))
        yield Box(service, "weak")
    finally:
        closed(service)


def mapping(access: str, more: str = "") -> str:
    """A program that maps a file and reads it."""
    source = (
        f"import mmap; f = open('/root/kept', 'r+b'); m = mmap.mmap(f.fileno(), 4, access=mmap.{access}); m[0]; {more}"
    )
    return f'python3 -c "{source}"'


@pytest.mark.parametrize(
    ("script", "kind", "said"),
    [
        ("ls -R /etc; cat /etc/passwd | grep root; find /usr -maxdepth 2 >/dev/null", "none", "no file"),
        ("for i in $(seq 20); do /bin/true; done", "none", "no file"),
        ("python3 -c 'import json, sqlite3'", "none", "no file"),
        ("rmdir /root/nothing; chmod 600 /root/nothing; : </root/nothing", "none", "no file"),
        ("touch /root/kept", "files", "something was written"),
        ("echo >/root/new", "files", "something was written"),
        ("echo >>/root/kept", "files", "something was written"),
        ("mkdir /root/folder", "files", "names or attributes were set"),
        ("mv /root/kept /root/moved", "files", "names or attributes were set"),
        ("chmod 600 /root/kept", "files", "names or attributes were set"),
        (mapping("ACCESS_READ"), "full", "mapped to be written"),
        (mapping("ACCESS_WRITE", "m[0] = 121"), "full", "mapped to be written"),
        (mapping("ACCESS_COPY", "m[0] = 121"), "none", "no file"),
    ],
)  # fmt: skip
def test_tier_c_goes_by_what_was_called(weak: Box, script: str, kind: str, said: str) -> None:
    weak.run("echo one >/root/kept")
    weak.checkpoint()
    weak.result(script)
    made = weak.checkpoint()
    assert made.kind == kind, reasons(made.decision)
    assert said in reasons(made.decision)
    assert weak.checkpoint().kind == "none", "the next turn starts from there"


def test_tier_c_captures_the_processes_too_if_it_does_not_know_which_file_changed(weak: Box) -> None:
    weak.background("exec sleep 100000")
    weak.checkpoint()
    eventually(lambda: weak.checkpoint().kind == "none", "rest")
    weak.run("echo >/root/new")
    made = weak.checkpoint()
    assert made.kind == "full", reasons(made.decision)
    assert "may have a file open" in reasons(made.decision)


def test_tier_c_survives_a_rewind(weak: Box) -> None:
    weak.run("echo one >/root/kept")
    first = weak.checkpoint()
    weak.run("echo two >/root/kept")
    assert weak.checkpoint().kind == "files"
    weak.rewind(first.id)
    assert weak.read("/root/kept") == "one\n"
    weak.checkpoint()
    assert weak.checkpoint().kind == "none"
    weak.run("echo three >/root/kept")
    assert weak.checkpoint().kind != "none"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tier_c_never_takes_a_changed_file_for_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operation on files, each as a turn of its own."""
    monkeypatch.setenv("CRAB_INSPECTOR", "C")
    closed_first = Service.open(folder)
    closed_first.close()
    missed: list[str] = []
    done = 0
    with crab.Host(str(folder)) as host, host.create(image=IMAGE) as sandbox:
        driver = Driver(sandbox)
        for one in [one for one in OPERATIONS if one.kind == "files" and one.changes]:
            said = driver.say(f"prepare {one.name}")
            if said == "ok":
                sandbox.checkpoint(policy="always", durable=False)
                time.sleep(REST)
                said = driver.say("act")
            if said == "ok":
                decision = sandbox.explain()
                assert decision.tier == "C"
                done += 1
                if decision.kind not in ("files", "full"):
                    missed.append(f"{one.name}: {decision.kind}, {reasons(decision)}")
            driver.say("close")
    closed(Service.open(folder))
    assert not missed, "\n".join(missed)
    assert done > 60


def test_a_tier_that_does_not_load_is_refused_with_the_reason(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    why = kernel_trials.inspector_tiers()["A"]
    if not why:
        pytest.skip("tier A loads here")
    monkeypatch.setenv("CRAB_INSPECTOR", "A")
    service = Service.open(folder)
    try:
        service.handle(ask.Create(image=IMAGE, name="blind"))
        box = Box(service, "blind")
        box.checkpoint()
        made = box.checkpoint()
        assert made.kind == "full" and f"tier A: {why}" in reasons(made.decision), reasons(made.decision)
    finally:
        closed(service)


def test_a_tier_that_does_not_exist_is_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRAB_INSPECTOR", "Z")
    service = Service.open(folder)
    try:
        assert not service._core.inspector.tier
        assert "there is no tier Z" in service._core.inspector.why_not
    finally:
        closed(service)


def test_a_lower_tier_ends_when_nobody_wants_it_any_more(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    best = next(tier for tier, why in kernel_trials.inspector_tiers().items() if not why)
    monkeypatch.setenv("CRAB_INSPECTOR", "C")
    Service.open(folder).close()
    monkeypatch.delenv("CRAB_INSPECTOR")
    service = Service.open(folder)
    try:
        assert service._core.inspector.tier == best
    finally:
        closed(service)


def test_what_another_tier_had_seen_is_doubt_not_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a sandbox that was just restored, whose epoch is the first one in both."""
    monkeypatch.setenv("CRAB_INSPECTOR", "C")
    service = Service.open(folder)
    try:
        service.handle(ask.Create(image=IMAGE, name="moved"))
        box = Box(service, "moved")
        box.rewind(box.checkpoint().id)
        box.run("echo >/root/new")
        service.close()
        monkeypatch.delenv("CRAB_INSPECTOR")
        service = Service.open(folder)
        made = Box(service, "moved").checkpoint()
        assert made.kind == "full" and "nothing is known" in reasons(made.decision), reasons(made.decision)
    finally:
        closed(service)


def test_a_slot_that_is_given_again_tells_nothing_of_who_had_it(service: Service, tmp_path: Path) -> None:
    tracker = service._core.inspector.tracker
    assert tracker
    parent, file = service._core.cgroups.group("x").path.parent, tmp_path / "file"
    file.touch()
    groups = [parent / "first", parent / "second"]
    tracker._spare.clear()
    try:
        for group in groups:
            group.mkdir()
        slot = tracker.track(groups[0].stat().st_ino, 0)
        command = ["sh", "-c", 'echo $$ >"$0/cgroup.procs" && chmod 600 "$1"', str(groups[0]), str(file)]
        subprocess.run(command, check=True)
        assert file.stat().st_ino in {change.number for change in tracker.changes(slot)}
        before = tracker.counts(slot)
        tracker.untrack(groups[0].stat().st_ino)
        assert tracker.track(groups[1].stat().st_ino, 0) == slot, "its set is there already"
        assert tracker.changes(slot) == []
        after = tracker.counts(slot)
        assert after.epoch > before.epoch and after.changes == 0
    finally:
        for group in groups:
            tracker.untrack(group.stat().st_ino)
            eventually(lambda group=group: not group.rmdir(), "the dead have left", seconds=5)


def test_hazard_h02_pins_of_a_deleted_state_directory_are_swept_by_the_next_owner_of_any(
    service: Service, tmp_path: Path
) -> None:
    gone, there = bpf.file_system() / "crab-0123456789ab", bpf.file_system() / "crab-ba9876543210"
    for folder, state in ((gone, tmp_path / "deleted"), (there, tmp_path)):
        (folder / "version").mkdir(parents=True)
        (folder / "state").symlink_to(state)
    try:
        service._core.sweep()
        assert not gone.exists() and there.exists()
        tracker = service._core.inspector.tracker
        assert tracker and (tracker._folder.parent / "state").resolve() == service._core.state_dir
    finally:
        shutil.rmtree(there)
