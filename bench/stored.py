"""What checkpoints take on disk: the local tier of a state directory, asked of the file systems themselves.

stored   process images: allocated blocks (st_blocks). Files, and process images that were made compact: the extents of data on
         the btrfs that they refer to, as long as they are on disk. Of snapshots the nodes of metadata that belong to their
         trees (the extent tree; btrfs keeps them twice), each counted once however many snapshots share it; of compact images
         what they take in the metadata. The image is not counted: it was there before.
logical  what a copy of each checkpoint by itself would take: process images and files of its layer, by their sizes.

Manifests count in both, Crab's database in neither. Reads the layout of a state directory (ARCHITECTURE.md, "On disk").
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from crab.host import btrfs

_WHOLE = 2**64 - 1

# linux/btrfs.h and btrfs_tree.h
_SEARCH = 0xC0709411  # BTRFS_IOC_TREE_SEARCH_V2
_KEY = struct.Struct(
    "=7Q4I4Q"
)  # tree; least and most of object, offset and transaction; least and most type; items; unused
_FOUND = struct.Struct("=QQQII")  # transaction, object, offset, type, length
_BUFFER = 1 << 20
_EXTENT_TREE, _METADATA_ITEM, _TREE_BLOCK_REF = 2, 169, 176
_EXTENT_ITEM = struct.Struct("=QQQ")  # references, generation, flags
_REFERENCE = struct.Struct("=BQ")  # type, root
_ITEM_HEAD, _REFERENCE_SIZE = 25, 37
_FS_INFO, _NODE_SIZE_AT = 0x8400941F, 32
_SPACE_INFO = 0xC0109414
_SPACE = struct.Struct("=QQQ")  # kind, total, used
_METADATA, _DUP = 4, 0x20


@dataclass(frozen=True)
class Stored:
    """Bytes."""

    stored: int = 0
    logical: int = 0


def stored(state: Path, checkpoints: Iterable[str]) -> Stored:
    """What those checkpoints take together. All of them must be durable: what is not committed is not in the extent tree."""
    images, logical, own = 0, 0, 0
    data: set[tuple[int, int]] = set()
    trees: set[int] = set()
    known: set[tuple[int, int, int]] = set()
    """Versions of files: number, time of the last change, size. They are the same in all snapshots of one line."""
    for identity in checkpoints:
        for entry in _below(state / "process" / identity):
            status = entry.stat(follow_symlinks=False)
            images += status.st_blocks * 512
            logical += status.st_size if stat.S_ISREG(status.st_mode) else 0
        folder = state / "pool" / "checkpoints" / identity
        for entry in _below(folder):
            status = entry.stat(follow_symlinks=False)
            own += own_metadata(entry.path) if Path(entry.path).parent == folder / "process" else 0
            if stat.S_ISREG(status.st_mode):
                logical += status.st_size
                version = (status.st_ino, status.st_ctime_ns, status.st_size)
                if version not in known:
                    known.add(version)
                    data.update(extents(entry.path))
            elif entry.is_dir(follow_symlinks=False) and btrfs.is_subvolume(entry.path):
                trees.add(btrfs.info(entry.path).id)
    nodes = metadata(state / "pool", trees, own) if trees else 0
    return Stored(stored=images + sum(length for _, length in data) + nodes, logical=logical)


def _below(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Everything in a folder and the folders in it, also in other subvolumes; symbolic links are not followed."""
    if folder.is_dir():
        for entry in os.scandir(folder):
            yield entry
            if entry.is_dir(follow_symlinks=False):
                yield from _below(Path(entry.path))


def extents(path: str) -> set[tuple[int, int]]:
    """Address and length on disk of each extent that a file refers to, compressed as it is, and the whole of it."""
    return {(piece.address, piece.stored) for piece in btrfs.pieces(path)}


def own_metadata(path: str) -> int:
    """Bytes that a file or folder takes in the tree of its subvolume, and its extents in that of extents; once."""
    sizes = [len(item) + _ITEM_HEAD for _, item in btrfs.items(path)]
    return sum(sizes) + len(btrfs.pieces(path)) * (_REFERENCE_SIZE + _ITEM_HEAD)


def metadata(pool: Path, trees: set[int], own: int = 0) -> int:
    """Bytes of the nodes that belong to at least one of those trees, and of what else takes `own` bytes in others.

    A node names the trees that it belongs to, or is implied by the node above, if that is shared: of trees with two levels,
    as those of layers are, every node names them all (fs/btrfs/extent-tree.c, "back references").
    """
    with _opened(str(pool)) as descriptor:
        about = bytearray(1024)
        fcntl.ioctl(descriptor, _FS_INFO, about)
        (size,) = struct.unpack_from("=I", about, _NODE_SIZE_AT)
        nodes = sum(not trees.isdisjoint(roots) for roots in _nodes(descriptor))
        return (size * nodes + own) * (2 if _twice(descriptor) else 1)


def _twice(descriptor: int) -> bool:
    """Whether the file system keeps its metadata twice, as mkfs.btrfs makes it on a single device."""
    request = bytearray(16 + 16 * _SPACE.size)
    struct.pack_into("=QQ", request, 0, 16, 0)
    fcntl.ioctl(descriptor, _SPACE_INFO, request)
    (_, count) = struct.unpack_from("=QQ", request)
    kinds = [_SPACE.unpack_from(request, 16 + number * _SPACE.size)[0] for number in range(count)]
    return any(kind & _METADATA and kind & _DUP for kind in kinds)


def _nodes(descriptor: int) -> Iterator[list[int]]:
    """The trees that each node of the file system names."""
    address, more = 0, True
    while more:
        request = bytearray(_KEY.size + 8 + _BUFFER)
        _KEY.pack_into(
            request, 0, _EXTENT_TREE, address, _WHOLE, 0, _WHOLE, 0, _WHOLE, _METADATA_ITEM, _METADATA_ITEM, 2**32 - 1,
            *(0,) * 5,
        )  # fmt: skip
        struct.pack_into("=Q", request, _KEY.size, _BUFFER)
        fcntl.ioctl(descriptor, _SEARCH, request)
        count = _KEY.unpack_from(request)[9]
        at, more = _KEY.size + 8, count > 0
        for _ in range(count):
            _, address, _, kind_of_item, length = _FOUND.unpack_from(request, at)
            item, end = at + _FOUND.size + _EXTENT_ITEM.size, at + _FOUND.size + length
            roots: list[int] = []
            while kind_of_item == _METADATA_ITEM and item + _REFERENCE.size <= end:
                kind, root = _REFERENCE.unpack_from(request, item)
                roots += [root] if kind == _TREE_BLOCK_REF else []
                item += _REFERENCE.size
            if roots:
                yield roots
            at = end
        address += 1


@contextlib.contextmanager
def _opened(path: str, flags: int = 0) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
