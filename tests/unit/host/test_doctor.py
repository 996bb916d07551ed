"""The doctor's judgement, and that looking at this machine is quick, complete and without traces."""

from __future__ import annotations

import os
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from crab import native
from crab.errors import HostUnsuitable
from crab.host import criu as crius
from crab.host import doctor, kernel_trials, provision
from crab.model import Probe

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def row(name: str, health: str) -> Probe:
    return Probe(name=name, health=health, found="")  # pyright: ignore[reportArgumentType]


# ---------------------------------------------------------------- judgement


@pytest.mark.parametrize(
    ("release", "machine", "health"),
    [
        ("5.15.0-91-generic", "x86_64", "missing"),
        ("5.19.0", "x86_64", "degraded"),
        ("6.1.0-18-amd64", "x86_64", "ok"),
        ("6.18.44", "x86_64", "ok"),
        ("6.18.44", "aarch64", "degraded"),
        ("what", "x86_64", "missing"),
    ],
)
def test_kernels_are_judged_by_what_overlay_needs(release: str, machine: str, health: str):
    assert doctor.kernel_row(release, machine).health == health


ALL_CAPABILITIES = 0x1FFFFFFFFFF


def test_only_sys_resource_may_be_missing_and_it_says_what_is_lost():
    assert doctor.capability_row(ALL_CAPABILITIES).health == "ok"
    lacking = doctor.capability_row(ALL_CAPABILITIES & ~(1 << 24))
    assert (lacking.health, lacking.found) == ("degraded", "without CAP_SYS_RESOURCE")
    assert lacking.loses
    assert doctor.capability_row(ALL_CAPABILITIES & ~(1 << 21)).health == "missing"
    both = doctor.capability_row(ALL_CAPABILITIES & ~(1 << 24 | 1 << 19))
    assert both.health == "missing"
    assert "CAP_SYS_PTRACE" in both.found


PROGRAMS = dict.fromkeys(("tracepoint", "raw_tracepoint", "tp_btf", "iter", "fentry", "lsm"), "")


def test_the_ebpf_row_names_what_does_not_load():
    assert doctor.ebpf_row(PROGRAMS, "lockdown,bpf").health == "ok"
    assert doctor.ebpf_row(PROGRAMS, "").health == "ok"
    locked = doctor.ebpf_row({**PROGRAMS, "fentry": "EPERM"}, "lockdown,bpf")
    assert locked.health == "degraded"
    assert "not fentry (EPERM)" in locked.found
    assert "tracepoints do" in locked.loses
    inactive = doctor.ebpf_row(PROGRAMS, "lockdown,apparmor")
    assert (inactive.health, "lsm (bpf is no active security module)" in inactive.found) == ("degraded", True)
    nothing = doctor.ebpf_row(dict.fromkeys(PROGRAMS, "EPERM"), "")
    assert "captured in full" in nothing.loses


@pytest.mark.parametrize(
    ("free", "inodes", "health"),
    [(5e8, 10**6, "missing"), (5e9, 10**6, "degraded"), (5e10, 10**6, "ok"), (5e10, 500, "missing"), (5e10, 0, "ok")],
)
def test_space_is_judged_by_bytes_and_inodes(free: float, inodes: int, health: str):
    assert doctor.space_row(int(free), inodes, Path("/var/lib")).health == health


def test_a_clock_of_the_past_or_one_that_jumps_is_found():
    now = 1_800_000_000.0
    assert doctor.clock_row(now, 0.0001, "").health == "ok"
    assert doctor.clock_row(86400.0, 0.0, "").found == "the clock says 1970-01-02"
    assert doctor.clock_row(now, -0.5, "").health == "degraded"
    assert "time namespaces" in doctor.clock_row(now, 0.0, "EINVAL").found


def test_the_worst_row_counts():
    assert doctor.worst([]) == "ok"
    assert doctor.worst([row("a", "ok"), row("b", "degraded")]) == "degraded"
    assert doctor.worst([row("a", "missing"), row("b", "degraded")]) == "missing"


def test_a_program_that_others_cannot_reach_is_found(tmp_path: Path):
    program = tmp_path / "a" / "b" / "program"
    program.parent.mkdir(parents=True)
    program.touch(0o755)
    for folder in (tmp_path, *tmp_path.parents, program.parent, program.parent.parent):
        if not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o001)
    assert doctor.unsearchable(program) is None
    program.chmod(0o750)
    assert doctor.unsearchable(program) == program
    (tmp_path / "a").chmod(0o700)
    assert doctor.unsearchable(program) == tmp_path / "a"


