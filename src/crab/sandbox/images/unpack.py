"""Unpack a tar archive that nobody vouches for into a folder, as root, with owners, modes, times, xattrs and links.

Python's `tarfile` only parses here; what is created is decided and done by this module, relative to open folders, so
that no member can reach outside. Refused (ArchiveRefused): paths with `..` or a leading `/`, members below a symlink
that leaves the folder, hard links to such places, device nodes, unknown types, more bytes or members than allowed, and
every archive that is cut short or corrupt (`tarfile` itself takes a damaged header for the end of the archive).

Also knows the whiteouts of OCI layers. Does not know what the archive is for.
"""

from __future__ import annotations

import bz2
import contextlib
import errno
import gzip
import io
import lzma
import os
import shutil
import stat
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple, Self, cast

from crab.errors import ArchiveRefused
from crab.host import btrfs
from crab.host.beneath import Links, open_beneath
from crab.sandbox.images import programs
from crab.sandbox.images.source import UnpackLimits

_BLOCK = 1 << 20
_HOLE = 64 << 10
"""Zeros of this size in a sparse file are not written."""
_CHECK = "check the file, get it again"
_HEADER_LIMIT = 8 << 20
"""Bytes of one extended header, which tarfile reads into memory: 64 KiB for each of many xattrs fit, a bomb does not.
"""
_TRAILER_LIMIT = 64 << 20
"""Bytes after the end of the archive (tar pads to 10 KiB) that are read to check the compressed stream to its end."""
_LARGEST_ID = 2**32 - 2
_KEPT_XATTRS = ("user.", "security.capability", "system.posix_acl_")
"""Others are not an archive's to set: trusted.* steers overlayfs, security.selinux and the like belong to the host."""
_WHITEOUT = b".wh."
_OPAQUE = b".wh..wh..opq"
_AUFS = b".wh..wh."

_BROKEN = (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, ValueError, OverflowError, RecursionError)
"""All that parsing a malformed archive can raise (RecursionError: a chain of extended headers)."""


class Budget:
    """What may still be unpacked; shared by the layers of one image."""

    def __init__(self, limits: UnpackLimits) -> None:
        self.limits = limits
        self.size = 0
        self.entries = 0
        self.lost_acls = 0
        """Members with an access list in text form, whose user names mean nothing here; it was left out."""

    def take(self, size: int) -> None:
        """Count a member of `size` bytes, or refuse the archive."""
        self.size += size
        self.entries += 1
        if self.size > self.limits.size:
            raise ArchiveRefused(
                f"the archive unpacks to more than {self.limits.size} bytes",
                remedy="if that is meant, allow a larger size for images",
            )
        if self.entries > self.limits.entries:
            raise ArchiveRefused(
                f"the archive has more than {self.limits.entries} members",
                remedy="if that is meant, allow more entries for images",
            )


def unpack(file: Path, root: Path, budget: Budget, *, links: Links = "beneath", whiteouts: bool = False) -> None:
    """Unpack the tar archive `file` (plain, gzip, bzip2, xz or zstd) into the folder `root`.

    `links`: how symlinks that are already there are followed on the way to a member, see `beneath`. `whiteouts`: apply
    the archive as an OCI layer over what `root` holds.
    """
    with btrfs.checked(root), opened(file) as stream:
        _Unpacking(root, budget, links, whiteouts).run(stream, file)


# ---------------------------------------------------------------- compression


@contextlib.contextmanager
def opened(file: Path) -> Iterator[IO[bytes]]:
    """The decompressed bytes of a file; the first bytes decide, not the name."""
    with open(file, "rb") as raw:
        magic = raw.read(6)
        raw.seek(0)
        if magic.startswith(b"\x1f\x8b"):
            with gzip.GzipFile(fileobj=raw) as stream:
                yield cast(IO[bytes], io.BufferedReader(stream, _BLOCK))
        elif magic.startswith(b"BZh"):
            with bz2.BZ2File(raw) as stream:
                yield stream
        elif magic == b"\xfd7zXZ\0":
            with lzma.LZMAFile(raw) as stream:
                yield stream
        elif magic.startswith(b"\x28\xb5\x2f\xfd"):
            os.lseek(raw.fileno(), 0, os.SEEK_SET)  # Python's buffer has read ahead of what it handed out
            with programs.piped([programs.require("zstd"), "-dc"], raw) as process:
                assert process.stdout is not None and process.stderr is not None
                yield process.stdout
                if process.wait() != 0:
                    reason = process.stderr.read().decode(errors="replace").strip()
                    raise ArchiveRefused(f"{file} is truncated or corrupt: {reason}")
        else:
            yield raw


# ---------------------------------------------------------------- parsing


