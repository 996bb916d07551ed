"""The small objects of a store as bytes: indexes, records of checkpoints, marks of the collection. docs/store.md has the table.

    offset  size
    0       8     "CRABDOC\\n"
    8       1     version of this form: 1
    9       1     1 if encrypted, else 0
    10      32    salt, random
    42      32    BLAKE3 of the context, a zero byte, bytes 0 to 41, and the content
    74            the content: compressed with zstd, then sealed as part 0

The context is the name of the object, so that none can be put in another's place.
"""

from __future__ import annotations

import struct
from typing import Any, TypeVar

import msgspec
from blake3 import blake3

from crab.errors import Damaged, Incompatible, WrongKey
from crab.host.zstd import zstd
from crab.store.sealing import Sealing

S = TypeVar("S")
MAGIC = b"CRABDOC\n"
VERSION = 1
_HEAD = struct.Struct("<8sBB32s")
_BODY = _HEAD.size + 32
_LARGEST = 1 << 30
"""Bytes of the content of one document: what stops a small object that unpacks to the whole memory."""
_REMEDY = "`crab store check` says what is affected"


def encode(sealing: Sealing, name: str, value: Any) -> bytes:
    """The object of that name, of a value that msgpack can hold."""
    context = name.encode()
    salt = sealing.salt()
    body = sealing.seal(salt, 0, context, zstd().compress(msgspec.msgpack.encode(value), 3))
    head = _HEAD.pack(MAGIC, VERSION, sealing.encrypted, salt)
    return head + _digest(context, head, body) + body


def decode(sealing: Sealing, name: str, data: bytes, kind: type[S]) -> S:
    """Inverse of `encode`. Raises `Damaged`, `Incompatible` (a newer version), or `WrongKey`."""
    if len(data) < _BODY or not data.startswith(MAGIC):
        raise Damaged(f"{name} of the store is cut short or something else", remedy=_REMEDY)
    _, version, encrypted, salt = _HEAD.unpack_from(data)
    if version > VERSION:
        raise Incompatible(
            f"{name} of the store has version {version}, this Crab reads up to {VERSION}", remedy="upgrade Crab"
        )
    head, digest, body = data[: _HEAD.size], data[_HEAD.size : _BODY], data[_BODY:]
    context = name.encode()
    if version < 1 or _digest(context, head, body) != digest:
        raise Damaged(f"{name} of the store is not what was written", remedy=_REMEDY)
    if encrypted != sealing.encrypted:
        raise WrongKey(
            f"{name} of the store is {'' if encrypted else 'not '}encrypted", remedy="somebody else wrote it"
        )
    try:
        content = unpack(sealing.open(salt, 0, context, body), _LARGEST)
        return msgspec.msgpack.decode(content, type=kind)
    except (msgspec.DecodeError, ValueError) as error:
        raise Damaged(f"{name} of the store cannot be read: {error}", remedy=_REMEDY) from error


def unpack(data: bytes, largest: int) -> bytes:
    """What was compressed with zstd. Raises ValueError if it is no such thing, or larger."""
    module = zstd()
    machine = module.ZstdDecompressor()
    try:
        content: bytes = machine.decompress(data, max_length=largest + 1)
    except module.ZstdError as error:
        raise ValueError(str(error)) from error
    if len(content) > largest or not machine.eof or machine.unused_data:
        raise ValueError("it has another length than it should have")
    return content


def _digest(context: bytes, head: bytes, body: bytes) -> bytes:
    return blake3(context + b"\0" + head + body).digest()
