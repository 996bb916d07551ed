"""Control groups: attribution, freezing, killing and limits of one group of processes.

Freezing and killing need cgroup2, with or without controllers. Limits use the controllers where they are: in cgroup2
on most hosts, in version 1 hierarchies on some (both may be mounted). All groups of one state directory lie below one
folder, so that a sweep finds exactly its own.
"""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

from crab.errors import HostUnsuitable
from crab.host import processes
from crab.model import Limits

CONTROLLERS = ("memory", "cpu", "pids")
PERIOD_US = 100_000  # of the processor quota; the kernel's default


class CgroupRoots:
    """Where this host mounts the hierarchies, and the folder below each that belongs to one owner."""

    def __init__(self, owner: str) -> None:
        self.owner = f"crab/{owner}"
        unified, self.version1 = _hierarchies()
        if unified is None:
            raise HostUnsuitable("cgroup2 is not mounted", remedy="mount -t cgroup2 cgroup2 /sys/fs/cgroup/unified")
        self.unified = unified
        available = (unified / "cgroup.controllers").read_text().split()
        self.in_unified = tuple(name for name in CONTROLLERS if name in available and name not in self.version1)

    def prepare(self) -> None:
        """Make the owner's folders and switch the controllers on for what is below."""
        folder = self.unified
        for part in self.owner.split("/"):
            self._enable(folder)
            folder = folder / part
            folder.mkdir(exist_ok=True)
        self._enable(folder)
        for root in self.version1.values():
            (root / self.owner).mkdir(parents=True, exist_ok=True)

    def _enable(self, folder: Path) -> None:
        if self.in_unified:
            (folder / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in self.in_unified))

    def group(self, name: str) -> Cgroup:
        """The group of that name; nothing is made yet."""
        owned = {controller: root / self.owner / name for controller, root in self.version1.items()}
        return Cgroup(self.unified / self.owner / name, owned, frozenset(self.in_unified))

    def names(self) -> list[str]:
        """Names of the owner's groups, in any hierarchy."""
        found: set[str] = set()
        for root in (self.unified, *self.version1.values()):
            folder = root / self.owner
            if folder.is_dir():
                found |= {entry.name for entry in folder.iterdir() if entry.is_dir()}
        return sorted(found)

    def remove(self) -> None:
        """Remove the owner's own (empty) folders."""
        for root in (self.unified, *self.version1.values()):
            _rmdir(root / self.owner)


