"""Members of an archive as a tree of files again. The other way round is in `trees`.

Nothing that is read is trusted. Members come in the order of a walk, folders before what is in them; each is made as a new
name in the folder that is open at that moment, no path is ever followed through a link, and a name can be made once.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path
from typing import Protocol

from crab.checkpoint import pax
from crab.checkpoint.pax import Member
from crab.checkpoint.trees import MAP_LIMIT, PIECE, Rule
from crab.errors import ArchiveRefused
from crab.host.beneath import open_beneath

_NUMBER = re.compile(rb"[0-9]{1,19}")
_NODE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NOT_OURS = (
    *(errno.EINVAL, errno.ELOOP, errno.EXDEV, errno.ENAMETOOLONG, errno.ERANGE, errno.E2BIG, errno.EFBIG),
    *(errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENXIO),
)
"""What the kernel says of values that no file has."""


class Content(Protocol):
    """What follows the header of a member."""

    def read(self, size: int, /) -> bytes:
        """The next bytes, as many as asked for if there are so many; none at the end."""
        ...


class Unpacking:
    """One tree on its way out of an archive; `root` is the folder that it grows in, empty but for what the caller made."""

    def __init__(self, root: Path, rule: Rule) -> None:
        self._rule = rule
        self._root = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._at = -1
        """The folder of the member that comes next, probably."""
        self._branch: list[tuple[bytes, Member]] = []
        """The open folder and those above it; their times are set when nothing more is made in them."""

    def close(self) -> None:
        """Let go of the folders. What `finish` was not called for is unfinished."""
        for descriptor in (self._at, self._root):
            if descriptor >= 0:
                os.close(descriptor)
        self._at = self._root = -1

    def finish(self) -> None:
        """All members came."""
        while self._branch:
            self._leave()

    def add(self, path: bytes, member: Member, content: Content, target: bytes = b"") -> None:
        """Make the next member at `path`, relative to the root (empty for itself). `target` is of a hard link, relative too.

        Raises `ArchiveRefused` for what must not be there, and OSError if the disk says no.
        """
        self._rule.check(member)
        folder, _, name = path.rpartition(b"/")
        try:
            self._go_to(folder, path)
            self._make(name, path, member, content, target)
        except (FileExistsError, FileNotFoundError, NotADirectoryError, ValueError, OverflowError) as error:
            raise self._refused(path, str(error)) from error
        except OSError as error:
            if error.errno in _NOT_OURS:
                raise self._refused(path, error.strerror or str(error)) from error
            raise

    @staticmethod
    def _refused(path: bytes, why: str) -> ArchiveRefused:
        shown = os.fsdecode(path[:200]).encode(errors="backslashreplace").decode()
        return ArchiveRefused(f"the archive has a member that cannot be: {shown!r}: {why}", remedy="do not use it")

    # ---- folders

    def _go_to(self, folder: bytes, path: bytes) -> None:
        if not path:
            if self._branch:
                raise self._refused(path, "the top comes twice")
            return
        while self._branch and self._branch[-1][0] != folder:
            self._leave()
        if not self._branch:
            raise self._refused(path, "its folder does not come before it")
        if self._at < 0:
            self._at = open_beneath(self._root, folder, os.O_RDONLY | os.O_DIRECTORY)

    def _leave(self) -> None:
        path, member = self._branch.pop()
        descriptor = self._at if self._at >= 0 else open_beneath(self._root, path, os.O_RDONLY | os.O_DIRECTORY)
        self._at = -1
        try:
            os.utime(descriptor, ns=_times(member))
        finally:
            os.close(descriptor)

    def _enter(self, descriptor: int, path: bytes, member: Member) -> None:
        if self._at >= 0:
            os.close(self._at)
        self._at = descriptor
        self._branch.append((path, member))

    # ---- members

    def _make(self, name: bytes, path: bytes, member: Member, content: Content, target: bytes) -> None:
        match member.kind:
            case "folder":
                if path:
                    os.mkdir(name, 0o700, dir_fd=self._at)
                    descriptor = os.open(name, _NODE | os.O_DIRECTORY, dir_fd=self._at)
                else:
                    descriptor = os.dup(self._root)
                self._enter(descriptor, path, member)
                _dress(descriptor, member)
                return
            case _ if not path:
                raise self._refused(path, "the top is not a folder")
            case "file":
                descriptor = os.open(name, _NEW, 0o600, dir_fd=self._at)
                try:
                    _write(descriptor, member, content)
                    _dress(descriptor, member)
                    os.utime(descriptor, ns=_times(member))
                finally:
                    os.close(descriptor)
                return
            case "hard":
                self._link(name, path, target)
                return
            case "link":
                os.symlink(member.target, name, dir_fd=self._at)
            case "fifo":
                os.mkfifo(name, 0o600, dir_fd=self._at)
            case "socket":
                os.mknod(name, stat.S_IFSOCK | 0o600, dir_fd=self._at)
            case "char":
                os.mknod(name, stat.S_IFCHR | 0o600, os.makedev(*member.device), dir_fd=self._at)
        os.chown(name, member.uid, member.gid, dir_fd=self._at, follow_symlinks=False)
        if member.kind != "link":
            os.chmod(name, member.mode, dir_fd=self._at)  # never a link: made a moment ago, in a folder of ours
        _set_attributes(b"/proc/self/fd/%d/%s" % (self._at, name), member, follow=False)
        os.utime(name, ns=_times(member), dir_fd=self._at, follow_symlinks=False)

    def _link(self, name: bytes, path: bytes, target: bytes) -> None:
        folder, _, first = target.rpartition(b"/")
        parent = open_beneath(self._root, folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            if stat.S_ISDIR(os.lstat(first, dir_fd=parent).st_mode):
                raise self._refused(path, "it is another name of a folder")
            os.link(first, name, src_dir_fd=parent, dst_dir_fd=self._at, follow_symlinks=False)
        finally:
            os.close(parent)


def _dress(descriptor: int, member: Member) -> None:
    """Owner first: changing it clears setuid bits and capabilities."""
    os.fchown(descriptor, member.uid, member.gid)
    os.fchmod(descriptor, member.mode)
    _set_attributes(descriptor, member, follow=True)


def _set_attributes(place: int | bytes, member: Member, follow: bool) -> None:
    for name, value in member.xattrs:
        os.setxattr(place, name, value, follow_symlinks=follow)


def _times(member: Member) -> tuple[int, int]:
    return (member.mtime if member.atime is None else member.atime, member.mtime)


def _write(descriptor: int, member: Member, content: Content) -> None:
    if member.real_size is None:
        while block := content.read(PIECE):
            _write_all(descriptor, block)
        return
    end = 0
    for offset, size in _read_map(content):
        if offset < end or offset + size > member.real_size:
            raise ValueError("the pieces of a sparse file overlap or lie outside of it")
        end = offset + size
        os.lseek(descriptor, offset, os.SEEK_SET)
        while size:
            block = content.read(min(size, PIECE))
            if not block:
                raise ValueError("a sparse file has less content than its map says")
            _write_all(descriptor, block)
            size -= len(block)
    if content.read(1):
        raise ValueError("a sparse file has more content than its map says")
    os.ftruncate(descriptor, member.real_size)


def _read_map(content: Content) -> list[tuple[int, int]]:
    numbers: list[int] = []
    wanted, rest = 1, b""
    while len(numbers) < wanted:
        block = content.read(pax.BLOCK)
        *lines, rest = (rest + block).split(b"\n")
        if len(block) < pax.BLOCK or not all(_NUMBER.fullmatch(line) for line in lines) or wanted > MAP_LIMIT // 4:
            raise ValueError("the map of a sparse file cannot be read")
        numbers += map(int, lines)
        if numbers:
            wanted = 1 + 2 * numbers[0]
    if len(numbers) != wanted or any(rest):
        raise ValueError("the map of a sparse file cannot be read")
    return list(zip(numbers[1::2], numbers[2::2], strict=True))


def _write_all(descriptor: int, block: bytes) -> None:
    view = memoryview(block)
    while view:
        view = view[os.write(descriptor, view) :]
