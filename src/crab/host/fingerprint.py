"""Digests of files and of whole trees, and the walk that both they and comparisons of trees use.

Knows what makes two trees the same: paths, types, modes, owners, device numbers, link targets, contents, extended
attributes, and which names are hard links of one file. Times are not part of it. Does not know what the trees are for.

The tree may be read-only or live; a live one can change during the walk, then each entry is as it was when it was read.
Names are bytes throughout. Paths may be longer than PATH_MAX. The digest of a file is that of `b3sum`.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Literal

import msgspec
from blake3 import blake3

from crab.host.beneath import open_beneath

Kind = Literal["file", "folder", "link", "fifo", "socket", "block", "char"]

_KINDS: dict[int, Kind] = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "folder",
    stat.S_IFLNK: "link",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFBLK: "block",
    stat.S_IFCHR: "char",
}
_HEADER = b"crab tree 1\n"
_BLOCK = 1 << 20
_LARGE = 8 << 20
"""From here on blake3's own threads pay."""
_WORTH_A_THREAD = 64 << 10
"""Smaller files are faster in the thread that walks: handing over the interpreter costs more than reading them."""
_BATCH = 512


class _Root:
    """The open top folder, shared by the entries of a walk and closed with the last of them."""

    def __init__(self, path: str | bytes | os.PathLike[str]) -> None:
        self.descriptor = -1
        self.descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


class Entry:
    """One file, folder or other inode name of a tree."""

    __slots__ = ("_root", "path", "stat", "target", "xattrs")

    def __init__(
        self, root: _Root, path: bytes, status: os.stat_result, target: bytes, xattrs: tuple[tuple[bytes, bytes], ...]
    ) -> None:
        self._root = root
        self.path = path
        """Relative to the top, without a slash at either end; empty for the top itself."""
        self.stat = status
        """As of lstat(2)."""
        self.target = target
        """Of a symlink; else empty."""
        self.xattrs = xattrs
        """Sorted (name, value) pairs, all that the kernel shows to root; empty if the walk was told to leave them out.
        """

    @property
    def kind(self) -> Kind:
        return _KINDS[stat.S_IFMT(self.stat.st_mode)]

    @property
    def key(self) -> list[bytes]:
        """What the walk is sorted by: the parts of the path. To merge two walks, compare this and not `path`."""
        return self.path.split(b"/") if self.path else []

    def open(self, flags: int = os.O_RDONLY) -> int:
        """A descriptor of the entry, reached without following any symlink. The caller closes it."""
        return open_beneath(self._root.descriptor, self.path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)

    def digest(self) -> str:
        """`blake3:…` of the content of a regular file; empty for all else."""
        if not stat.S_ISREG(self.stat.st_mode):
            return ""
        descriptor = self.open()
        try:
            return file_digest(descriptor)
        finally:
            os.close(descriptor)

    def __repr__(self) -> str:
        return f"Entry({self.path!r}, {self.kind})"


class TreeSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What one pass over a tree tells."""

    fingerprint: str
    size: int
    """Bytes in regular files, hard-linked ones once."""
    entries: int


def walk(path: str | bytes | os.PathLike[str], *, xattrs: bool = True) -> Iterator[Entry]:
    """Everything in the tree at `path`, itself first, folders before their content, names in the order of their bytes.

    Neither follows symlinks nor enters what is mounted or another subvolume: such a folder is the last of its branch.
    Memory is bounded by the folders on one branch, not by the tree; no descriptors but the top's are kept open.
    """
    root = _Root(path)
    status = os.fstat(root.descriptor)
    top = Entry(root, b"", status, b"", _xattrs(root.descriptor, None) if xattrs else ())
    yield top
    branch = [iter(_children(root, b"", xattrs))]
    while branch:
        for entry in branch[-1]:
            yield entry
            if stat.S_ISDIR(entry.stat.st_mode) and entry.stat.st_dev == status.st_dev:
                branch.append(iter(_children(root, entry.path, xattrs)))
                break
        else:
            branch.pop()


_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV)
"""What opening a folder says that a live tree replaced or moved since it was listed."""


def _children(root: _Root, path: bytes, xattrs: bool) -> list[Entry]:
    try:
        folder = open_beneath(root.descriptor, path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in _GONE:
            return []
        raise
    prefix = path + b"/" if path else b""
    found = []
    try:
        for name in sorted(map(os.fsencode, os.listdir(folder))):
            try:
                status = os.lstat(name, dir_fd=folder)
                target = os.readlink(name, dir_fd=folder) if stat.S_ISLNK(status.st_mode) else b""
                values = _xattrs(folder, name) if xattrs else ()
            except OSError as error:
                if error.errno in _GONE or error.errno == errno.EINVAL:  # EINVAL: no longer a symlink
                    continue
                raise
            found.append(Entry(root, prefix + name, status, target, values))
    finally:
        os.close(folder)
    return found


def _xattrs(folder: int, name: bytes | None) -> tuple[tuple[bytes, bytes], ...]:
    # There is no listxattrat(2) before Linux 6.13; the magic link gives every name a short path.
    place: int | bytes = folder if name is None else b"/proc/self/fd/%d/%s" % (folder, name)
    follow = name is None
    try:
        names = os.listxattr(place, follow_symlinks=follow)
    except OSError as error:
        if error.errno in (errno.ENOTSUP, errno.EPERM):  # EPERM: user attributes of a symlink or device
            return ()
        raise
    values = []
    for attribute in sorted(map(os.fsencode, names)):
        try:
            values.append((attribute, os.getxattr(place, attribute, follow_symlinks=follow)))
        except OSError as error:
            if error.errno not in (errno.ENODATA, errno.ENOTSUP):
                raise
    return tuple(values)


# ---------------------------------------------------------------- digests


def file_digest(file: str | bytes | os.PathLike[str] | int) -> str:
    """`blake3:…` of the content of a file: a path, or a descriptor (read from its start, its position is not moved).

    Read, not mapped: a mapped file that a sandbox truncates meanwhile would end this process by SIGBUS.
    """
    if not isinstance(file, int):
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return file_digest(descriptor)
        finally:
            os.close(descriptor)
    large = os.fstat(file).st_size >= _LARGE
    hasher = blake3(max_threads=blake3.AUTO) if large else blake3()
    size = _LARGE if large else _BLOCK
    offset = 0
    while block := os.pread(file, size, offset):
        hasher.update(block)
        offset += len(block)
    return "blake3:" + hasher.hexdigest()


def tree_fingerprint(path: str | bytes | os.PathLike[str]) -> str:
    """`blake3:…` of the tree at `path`: equal for two trees exactly if they are the same (see above)."""
    return tree_summary(path).fingerprint


def tree_summary(path: str | bytes | os.PathLike[str]) -> TreeSummary:
    """Fingerprint, size and number of entries of the tree at `path`, in one pass.

    The fingerprint is the blake3 digest of a header and, for every entry of `walk`, a msgpack array of path, type,
    mode, uid, gid, size, device number, target, content digest, first other name of the same inode, and attributes.
    """
    hasher = blake3(_HEADER)
    encode = msgspec.msgpack.encode
    names: dict[tuple[int, int], bytes] = {}
    size = count = 0
    entries = walk(path)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        while batch := list(islice(entries, _BATCH)):
            firsts = [_first_name(entry, names) for entry in batch]
            futures = [
                None if first or entry.stat.st_size < _WORTH_A_THREAD else threads.submit(entry.digest)
                for entry, first in zip(batch, firsts, strict=True)
            ]
            for entry, first, future in zip(batch, firsts, futures, strict=True):
                digest = future.result() if future else "" if first else entry.digest()
                status, kind = entry.stat, entry.kind
                length = status.st_size if kind == "file" else 0
                device = status.st_rdev if kind in ("block", "char") else 0
                # Labels of a security module and properties of the file system belong to the machine, not to the tree.
                kept = [pair for pair in entry.xattrs if not pair[0].startswith((b"security.selinux", b"btrfs."))]
                mode, uid, gid = stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid
                record = (entry.path, kind, mode, uid, gid, length, device, entry.target, digest, first, kept)
                hasher.update(encode(record))
                count += 1
                if not first:
                    size += length
    return TreeSummary(fingerprint="blake3:" + hasher.hexdigest(), size=size, entries=count)


def _first_name(entry: Entry, names: dict[tuple[int, int], bytes]) -> bytes:
    """The name under which this inode came before; empty for its first or only one."""
    if entry.stat.st_nlink < 2 or stat.S_ISDIR(entry.stat.st_mode):
        return b""
    first = names.setdefault((entry.stat.st_dev, entry.stat.st_ino), entry.path)
    return b"" if first == entry.path else first
