"""What the record lets go of, and how large it is.

Knows age and size, and the rule: of a sandbox that is still there only what was rewound away may go. All that counts stays,
however old and large: an agent that starts anew asks for all of it from its first question on, and one link that is missing
would make it ask the model, and run its commands once more in a sandbox that has their effects. So do answers whose turn was
lost in a crash, which are given once more.

What is let go leaves a mark where it was: a question that was asked anew since still says which commands were before its
checkpoint, to which the sandbox may be brought back.
"""

from __future__ import annotations

import logging
import math
import sqlite3
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from crab.turns import blobs, branches
from crab.turns.database import Database
from crab.turns.exchange import Size

log = logging.getLogger("crab.turns")

_SLICE = 32
"""Exchanges, or outcomes, that are removed in one transaction."""
_PAGES = 256
"""Pages that are given back while others wait."""
_LOOSE = f"kind != 'mark' AND abandoned NOT IN (0, {branches.LOST})"
"""What may go. (A `mark` has no content.)"""


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
    """Everything of a sandbox, in slices. If it is cut off in the middle, `Lookup.sandboxes` still has it."""
    _sliced(database, lambda db: _remove_outcomes(db, "sandbox = ?", sandbox))
    _sliced(database, lambda db: _remove(db, "sandbox = ?", sandbox))
    with database.write() as db:
        db.execute("DELETE FROM standings WHERE sandbox = ?", (sandbox,))
    _shrink(database)


def retain(database: Database, max_age_seconds: float | None, max_bytes: int | None) -> int:
    """See `crab.turns.record.Record.retain`."""
    gone = 0
    if max_age_seconds is not None:
        oldest = time.time() - max_age_seconds
        gone += _sliced(database, lambda db: _hollow(db, f"asked < ? AND {_LOOSE}", oldest)).rows
        _sliced(database, lambda db: _remove_outcomes(db, "abandoned AND started < ?", oldest))
    if max_bytes is not None and (excess := size(database).stored - max_bytes) > 0:
        oldest_first = _sliced(database, lambda db: _hollow(db, _LOOSE), excess)
        rest = _sliced(database, lambda db: _remove_outcomes(db, "abandoned"), excess - oldest_first.freed)
        gone += oldest_first.rows
        if oldest_first.freed + rest.freed < excess:
            log.warning(
                "the record holds more than it should (%d bytes), all of it of sandboxes that are there and may need it",
                max_bytes,
            )
    _shrink(database)
    return gone


# ---- slices


class _Taken(NamedTuple):
    """What was removed."""

    rows: int
    freed: int
    """Bytes that were stored of what only that referred to."""


def _sliced(database: Database, remove: Callable[[sqlite3.Connection], _Taken], wanted: float = math.inf) -> _Taken:
    """Let `remove` take one slice after the other, until there is none or so many bytes are free; returns what it took.

    Answers of other sandboxes are written in between, so as much time is left to them as a slice took: a lock that is taken
    again at once is got by nobody else.
    """
    taken = _Taken(0, 0)
    while taken.freed < wanted:
        begin = time.monotonic()
        with database.write() as db:
            now = remove(db)
        if not now.rows:
            break
        taken = _Taken(taken.rows + now.rows, taken.freed + now.freed)
        _leave_room(time.monotonic() - begin)
    return taken


def _leave_room(seconds: float) -> None:
    time.sleep(max(seconds, 0.001))


def _shrink(database: Database) -> None:
    begin = time.monotonic()
    while database.shrink(_PAGES):
        _leave_room(time.monotonic() - begin)
        begin = time.monotonic()


def _remove(db: sqlite3.Connection, condition: str, *values: object) -> _Taken:
    """A slice of the exchanges, and all that belongs to them. From its newest question back a conversation goes link by link:
    each takes only what is its own."""
    query = f"SELECT id, key, answer FROM exchanges WHERE {condition} ORDER BY id DESC LIMIT {_SLICE}"
    return _emptied(db, query, values, ("DELETE FROM ties WHERE exchange = ?", "DELETE FROM exchanges WHERE id = ?"))


def _hollow(db: sqlite3.Connection, condition: str, *values: object) -> _Taken:
    """The content of a slice of the exchanges, oldest first, and their commands."""
    query = f"SELECT id, key, answer FROM exchanges WHERE {condition} ORDER BY id LIMIT {_SLICE}"
    mark = "UPDATE exchanges SET kind = 'mark', key = x'', answer = NULL, complete = 0, headers = '{}' WHERE id = ?"
    return _emptied(db, query, values, (mark,))


def _emptied(db: sqlite3.Connection, query: str, values: Sequence[object], actions: Sequence[str]) -> _Taken:
    found = db.execute(query, values).fetchall()
    freed = 0
    for exchange, key, answer in found:
        # exchange numbers are never given twice, so one number is one sandbox's
        results = [row[0] for row in db.execute("SELECT result FROM outcomes WHERE exchange = ?", (exchange,))]
        for action in ("DELETE FROM outcomes WHERE exchange = ?", *actions):
            db.execute(action, (exchange,))
        freed += blobs.let_go(db, [key], [answer, *results])
    return _Taken(len(found), freed)


def _remove_outcomes(db: sqlite3.Connection, condition: str, *values: object) -> _Taken:
    """A slice of the outcomes."""
    found = db.execute(f"SELECT id, result FROM outcomes WHERE {condition} LIMIT {_SLICE}", values).fetchall()
    db.executemany("DELETE FROM outcomes WHERE id = ?", [(row[0],) for row in found])
    return _Taken(len(found), blobs.let_go(db, digests=[row[1] for row in found]))