class Cgroup:
    """One group: born empty, filled by `crab-box` (never by writing a pid), removed by its owner."""

    def __init__(self, path: Path, version1: dict[str, Path], in_unified: frozenset[str]) -> None:
        self.path = path
        self.version1 = version1
        self._in_unified = in_unified

    @property
    def joins(self) -> list[Path]:
        """Folders of version 1 that a new process has to enter besides."""
        return sorted(set(self.version1.values()))

    def create(self, limits: Limits) -> None:
        """Make the group and set its limits. Raises `HostUnsuitable` if a limit has no controller here."""
        self.path.mkdir(exist_ok=True)
        for folder in self.joins:
            folder.mkdir(exist_ok=True)
        self.limit(limits)

    def limit(self, limits: Limits) -> None:
        """Set all limits anew; None lifts one."""
        memory = str(limits.memory) if limits.memory else None
        pids = str(limits.pids) if limits.pids else None
        quota = round(limits.cpus * PERIOD_US) if limits.cpus else None
        self._set(
            "memory",
            memory,
            {"memory.max": memory or "max", "memory.swap.max": "0" if memory else "max"},
            {"memory.limit_in_bytes": memory or "-1", "memory.swappiness": "0" if memory else "60"},
        )
        self._set("pids", pids, {"pids.max": pids or "max"}, {"pids.max": pids or "max"})
        self._set(
            "cpu",
            quota,
            {"cpu.max": f"{quota or 'max'} {PERIOD_US}"},
            {"cpu.cfs_period_us": str(PERIOD_US), "cpu.cfs_quota_us": str(quota or -1)},
        )

    def _set(self, controller: str, wanted: object, unified: dict[str, str], version1: dict[str, str]) -> None:
        if controller in self.version1:
            folder, values = self.version1[controller], version1
        elif controller in self._in_unified:
            folder, values = self.path, unified
        elif wanted is None:
            return
        else:
            raise HostUnsuitable(
                f"this host has no {controller} controller for the limit",
                remedy="create the sandbox without that limit; see `crab doctor`",
            )
        for name, value in values.items():
            try:
                (folder / name).write_text(value)
            except FileNotFoundError:
                if wanted is not None and name not in ("memory.swap.max", "memory.swappiness"):  # no swap accounting
                    raise

    def exists(self) -> bool:
        return self.path.is_dir()

    def members(self) -> list[int]:
        """Host pids of all processes in the group and below."""
        found: list[int] = []
        for folder, _, files in os.walk(self.path):
            if "cgroup.procs" in files:
                try:
                    found += map(int, Path(folder, "cgroup.procs").read_text().split())
                except OSError as error:
                    if error.errno not in (errno.ENODEV, errno.ENOENT):
                        raise
        return found

    def _guard(self) -> None:
        strangers = [pid for pid in self.members() if pid == os.getpid() or pid == 1]
        if strangers:
            raise HostUnsuitable(
                f"processes of the host are in {self.path}: {strangers}",
                remedy="move them out by hand; Crab never put them there",
            )

    def freeze(self, seconds: float = 10.0) -> None:
        """Stop every process in the group; returns when none runs. Raises TimeoutError (and thaws) otherwise."""
        self._guard()
        (self.path / "cgroup.freeze").write_text("1")
        end = time.monotonic() + seconds
        while not self.is_frozen():
            if time.monotonic() > end:
                self.thaw()
                raise TimeoutError(f"{self.path} did not freeze within {seconds} s")
            time.sleep(0.0001)

    def thaw(self) -> None:
        """Let the processes run again; no error if the group is gone or not frozen."""
        try:
            (self.path / "cgroup.freeze").write_text("0")
        except FileNotFoundError:
            pass

    def is_frozen(self) -> bool:
        return "frozen 1" in self._events()

    def is_populated(self) -> bool:
        return "populated 1" in self._events()

    def _events(self) -> str:
        """Text of `cgroup.events`; empty if the group is gone (ENODEV: it went while the file was open)."""
        try:
            return (self.path / "cgroup.events").read_text()
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENODEV):
                return ""
            raise

    def kill(self, seconds: float = 10.0) -> bool:
        """SIGKILL everything in the group; True when it is empty. Kills frozen processes too (cgroup.kill does).

        Afterwards nothing can be cloned into this group any more: on the kernels seen, CLONE_INTO_CGROUP into a group
        that was killed once kills the child at birth. Make a new group.
        """
        if not self.path.is_dir():
            return True
        self._guard()
        end = time.monotonic() + seconds
        kill_file = self.path / "cgroup.kill"
        while self.is_populated():
            if kill_file.exists():
                kill_file.write_text("1")
            else:  # before 5.14
                for pid in self.members():
                    if processes.is_foreign(pid):
                        processes.kill(processes.identify(pid))
                self.thaw()
            if time.monotonic() > end:
                return False
            for _ in range(50):
                if not self.is_populated():
                    break
                time.sleep(0.0005)
        return True

    def child(self, name: str) -> Cgroup:
        """A group inside this one, for attribution and killing only (limits are those of the outer one)."""
        return Cgroup(self.path / name, {}, frozenset())

    def delegate(self, uid: int) -> None:
        """Let a process of that host uid start children in this group from the one above (CLONE_INTO_CGROUP).

        The cgroup file system is not mounted in a sandbox, so nothing else can be done with this right.
        """
        os.chown(self.path / "cgroup.procs", uid, -1)

    def remove(self, seconds: float = 2.0) -> None:
        """Remove the (empty) group and those inside it."""
        for folder in (self.path, *self.joins):
            _rmdir(folder, seconds)

    def memory_peak(self) -> int | None:
        """Largest memory use so far in bytes, where the host counts it."""
        for path in (self.version1.get("memory", self.path) / "memory.max_usage_in_bytes", self.path / "memory.peak"):
            try:
                return int(path.read_text())
            except (OSError, ValueError):
                continue
        return None

    def was_out_of_memory(self) -> bool:
        """Whether the memory limit has killed a process."""
        for path in (self.version1.get("memory", self.path) / "memory.oom_control", self.path / "memory.events"):
            try:
                counts = dict(line.split() for line in path.read_text().splitlines())
            except (OSError, ValueError):
                continue
            return counts.get("oom_kill", "0") != "0"
        return False


def _hierarchies() -> tuple[Path | None, dict[str, Path]]:
    """Mount point of cgroup2 and of the version 1 hierarchies of our controllers."""
    unified: Path | None = None
    version1: dict[str, Path] = {}
    with open("/proc/self/mountinfo") as f:
        for line in f:
            before, _, after = line.partition(" - ")
            kind, _, options = after.split()[:3]
            where = Path(before.split()[4])
            if kind == "cgroup2" and unified is None:
                unified = where
            elif kind == "cgroup":
                for name in set(CONTROLLERS) & set(options.split(",")):
                    version1[name] = where
    return unified, version1


def _rmdir(folder: Path, seconds: float = 0.0) -> None:
    end = time.monotonic() + seconds
    for root, folders, _ in os.walk(folder, topdown=False):
        for name in (*folders, ""):
            while True:
                try:
                    os.rmdir(os.path.join(root, name))
                    break
                except FileNotFoundError:
                    break
                except OSError as error:
                    # processes that were killed leave a moment after the group says that it is empty
                    if error.errno != errno.EBUSY or time.monotonic() > end:
                        break
                time.sleep(0.001)
