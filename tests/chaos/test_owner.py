"""The owner of the state directory is killed at random moments: nothing that it reported is lost, nothing is left over.

`$CRAB_TEST_KILLS` is the number of kills for each kind of operation (4; by hand, take 100).
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e import leaks
from e2e.box import Box, eventually
from e2e.counting import count, counts_on
from e2e.roots import small_root

from crab.daemon import requests as ask
from crab.daemon.service import Service
from crab.errors import Damaged, InUse
from crab.model import State

pytestmark = [pytest.mark.kernel, pytest.mark.criu, pytest.mark.slow]

KILLS = int(os.environ.get("CRAB_TEST_KILLS", "4"))


@pytest.fixture(scope="module")
def state(service: Service, image: str, state_dir: Path, tmp_path_factory) -> Iterator[Path]:
    """A state directory with a running sandbox `one`, owned by nobody. Nothing of it is left at the end."""
    path = state_dir.parent / f"{state_dir.name}-chaos"
    root = tmp_path_factory.mktemp("root")
    small_root(service._core.images.path(image), root)
    shutil.rmtree(path, ignore_errors=True)
    try:
        with Service.open(path) as first:
            first.handle(ask.ImageAdd(name="small", source=f"dir:{root}"))
            box = Box(first, first.handle(ask.Create(name="one", image="small")).name)
            count(box)
            box.checkpoint("first")
        yield path
    finally:
        last = Service.open(path)
        owner = last._core.cgroups.owner
        for sandbox in last.handle(ask.SandboxList()):
            last.handle(ask.Remove(sandbox=sandbox.name, force=True))
        last.close_down()
        assert not leaks.left_of(path, owner), leaks.left_of(path, owner)
        shutil.rmtree(path)


class Victim:
    """A process that owns the state directory and works, until it is killed."""

    def __init__(self, state: Path, what: str) -> None:
        words = [sys.executable, str(Path(__file__).with_name("owner.py")), str(state), "one", what]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout
        assert self.process.stdout.readline() == "ready\n", self.process.communicate()[1]

    def killed_after(self, seconds: float) -> list[list[str]]:
        """Kill it at that moment; returns the words of every line that it got to say."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        self.process.send_signal(signal.SIGKILL)
        said, complaint = self.process.communicate()
        assert self.process.returncode == -signal.SIGKILL, f"it ended by itself: {complaint}"
        return [line.split() for line in said.splitlines()]


def is_held(owner: str) -> list[str]:
    """What is frozen, stopped or traced in the groups of an owner, in words."""
    held = [
        what
        for what in leaks.processes_in(owner).values()
        if what and (" t " in f" {what} " or not what.endswith("tracer 0"))
    ]
    for root in leaks.hierarchies():
        for path in (root / owner).rglob("cgroup.events"):
            with contextlib.suppress(OSError):
                if "frozen 1" in path.read_text():
                    held.append(str(path))
    return held


@pytest.mark.parametrize("what", ["checkpoint", "rewind", "fork", "mixed"])
@pytest.mark.timeout(60 + 30 * KILLS)
def test_hazard_c18_h01_h02_killing_the_owner_at_any_moment_costs_nothing_that_was_reported(
    state: Path, what: str, figures
) -> None:
    choice = random.Random(f"{what}{os.environ.get('CRAB_TEST_SEED', '')}")
    longest = 0.0
    with Service.open(state) as service:
        owner = service._core.cgroups.owner
        reported = service.handle(ask.Turns(sandbox="one"))[-1].id
    for _ in range(KILLS):
        victim = Victim(state, what)
        said = victim.killed_after(choice.uniform(0.0, 0.7))
        begin = time.monotonic()
        eventually(lambda: not is_held(owner), lambda: f"{is_held(owner)} let go", 10)
        eventually(lambda: not leaks.tools_running(state), lambda: f"the end of {leaks.tools_running(state)}", 30)
        longest = max(longest, time.monotonic() - begin)
        reported = next((line[1] for line in reversed(said) if line[0] == "checkpoint"), reported)
        clones = {name for line in said if line[0] == "fork" for name in line[1:]}
        removing = {line[1] for line in said if line[0] == "removing"}
        clones -= removing
        with Service.open(state) as service:
            reported = check_after_a_kill(service, reported, clones, removing)
    figures(f"owner killed in {what}: {KILLS} times, all let go within {longest * 1e3:.0f} ms")


