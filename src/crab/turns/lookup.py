"""Questions to the record: what was asked, what was answered, how far an agent has got.

Knows which exchanges count (`crab.turns.branches` decides it). Writes nothing.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

import msgspec

from crab.errors import NotFound
from crab.turns import blobs, branches
from crab.turns.database import Database
from crab.turns.exchange import EXCHANGE, Exchange, Standing, exchange_of

_CHUNK = 500
"""Links of a chain in one query; SQLite takes 999 values at least."""


class Lookup:
    """See the module. What does not count any more is left out where nothing else is said."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def get(self, identity: int) -> Exchange:
        """Raises `NotFound`."""
        with self._database.read() as db:
            return exchange_in(db, identity)

    def find(self, sandbox: str, key: bytes) -> Exchange | None:
        """The newest one with a whole answer to exactly that conversation. Look at `redacted` before giving it again."""
        return self._newest("sandbox = ? AND key = ? AND complete = 1 AND abandoned = 0", sandbox, key)

    def lost(self, sandbox: str, key: bytes) -> Exchange | None:
        """The newest one with a whole answer to exactly that conversation which the death of its sandbox took from the
        branch."""
        condition = "sandbox = ? AND key = ? AND complete = 1 AND redacted = 0 AND abandoned = ?"
        return self._newest(condition, sandbox, key, branches.LOST)

    def verdict(self, identity: int) -> int:
        """Whether it counts: `abandoned`, as `crab.turns.branches` has it. Raises `NotFound`."""
        with self._database.read() as db:
            row = db.execute("SELECT abandoned FROM exchanges WHERE id = ?", (identity,)).fetchone()
        if not row:
            raise NotFound(f"there is no exchange {identity} in the record")
        return row[0]

    def open_ones(self, sandbox: str) -> list[Exchange]:
        """Those that wait for an answer, oldest first."""
        return self._all(
            "sandbox = ? AND complete = 0 AND released IS NULL AND abandoned = 0 AND kind != 'mark'", sandbox
        )

    def newest(self, sandbox: str, released: bool = False) -> Exchange | None:
        """The newest question of an agent's main loop, or the newest whose answer was passed on."""
        condition = "sandbox = ? AND kind = 'main' AND abandoned = 0"
        return self._newest(condition + (" AND released IS NOT NULL" if released else ""), sandbox)

    def position(self, sandbox: str, chain: Sequence[bytes]) -> Exchange | None:
        """How far an agent that comes with this conversation has got: the newest question of a main loop that is in it."""
        best: Exchange | None = None
        for begin in range(0, len(chain), _CHUNK):
            links = chain[begin : begin + _CHUNK]
            keys = ", ".join("?" * len(links))
            found = self._newest(
                f"sandbox = ? AND kind = 'main' AND abandoned = 0 AND key IN ({keys})", sandbox, *links
            )
            if found and (best is None or found.id > best.id):
                best = found
        return best

    def goes_on(self, exchange: Exchange) -> bool:
        """Whether a later question of a main loop has the conversation of that one in it."""
        query = """
            WITH RECURSIVE up (id) AS (
                SELECT key FROM exchanges WHERE sandbox = ? AND kind = 'main' AND abandoned = 0 AND id > ? AND key != ?
                UNION SELECT parent FROM nodes JOIN up ON nodes.id = up.id WHERE parent IS NOT NULL
            ) SELECT 1 FROM up WHERE id = ? LIMIT 1
        """
        with self._database.read() as db:
            values = (exchange.sandbox, exchange.id, exchange.key, exchange.key)
            return db.execute(query, values).fetchone() is not None

    def exchanges(self, sandbox: str, limit: int | None = None, before: int | None = None) -> list[Exchange]:
        """The newest `limit` ones (all) with an id below `before`, oldest first, abandoned ones too."""
        found = self._all(
            "sandbox = ? AND kind != 'mark' AND (? IS NULL OR id < ?)",
            sandbox,
            before,
            before,
            order=f"DESC LIMIT {-1 if limit is None else limit:d}",
        )
        return found[::-1]

    def standing(self, sandbox: str) -> Standing:
        """How far the agent has come."""
        query = "SELECT forwarding, beyond, exchange, given FROM standings WHERE sandbox = ?"
        with self._database.read() as db:
            row = db.execute(query, (sandbox,)).fetchone()
        if not row:
            return Standing()
        given = msgspec.json.decode(row[3], type=tuple[int, ...])
        return Standing(forwarding=bool(row[0]), beyond=bool(row[1]), exchange=row[2], given=given)

    def sandboxes(self) -> list[str]:
        """Those of which anything is recorded."""
        query = " UNION ".join(f"SELECT sandbox FROM {table}" for table in ("exchanges", "outcomes", "standings"))
        with self._database.read() as db:
            return [row[0] for row in db.execute(query)]

    def knows(self, sandbox: str) -> bool:
        """Whether anything was recorded of a sandbox."""
        with self._database.read() as db:
            return any(
                db.execute(f"SELECT 1 FROM {table} WHERE sandbox = ? LIMIT 1", (sandbox,)).fetchone()
                for table in ("exchanges", "outcomes", "standings")
            )

    def answer(self, identity: int) -> bytes:
        """The bytes of the answer. Raises `NotFound` if there is none, or `Damaged`."""
        with self._database.read() as db:
            row = db.execute("SELECT answer FROM exchanges WHERE id = ?", (identity,)).fetchone()
            if not row or row[0] is None:
                raise NotFound(f"the record has no answer of exchange {identity}")
            return blobs.get(db, row[0])

    def conversation(self, identity: int) -> list[bytes]:
        """The items of the question, first one first. Raises `NotFound` or `Damaged`."""
        with self._database.read() as db:
            return blobs.conversation(db, exchange_in(db, identity).key)

    def _all(self, condition: str, *values: object, order: str = "") -> list[Exchange]:
        with self._database.read() as db:
            rows = db.execute(f"SELECT {EXCHANGE} FROM exchanges WHERE {condition} ORDER BY id {order}", values)
            return [exchange_of(row) for row in rows]

    def _newest(self, condition: str, *values: object) -> Exchange | None:
        found = self._all(condition, *values, order="DESC LIMIT 1")
        return found[0] if found else None


def exchange_in(db: sqlite3.Connection, identity: int) -> Exchange:
    """An exchange, in the transaction of the caller. Raises `NotFound`."""
    row = db.execute(f"SELECT {EXCHANGE} FROM exchanges WHERE id = ?", (identity,)).fetchone()
    if not row:
        raise NotFound(f"there is no exchange {identity} in the record")
    return exchange_of(row)
