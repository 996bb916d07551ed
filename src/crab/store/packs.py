"""Packs: many blobs in one object, with a list of them at the end. docs/store.md has the table.

    offset  size
    0       8     "CRABPACK"
    8       1     version of this form: 1
    9       1     1 if encrypted, else 0
    10      6     zeros
    16      32    salt, random
    48            the blobs, one after the other: each 1 byte (0 as it is, 1 zstd) and its content, sealed as part 0, 1, 2, …
    T       L     the list: 41 bytes for each blob, compressed with zstd, sealed as part 2^64
    T+L     4     L
            32    BLAKE3 of the list as it is stored
            8     "CRABEND\\n"

An entry of the list is the name of the blob (32 bytes), its kind (1), its length in the pack (4) and its own length (4).
All numbers are little-endian. A pack is named by the BLAKE3 digest of all its bytes, so it can be checked without any index,
and an index can be made again from packs alone.

Blobs are `DATA`, or `NODE`s: those begin with the names of other blobs that they need. Nothing else of them is known here.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from blake3 import blake3

from crab.errors import Damaged, Incompatible, WrongKey
from crab.host.zstd import zstd
from crab.model import Struct
from crab.store.documents import unpack
from crab.store.sealing import Sealing

MAGIC, END = b"CRABPACK", b"CRABEND\n"
VERSION = 1
DATA, NODE = 0, 1
ID = 32
LARGEST = 64 << 20
"""Bytes of one blob."""
_HEAD = struct.Struct("<8sBB6x32s")
_ENTRY = struct.Struct("<32sBII")
_FOOT = struct.Struct("<I32s8s")
_LIST_NUMBER = 1 << 64
_LIST_LARGEST = 256 << 20
_AS_IT_IS, _ZSTD = b"\0", b"\1"
_WORTH_IT = 0.97
_REMEDY = "`crab store check` says what is affected"


class Blob(Struct):
    """One that is to be written."""

    id: bytes
    kind: int
    data: bytes


class Pack:
    """One that exists: where its blobs lie. 41 bytes for each of them."""

    __slots__ = ("_offsets", "entries", "id", "salt", "size")

    def __init__(self, identity: bytes, size: int, salt: bytes, entries: bytes) -> None:
        """Raises `Damaged` if that is impossible."""
        self.id = identity
        self.size = size
        self.salt = salt
        self.entries = entries
        offset, self._offsets = _HEAD.size, list[int]()
        if len(entries) % _ENTRY.size or len(salt) != 32 or len(identity) != ID:
            raise Damaged("an index of the store is not what was written", remedy=_REMEDY)
        for _, _, length, _ in _ENTRY.iter_unpack(entries):
            self._offsets.append(offset)
            offset += length
        if offset + _FOOT.size > size:
            raise Damaged("an index of the store is not what was written", remedy=_REMEDY)

    @property
    def name(self) -> str:
        return object_name(self.id)

    @property
    def filled(self) -> int:
        """Bytes of its blobs."""
        return sum(length for _, _, length, _ in self.list())

    def __len__(self) -> int:
        return len(self._offsets)

    def entry(self, number: int) -> tuple[bytes, int, int, int]:
        """Name, kind, length in the pack and own length of a blob."""
        return _ENTRY.unpack_from(self.entries, number * _ENTRY.size)

    def place(self, number: int) -> tuple[int, int]:
        """Offset and length of a blob in the pack."""
        return self._offsets[number], self.entry(number)[2]

    def list(self) -> list[tuple[bytes, int, int, int]]:
        """All entries, in order."""
        return list(_ENTRY.iter_unpack(self.entries))


def object_name(identity: bytes) -> str:
    """Where a pack lies in the store."""
    text = identity.hex()
    return f"packs/{text[:2]}/{text}"


def node(links: Sequence[bytes], content: bytes) -> bytes:
    """The bytes of a node: number of links (4 bytes), the links, the content."""
    return struct.pack("<I", len(links)) + b"".join(links) + content


def split(data: bytes) -> tuple[list[bytes], bytes]:
    """Inverse of `node`. Raises `Damaged`."""
    count = int.from_bytes(data[:4], "little")
    end = 4 + count * ID
    if len(data) < max(4, end):
        raise Damaged("a node of the store is cut short", remedy=_REMEDY)
    return [data[at : at + ID] for at in range(4, end, ID)], data[end:]


def build(sealing: Sealing, blobs: Sequence[Blob], level: int) -> tuple[Pack, bytes]:
    """A pack of some blobs, and its bytes."""
    compress = zstd().compress
    salt = sealing.salt()
    out = bytearray(_HEAD.pack(MAGIC, VERSION, sealing.encrypted, salt))
    entries = bytearray()
    for number, blob in enumerate(blobs):
        packed = compress(blob.data, level)
        body = _ZSTD + packed if len(packed) < _WORTH_IT * len(blob.data) else _AS_IT_IS + blob.data
        stored = sealing.seal(salt, number, blob.id, body)
        out += stored
        entries += _ENTRY.pack(blob.id, blob.kind, len(stored), len(blob.data))
    listed = sealing.seal(salt, _LIST_NUMBER, MAGIC, compress(bytes(entries), 3))
    out += listed
    out += _FOOT.pack(len(listed), blake3(listed).digest(), END)
    data = bytes(out)
    return Pack(blake3(data).digest(), len(data), salt, bytes(entries)), data


def opened(sealing: Sealing, pack: Pack, number: int, stored: bytes) -> bytes:
    """Blob `number` of a pack, from its bytes there. Raises `Damaged` unless it is what its name says."""
    identity, _, length, size = pack.entry(number)
    where = f"a blob of {pack.name} ({identity.hex()[:16]}…)"
    if len(stored) != length:
        raise Damaged(f"{where} is cut short", remedy=_REMEDY)
    body = sealing.open(pack.salt, number, identity, stored)
    try:
        data = unpack(body[1:], min(size, LARGEST)) if body[:1] == _ZSTD else body[1:]
    except ValueError as error:
        raise Damaged(f"{where} cannot be decompressed: {error}", remedy=_REMEDY) from error
    if len(data) != size or sealing.identify(data) != identity:
        raise Damaged(f"{where} is not what was written", remedy=_REMEDY)
    return data


def read_list(sealing: Sealing, identity: bytes, data: bytes) -> Pack:
    """What is in a pack, from all its bytes. Raises `Damaged`, `Incompatible` or `WrongKey`."""
    name = object_name(identity)
    if blake3(data).digest() != identity:
        raise Damaged(f"{name} of the store is not what was written", remedy=_REMEDY)
    if len(data) < _HEAD.size + _FOOT.size or not data.startswith(MAGIC):
        raise Damaged(f"{name} of the store is something else", remedy=_REMEDY)
    _, version, encrypted, salt = _HEAD.unpack_from(data)
    if version > VERSION:
        raise Incompatible(
            f"{name} of the store has version {version}, this Crab reads up to {VERSION}", remedy="upgrade Crab"
        )
    if encrypted != sealing.encrypted:
        raise WrongKey(
            f"{name} of the store is {'' if encrypted else 'not '}encrypted", remedy="somebody else wrote it"
        )
    length, digest, end = _FOOT.unpack_from(data, len(data) - _FOOT.size)
    listed = data[max(0, len(data) - _FOOT.size - length) : len(data) - _FOOT.size]
    if end != END or blake3(listed).digest() != digest:
        raise Damaged(f"{name} of the store has no list at its end", remedy=_REMEDY)
    try:
        entries = unpack(sealing.open(salt, _LIST_NUMBER, MAGIC, listed), _LIST_LARGEST)
    except ValueError as error:
        raise Damaged(f"{name} of the store: its list cannot be read: {error}", remedy=_REMEDY) from error
    return Pack(identity, len(data), salt, entries)