def check_after_a_kill(service: Service, reported: str, clones: set[str], removing: set[str]) -> str:
    """Everything that was reported is there, runs and can be restored; nothing else is. Returns the new head."""
    core = service._core
    box = Box(service, "one")
    for name in removing & {sandbox.name for sandbox in service.handle(ask.SandboxList())}:
        service.handle(ask.Remove(sandbox=name, force=True))  # a removal that was cut off can be repeated
    found = {sandbox.name: sandbox for sandbox in service.handle(ask.SandboxList())}
    assert clones <= found.keys(), "a clone that was reported is gone"
    not_running = {name: (one.state, one.reason) for name, one in found.items() if one.state != State.RUNNING}
    assert not not_running, "a sandbox does not run on, or is half made"
    for name in found:
        counts_on(Box(service, name))
    groups = {f"{one.id}.{one.generation}" for one in found.values()}
    assert set(core.cgroups.names()) == groups, "control groups without a sandbox"
    assert {path.name for path in core.pool.live.iterdir()} == groups, "files without a sandbox"
    assert not list(core.pool.staging.iterdir())
    turns = {turn.id for turn in service.handle(ask.Turns(sandbox="one", every=True))}
    assert reported in turns and set(core.ground.store.identities()) == turns
    box.rewind(reported)
    counts_on(box)
    box.rewind(box.checkpoint().id)
    counts_on(box)
    for name in found.keys() - {"one"}:
        service.handle(ask.Remove(sandbox=name, force=True))
    for turn in service.handle(ask.Turns(sandbox="one", every=True))[:-2]:
        service.handle(ask.RemoveCheckpoint(sandbox="one", ref=turn.id))
    return service.handle(ask.Turns(sandbox="one"))[-1].id


def test_hazard_h01_a_command_survives_the_owner_with_all_its_output(state: Path) -> None:
    with Service.open(state) as service:
        command = service.spawn(
            "one",
            ask.ExecSpec(
                argv=("sh", "-c", "n=0; while [ $n -lt 2000 ]; do n=$((n + 1)); echo $n; done; sleep 0.5; echo end"),
                name="long",
            ),
        )
        command.detach()
    with Service.open(state) as service:
        done = service.command("one", "long").collect()
    assert done.stdout.split() == [b"%d" % n for n in range(1, 2001)] + [b"end"]


def test_hazard_h01_checkpoints_are_found_again_without_the_registry(state: Path) -> None:
    with Service.open(state) as service:
        turns = {turn.id for turn in service.handle(ask.Turns(sandbox="one", every=True))}
        for identity in turns:
            service._core.registry.unindex(identity)
    with Service.open(state) as service:
        assert {turn.id for turn in service.handle(ask.Turns(sandbox="one", every=True))} == turns


def test_hazard_h02_what_a_dead_owner_left_is_swept_by_the_next(state: Path) -> None:
    with Service.open(state) as service:
        pool, cgroups = service._core.pool, service._core.cgroups
        (pool.staging / "c0123456789ab").mkdir()
        (pool.staging / "c0123456789ab" / "half").write_text("x" * 100)
        (pool.live / "s0123456789ab.7").mkdir()
        cgroups.group("s0123456789ab.7").path.mkdir()
    with Service.open(state) as service:
        assert not list(service._core.pool.staging.iterdir())
        assert "s0123456789ab.7" not in service._core.cgroups.names()
        assert "s0123456789ab.7" not in os.listdir(service._core.pool.live)
        counts_on(Box(service, "one"))


def test_hazard_r11_a_second_owner_is_told_busy_with_the_pid_of_the_first(state: Path) -> None:
    words = [sys.executable, str(Path(__file__).with_name("owner.py")), str(state), "one", "checkpoint"]
    with Service.open(state):
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode and "Busy" in done.stderr and str(os.getpid()) in done.stderr


def test_hazard_h01_a_record_that_cannot_be_read_is_reported_and_what_it_owns_left_alone(state: Path) -> None:
    with Service.open(state) as service:
        made = service.handle(ask.Create(name="spoiled", image="small"))
        spoiled = Box(service, made.name)
        count(spoiled)
        checkpoint = spoiled.checkpoint()
        core = service._core
        (group,) = [core.cgroups.group(name) for name in core.cgroups.names() if name.startswith(made.id)]
        with core.registry._transaction() as db:
            db.execute("UPDATE sandboxes SET record = x'00' WHERE id = ?", (made.id,))
    with Service.open(state) as service:
        listed = {sandbox.name: sandbox for sandbox in service.handle(ask.SandboxList())}
        assert listed["spoiled"].state == State.DAMAGED and listed["spoiled"].reason
        assert group.members(), "its processes run on"
        assert (
            service._core.pool.live / f"{made.id}.1"
        ).is_dir() and checkpoint.id in service._core.ground.store.identities()
        counts_on(Box(service, "one"))
        for call in (ask.Inspect, ask.TakeCheckpoint, ask.Start, ask.Remove):
            with pytest.raises(Damaged):
                service.handle(call(sandbox="spoiled"))
        with pytest.raises(InUse):
            service.handle(ask.ImageRemove(name="small"))
        assert checkpoint.id in service.handle(ask.Remove(sandbox="spoiled", force=True)).removed
        assert not group.exists() and not list(service._core.pool.live.glob(f"{made.id}.*"))
        assert [sandbox.name for sandbox in service.handle(ask.SandboxList())] == ["one"]
