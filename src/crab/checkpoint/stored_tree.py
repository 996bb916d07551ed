"""Trees of files as nodes of a store. docs/store.md has the table.

A tree is a list of members, cut into lists of about 64 where the names say so: a file that is added changes one of them, and
the others are found again. A member is the header that an archive has for it (`pax`), so both hold the same and are read by the
same checks, and what its content consists of: nothing, the bytes themselves if they are few, or stretches of blobs.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import msgspec

from crab.checkpoint import pax
from crab.checkpoint.extents import Extent, flat, unflat
from crab.checkpoint.pax import Member
from crab.checkpoint.trees import Size
from crab.errors import Damaged
from crab.model import Struct
from crab.store.repository import Repository
from crab.store.writing import Writer

T = TypeVar("T")
_CUT, _MOST = 64, 1024
"""Members of a list on average and at most."""
_LARGE = 1 << 20
"""Bytes of headers and contents after which a list ends."""
_FEW = 64
"""Stretches that stand in the list; more of them get nodes of their own."""
_STRETCHES = 8192

Content = bytes | list[Extent]
Stamp = tuple[int, int]
"""Inode number and time of its last change, in ns: of the pool that the checkpoint was taken in."""


class Stored(Struct):
    """A member that was read from a store."""

    member: Member
    header: bytes
    content: Content
    stamp: Stamp


class _Entry(Struct, array_like=True):
    header: bytes
    few: bytes = b""
    """The content itself."""
    stretches: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()
    """Which links are nodes of stretches."""
    inode: int = 0
    changed: int = 0


class TreeWriter:
    """Takes the members of one tree, in the order of a walk."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._entries: list[_Entry] = []
        self._links: dict[bytes, int] = {}
        self._weight = 0
        self.segments: list[bytes] = []
        """Names of the nodes; whole after `finish`."""
        self.size = Size()

    def add(self, member: Member, content: Content = b"", stamp: Stamp = (0, 0)) -> None:
        """Add the next member."""
        if self._entries and (
            zlib.crc32(member.name) % _CUT == 0 or len(self._entries) >= _MOST or self._weight >= _LARGE
        ):
            self.finish()
        self.size.entries += 1
        self.size.size += member.size
        entry = _Entry(pax.encode(member), inode=stamp[0], changed=stamp[1])
        if isinstance(content, bytes):
            entry = msgspec.structs.replace(entry, few=content)
        elif len(content) <= _FEW:
            entry = msgspec.structs.replace(entry, stretches=tuple(flat(content, self._links)))
        else:
            nodes = [self._stretches(content[at : at + _STRETCHES]) for at in range(0, len(content), _STRETCHES)]
            entry = msgspec.structs.replace(
                entry, nodes=tuple(self._links.setdefault(node, len(self._links)) for node in nodes)
            )
        self._entries.append(entry)
        self._weight += len(entry.header) + len(entry.few)

    def finish(self) -> None:
        """End the list that is being made."""
        if self._entries:
            data = msgspec.msgpack.encode(self._entries)
            self.segments.append(self._writer.node(list(self._links), data))
        self._entries, self._links, self._weight = [], {}, 0

    def _stretches(self, content: Sequence[Extent]) -> bytes:
        links: dict[bytes, int] = {}
        numbers = flat(content, links)
        return self._writer.node(list(links), msgspec.msgpack.encode(numbers))


def read_tree(repository: Repository, segments: Sequence[bytes]) -> Iterator[Stored]:
    """The members of a tree. Raises `Damaged`, and `ArchiveRefused` for members that no archive may have."""
    for segment in segments:
        links, data = repository.node(segment)
        for entry in _decoded(data, list[_Entry]):
            content: Content = entry.few
            try:
                if entry.nodes:
                    content = [extent for node in entry.nodes for extent in _read_stretches(repository, links[node])]
                elif entry.stretches:
                    content = unflat(entry.stretches, links)
            except (ValueError, IndexError) as error:
                raise _damaged(str(error)) from error
            member = pax.decode(_taker(entry.header))
            if member is None:
                raise _damaged("a member is empty")
            yield Stored(member, entry.header, content, (entry.inode, entry.changed))


def _read_stretches(repository: Repository, identity: bytes) -> list[Extent]:
    links, data = repository.node(identity)
    return unflat(_decoded(data, list[int]), links)


def _taker(header: bytes) -> Callable[[int], bytes]:
    at = 0

    def take(size: int) -> bytes:
        nonlocal at
        data = header[at : at + size]
        if len(data) < size:
            raise _damaged("a header is cut short")
        at += size
        return data

    return take


def _decoded(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise _damaged(str(error)) from error


def _damaged(why: str) -> Damaged:
    return Damaged(
        f"a list of files in the store cannot be read: {why}", remedy="`crab store check` says what is affected"
    )
