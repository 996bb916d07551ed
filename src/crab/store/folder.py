"""Objects in a folder of a file system (a disk, a network share).

Written here and not by obstore, whose local store does not flush what it wrote: a checkpoint would be called durable that a
crash of the host takes away again. An object is a file that gets its name when it is complete and on the disk.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from crab.errors import InvalidRequest, NotFound, StoreRefused, StoreUnavailable
from crab.host import btrfs
from crab.store.objects import Found

PART = ".part-"
"""How names of files begin that are not complete."""
_NOT_PERMITTED = (errno.EACCES, errno.EPERM, errno.EROFS)


class FolderObjects:
    """See `crab.store.objects.Objects`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = str(root)

    def get(self, name: str) -> bytes:
        with self._saying(name):
            return (self.root / name).read_bytes()

    def get_range(self, name: str, offset: int, size: int) -> bytes:
        with self._saying(name), open(self.root / name, "rb", buffering=0) as file:
            parts: list[bytes] = []
            while size and (part := os.pread(file.fileno(), size, offset)):
                parts.append(part)
                offset, size = offset + len(part), size - len(part)
            return b"".join(parts)

    def put(self, name: str, data: bytes | bytearray) -> None:
        self._write(name, data, replace=True)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        return self._write(name, data, replace=False)

    def list(self, prefix: str) -> Iterator[Found]:
        with self._saying(prefix):
            yield from self._below(self.root / prefix, prefix)

    def delete(self, name: str) -> None:
        with self._saying(name):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.root / name)

    # ---- files

    def _write(self, name: str, data: bytes | bytearray, replace: bool) -> bool:
        target = self.root / name
        with self._saying(name):
            self._make(target.parent)
            if not Path(os.path.realpath(target.parent)).is_relative_to(os.path.realpath(self.root)):
                raise StoreRefused(
                    f"{target.parent} leads out of the store", remedy="somebody made a link of it: remove it"
                )
            part = target.with_name(f"{PART}{secrets.token_hex(8)}")
            written = True
            descriptor = os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
            try:
                try:
                    view = memoryview(data)
                    while view:
                        view = view[os.write(descriptor, view) :]
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
                if replace:
                    part.rename(target)
                else:
                    os.link(part, target)
            except FileExistsError:
                written = False
            finally:
                part.unlink(missing_ok=True)
            _flush(target.parent)  # also what somebody else has linked a moment ago: it is told to be there
        return written

    def make(self) -> None:
        """Make the folder of a new store, durably, but not what it lies in."""
        with self._saying(""):
            if self.root.parent.is_dir() and not self.root.exists():
                self.root.mkdir(mode=0o700)
                _flush(self.root.parent)

    def _make(self, folder: Path) -> None:
        """Make a folder, durably. Not the root: a share that is not mounted must not become a folder of the host."""
        if folder == self.root or folder.is_dir():
            return
        self._make(folder.parent)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        _flush(folder.parent)

    def _below(self, folder: Path, prefix: str) -> Iterator[Found]:
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except FileNotFoundError:
            if folder == self.root or not self.root.is_dir():
                raise
            return
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from self._below(folder / entry.name, f"{prefix}{entry.name}/")
            elif not entry.name.startswith(PART):
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    yield Found(name=prefix + entry.name, size=status.st_size, modified=status.st_mtime)

    def sweep(self, older_than: float) -> None:
        """Remove what writers that were killed left half written."""
        with self._saying(""):
            for folder, _, names in os.walk(self.root):
                for name in names:
                    path = Path(folder, name)
                    with contextlib.suppress(FileNotFoundError):
                        if name.startswith(PART) and path.stat().st_mtime < older_than:
                            path.unlink()

    @contextlib.contextmanager
    def _saying(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            place = self.root / name
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise btrfs.no_space(self.root, error.errno) from error
            if not self.root.is_dir():
                raise StoreUnavailable(
                    f"there is no folder {self.root}", remedy="make it, or mount what it lies on, then try again"
                ) from error
            if error.errno == errno.ENOENT:
                raise NotFound(f"the store has no {name}", remedy="`crab store check` says what is missing") from error
            if error.errno in _NOT_PERMITTED:
                raise StoreRefused(
                    f"{place} cannot be used: {error.strerror}", remedy="give the daemon's user (root) the right to"
                ) from error
            if error.errno in (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR):
                raise InvalidRequest(f"{place} cannot be: {error.strerror}", remedy="choose another folder") from error
            raise StoreUnavailable(
                f"the disk of {place} failed: {error.strerror or error}",
                remedy="see dmesg; try again when the disk answers",
            ) from error


def _flush(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
