"""Copying files and folders between the host and a sandbox, by directory descriptors only.

Neither side is trusted to keep still: no link is ever followed below the two ends, a name that turns into a link while it
is copied is an error and not a way out. Copies regular files, folders and symlinks; other kinds are counted and left
out. Modes and times are kept; the owner is whoever writes (the sandbox's root inside, the caller outside).
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from crab.errors import InvalidRequest, NotFound
from crab.host.beneath import open_beneath

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PIECE = 1 << 20


@dataclass
class Tally:
    """What a copy did."""

    files: int = 0
    size: int = 0
    skipped: list[str] = field(default_factory=list[str])
    """Sockets, devices, FIFOs."""


def _copy_file(source: int, target: int, tally: Tally) -> None:
    """Content from one descriptor to the other."""
    while True:
        try:
            # in the kernel, sharing blocks where both are on one file system
            count = os.copy_file_range(source, target, 64 << 20)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            count = _by_hand(source, target)
        if not count:
            return
        tally.size += count


def _by_hand(source: int, target: int) -> int:
    data = os.read(source, _PIECE)
    view = memoryview(data)
    while view:
        view = view[os.write(target, view) :]
    return len(data)


def copy(from_folder: int, name: bytes, to_folder: int, new_name: bytes, tally: Tally) -> None:
    """Copy `name` in one folder to `new_name` in another; an existing file there is replaced, a folder is merged into."""
    status = os.lstat(name, dir_fd=from_folder)
    if stat.S_ISDIR(status.st_mode):
        _copy_folder(from_folder, name, to_folder, new_name, status, tally)
    elif stat.S_ISLNK(status.st_mode):
        target = os.readlink(name, dir_fd=from_folder)
        _unlink(to_folder, new_name)
        os.symlink(target, new_name, dir_fd=to_folder)
        os.utime(new_name, ns=(status.st_atime_ns, status.st_mtime_ns), dir_fd=to_folder, follow_symlinks=False)
    elif stat.S_ISREG(status.st_mode):
        source = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=from_folder)
        try:
            _unlink(to_folder, new_name)
            target = os.open(
                new_name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=to_folder
            )
            try:
                _copy_file(source, target, tally)
                os.fchmod(target, stat.S_IMODE(status.st_mode))
                os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
            finally:
                os.close(target)
        finally:
            os.close(source)
        tally.files += 1
    else:
        tally.skipped.append(os.fsdecode(name))


def _unlink(folder: int, name: bytes) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        pass
    except IsADirectoryError:
        raise InvalidRequest(
            f"{os.fsdecode(name)} is a folder there and would be replaced by a file",
            remedy="remove it first, or choose another target",
        ) from None


def _copy_folder(
    from_folder: int, name: bytes, to_folder: int, new_name: bytes, status: os.stat_result, tally: Tally
) -> None:
    try:
        os.mkdir(new_name, 0o700, dir_fd=to_folder)
        made = True
    except FileExistsError:
        made = False
    source = os.open(name, _FOLDER, dir_fd=from_folder)
    try:
        target = os.open(new_name, _FOLDER, dir_fd=to_folder)
        try:
            for child in os.listdir(source):
                copy(source, os.fsencode(child), target, os.fsencode(child), tally)
            if made:
                os.fchmod(target, stat.S_IMODE(status.st_mode))
                os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
        finally:
            os.close(target)
    finally:
        os.close(source)


def copy_in(source: Path, root: int, target: str) -> Tally:
    """Copy a file or folder of the host to a path below the descriptor `root`, as `cp -r` would: into `target` if that is a
    folder, else under its name. Raises `NotFound`, `InvalidRequest` or OSError."""
    if not os.path.lexists(source):
        raise NotFound(f"the host has no {source}", remedy="check the path")
    return _place(os.fsencode(source), None, os.fsencode(target), root)


def copy_out(root: int, source: str, target: Path) -> Tally:
    """The way back: `source` below `root` to a path of the host."""
    return _place(os.fsencode(source), root, os.fsencode(target), None)


def _open(root: int | None, path: bytes, flags: int) -> int:
    """A path of the host (root None; links are followed, it is the user's own) or below a sandbox's root."""
    if root is None:
        return os.open(path, flags | os.O_CLOEXEC)
    return open_beneath(root, path.lstrip(b"/"), flags, links="in-root")


def _place(source: bytes, source_root: int | None, target: bytes, target_root: int | None) -> Tally:
    tally = Tally()
    folder_part, name = os.path.split(source.rstrip(b"/") or b"/")
    if not name or name in (b".", b".."):
        raise InvalidRequest(f"{os.fsdecode(source)!r} cannot be copied", remedy="name a file or folder below the root")
    try:
        from_folder = _open(
            source_root, folder_part or (b"." if source_root is None else b"/"), os.O_RDONLY | os.O_DIRECTORY
        )
    except OSError as error:
        raise _missing(folder_part, error) from error
    try:
        try:
            os.lstat(name, dir_fd=from_folder)
        except OSError as error:
            raise _missing(source, error) from error
        to_folder, new_name = _target(target, target_root, name)
        try:
            copy(from_folder, name, to_folder, new_name, tally)
        finally:
            os.close(to_folder)
    finally:
        os.close(from_folder)
    return tally


def _target(target: bytes, root: int | None, name: bytes) -> tuple[int, bytes]:
    try:
        return _open(root, target or b"/", os.O_RDONLY | os.O_DIRECTORY), name
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR) or target.endswith(b"/"):
            raise _missing(target, error) from error
    parent, new_name = os.path.split(target)
    try:
        return _open(root, parent or (b"." if root is None else b"/"), os.O_RDONLY | os.O_DIRECTORY), new_name
    except OSError as error:
        raise _missing(parent, error) from error


def _missing(path: bytes, error: OSError) -> NotFound:
    return NotFound(f"{os.fsdecode(path)}: {error.strerror}", remedy="check the path, and make the folder first")
