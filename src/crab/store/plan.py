"""The plan of a store: `crab-store.json`, written once. What it is, how it is cut up, whether it is encrypted."""

from __future__ import annotations

import msgspec

from crab.errors import Damaged, Incompatible
from crab.model import Seconds, Struct
from crab.store.sealing import Encryption

NAME = "crab-store.json"
FORMAT = "crab-store"
VERSION = 1
GRACE = 24 * 3600.0


class Cut(Struct, kw_only=True):
    """How contents are cut into blobs. Readers do not need it: writers of one store have to agree, or find little again."""

    least: int = 256 << 10
    average: int = 1 << 20
    most: int = 4 << 20
    """Bytes of the pieces of a file, which its content decides (FastCDC)."""
    pages: int = 64
    """Pages of memory in a blob."""


class Plan(Struct, kw_only=True):
    """See the module."""

    format: str = FORMAT
    version: int = VERSION
    id: str
    created: float
    grace: Seconds = GRACE
    cut: Cut = Cut()
    encryption: Encryption | None = None


class _Version(Struct):
    format: str = ""
    version: int = 0


def encode(plan: Plan) -> bytes:
    return msgspec.json.format(msgspec.json.encode(plan), indent=1) + b"\n"


def decode(data: bytes, place: str) -> Plan:
    """Inverse of `encode`. Raises `Incompatible` for a newer version, `Damaged` for what is no plan."""
    remedy = "put a copy of crab-store.json back; all else in the store can be read with it"
    try:
        known = msgspec.json.decode(data, type=_Version)
        if known.format != FORMAT or known.version < 1:
            raise Damaged(f"{place}/{NAME} is of something else", remedy="check the URL of the store")
        if known.version > VERSION:
            raise Incompatible(
                f"the store {place} has version {known.version}, this Crab reads up to {VERSION}", remedy="upgrade Crab"
            )
        found = msgspec.json.decode(data, type=Plan)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Damaged(f"{place}/{NAME} cannot be read: {error}", remedy=remedy) from error
    cut = found.cut
    if not 64 <= cut.least <= cut.average <= cut.most <= 32 << 20 or not 1 <= cut.pages <= 4096:
        raise Damaged(f"{place}/{NAME} states impossible sizes", remedy=remedy)
    return found