# ---------------------------------------------------------------- this machine


@needs_root
@pytest.mark.kernel
def test_looking_takes_less_than_two_seconds_and_leaves_nothing_behind(tmp_path: Path):
    before = set(Path("/tmp").iterdir())
    start = time.perf_counter()
    rows = doctor.examine(tmp_path / "state", tmp_path / "private")
    assert time.perf_counter() - start < 2
    assert not (tmp_path / "state").exists()
    assert not (tmp_path / "private").exists()
    assert "crab-trial" not in Path("/proc/self/mountinfo").read_text()
    assert list(Path("/sys/fs/cgroup").rglob("crab-trial-*")) == []
    backing = [path.read_text() for path in Path("/sys/block").glob("loop*/loop/backing_file")]
    assert [name for name in backing if name.startswith("/image")] == []
    assert [path for path in set(Path("/tmp").iterdir()) - before if "crab-trial" in path.name] == []
    assert len({row.name for row in rows}) == len(rows) >= 20
    for row in rows:
        assert row.found, row
        assert row.health == "ok" or row.remedy, row
        assert row.health != "degraded" or row.loses, row


@needs_root
@pytest.mark.criu
def test_this_machine_can_run_crab():
    rows = doctor.examine(Path("/var/lib/crab"), crius.default_private_dir())
    assert [row for row in rows if row.health == "missing"] == []


@needs_root
@pytest.mark.kernel
def test_without_mkfs_the_rest_is_tried_on_a_tmpfs(monkeypatch: pytest.MonkeyPatch):
    real = subprocess.run

    def without_mkfs(command: list[str], **options: object):
        if command[0] == "mkfs.btrfs":
            raise FileNotFoundError(2, "No such file or directory", "mkfs.btrfs")
        return real(command, **options)  # pyright: ignore[reportCallIssue, reportArgumentType]

    monkeypatch.setattr(subprocess, "run", without_mkfs)
    trials = kernel_trials.file_systems(None)
    assert (trials.btrfs, trials.on, trials.overlay, trials.idmapped) == ("ENOENT", "tmpfs", "", "not tried")


@needs_root
@pytest.mark.kernel
def test_mounts_of_a_trial_are_seen_by_nobody_else_and_end_with_it(tmp_path: Path):
    def work() -> tuple[bool, bool]:
        kernel_trials.mounts.mount("crab-trial", tmp_path, "tmpfs")
        (tmp_path / "inside").touch()
        outside = Path(f"/proc/{os.getpid()}/root{tmp_path}/inside")  # as the main thread sees it
        return (tmp_path / "inside").exists(), outside.exists()

    assert kernel_trials.in_private_mounts(work) == (True, False)
    assert not (tmp_path / "inside").exists()


@needs_root
@pytest.mark.kernel
def test_a_trial_that_fails_raises_in_the_caller():
    def work() -> None:
        raise LookupError("as it should")

    with pytest.raises(LookupError, match="as it should"):
        kernel_trials.in_private_mounts(work)


@needs_root
@pytest.mark.kernel
def test_the_namespace_of_a_trial_has_the_shifted_map_and_ends():
    def holders() -> list[str]:
        found: list[str] = []
        for path in Path("/proc").glob("[0-9]*/uid_map"):
            try:
                if path.read_text().split() == ["0", str(kernel_trials.SHIFT), "65536"]:
                    found.append(path.parent.name)
            except OSError:
                continue
        return [pid for pid in found if parent_of(pid) == os.getpid()]

    def parent_of(pid: str) -> int:
        try:
            return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            return -1

    with kernel_trials.shifted_user_namespace() as descriptor:
        assert os.readlink(f"/proc/self/fd/{descriptor}").startswith("user:[")
        assert len(holders()) == 1
    assert holders() == []


# ---------------------------------------------------------------- what goes wrong is a row


def test_a_probe_that_fails_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(crius, "find_criu", fail)
    monkeypatch.setattr(kernel_trials, "file_systems", fail)
    rows = {row.name: row for row in doctor.examine(tmp_path, tmp_path)}
    assert rows["criu"].health == "missing"
    assert "boom" in rows["criu"].found
    assert rows["btrfs"].health != "ok"


def test_without_root_the_rows_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    rows = {row.name: row for row in doctor.examine(tmp_path, tmp_path)}
    assert rows["root"].health == "missing"
    for name in ("namespaces", "overlay", "idmapped mounts", "ebpf", "cgroup v2"):
        assert rows[name].health != "ok"
        assert "needs root" in rows[name].found + rows[name].loses


