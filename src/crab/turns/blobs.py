"""What was said, each piece once: content by its digest, conversations as a tree of items.

A node is an item and the node before it, so a conversation of a hundred turns is a hundred nodes whose last one stands for
the whole, and the next request adds what is new in it. Knows nothing of who said it. Whoever removes the last that refers to
something lets go of it, too.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence

from blake3 import blake3

from crab.errors import Damaged
from crab.host.zstd import zstd
from crab.model import Struct
from crab.turns.redact import Redactor

_LARGE = 1 << 20
"""From here on the fastest level: an agent waits."""


class Blob(Struct):
    """A piece of content as it is stored."""

    digest: bytes
    size: int
    data: bytes


def packed(content: bytes) -> Blob:
    """The content, ready to be stored. The slow part, for outside of a transaction."""
    data = zstd().compress(content, level=1 if len(content) >= _LARGE else 3)
    return Blob(blake3(content).digest(), len(content), data)


def put(db: sqlite3.Connection, blob: Blob) -> bytes:
    """Store it unless it is there; returns its digest."""
    db.execute("INSERT OR IGNORE INTO blobs VALUES (?, ?, ?)", (blob.digest, blob.size, blob.data))
    return blob.digest


def get(db: sqlite3.Connection, digest: bytes) -> bytes:
    """The content. Raises `Damaged` if it is not what was stored."""
    row = db.execute("SELECT data FROM blobs WHERE digest = ?", (digest,)).fetchone()
    return _unpacked(digest, row[0] if row else b"")


def _unpacked(digest: bytes, data: bytes) -> bytes:
    try:
        content = zstd().decompress(data)
    except (zstd().ZstdError, EOFError):
        content = None
    if content is None or blake3(content).digest() != digest:
        raise Damaged(f"the recorded content {digest.hex()[:16]} is damaged")
    return content


# ---- conversations


def known(db: sqlite3.Connection, chain: Sequence[bytes]) -> int:
    """How many links from the beginning are stored. (If a node is there, so are all before it.)"""
    for count in range(len(chain), 0, -1):
        if db.execute("SELECT 1 FROM nodes WHERE id = ?", (chain[count - 1],)).fetchone():
            return count
    return 0


def pack_items(items: Sequence[bytes], begin: int, redactor: Redactor) -> dict[int, Blob]:
    """Items from `begin` on, without credentials, ready to be stored."""
    return {place: packed(redactor.replaced(items[place])[0]) for place in range(begin, len(items))}


def put_conversation(
    db: sqlite3.Connection, chain: Sequence[bytes], items: Sequence[bytes], ready: dict[int, Blob], redactor: Redactor
) -> None:
    """Store what is new of a conversation. `ready` is what `pack_items` made of it; what it lacks is packed here."""
    for place in range(known(db, chain), len(chain)):
        blob = ready.get(place) or packed(redactor.replaced(items[place])[0])  # it was let go in between
        parent = chain[place - 1] if place else None
        db.execute("INSERT OR IGNORE INTO nodes VALUES (?, ?, ?)", (chain[place], parent, put(db, blob)))


def conversation(db: sqlite3.Connection, node: bytes) -> list[bytes]:
    """The items up to a node, first one first. Raises `Damaged`."""
    rows = db.execute(
        """
        WITH RECURSIVE line (parent, item, depth) AS (
            SELECT parent, item, 0 FROM nodes WHERE id = ?
            UNION ALL SELECT nodes.parent, nodes.item, depth + 1 FROM nodes JOIN line ON nodes.id = line.parent
        )
        SELECT line.item, blobs.data FROM line LEFT JOIN blobs ON blobs.digest = line.item ORDER BY depth DESC
        """,
        (node,),
    )
    return [_unpacked(digest, data or b"") for digest, data in rows]


# ---- the end


def let_go(db: sqlite3.Connection, nodes: Iterable[bytes] = (), digests: Iterable[bytes | None] = ()) -> int:
    """Remove of these conversations and pieces what nothing refers to any more, in the transaction in which something ceased
    to: nothing else ever has to be looked through. Returns how many bytes were stored of it."""
    loose = set(digests) - {None}
    for node in nodes:
        at: bytes | None = node
        while at is not None and (found := _unused_node(db, at)) is not None:
            db.execute("DELETE FROM nodes WHERE id = ?", (at,))
            at, item = found
            loose.add(item)
    freed = 0
    for digest in loose:
        if not any(db.execute(query, (digest,)).fetchone() for query in _USES):
            row = db.execute("SELECT LENGTH(data) FROM blobs WHERE digest = ?", (digest,)).fetchone()
            freed += row[0] if row else 0
            db.execute("DELETE FROM blobs WHERE digest = ?", (digest,))
    return freed


_USES = (
    "SELECT 1 FROM nodes WHERE item = ? LIMIT 1",
    "SELECT 1 FROM exchanges WHERE answer = ? LIMIT 1",
    "SELECT 1 FROM outcomes WHERE result = ? LIMIT 1",
)


def _unused_node(db: sqlite3.Connection, node: bytes) -> tuple[bytes | None, bytes] | None:
    """Parent and item of a node that no question ends with and no other node comes after."""
    query = """
        SELECT parent, item FROM nodes WHERE id = :node
        AND NOT EXISTS (SELECT 1 FROM exchanges WHERE key = :node)
        AND NOT EXISTS (SELECT 1 FROM nodes AS later WHERE later.parent = :node)
    """
    row = db.execute(query, {"node": node}).fetchone()
    return (row[0], row[1]) if row else None
