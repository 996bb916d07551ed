"""How the commands of agents ended: what an agent that comes back is told instead of running them again.

Knows the place of a command (sandbox, exchange, index) and its result as bytes. What a command is, and whether an outcome may
stand for it, is the caller's to say. Which outcomes count after a rewind: `crab.turns.branches`.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from typing import Literal

from crab.errors import AlreadyExists, NotFound
from crab.turns import blobs, branches
from crab.turns.database import Database
from crab.turns.exchange import OUTCOME, Outcome, outcome_of
from crab.turns.redact import Redactor


class Outcomes:
    """See the module. Safe from any thread; errors of `crab.turns.database` everywhere."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def begin(self, sandbox: str, exchange: int, index: int, command: bytes) -> Outcome:
        """A command is going to run: on the disk when it returns, and only then may it run.

        `command` is a digest. Raises `AlreadyExists` if there is an outcome at that place: of two callers one wins.
        """
        with self._database.write() as db:
            if _at(db, sandbox, exchange, index):
                raise AlreadyExists(f"command {index} of exchange {exchange} in {sandbox} was begun before")
            query = """
                INSERT INTO outcomes (sandbox, exchange, place, command, state, started)
                VALUES (?, ?, ?, ?, 'intended', ?)
            """
            made = db.execute(query, (sandbox, exchange, index, bytes(command), time.time())).lastrowid
            return _outcome(db, db.execute(f"SELECT {OUTCOME} FROM outcomes WHERE id = ?", (made,)).fetchone())

    def withdraw(self, identity: int) -> None:
        """It did not run, and has no end."""
        with self._database.write() as db:
            db.execute("DELETE FROM outcomes WHERE id = ? AND state = 'intended'", (identity,))

    def end(
        self, identity: int, state: Literal["done", "failed"], result: bytes, secrets: Sequence[bytes] = ()
    ) -> Outcome:
        """How it ended: on the disk when it returns. Raises `NotFound` if it was forgotten meanwhile.

        One that was abandoned meanwhile stays so: what ended is not in the sandbox any more.
        """
        clean, found = Redactor(secrets).masked(result)
        blob = blobs.packed(clean)
        with self._database.write() as db:
            before = db.execute("SELECT result FROM outcomes WHERE id = ?", (identity,)).fetchone()
            query = """
                UPDATE outcomes SET state = ?, result = ?, redacted = ?, ended = ? WHERE id = ?
            """
            if not db.execute(query, (state, blobs.put(db, blob), found, time.time(), identity)).rowcount:
                raise NotFound(f"there is no outcome {identity} in the record")
            blobs.let_go(db, digests=before)
            return _outcome(db, db.execute(f"SELECT {OUTCOME} FROM outcomes WHERE id = ?", (identity,)).fetchone())

    def of(self, sandbox: str, exchange: int | None = None) -> list[Outcome]:
        """Those of an exchange, or of all, that count: by exchange and index."""
        with self._database.read() as db:
            rows = db.execute(
                f"""
                SELECT {OUTCOME} FROM outcomes WHERE sandbox = ? AND abandoned = 0 AND (? IS NULL OR exchange = ?)
                ORDER BY exchange, place
                """,
                (sandbox, exchange, exchange),
            ).fetchall()
            return [_outcome(db, row) for row in rows]

    def ended(self, sandbox: str) -> frozenset[int]:
        """Those that have ended since the last question or checkpoint."""
        with self._database.read() as db:
            return branches.ended_since(db, sandbox)

    def next_index(self, sandbox: str, exchange: int) -> int:
        """The first place of an exchange after those that are taken."""
        query = "SELECT COALESCE(MAX(place) + 1, 0) FROM outcomes WHERE sandbox = ? AND exchange = ? AND abandoned = 0"
        with self._database.read() as db:
            return db.execute(query, (sandbox, exchange)).fetchone()[0]

    def at(self, sandbox: str, exchange: int, index: int) -> Outcome | None:
        """The one at a place, if one counts."""
        with self._database.read() as db:
            return _at(db, sandbox, exchange, index)


def _at(db: sqlite3.Connection, sandbox: str, exchange: int, index: int) -> Outcome | None:
    row = db.execute(
        f"SELECT {OUTCOME} FROM outcomes WHERE sandbox = ? AND exchange = ? AND place = ? AND abandoned = 0",
        (sandbox, exchange, index),
    ).fetchone()
    return _outcome(db, row) if row else None


def _outcome(db: sqlite3.Connection, row: sqlite3.Row) -> Outcome:
    return outcome_of(row, blobs.get(db, row["result"]) if row["result"] is not None else None)
