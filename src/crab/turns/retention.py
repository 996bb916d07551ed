"""What the record lets go of, and how large it is.

Knows age and size. Of a sandbox that is still there the newest question and every open one are never let go.
"""

from __future__ import annotations

import sqlite3
import time

from crab.turns import blobs
from crab.turns.database import Database
from crab.turns.exchange import Size

_BATCHES = 8
"""A record that is too large is made smaller in steps: what is shared is free only when its last user is gone."""
_KEPT = """(
    SELECT id FROM exchanges WHERE abandoned = 0 AND complete = 0 AND released IS NULL AND kind != 'mark'
    UNION SELECT MAX(id) FROM exchanges WHERE abandoned = 0 AND kind = 'main' GROUP BY sandbox
)"""


def size(database: Database) -> Size:
    """How much there is."""
    with database.read() as db:
        exchanges, outcomes, items = (
            db.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0] for table in ("exchanges", "outcomes", "nodes")
        )
        content, stored = db.execute(
            "SELECT COALESCE(SUM(size), 0), COALESCE(SUM(LENGTH(data)), 0) FROM blobs"
        ).fetchone()
    return Size(
        exchanges=exchanges,
        outcomes=outcomes,
        items=items,
        content=content,
        stored=stored,
        file=database.file_size(),
    )


def forget(database: Database, sandbox: str) -> None:
    """Everything of a sandbox."""
    with database.write() as db:
        db.execute("DELETE FROM ties WHERE exchange IN (SELECT id FROM exchanges WHERE sandbox = ?)", (sandbox,))
        for table in ("exchanges", "outcomes", "standings"):
            db.execute(f"DELETE FROM {table} WHERE sandbox = ?", (sandbox,))
        blobs.sweep(db)
    database.shrink()


def retain(database: Database, max_age_seconds: float | None, max_bytes: int | None) -> int:
    """See `crab.turns.record.Record.retain`."""
    gone = 0
    if max_age_seconds is not None:
        oldest = time.time() - max_age_seconds
        with database.write() as db:
            found = db.execute(f"SELECT id FROM exchanges WHERE asked < ? AND id NOT IN {_KEPT}", (oldest,)).fetchall()
            db.execute("DELETE FROM outcomes WHERE exchange = 0 AND started < ?", (oldest,))
            gone += _remove(db, [row[0] for row in found])
    while max_bytes is not None and size(database).stored > max_bytes:
        with database.write() as db:
            found = db.execute(
                f"SELECT id FROM exchanges WHERE id NOT IN {_KEPT} ORDER BY abandoned = 0, id"
            ).fetchall()
            if not found:
                break
            gone += _remove(db, [row[0] for row in found[: max(1, len(found) // _BATCHES)]])
    database.shrink()
    return gone


def _remove(db: sqlite3.Connection, exchanges: list[int]) -> int:
    rows = [(exchange,) for exchange in exchanges]
    db.executemany("DELETE FROM exchanges WHERE id = ?", rows)
    # exchange numbers are never given twice, so one number is one sandbox's
    for table in ("outcomes", "ties"):
        db.executemany(f"DELETE FROM {table} WHERE exchange = ?", rows)
    blobs.sweep(db)
    return len(exchanges)
