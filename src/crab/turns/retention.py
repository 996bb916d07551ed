"""What the record lets go of, and how large it is.

Knows age and size, and the rule: of a sandbox that is still there only what was rewound away may go. All that counts stays,
however old and large: an agent that starts anew asks for all of it from its first question on, and one link that is missing
would make it ask the model, and run its commands once more in a sandbox that has their effects. So do answers whose turn was
lost in a crash, which are given once more.
"""

from __future__ import annotations

import logging
import sqlite3
import time

from crab.turns import blobs, branches
from crab.turns.database import Database
from crab.turns.exchange import Size

log = logging.getLogger("crab.turns")

_BATCHES = 8
"""A record that is too large is made smaller in steps: what is shared is free only when its last user is gone."""
_KEPT = f"""(
    SELECT id FROM exchanges WHERE abandoned IN (0, {branches.LOST})
    UNION SELECT begun_by FROM outcomes WHERE abandoned = 0 AND begun_by IS NOT NULL
    UNION SELECT ended_by FROM outcomes WHERE abandoned = 0 AND ended_by IS NOT NULL
)"""
"""Also a question that was asked anew since, if it says which commands are before its checkpoint."""


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
            db.execute("DELETE FROM outcomes WHERE abandoned AND started < ?", (oldest,))
            gone += _remove(db, [row[0] for row in found])
    while max_bytes is not None and size(database).stored > max_bytes:
        with database.write() as db:
            found = db.execute(f"SELECT id FROM exchanges WHERE id NOT IN {_KEPT} ORDER BY id").fetchall()
            gone += _remove(db, [row[0] for row in found[: max(1, len(found) // _BATCHES)]])
            if not found and not _remove_outcomes(db):
                log.warning(
                    "the record holds more than it should (%d bytes), all of it of sandboxes that are there and may need it",
                    max_bytes,
                )
                break
    database.shrink()
    return gone


def _remove_outcomes(db: sqlite3.Connection) -> int:
    removed = db.execute("DELETE FROM outcomes WHERE abandoned").rowcount
    blobs.sweep(db)
    return removed


def _remove(db: sqlite3.Connection, exchanges: list[int]) -> int:
    rows = [(exchange,) for exchange in exchanges]
    db.executemany("DELETE FROM exchanges WHERE id = ?", rows)
    # exchange numbers are never given twice, so one number is one sandbox's
    for table in ("outcomes", "ties"):
        db.executemany(f"DELETE FROM {table} WHERE exchange = ?", rows)
    blobs.sweep(db)
    return len(exchanges)