class _Member(tarfile.TarInfo):
    """A member whose header is checked where tarfile would go on in silence."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        try:
            member = super().frombuf(buf, encoding, errors)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise  # the block of zeros that ends an archive
        except tarfile.HeaderError as error:
            # Within an archive tarfile ends the iteration here as if all were well.
            raise ArchiveRefused(
                f"this is no tar archive, or it is truncated or corrupt: {error}", remedy=_CHECK
            ) from error
        if member.size < 0:
            raise ArchiveRefused(f"the archive is corrupt: {member.name!r} has a negative size")
        extended = (
            tarfile.XHDTYPE,
            tarfile.XGLTYPE,
            tarfile.SOLARIS_XHDTYPE,
            tarfile.GNUTYPE_LONGNAME,
            tarfile.GNUTYPE_LONGLINK,
        )
        if member.type in extended and member.size > _HEADER_LIMIT:
            raise ArchiveRefused(f"an extended header of {member.size} bytes is too large")
        return member


class _Attributes(NamedTuple):
    mode: int
    uid: int
    gid: int
    mtime: int
    """Nanoseconds."""
    xattrs: dict[bytes, bytes]


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _parts(name: bytes, what: str) -> list[bytes]:
    if name.startswith(b"/"):
        raise ArchiveRefused(
            f"{what} is absolute: {os.fsdecode(name)!r}",
            remedy="make the archive with relative paths (tar -C ROOT -c .)",
        )
    parts = [part for part in name.split(b"/") if part not in (b"", b".")]
    if b".." in parts or b"\0" in name:
        raise ArchiveRefused(f"{what} leaves the archive: {os.fsdecode(name)!r}")
    return parts


def _mtime(member: tarfile.TarInfo) -> int:
    text = member.pax_headers.get("mtime", "")
    if not text:
        return int(member.mtime) * 10**9
    seconds, _, fraction = text.partition(".")
    nanoseconds = int(fraction[:9].ljust(9, "0")) if fraction else 0
    # -1.25 is 0.25 before -1, so the fraction takes the sign along.
    return int(seconds) * 10**9 + (-nanoseconds if seconds.startswith("-") else nanoseconds)


def _attributes(member: tarfile.TarInfo) -> _Attributes:
    if not (0 <= member.uid <= _LARGEST_ID and 0 <= member.gid <= _LARGEST_ID):
        raise ArchiveRefused(f"{member.name!r} has an impossible owner: {member.uid}:{member.gid}")
    xattrs = {}
    for key, value in member.pax_headers.items():
        name = key.removeprefix("SCHILY.xattr.")
        if name != key and name.startswith(_KEPT_XATTRS):
            xattrs[_encode(name)] = _encode(value)
    return _Attributes(member.mode & 0o7777, member.uid, member.gid, _mtime(member), xattrs)


# ---------------------------------------------------------------- creating


class _Unpacking:
    """One archive on its way into one folder."""

    def __init__(self, root: Path, budget: Budget, links: Links, whiteouts: bool) -> None:
        self._root_path = root
        self._root = -1
        self._budget = budget
        self._links: Links = links
        self._whiteouts = whiteouts
        self._fresh: set[bytes] = set()
        """Paths that came with this layer, which its own whiteouts leave alone (image-spec: layer.md)."""
        self._folders: dict[bytes, _Attributes] = {}
        self._times: dict[bytes, int] = {}
        """Times of folders that were there and get new members without being members themselves."""
        self._parent: tuple[bytes, int] | None = None
        """The folder of the previous member, kept open: archives come folder by folder."""

    def run(self, stream: IO[bytes], file: Path) -> None:
        self._root = os.open(self._root_path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with contextlib.ExitStack() as stack:
                with self._parsing(file):
                    # Stream mode: one pass, and never a seek that a header could steer.
                    archive = stack.enter_context(
                        tarfile.open(
                            fileobj=stream, mode="r|", tarinfo=_Member, encoding="utf-8", errors="surrogateescape"
                        )
                    )
                while True:
                    with self._parsing(file):
                        member = archive.next()
                    if member is None:
                        break
                    # The table of contents, which would grow in memory.
                    archive.members.clear()  # pyright: ignore[reportAttributeAccessIssue]
                    self._apply(archive, member, file)
                self._check_end(stream, file)
            self._finish_folders()
        finally:
            self._forget_parent()
            os.close(self._root)

    @contextlib.contextmanager
    def _parsing(self, file: Path) -> Iterator[None]:
        try:
            yield
        except (*_BROKEN, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # a failing disk; the decompressors' own errors have no number
            raise ArchiveRefused(
                f"{file} is no tar archive, or it is truncated or corrupt: {error or type(error).__name__}",
                remedy=_CHECK,
            ) from error

    def _check_end(self, stream: IO[bytes], file: Path) -> None:
        """Read what follows the archive: only at the end of a compressed stream its checksum is known to be right."""
        total = 0
        with self._parsing(file):
            while block := stream.read(_BLOCK):
                total += len(block)
                if total > _TRAILER_LIMIT:
                    raise ArchiveRefused(f"{file} goes on after the end of the archive", remedy="pack it again")

    # ------------------------------------------------------------ members

    def _apply(self, archive: tarfile.TarFile, member: tarfile.TarInfo, file: Path) -> None:
        self._budget.take(member.size if member.isreg() else 0)
        if any(key.startswith("SCHILY.acl.") for key in member.pax_headers):
            self._budget.lost_acls += 1
        parts = _parts(_encode(member.name), "a member")
        if not parts:
            if not member.isdir():
                raise ArchiveRefused("the top of the archive is not a folder")
            self._folders[b""] = _attributes(member)
            return
        folder, name = b"/".join(parts[:-1]), parts[-1]
        try:
            if self._whiteouts and name.startswith(_WHITEOUT):
                self._whiteout(folder, name)
            else:
                self._create(archive, member, folder, name, file)
        except (OSError, ValueError, OverflowError) as error:
            number = error.errno if isinstance(error, OSError) else None
            if number in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS):
                raise
            reason = error.strerror if isinstance(error, OSError) else str(error)
            if number in (errno.EXDEV, errno.ELOOP):
                reason = "its path leads through a symlink that leaves the archive"
            raise ArchiveRefused(f"{file}: the member {member.name!r} cannot be unpacked: {reason}") from error

    def _create(
        self, archive: tarfile.TarFile, member: tarfile.TarInfo, folder: bytes, name: bytes, file: Path
    ) -> None:
        path = folder + b"/" + name if folder else name
        if member.ischr() or member.isblk():
            raise ArchiveRefused(
                f"the archive contains a device node: {member.name!r}",
                remedy="pack it without device nodes (tar --exclude='./dev/*'); a sandbox gets its own /dev",
            )
        parent = self._open_parent(folder)
        attributes = _attributes(member)
        if member.isdir():
            self._make_folder(parent, name)
            self._folders[path] = attributes
        elif member.islnk():
            self._hard_link(parent, name, path, _parts(_encode(member.linkname), "the target of a hard link"))
        elif member.issym():
            self._remove(parent, name)
            os.symlink(_encode(member.linkname), name, dir_fd=parent)
            os.chown(name, attributes.uid, attributes.gid, dir_fd=parent, follow_symlinks=False)
            times = (attributes.mtime, attributes.mtime)
            os.utime(name, ns=times, dir_fd=parent, follow_symlinks=False)
        elif member.isfifo():
            self._remove(parent, name)
            os.mkfifo(name, 0o600, dir_fd=parent)
            descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
            with _closing(descriptor):
                _set_attributes(descriptor, attributes)
        elif member.isreg():
            self._remove(parent, name)
            self._write_file(archive, member, parent, name, attributes, file)
        else:
            raise ArchiveRefused(f"the archive contains a member of unknown type {member.type!r}: {member.name!r}")
        if self._whiteouts:
            self._fresh.add(path)

    def _make_folder(self, parent: int, name: bytes) -> None:
        try:
            os.mkdir(name, 0o755, dir_fd=parent)
        except FileExistsError:
            if stat.S_ISDIR(os.lstat(name, dir_fd=parent).st_mode):
                return
            self._remove(parent, name)
            os.mkdir(name, 0o755, dir_fd=parent)

    def _hard_link(self, parent: int, name: bytes, path: bytes, target: list[bytes]) -> None:
        if b"/".join(target) == path:
            return  # tar can write that for a file that is named twice on its command line
        if not target:
            raise ArchiveRefused(f"a hard link to the top of the archive: {os.fsdecode(path)!r}")
        source = open_beneath(self._root, b"/".join(target[:-1]), os.O_RDONLY | os.O_DIRECTORY, links=self._links)
        try:
            os.lstat(target[-1], dir_fd=source)  # before anything is removed
            self._remove(parent, name)
            os.link(target[-1], name, src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False)
        finally:
            os.close(source)

    def _write_file(
        self,
        archive: tarfile.TarFile,
        member: tarfile.TarInfo,
        parent: int,
        name: bytes,
        attributes: _Attributes,
        file: Path,
    ) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(name, flags, 0o600, dir_fd=parent), "wb", buffering=0) as target:
            descriptor = target.fileno()
            with self._parsing(file):
                content = archive.extractfile(member)
            assert content is not None
            left, size = member.size, _HOLE if member.issparse() else _BLOCK
            while left:
                with self._parsing(file):
                    block = content.read(min(left, size))
                if not block:
                    raise ArchiveRefused(f"{file} is truncated in {member.name!r}", remedy=_CHECK)
                left -= len(block)
                if member.issparse() and not any(block):
                    os.lseek(descriptor, len(block), os.SEEK_CUR)
                else:
                    target.write(block)
            if member.issparse():
                os.ftruncate(descriptor, member.size)
            _set_attributes(descriptor, attributes)

    def _finish_folders(self) -> None:
        """Attributes of folders come last: a default access list would spread to what is unpacked below it, and every
        member changes the time of its folder."""
        for path in sorted(self._folders.keys() | self._times.keys(), reverse=True):
            try:
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
                descriptor = open_beneath(self._root, path, flags, links=self._links)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV):
                    continue  # a later member took its place
                raise
            with _closing(descriptor):
                if path in self._folders:
                    _set_attributes(descriptor, self._folders[path])
                else:
                    os.utime(descriptor, ns=(self._times[path], self._times[path]))

    # ------------------------------------------------------------ folders on the way

    def _open_parent(self, folder: bytes) -> int:
        if self._parent is not None and self._parent[0] == folder:
            return self._parent[1]
        self._forget_parent()
        descriptor = self._open_folder(folder)
        self._parent = (folder, descriptor)
        self._times.setdefault(folder, os.fstat(descriptor).st_mtime_ns)
        return descriptor

    def _open_folder(self, folder: bytes) -> int:
        flags = os.O_RDONLY | os.O_DIRECTORY
        try:
            return open_beneath(self._root, folder, flags, links=self._links)
        except FileNotFoundError:
            pass
        # The archive did not mention the folder: make it, and those above.
        for end in [index for index, byte in enumerate(folder + b"/") if byte == ord("/")]:
            above, _, name = folder[:end].rpartition(b"/")
            parent = open_beneath(self._root, above, flags, links=self._links)
            try:
                os.mkdir(name, 0o755, dir_fd=parent)
            except FileExistsError:
                pass
            finally:
                os.close(parent)
        return open_beneath(self._root, folder, flags, links=self._links)

    def _forget_parent(self) -> None:
        if self._parent is not None:
            os.close(self._parent[1])
            self._parent = None

    def _remove(self, parent: int, name: bytes) -> None:
        """Make room for a member that replaces something; never follows a symlink."""
        try:
            os.unlink(name, dir_fd=parent)
        except FileNotFoundError:
            return
        except IsADirectoryError:
            shutil.rmtree(name, dir_fd=parent)

    # ------------------------------------------------------------ whiteouts

    def _whiteout(self, folder: bytes, name: bytes) -> None:
        self._forget_parent()  # it may be what is removed
        try:
            parent = open_beneath(self._root, folder, os.O_RDONLY | os.O_DIRECTORY, links=self._links)
        except FileNotFoundError:
            return
        try:
            self._times.setdefault(folder, os.fstat(parent).st_mtime_ns)
            if name == _OPAQUE:
                self._clear(parent, folder)
            elif not name.startswith(_AUFS):  # other names of that form are bookkeeping of aufs
                hidden = name.removeprefix(_WHITEOUT)
                if hidden in (b"", b".", b".."):
                    raise ArchiveRefused(f"a whiteout without a name in {os.fsdecode(folder)!r}")
                path = folder + b"/" + hidden if folder else hidden
                if path not in self._fresh:
                    self._remove(parent, hidden)
        finally:
            os.close(parent)

    def _clear(self, parent: int, folder: bytes) -> None:
        """Remove all that lower layers put into a folder."""
        for name in map(os.fsencode, os.listdir(parent)):
            path = folder + b"/" + name if folder else name
            if path not in self._fresh:
                self._remove(parent, name)
            elif stat.S_ISDIR(os.lstat(name, dir_fd=parent).st_mode):
                below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
                try:
                    self._clear(below, path)
                finally:
                    os.close(below)


@contextlib.contextmanager
def _closing(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _set_attributes(descriptor: int, attributes: _Attributes) -> None:
    """Give an open file its attributes. Owner first: changing it clears setuid bits and capabilities."""
    os.fchown(descriptor, attributes.uid, attributes.gid)
    os.fchmod(descriptor, attributes.mode)
    for name in map(os.fsencode, os.listxattr(descriptor)):
        # Inherited from a default access list of the folder, or left of a lower layer.
        if name not in attributes.xattrs and os.fsdecode(name).startswith(_KEPT_XATTRS):
            os.removexattr(descriptor, name)
    for name, value in attributes.xattrs.items():
        os.setxattr(descriptor, name, value)
    os.utime(descriptor, ns=(attributes.mtime, attributes.mtime))