def test_a_criu_behind_a_closed_folder_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "closed" / "criu-1"
    folder.mkdir(parents=True)
    (folder / "criu").touch(0o755)
    for parent in (tmp_path, *tmp_path.parents):
        if not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o001)
    (tmp_path / "closed").chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(crius, "find_criu", lambda _private: crius.at_folder(folder, "4.1.1"))
    monkeypatch.setattr(crius, "check", lambda _criu: "")
    machine = doctor.Machine(tmp_path, tmp_path, is_root=True)
    closed = doctor._PROBES["criu"](machine)
    assert (closed.health, closed.remedy) == ("missing", f"chmod o+x {tmp_path / 'closed'}")


# ---------------------------------------------------------------- type information


def btf(*types: tuple[str, int, int, bytes]) -> bytes:
    """BTF data of types given by name, kind, number of members and what follows the first 12 bytes.

    Equal names stand once among the strings, as in the kernel's data.
    """
    strings, body = b"\0", b""
    places: dict[str, int] = {}
    for name, kind, members, rest in types:
        if name not in places:
            places[name] = len(strings)
            strings += name.encode() + b"\0"
        body += struct.pack("=III", places[name], kind << 24 | members, 0) + rest
    header = struct.pack("=HBBIIIII", 0xEB9F, 1, 0, 24, 0, len(body), len(body), len(strings))
    return header + body + strings


def test_types_are_numbered_in_order_whatever_their_length():
    data = btf(
        ("int", 1, 0, bytes(4)),
        ("array", 3, 0, bytes(12)),
        ("struct", 4, 2, bytes(24)),
        ("same", 8, 0, b""),  # a typedef of that name is not the function
        ("enum", 6, 3, bytes(24)),
        ("prototype", 13, 1, bytes(8)),
        ("section", 15, 2, bytes(24)),
        ("variable", 14, 0, bytes(4)),
        ("attribute", 17, 0, bytes(4)),
        ("enum64", 19, 1, bytes(12)),
        ("same", 12, 0, b""),
    )
    assert kernel_trials.btf_ids(data, [(12, "same"), (8, "same")]) == {(8, "same"): 4, (12, "same"): 11}
    assert kernel_trials.btf_ids(data, [(12, "absent")]) == {}


def test_foreign_data_has_no_types():
    assert kernel_trials.btf_ids(bytes(64), [(12, "x")]) == {}


# ---------------------------------------------------------------- fixing


@pytest.fixture
def fixes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records what `fix` would do to the machine."""
    done: list[str] = []

    def record(what: str, result: object) -> Callable[..., object]:
        def call(*_: object) -> object:
            done.append(what)
            return result

        return call

    monkeypatch.setattr(provision, "install_packages", record("packages", ("btrfs-progs",)))
    monkeypatch.setattr(provision, "ensure_criu", record("criu", crius.Criu(("criu",), "4.1.1", "private", Path("/x"))))
    monkeypatch.setattr(doctor, "_loader", lambda module: record(f"module {module}", ""))
    monkeypatch.setattr(native, "build", record("native", None))
    return done


def test_what_is_ok_is_left_alone(fixes: list[str], tmp_path: Path):
    rows = [row(name, "ok") for name in ("criu", "btrfs", "image tools", "native programs")]
    assert doctor.fix(rows, tmp_path) == ()
    assert fixes == []


def test_what_is_missing_is_brought(fixes: list[str], tmp_path: Path):
    rows = [
        row("criu", "missing"),
        row("btrfs", "missing"),
        row("native programs", "missing"),
        row("kernel", "missing"),
    ]
    done = doctor.fix(rows, tmp_path)
    assert fixes == ["packages", "module btrfs", "native", "criu"]
    assert done == ("installed btrfs-progs", "compiled the native programs", "CRIU 4.1.1")


def test_one_failure_does_not_keep_the_rest_from_being_fixed(
    fixes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: object) -> None:
        raise HostUnsuitable("no network", remedy="plug it in")

    monkeypatch.setattr(provision, "install_packages", refuse)
    with pytest.raises(HostUnsuitable, match="no network") as caught:
        doctor.fix([row("btrfs", "missing"), row("criu", "missing")], tmp_path)
    assert caught.value.remedy == "plug it in"
    assert fixes == ["module btrfs", "criu"]
    assert caught.value.details["done"] == ["CRIU 4.1.1"]
