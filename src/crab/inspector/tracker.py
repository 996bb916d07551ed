"""The programs in the kernel: loaded once for a state directory, pinned, asked what has changed.

Knows sandboxes as cgroups and changes as numbers of inodes and processes; what they mean is said elsewhere. Pins outlive
the daemon: tracking goes on while none runs, and the next one takes over what the kernel holds. Programs of another version
of Crab are replaced, and what they had seen is forgotten: the caller finds no entry for a sandbox then, which it takes for
doubt.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import struct
import subprocess
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import blake3
import msgspec

from crab.errors import HostUnsuitable
from crab.host import bpf
from crab.inspector.task import Task, parse
from crab.native import bpf as packs

INODE, TASK, CALL = 0, 1, 2
WRITTEN, NAMED, MAPPED, RING, REMOTE, UNKNOWN = 1, 2, 3, 4, 5, 6
"""What was called: numbers of changes of the kind CALL (`enum call` of `bpf/syscalls.bpf.c`)."""
CTIME, DATA, CREATED, SIGNAL, MEMORY = 1, 2, 4, 8, 16
SLOTS = 1024
_KEY, _VALUE, _BOX = struct.Struct("<QIIII"), struct.Struct("<QIIQ"), struct.Struct("<IIQQQQ")
FIRST_SIZE, LARGEST_SIZE = 8192, 1 << 18
SPARE_SETS = 32
"""Sets kept for the sandboxes to come (0.8 MB each): to give a slot one, or take it away, waits for a grace period of the
kernel's, 3 to 10 ms."""
OWNER_LINK = "state"
"""Beside the pins: which state directory they belong to."""
_MAPS = ("slots", "boxes", "changes")
_DEEPEST = 8


@dataclass(frozen=True, slots=True)
class Change:
    """Something that was changed, some time in an epoch."""

    kind: int
    number: int
    """Of the inode, host number of the process, or what was called."""
    device: int
    epoch: int
    flags: int
    mode: int
    magic: int
    when: int
    """ns of CLOCK_MONOTONIC, of the newest change."""

    @property
    def is_fifo(self) -> bool:
        """A pipe or a fifo: something was written to it."""
        return self.kind == INODE and stat.S_ISFIFO(self.mode)


@dataclass(frozen=True, slots=True)
class Counts:
    """Of one sandbox since it is tracked; they never go back."""

    epoch: int
    changes: int = 0
    lost: int = 0
    elsewhere: int = 0
    """Changes on file systems that no snapshot covers (bind mounts)."""
    in_memory: int = 0
    """Changes on a tmpfs."""


