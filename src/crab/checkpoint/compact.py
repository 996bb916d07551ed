"""Process images as they are kept: what equals that of the checkpoint before lies on disk once.

CRIU writes all memory of all processes at every dump, and most of it is what it was. On a file system with reflinks (btrfs)
a file can be put together of parts of others: every checkpoint keeps whole images, byte for byte those that CRIU wrote, so it
is restored, checked and archived without a look at any other, and no page of another is lost when it is removed.

    target/pages-N.img   parts of those of `before` where a page is equal (`pages`), and parts of `.new`
    target/.new          some zeros, and all pages that are new, close together so that they compress; removed at the end,
                         its blocks stay. Zeros are data and no holes, as CRIU wrote them
    target/…             the rest, copied: most are so small that they lie in the metadata

What is new is compressed by the file system (zstd): a piece of up to 128 KiB is what has to be read for a page of it.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path

from crab.checkpoint.extents import Extent, Extents
from crab.checkpoint.pages import PAGE, PREFIX, Earlier, Layout, contents_of
from crab.host import btrfs
from crab.model import Struct

_NEW = ".new"
_LEAST = 4
"""Pages in a row that are worth a piece of their own. A piece takes some 250 bytes of metadata (twice 125) of every checkpoint
that has it, four pages some 4 KiB of one, as far as they compress."""
_FEW, _SHARE = 256, 4
"""Pieces that the memory of a dump may always lie in; beyond that, and one for so many pages, all of it is written anew. A
piece costs some 0.15 ms of a restore that finds nothing in memory."""
_HELD, _LITTLE = 2, 1 << 20
"""How many times the bytes that a dump needs of extents it may hold (and so many more): an extent stays whole as long as a part
of it is needed. Beyond that it is written anew."""
_ZEROS = 128 << 10
"""Bytes of the zeros that all zeros are parts of: what is compressed at once."""


class Compacted(Struct, kw_only=True):
    """What it came to. Bytes, as if nothing were compressed."""

    size: int
    own: int
    """That no earlier checkpoint has."""


def compact(
    images: Path,
    names: Iterable[str],
    target: Path,
    before: Path | None,
    look: Callable[[], object] = lambda: None,
) -> Compacted:
    """Write the images of those names anew, into a folder that does not exist yet, on the file system of `before`: the same of
    an earlier checkpoint. All is on disk on return. Every few hundred KiB it has a `look`, which ends it by raising something.

    Raises OSError, `NoSpace`; what is in `target` then is the caller's to remove.
    """
    size, own = 0, 0
    with ExitStack() as stack:
        stack.enter_context(btrfs.checked(target))
        target.mkdir(mode=stat.S_IMODE(images.stat().st_mode))
        btrfs.compress(target)
        sources = _Sources(stack, target / _NEW, before)
        contents = _contents(images, before, sources, look)
        sources.flush()
        for name in names:
            look()
            path, new = images / name, target / name
            mode = stat.S_IMODE(path.stat().st_mode)
            if name in contents:
                _put_together(new, contents[name], sources, mode)
            else:
                shutil.copyfile(path, new)
                new.chmod(mode)
                own += new.stat().st_size
            size += new.stat().st_size
        own += sources.size
        (target / _NEW).unlink()
        for path in (*target.iterdir(), target):
            _flush(path)
    return Compacted(size=size, own=own)


def _contents(
    images: Path, before: Path | None, sources: _Sources, look: Callable[[], object]
) -> dict[str, list[Extent]]:
    """What the files with pages consist of; empty if the images are not understood: then they are copied as they are."""
    try:
        now = Layout(images)
        if any((images / name).stat().st_size % PAGE for name in now.files):
            return {}
        earlier = _earlier(before) if before is not None else None
    except (FileNotFoundError, ValueError):
        return {}
    return dict(contents_of(now, earlier, sources.put, lambda blob: 0, least=_LEAST, look=look))


def _earlier(before: Path) -> Earlier | None:
    layout = Layout(before)
    sizes = {name: (before / name).stat().st_size for name in layout.files}
    pieces = [piece for name in sizes for piece in btrfs.pieces(before / name)]
    held = sum({piece.address: piece.stored for piece in pieces}.values())
    used = sum(piece.used for piece in pieces)
    if len(pieces) > _FEW + sum(sizes.values()) // PAGE // _SHARE or held > _LITTLE + _HELD * used:
        return None
    return Earlier(layout, {name: Extents([Extent(name.encode(), 0, size)]) for name, size in sizes.items()})


class _Sources:
    """Where the pages lie that files are put together of. What is new has its place as its name, the rest that of its file,
    which begins with `PREFIX`."""

    def __init__(self, stack: ExitStack, new: Path, before: Path | None) -> None:
        self._stack = stack
        self._before = before
        self._new = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        stack.callback(os.close, self._new)
        self._old: dict[bytes, int] = {}
        self._end = 0
        self.put(bytes(_ZEROS))

    @property
    def size(self) -> int:
        """Bytes of what is new."""
        return self._end - _ZEROS

    def put(self, data: bytes) -> bytes:
        """Keep what is new; its name."""
        written = os.pwrite(self._new, data, self._end)
        if written != len(data):
            raise OSError(errno.ENOSPC, f"{written} of {len(data)} bytes were written")
        place = self._end
        self._end += len(data)
        return b"%d" % place

    def flush(self) -> None:
        """Write out what is new, in one go: so it lies together and is compressed together."""
        os.fsync(self._new)

    def place(self, extent: Extent) -> tuple[int, int]:
        """The open file that has an extent, and where."""
        if not extent.blob:
            return self._new, 0
        if not extent.blob.startswith(PREFIX.encode()):
            return self._new, int(extent.blob) + extent.offset
        if extent.blob not in self._old:
            assert self._before is not None
            found = os.open(self._before / os.fsdecode(extent.blob), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            self._old[extent.blob] = found
            self._stack.callback(os.close, found)
        return self._old[extent.blob], extent.offset


def _put_together(path: Path, content: list[Extent], sources: _Sources, mode: int) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        at = 0
        for extent in content:
            source, offset = sources.place(extent)
            most = extent.size if extent.blob else _ZEROS
            for begin in range(0, extent.size, most):
                size = min(most, extent.size - begin)
                btrfs.clone(source, descriptor, offset + begin if extent.blob else 0, size, at)
                at += size
    finally:
        os.close(descriptor)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
