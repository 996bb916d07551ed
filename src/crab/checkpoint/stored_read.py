"""A checkpoint out of a store, as `archive_unpack` takes it: the same members in the same order, under the same checks.

A store is not trusted more than an archive: what it says of names, sizes and types is checked before anything is made of it.
Every blob is compared with its name when it is read, so what was not written by a Crab with the same key is found out.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from blake3 import blake3

from crab.checkpoint import stored
from crab.checkpoint.archive_reader import Tally, check_header, check_size
from crab.checkpoint.extents import Extent
from crab.checkpoint.pax import Member
from crab.checkpoint.stored_tree import Content, read_tree
from crab.errors import Damaged
from crab.sandbox.images import ImageStore, UnpackLimits
from crab.store.repository import Record, Repository

_PIECE = 1 << 20


class StoredSource:
    """See `archive_unpack.Source`."""

    def __init__(self, repository: Repository, record: Record, images: ImageStore, limits: UnpackLimits) -> None:
        """Raises `Damaged`, `ArchiveRefused`, `Incompatible`. An image that is here already is left out."""
        self._repository = repository
        root = stored.read(repository, record.root)
        check_header(root.header)
        self.manifest = root.manifest
        self._trees = root.trees
        self.header = root.header
        here = {image.fingerprint for image in images.list()}
        if self.header.image.fingerprint in here:
            gone = [tree for tree in self._trees if tree.name == b"image"]
            self._trees = tuple(tree for tree in self._trees if tree not in gone)
            sizes = {name: size for name, size in self.header.sizes.items() if name != "image"}
            entries = self.header.entries - sum(tree.entries for tree in gone)
            self.header = msgspec.structs.replace(self.header, sizes=sizes, entries=entries)
        check_size(self.header, limits)

    def members(self) -> Iterator[tuple[bytes, Member, StoredContent]]:
        """See `archive_unpack.Source`."""
        tally = Tally(self.header)
        for tree in self._trees:
            for one in read_tree(self._repository, tree.segments):
                content = StoredContent(self._repository, one.content, one.member)
                yield tally.take(one.member), one.member, content
        tally.end()


class StoredContent:
    """The content of one member. What is skipped is not fetched."""

    def __init__(self, repository: Repository, content: Content, member: Member) -> None:
        self._repository = repository
        self._few = content if isinstance(content, bytes) else b""
        self._extents = content if isinstance(content, list) else []
        self._hasher = blake3()
        self._number = self._at = 0
        size = len(self._few) + sum(extent.size for extent in self._extents)
        if size != member.size:
            raise _damaged("a file has another size than it states")

    def read(self, size: int, /) -> bytes:
        """The next bytes, as many as asked for if there are so many."""
        parts: list[bytes] = []
        while size and (part := self._next(size)):
            parts.append(part)
            size -= len(part)
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        self._hasher.update(data)
        return data

    def _next(self, size: int) -> bytes:
        if self._few:
            data, self._few = self._few[:size], self._few[size:]
            return data
        while self._number < len(self._extents):
            extent = self._extents[self._number]
            taken = min(size, extent.size - self._at)
            if taken:
                data = self._of(extent, self._at, taken)
                self._at += taken
                return data
            self._number, self._at = self._number + 1, 0
        return b""

    def _of(self, extent: Extent, at: int, size: int) -> bytes:
        if not extent.blob:
            return bytes(size)
        blob = self._repository.get(extent.blob, whole=True)
        data = blob[extent.offset + at : extent.offset + at + size]
        if len(data) != size:
            raise _damaged("a stretch of a file lies outside of its blob")
        return data

    def skip(self) -> None:
        """Nobody needs the rest."""

    def digest(self) -> str:
        """Of the whole content."""
        while self.read(_PIECE):
            pass
        return self._hasher.hexdigest()


def _damaged(why: str) -> Damaged:
    return Damaged(f"a stored checkpoint cannot be read: {why}", remedy="`crab store check` says what is affected")