class Tracker:
    """See the module. Safe to use from several threads."""

    def __init__(self, pack: str, folder: Path, maps: dict[str, int], tasks: int, links: Iterable[int]) -> None:
        self.tier = packs.TIERS[pack]
        self.by_time = pack in packs.BY_TIME
        """Whether a change is seen by the change time that it gives: equal times are none, so stamps have to be kept fresh,
        and an inode that has its time of before is what it was."""
        self.load_ms = 0.0
        self._folder = folder
        self._maps, self._tasks, self._links = maps, tasks, tuple(links)
        self._boxes = bpf.Memory(maps["boxes"], SLOTS * _BOX.size)
        self._sets: dict[int, tuple[int, int]] = {}
        self._spare: set[int] = set()
        self._lock = threading.Lock()

    # ---- life

    @classmethod
    def open(cls, owner: str, parent: Path, scratch: Path, only: str = "") -> Tracker:
        """The programs for the sandboxes whose cgroups lie in `parent`: those that are pinned, or loaded anew.

        `scratch` is the state directory, with room for a trial; `only` names the tier that it must be. Raises
        `HostUnsuitable` if no tier works here.
        """
        begin = time.perf_counter()
        try:
            folder = bpf.file_system() / f"crab-{owner}"
        except OSError as error:
            raise HostUnsuitable(
                f"no bpf file system: {error.strerror}", remedy="mount -t bpf bpf /sys/fs/bpf"
            ) from error
        why: list[str] = []
        found: dict[str, tuple[packs.Pack, Path]] = {}
        for name, tier in packs.TIERS.items():
            if only not in ("", tier):
                continue
            try:
                pack = packs.read(name)
            except HostUnsuitable as error:
                why.append(f"tier {tier}: {error.message}")
                continue
            # one that was wanted lower than possible is not taken over by who wants the best
            version = blake3.blake3(msgspec.msgpack.encode(pack) + only.encode())
            found[name] = pack, folder / version.hexdigest(8)
        for name, (pack, pins) in found.items():
            with contextlib.suppress(OSError):
                return cls._take_over(name, pins, pack)
        _remove(folder)
        for name, (pack, pins) in found.items():
            tier = packs.TIERS[name]
            try:
                tracker = cls._load(name, pins, pack, parent, scratch)
                tracker.load_ms = (time.perf_counter() - begin) * 1e3
                return tracker
            except HostUnsuitable as error:
                why.append(f"tier {tier}: {error.message}")
            except OSError as error:
                why.append(f"tier {tier}: {bpf.why_refused(error, pack)}")
        raise HostUnsuitable(
            f"what a turn changes cannot be seen: {'; '.join(dict.fromkeys(why)) or f'there is no tier {only}'}",
            remedy="see docs/inspector.md; until then every checkpoint is a full one",
        )

    @classmethod
    def _take_over(cls, name: str, folder: Path, pack: packs.Pack) -> Tracker:
        with contextlib.ExitStack() as undo:
            links = {name: _kept(undo, bpf.pinned(folder / f"link-{name}")) for name in pack.programs}
            maps = {name: _kept(undo, bpf.pinned(folder / name)) for name in _MAPS}
            tracker = cls(name, folder, maps, links["tasks"], links.values())
            undo.pop_all()
            return tracker

    @classmethod
    def _load(cls, name: str, folder: Path, pack: packs.Pack, parent: Path, scratch: Path) -> Tracker:
        depth = _depth(parent) + 1
        for level in range(depth, depth + _DEEPEST):  # in a cgroup namespace the path does not tell the real depth
            with bpf.load(pack, struct.pack("<I", level)) as loaded, contextlib.ExitStack() as undo:
                links = {
                    name: _kept(undo, bpf.attach(loaded.programs[name], section))
                    for name, section in zip(pack.programs, pack.sections, strict=True)
                }
                maps = {name: _kept(undo, os.dup(loaded.maps[name])) for name in _MAPS}
                tracker = cls(name, folder, maps, links["tasks"], links.values())
                undo.pop_all()
            if tracker.sees(parent, scratch):
                folder.mkdir(parents=True, mode=0o700, exist_ok=True)
                with contextlib.suppress(FileExistsError):
                    os.symlink(scratch, folder.parent / OWNER_LINK)
                for name, fd in maps.items():
                    bpf.pin(fd, folder / name)
                for name, fd in links.items():
                    bpf.pin(fd, folder / f"link-{name}")
                return tracker
            tracker.close()
        raise HostUnsuitable("the programs load, but a trial was not seen", remedy="please report it")

    def sees(self, parent: Path, scratch: Path) -> bool:
        """Whether it notices a process in a cgroup and a file that this changes: proof that the hooks work."""
        group, file = parent / "trial", scratch / "trial"
        group.mkdir(exist_ok=True)
        try:
            file.write_bytes(b"")
            time.sleep(0.01)  # another tick of the clock: equal times are no change
            slot = self.track(group.stat().st_ino, 0)
            try:
                script = 'echo $$ >"$0/cgroup.procs" && chmod 600 "$1" && echo && read end'
                with subprocess.Popen(
                    ["sh", "-c", script, group, file], stdin=subprocess.PIPE, stdout=subprocess.PIPE
                ) as process:
                    assert process.stdout
                    process.stdout.readline()
                    listed = any(task.process == process.pid for task in self.tasks(slot))
                    process.communicate()
                number = file.stat().st_ino
                changes = self.changes(slot)
                return listed and any(c.kind == CALL or (c.kind, c.number) == (INODE, number) for c in changes)
            finally:
                self.untrack(group.stat().st_ino)
        finally:
            file.unlink(missing_ok=True)
            for _ in range(200):  # the dead leave a moment later
                with contextlib.suppress(OSError):
                    group.rmdir()
                    break
                time.sleep(0.001)

    def close(self) -> None:
        """Let go. What is pinned goes on tracking."""
        self._boxes.close()
        for fd in (*self._maps.values(), *self._links, *(fd for fd, _ in self._sets.values())):
            os.close(fd)
        self._sets.clear()

    def remove(self) -> None:
        """Remove the pins: tracking ends with `close`."""
        _remove(self._folder.parent)

    def sweep(self) -> None:
        """Remove the pins of state directories that are no more: nobody else would."""
        for folder in self._folder.parent.parent.glob("crab-*"):
            link = folder / OWNER_LINK
            if link.is_symlink() and not link.exists():
                _remove(folder)

    # ---- sandboxes

    def track(self, group: int, device: int) -> int:
        """Begin to track the cgroup with that id; its slot. `device` is the one file system that matters (0: all do).

        If it is tracked already, nothing changes. Raises `HostUnsuitable` if there is no slot left.
        """
        with self._lock:
            if (known := self._slot(group)) is not None:
                return known
            slot = self._free_slot()
            # an epoch that no event of the one before can carry
            epoch = self.counts(slot).epoch + 1
            self._boxes.view[slot * _BOX.size : (slot + 1) * _BOX.size] = _BOX.pack(epoch, device, 0, 0, 0, 0)
            bpf.update(self._maps["slots"], struct.pack("<Q", group), struct.pack("<I", slot))
            return slot

    def _free_slot(self) -> int:
        """A slot that no sandbox has, with an empty set."""
        if self._spare:
            slot = self._spare.pop()
            fd, size = self._set(slot)
            bpf.delete_all(fd, [key for key, _ in bpf.entries(fd, _KEY.size, _VALUE.size, size)])
            return slot
        used = {struct.unpack("<I", value)[0] for _, value in bpf.entries(self._maps["slots"], 8, 4, SLOTS)}
        slot = next((slot for slot in range(SLOTS) if slot not in used), None)
        if slot is None:
            raise HostUnsuitable(f"{SLOTS} sandboxes are tracked, no more fit", remedy="use another state directory")
        self._renew(slot, FIRST_SIZE)
        return slot

    def slot(self, group: int) -> int | None:
        """Slot of a cgroup; None if it is not tracked."""
        with self._lock:
            return self._slot(group)

    def _slot(self, group: int) -> int | None:
        found = bpf.lookup(self._maps["slots"], struct.pack("<Q", group), 4)
        return None if found is None else int.from_bytes(found, "little")

    def untrack(self, group: int) -> None:
        """Forget a cgroup; no error if it is not tracked."""
        with self._lock:
            slot = self._slot(group)
            if slot is None:
                return
            bpf.delete(self._maps["slots"], struct.pack("<Q", group))
            if len(self._spare) < SPARE_SETS and self._set(slot)[1] == FIRST_SIZE:
                self._spare.add(slot)
                return
            bpf.delete(self._maps["changes"], struct.pack("<I", slot))
            if known := self._sets.pop(slot, None):
                os.close(known[0])

    def groups(self) -> list[int]:
        """Ids of all tracked cgroups."""
        return [struct.unpack("<Q", key)[0] for key, _ in bpf.entries(self._maps["slots"], 8, 4, SLOTS)]

    def _renew(self, slot: int, size: int) -> None:
        fd = bpf.create_hash(_KEY.size, _VALUE.size, size, b"changes")
        bpf.update(self._maps["changes"], struct.pack("<I", slot), struct.pack("<I", fd))
        if known := self._sets.pop(slot, None):
            os.close(known[0])
        self._sets[slot] = fd, size

    def _set(self, slot: int) -> tuple[int, int]:
        if slot not in self._sets:  # of before a takeover
            number = bpf.lookup(self._maps["changes"], struct.pack("<I", slot), 4)
            if number is None:
                raise OSError(f"slot {slot} has no set of changes")
            fd = bpf.map_by_id(int.from_bytes(number, "little"))
            self._sets[slot] = fd, bpf.map_entries(fd)
        return self._sets[slot]

    # ---- what changed

    def counts(self, slot: int) -> Counts:
        """The counters of a sandbox."""
        epoch, _, *counts = _BOX.unpack_from(self._boxes.view, slot * _BOX.size)
        return Counts(epoch, *counts)

    def changes(self, slot: int) -> list[Change]:
        """All that changed and was not forgotten. Raises OSError."""
        with self._lock:
            fd, size = self._set(slot)
            found: list[Change] = []
            for key, value in bpf.entries(fd, _KEY.size, _VALUE.size, size):
                number, device, _, epoch, kind = _KEY.unpack(key)
                when, flags, mode, magic = _VALUE.unpack(value)
                found.append(Change(kind, number, device, epoch, flags, mode, magic, when))
            return found

    def advance(self, slot: int, *, grow: bool = False) -> int:
        """Begin a new epoch and return its number. No process of the sandbox may have run since
        what is captured stood still; the caller knows that, or proves it afterwards.

        `grow` gives it a larger set, for the one that was too small; what that holds is forgotten, as it is incomplete.
        """
        with self._lock:
            epoch = self.counts(slot).epoch + 1
            if grow:
                self._renew(slot, min(self._set(slot)[1] * 4, LARGEST_SIZE))
            struct.pack_into("<I", self._boxes.view, slot * _BOX.size, epoch)
            return epoch

    def forget(self, slot: int, before: int) -> None:
        """Remove the changes of epochs below `before`: a published checkpoint covers them."""
        with self._lock:
            fd, size = self._set(slot)
            old = [key for key, _ in bpf.entries(fd, _KEY.size, _VALUE.size, size) if _KEY.unpack(key)[3] < before]
            bpf.delete_all(fd, old)

    def tasks(self, slot: int) -> list[Task]:
        """Every task of a sandbox."""
        return [task for task in parse(bpf.read_iterator(self._tasks)) if task.slot == slot]


def _depth(group: Path) -> int:
    """How many folders below the root of its hierarchy a cgroup is, as far as its path tells."""
    with open("/proc/self/mountinfo") as f:
        for line in f:
            fields = line.split()
            if " - cgroup2 " in line and group.is_relative_to(fields[4]):
                return len([*Path(fields[3]).parts[1:], *group.relative_to(fields[4]).parts])
    raise HostUnsuitable(f"{group} is no cgroup", remedy="mount cgroup2; see `crab doctor`")


def _kept(undo: contextlib.ExitStack, fd: int) -> int:
    """A descriptor that is closed if what follows fails."""
    undo.callback(os.close, fd)
    return fd


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
