"""The net effect of changes to files: which of the inodes that were touched differ from the last snapshot, and in what.

A file that was made and removed again, one that was rewritten with what it held, one of the image that was only opened for
writing (overlayfs copies it then) have changed nothing. Cost is that of what was touched, not of the tree: btrfs tells the
names of an inode in the live subvolume and in the snapshot, where it has the same number.

Compared is what a user of the sandbox can see: type, content, mode, owner, device, link target, extended attributes and
ACLs, inode flags (chattr), which names are one file. Times are not; files in which nothing else changed are counted.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from crab.host.beneath import open_beneath
from crab.host.btrfs import InodePaths
from crab.model import FileChange

ENOUGH = 16
"""Changes that are told one by one; the decision needs one."""
MOST_BYTES = 64 << 20
"""Content that is read to prove that nothing changed; beyond, it counts as changed."""
_PIECE = 1 << 20
_OWN = ("trusted.overlay.", "security.selinux")
_OPAQUE, _REDIRECT, _PROTECTED = (f"trusted.overlay.{name}" for name in ("opaque", "redirect", "protattr"))
_REMAP = b"link_remap."
"""Names that CRIU gives, for the time of a snapshot, to open files that have none."""
_GET_FLAGS = 0x80086601  # FS_IOC_GETFLAGS
_UPPER = b"u/"


Same = dict[int, tuple[bytes, int]]
"""Inodes that were found to be what they were: name and change time (ns) at that moment. While both are so, they still are."""


@dataclass
class NetChange:
    """See the module."""

    changed: list[FileChange] = field(default_factory=list[FileChange])
    """At most ENOUGH of them."""
    unsure: str = ""
    """Why it is not known whether something changed; empty if it is known."""
    touched: int = 0
    """Inodes that were looked at."""
    names_unknown: bool = False
    """An inode has more names than the kernel tells, so `replaced` is not all."""
    replaced: set[str] = field(default_factory=set[str])
    """If they were asked for: names that are no longer those of the same inode. Whoever has one open has another file."""
    times_only: int = 0
    """Files that were written or touched and hold what they held."""

    def __bool__(self) -> bool:
        return bool(self.changed or self.unsure)


@dataclass(frozen=True)
class Sides:
    """What is compared: two subvolumes with the writable layers of a sandbox, and what lies below these."""

    live: Path
    base: Path
    lower: Mapping[bytes, Path]
    """Of each part (`` for the root, `mN/` for a copy-on-write mount) the layer below."""
    places: Mapping[bytes, str]
    """Of each part where it is seen in the sandbox: `` or a path that ends in a slash."""


def net_changes(sides: Sides, numbers: Iterable[int], same: Same, *, replaced: bool = False) -> NetChange:
    """Compare what has those inode numbers; `replaced` asks for all names that were given to other inodes.

    `same` is what earlier comparisons of the same two subvolumes have found; it is added to. Never raises for files that
    vanish meanwhile.
    """
    with contextlib.ExitStack() as stack:
        return _Comparison(sides, same, stack).run(numbers, replaced)


def refresh_stamps(live: Path, numbers: Iterable[int]) -> None:
    """Ask for the times of inodes, so that their next change gets another time even within the same tick of the clock.

    Without this a second change within one tick (4 ms at HZ=250) would not change the time, and be missed
    (Documentation/filesystems/multigrain-ts.rst, Linux 6.13).
    """
    with InodePaths(live) as paths:
        for number in numbers:
            for path in (paths(number) or ())[:1]:
                with contextlib.suppress(OSError):
                    os.stat(path, dir_fd=paths.fd, follow_symlinks=False)


class _Comparison:
    def __init__(self, sides: Sides, same: Same, stack: contextlib.ExitStack) -> None:
        self.sides, self.same = sides, same
        self.live = stack.enter_context(InodePaths(sides.live))
        self.base = stack.enter_context(InodePaths(sides.base))
        self.lower: dict[bytes, int] = {}
        for part, path in sides.lower.items():
            self.lower[part] = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, self.lower[part])
        self.result = NetChange()
        self.left = MOST_BYTES
        self.done: set[bytes] = set()
        self.statuses: dict[bytes, os.stat_result | None] = {}
        """Of live names, from before they were compared: whatever changes later gets another time."""
        self.cut_off: dict[tuple[int, bytes], bool] = {}

    def run(self, numbers: Iterable[int], replaced: bool) -> NetChange:
        found = self.result
        for number in dict.fromkeys(numbers):  # one that changed in several epochs comes several times
            done = len(found.changed) >= ENOUGH or bool(found.unsure)
            if done and not replaced:
                break
            if self._is_same(number):
                found.touched += 1
                continue
            now = self._now(number)
            then = self._then(number, now)
            if now is None or then is None:
                # overlayfs makes every removed file of the image a name of one and the same inode
                found.unsure = "so many files of the image were removed that not all their names are known"
                found.names_unknown = True
                break
            if not now and not then:
                continue  # came and went, or not one of these files
            if replaced:
                found.replaced.update(
                    self._shown(name) for name in now ^ then if not (not then and self._shows_folder(name))
                )
            if done:
                continue
            found.touched += 1
            told = len(found.changed)
            moved = bool(now and then) and now != then
            paths = {*now, *then} - self.done
            self.done |= paths
            for path in sorted(paths):
                try:
                    self._compare(path, moved, (len(now), len(then)) if now and then else (0, 0))
                except OSError as error:
                    found.unsure = f"{self._shown(path)} cannot be compared: {error.strerror}"
                    break
            # it alone has the name, and that was compared just now
            if now == then == paths and len(paths) == 1 and len(found.changed) == told and not found.unsure:
                self._remember(number, *paths)
        return found

    def _is_same(self, number: int) -> bool:
        known = self.same.get(number)
        if known is None:
            return False
        status = _status(self.live.fd, known[0])
        return status is not None and (status.st_ino, status.st_ctime_ns) == (number, known[1])

    def _remember(self, number: int, name: bytes) -> None:
        if (status := self.statuses.get(name)) is not None:
            self.same[number] = name, status.st_ctime_ns

    def _names(self, paths: InodePaths, number: int) -> set[bytes] | None:
        """Its names in writable layers, `part` + `u/` + path."""
        names = paths(number)
        if names is None:
            return None
        return {name for name in names if self._split(name) is not None}

    def _now(self, number: int) -> set[bytes] | None:
        """Its names in the live subvolume. btrfs still tells that of a file that was removed a moment ago and is open."""
        names = self._names(self.live, number)
        if names is None:
            return None
        for name in names:
            self.statuses[name] = _status(self.live.fd, name)
        return {name for name in names if (status := self.statuses[name]) is not None and status.st_ino == number}

    def _then(self, number: int, now: set[bytes] | None) -> set[bytes] | None:
        """Its names in the base. If it has the one that it has now and no other, the kernel need not be asked again."""
        if now and len(now) == 1:
            (name,) = now
            status = _status(self.base.fd, name)
            if (
                status is not None
                and status.st_ino == number
                and (status.st_nlink == 1 or stat.S_ISDIR(status.st_mode))
            ):
                return now
        return self._names(self.base, number)

    def _split(self, name: bytes) -> tuple[bytes, bytes] | None:
        """Part and path below its writable layer; None for what is overlayfs's own, or CRIU's."""
        for part in self.sides.lower:
            if name.startswith(part + _UPPER) and not name.rpartition(b"/")[2].startswith(_REMAP):
                return part, name[len(part) + len(_UPPER) :]
        return None

    def _shown(self, name: bytes) -> str:
        part, path = self._split(name) or (b"", name)
        return self.sides.places[part] + os.fsdecode(path)

    # ---- one path

    def _compare(self, name: bytes, moved: bool, links: tuple[int, int]) -> None:
        if name not in self.statuses:
            self.statuses[name] = _status(self.live.fd, name)
        now, then = self.statuses[name], _status(self.base.fd, name)
        part, path = self._split(name) or (b"", name)
        old_fd, old_name = self.base.fd, name
        if now is None and then is None:
            return
        if then is None:  # new in the writable layer: what was seen before is the layer below, if anything
            then = self._below(part, path, self.base)
            old_fd, old_name = self.lower[part], path
        elif _is_whiteout(then):
            then = None
        if now is not None and _is_whiteout(now):
            now = None
        if now is None:
            if then is not None:
                self._tell(name, "removed")
            return
        if then is None:
            self._tell(name, "added", (), now.st_size if stat.S_ISREG(now.st_mode) else 0)
            return
        what = self._differences(name, now, old_fd, old_name, then)
        if moved and stat.S_ISDIR(now.st_mode):
            what.append("moved")  # and all that is in it
        if links != (0, 0) and links[0] != links[1] and not stat.S_ISDIR(now.st_mode):
            what.append("links")
        if what:
            self._tell(name, "changed", tuple(what), now.st_size if stat.S_ISREG(now.st_mode) else 0)
        elif now.st_mtime_ns != then.st_mtime_ns and not stat.S_ISDIR(now.st_mode):
            self.result.times_only += 1

    def _below(self, part: bytes, path: bytes, layer: InodePaths) -> os.stat_result | None:
        """What shows through an empty place of a writable layer. Raises OSError if that cannot be told."""
        folder = path
        while b"/" in folder:
            folder = folder.rpartition(b"/")[0]
            if self._hides(layer, part + _UPPER + folder):
                return None
        return _status(self.lower[part], path)

    def _shows_folder(self, name: bytes) -> bool:
        """Whether a folder that is new in the writable layer is the one that showed through before."""
        status = _status(self.live.fd, name)
        part, path = self._split(name) or (b"", name)
        below = self._below(part, path, self.base)
        return status is not None and below is not None and stat.S_ISDIR(status.st_mode) and stat.S_ISDIR(below.st_mode)

    def _hides(self, layer: InodePaths, name: bytes) -> bool:
        """Whether a folder of a writable layer lets nothing show through (or something else, after a rename)."""
        key = layer.fd, name
        if key not in self.cut_off:
            status = _status(layer.fd, name)
            self.cut_off[key] = status is not None and (
                _is_whiteout(status) or bool({_OPAQUE, _REDIRECT} & _seen(_path(layer.fd, name)).keys())
            )
        return self.cut_off[key]

    def _differences(
        self, name: bytes, now: os.stat_result, old_fd: int, old_name: bytes, then: os.stat_result
    ) -> list[str]:
        if stat.S_IFMT(now.st_mode) != stat.S_IFMT(then.st_mode) or now.st_rdev != then.st_rdev:
            return ["type"]
        found: list[str] = []
        if now.st_mode != then.st_mode:
            found.append("mode")
        if (now.st_uid, now.st_gid) != (then.st_uid, then.st_gid):
            found.append("owner")
        fd = self.live.fd
        if stat.S_ISREG(now.st_mode) or stat.S_ISDIR(now.st_mode):
            with _opened(fd, name) as new, _opened(old_fd, old_name) as old:
                if stat.S_ISREG(now.st_mode) and not self._same_content(new, old, now.st_size, then.st_size):
                    found.append("content")
                if _seen(new) != _seen(old):
                    found.append("xattr")
                if not found and _flags(new) != _flags(old):
                    found.append("flags")
            return found
        if stat.S_ISLNK(now.st_mode) and os.readlink(name, dir_fd=fd) != os.readlink(old_name, dir_fd=old_fd):
            found.append("target")
        if _seen(_path(fd, name)) != _seen(_path(old_fd, old_name)):
            found.append("xattr")
        return found

    def _same_content(self, new: int, old: int, size: int, old_size: int) -> bool:
        if size != old_size:
            return False
        self.left -= size
        if self.left < 0:
            self.result.unsure = f"more than {MOST_BYTES >> 20} MiB were written: not compared"
            return False
        return all(os.pread(new, _PIECE, at) == os.pread(old, _PIECE, at) for at in range(0, size, _PIECE))

    def _tell(self, name: bytes, kind: str, what: tuple[str, ...] = (), size: int = 0) -> None:
        assert kind in ("added", "changed", "removed")
        self.result.changed.append(FileChange(path=self._shown(name), kind=kind, what=what, size=size))


# ---------------------------------------------------------------- one side of a path


def _status(fd: int, name: bytes) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=fd, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _is_whiteout(status: os.stat_result | None) -> bool:
    """How overlayfs says that a file of the layer below is gone."""
    return status is not None and stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


@contextlib.contextmanager
def _opened(fd: int, name: bytes) -> Iterator[int]:
    opened = open_beneath(fd, name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOATIME)
    try:
        yield opened
    finally:
        os.close(opened)


def _path(fd: int, name: bytes) -> bytes:
    """A path to a name that cannot be opened: a symlink, a socket, a device."""
    return b"/proc/self/fd/%d/%s" % (fd, name)


def _seen(place: int | bytes) -> dict[str, bytes]:
    """Extended attributes that can be seen in the sandbox, and what makes a folder opaque or renamed."""
    follow = isinstance(place, int)
    return {
        name: os.getxattr(place, name, follow_symlinks=follow)
        for name in os.listxattr(place, follow_symlinks=follow)
        if name in (_OPAQUE, _REDIRECT, _PROTECTED) or not name.startswith(_OWN)
    }


def _flags(fd: int) -> int:
    """Of chattr(1); 0 for what has none."""
    try:
        return struct.unpack("<I", fcntl.ioctl(fd, _GET_FLAGS, bytes(4)))[0]
    except OSError:
        return 0
