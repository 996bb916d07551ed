"""The file of an archive: it appears when it is complete, never replaces another, and may be compressed.

Knows nothing of what is in it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from crab.errors import AlreadyExists, CrabError, Damaged, InvalidRequest, NoSpace, NotFound
from crab.host import btrfs
from crab.host.zstd import zstd


def check_target(path: Path) -> None:
    if not path.is_absolute():
        raise InvalidRequest(f"the path of an archive must be absolute: {path}", remedy="begin it with a slash")
    if not path.parent.is_dir():
        raise NotFound(f"there is no folder {path.parent}", remedy="make it first")
    if os.path.lexists(path):
        raise _taken(path)


def _taken(path: Path) -> AlreadyExists:
    return AlreadyExists(f"{path} exists", remedy="remove it first, or choose another name")


def check_room(path: Path, size: int) -> None:
    status = os.statvfs(path.parent)
    free = status.f_bavail * status.f_frsize
    if free < size:
        raise NoSpace(
            f"the file system of {path.parent} has {free >> 20} MiB left, the archive takes {size >> 20} MiB",
            remedy="make room there, choose another place, or let it be compressed (a name that ends in .zst)",
        )


def explained(path: Path, error: OSError) -> CrabError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return btrfs.no_space(path.parent, error.errno)
    if error.errno == errno.EFBIG:
        return NoSpace(f"{path.parent} cannot hold a file that large", remedy="choose another file system")
    if error.errno == errno.EIO:
        return Damaged(f"the disk failed while {path} was written: {error}", remedy="see dmesg; nothing was changed")
    return InvalidRequest(f"the archive {path} cannot be written: {error}", remedy="choose another place for it")


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """A file without a name that gets one at the end of the block, if that is reached and `path` is still free.

    Killed at any moment, this process leaves nothing. Where a file system has no files without a name, one with a name
    that nobody else has is used.
    """
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    own = f".{path.name[:200]}.{secrets.token_hex(4)}.part"
    try:
        try:
            descriptor = os.open(path.parent, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            own = ""
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
            descriptor = os.open(own, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600, dir_fd=folder)
        try:
            with open(descriptor, "wb", buffering=0, closefd=False) as raw:
                yield _Whole(raw)  # type: ignore[misc]
            os.fsync(descriptor)
            _name(path, folder, own or f"/proc/self/fd/{descriptor}")
        finally:
            os.close(descriptor)
            if own:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(own, dir_fd=folder)
        os.fsync(folder)
    finally:
        os.close(folder)


def _name(path: Path, folder: int, source: str) -> None:
    """Give a file its name. By a link and not a rename, which would replace what came there meanwhile."""
    try:
        os.link(source, path.name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=True)
    except FileExistsError:
        raise _taken(path) from None
    except OSError as error:
        # FAT and the like have neither files without a name nor links
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS) or source.startswith("/"):
            raise
        if os.path.lexists(path):
            raise _taken(path) from None
        os.rename(source, path.name, src_dir_fd=folder, dst_dir_fd=folder)


class _Whole:
    """A raw file whose `write` writes all."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw

    def write(self, data: bytes | bytearray) -> int:
        view = memoryview(data)
        while view:
            view = view[self._raw.write(view) :]
        return len(data)

    def flush(self) -> None:
        """Nothing is held back."""


@contextlib.contextmanager
def compressing(file: IO[bytes]) -> Iterator[IO[bytes]]:
    module = zstd()
    parameter = module.CompressionParameter
    options = {
        parameter.compression_level: 3,
        parameter.checksum_flag: 1,
        parameter.nb_workers: min(4, os.cpu_count() or 1, parameter.nb_workers.bounds()[1]),
    }
    out = module.ZstdFile(file, "wb", options=options)
    try:
        yield out
    except BaseException:
        with contextlib.suppress(OSError):
            out.close()
        raise
    out.close()


@contextlib.contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """The uncompressed bytes of an archive; its first bytes decide, not its name."""
    if not path.is_absolute():
        raise InvalidRequest(f"the path of an archive must be absolute: {path}", remedy="begin it with a slash")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise NotFound(
            f"there is no file {path}", remedy="give a path on the machine that the daemon runs on"
        ) from None
    except OSError as error:
        raise InvalidRequest(
            f"{path} cannot be read: {error.strerror}", remedy="check the path and its rights"
        ) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InvalidRequest(f"{path} is not a file", remedy="give the path of an archive")
    with open(descriptor, "rb", buffering=0) as raw:
        magic = os.pread(descriptor, 4, 0)
        if magic != b"\x28\xb5\x2f\xfd":
            yield raw
            return
        with zstd().ZstdFile(raw, "rb") as stream:
            yield stream
