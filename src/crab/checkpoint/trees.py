"""A tree of files as members of an archive, with all that a sandbox can see of it.

Kept are owners, modes, times (to the nanosecond), extended attributes, hard links, holes of sparse files, whiteouts,
FIFOs and sockets. Not kept, because no file system lets one set them: inode numbers, times of birth and of the last
change of an inode. Knows nothing of what the trees are for: the caller says by a `Rule` what may be in them. The way back
is in `unpacking`.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from crab.checkpoint import pax
from crab.checkpoint.pax import Member
from crab.errors import ArchiveRefused, Damaged, InvalidRequest
from crab.host.fingerprint import Entry, walk

PIECE = 1 << 20
MAP_LIMIT = 32 << 20
"""Bytes of the map of one sparse file: more than a million pieces."""

PLAIN = ("user.", "security.capability", "system.posix_acl_")
"""Attributes that mean the same everywhere. Labels of security modules and properties of a file system do not."""
OVERLAY = (b"trusted.overlay.opaque", b"trusted.overlay.redirect", b"trusted.overlay.protattr")
"""Marks of overlayfs that are part of a writable layer. The others (origin, impure, nlink, uuid) are about inodes of the
layer below as they are on one file system: overlayfs makes them again, and refuses to mount with those of another."""


@dataclass(frozen=True)
class Rule:
    """What may be in a tree."""

    marks: bool = False
    """Whiteouts and marks of overlayfs: a writable layer."""
    devices: frozenset[tuple[int, int]] = frozenset()
    """Character devices that may be there."""
    strict: bool = False
    """An attribute that cannot be kept is an error, since it is part of a fingerprint."""

    def keeps(self, name: bytes) -> bool:
        """Whether that attribute is part of the archive."""
        return name.startswith(tuple(map(str.encode, PLAIN))) or (self.marks and name in OVERLAY)

    def allows(self, device: tuple[int, int]) -> bool:
        """Whether that character device may be there; 0:0 is a whiteout."""
        return device in self.devices or (self.marks and device == (0, 0))

    def check(self, member: Member) -> None:
        """Raise `ArchiveRefused` for a member that must not be there."""
        shown = os.fsdecode(member.name[:200]).encode(errors="backslashreplace").decode()
        if member.kind == "char" and not self.allows(member.device):
            raise ArchiveRefused(
                f"the archive has a device node: {shown!r} ({member.device[0]}:{member.device[1]})",
                remedy="do not use it: a sandbox gets its own /dev, and other devices lead to the host",
            )
        for name, _ in member.xattrs:
            if not self.keeps(name):
                raise ArchiveRefused(
                    f"the archive has an attribute that must not be: {os.fsdecode(name[:100])!r} of {shown!r}",
                    remedy="do not use it",
                )


Add = Callable[[Member, Iterable[bytes]], None]
"""Takes a member and its content."""


@dataclass
class Size:
    """What a tree will take in an archive."""

    size: int = 0
    """Bytes of content, holes left out."""
    entries: int = 0


def measure(root: Path) -> Size:
    """How large the tree is. It must not change until it is packed."""
    total = Size()
    seen: set[tuple[int, int]] = set()
    for entry in walk(root, xattrs=False):
        total.entries += 1
        status = entry.stat
        if not stat.S_ISREG(status.st_mode):
            continue
        if status.st_nlink > 1:
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
        sparse = status.st_blocks * 512 < status.st_size
        total.size += 0 if sparse else status.st_size
        if sparse or 0 < status.st_size <= PIECE:
            descriptor = entry.open()
            try:
                if sparse:
                    total.size += _stored(_pieces(descriptor, status.st_size), status.st_size)
                else:  # many small files are read one by one, which takes long unless the disk has begun before
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(descriptor)
    return total


def pack(root: Path, name: bytes, rule: Rule, add: Add) -> None:
    """Give every entry of the tree at `root` to `add`, under names that begin with `name`.

    Raises `InvalidRequest` for what no archive can hold.
    """
    for _, member, content in members(root, name, rule):
        add(member, content)


def members(root: Path, name: bytes, rule: Rule) -> Iterator[tuple[Entry, Member, Iterable[bytes]]]:
    """The same, one after the other, each with what the walk saw. A file is read only if its content is asked for."""
    firsts: dict[tuple[int, int], bytes] = {}
    for entry in walk(root):
        member = _member(entry, name + b"/" + entry.path if entry.path else name, rule)
        if entry.stat.st_nlink > 1 and member.kind not in ("folder", "char"):
            first = firsts.setdefault((entry.stat.st_dev, entry.stat.st_ino), member.name)
            if first != member.name:
                member.kind, member.target, member.xattrs, member.size = "hard", first, (), 0
        if member.kind != "file":
            yield entry, member, ()
        elif member.size > entry.stat.st_blocks * 512:
            yield entry, member, _sparse(entry, member)
        else:
            yield entry, member, _content(entry, b"", [(0, member.size)])


def _member(entry: Entry, name: bytes, rule: Rule) -> Member:
    status, kind = entry.stat, entry.kind
    device = (os.major(status.st_rdev), os.minor(status.st_rdev)) if kind == "char" else (0, 0)
    if kind == "block" or (kind == "char" and not rule.allows(device)):
        raise InvalidRequest(
            f"{os.fsdecode(name)} is a device node, which an archive must not have", remedy="remove it, then try again"
        )
    kept = tuple(pair for pair in entry.xattrs if rule.keeps(pair[0]))
    if rule.strict and len(kept) < len(entry.xattrs):
        for lost, _ in entry.xattrs:
            if not rule.keeps(lost) and not lost.startswith((b"security.selinux", b"btrfs.")):
                raise InvalidRequest(
                    f"{os.fsdecode(name)} has the attribute {os.fsdecode(lost)}, which an archive cannot keep",
                    remedy="export without the image, or make the image without that attribute",
                )
    return Member(
        name=name,
        kind=kind,  # type: ignore[arg-type]  # "block" was refused
        mode=stat.S_IMODE(status.st_mode),
        uid=status.st_uid,
        gid=status.st_gid,
        mtime=status.st_mtime_ns,
        atime=status.st_atime_ns,
        size=status.st_size if kind == "file" else 0,
        target=entry.target,
        device=device,
        xattrs=kept,
    )


def _range(descriptor: int, offset: int, size: int) -> Iterator[bytes]:
    while size:
        block = os.pread(descriptor, min(size, PIECE), offset)
        if not block:
            raise Damaged("a file became shorter while it was read", remedy="try again")
        offset += len(block)
        size -= len(block)
        yield block


def _pieces(descriptor: int, size: int) -> list[tuple[int, int]]:
    """Offset and size of all that is no hole."""
    found: list[tuple[int, int]] = []
    offset = 0
    while offset < size:
        try:
            begin = os.lseek(descriptor, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # a hole up to the end
                break
            raise
        offset = min(os.lseek(descriptor, begin, os.SEEK_HOLE), size)
        found.append((begin, offset - begin))
    return found


def _map(pieces: list[tuple[int, int]], size: int) -> bytes:
    """The map before the content: GNU's format 1.0. An empty last piece says where a file with a hole at its end ends."""
    if not pieces or sum(pieces[-1]) < size:
        pieces = [*pieces, (size, 0)]
    text = b"%d\n" % len(pieces) + b"".join(b"%d\n%d\n" % piece for piece in pieces)
    return text + bytes(pax.padding(len(text)))


def _stored(pieces: list[tuple[int, int]], size: int) -> int:
    if pieces == [(0, size)]:
        return size
    return len(_map(pieces, size)) + sum(length for _, length in pieces)


def _content(entry: Entry, head: bytes, pieces: list[tuple[int, int]]) -> Iterator[bytes]:
    descriptor = entry.open()
    try:
        if head:
            yield head
        for offset, length in pieces:
            yield from _range(descriptor, offset, length)
    finally:
        os.close(descriptor)


def _sparse(entry: Entry, member: Member) -> Iterator[bytes]:
    """The content of a file with holes; the member is told of them."""
    size = member.size
    descriptor = entry.open()
    try:
        pieces = _pieces(descriptor, size)
    finally:
        os.close(descriptor)
    if pieces == [(0, size)]:
        return _content(entry, b"", pieces)
    head = _map(pieces, size)
    if len(head) > MAP_LIMIT:
        raise InvalidRequest(f"{os.fsdecode(member.name)} has too many holes", remedy="copy it inside the sandbox")
    member.real_size, member.size = size, _stored(pieces, size)
    return _content(entry, head, pieces)
