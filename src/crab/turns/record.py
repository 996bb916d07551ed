"""The record: what agents asked their models, what was answered, and how their commands ended.

Knows sandboxes, checkpoints and conversations by name only: whether two requests ask the same is in the chain of digests that
the caller gives, what a checkpoint holds is the business of whoever took it. What a call has returned for is on the disk,
whatever ends the process next. Content is kept once (`blobs`), credentials not at all (`redact`), and which part of it
counts after a rewind is decided in `branches`.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Collection, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Literal

import msgspec

from crab.errors import NotFound
from crab.turns import blobs, branches, retention
from crab.turns.database import Database
from crab.turns.exchange import Exchange, Protection, Size, Standing
from crab.turns.lookup import Lookup, exchange_in
from crab.turns.outcomes import Outcomes
from crab.turns.redact import Redactor, kept_headers


class Record(Lookup):
    """See the module. Safe from any thread of one process; errors of `crab.turns.database` everywhere.

    Methods that change an exchange raise `NotFound` if its sandbox was forgotten meanwhile.
    """

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.outcomes = Outcomes(database)

    @classmethod
    def open(cls, path: Path) -> Record:
        """Open or make the file. A damaged one is set aside, see `set_aside`.

        Raises `Incompatible` if a newer Crab wrote it, and `NoSpace`; nothing in it is changed then.
        """
        return cls(Database(path))

    def close(self) -> None:
        self._database.close()

    @property
    def set_aside(self) -> Path | None:
        """Where a damaged file lies that was found in its place when it was opened."""
        return self._database.set_aside

    # ---- the life of an exchange

    def begin(
        self,
        sandbox: str,
        *,
        chain: Sequence[bytes],
        items: Sequence[bytes],
        kind: Literal["main", "helper"] = "main",
        wire: str = "",
        model: str = "",
        client: str = "",
        agent: str = "",
        session: str = "",
        bytes_in: int = 0,
        secrets: Sequence[bytes] = (),
    ) -> Exchange:
        """A question came: on the disk when it returns.

        `chain` has a digest of the conversation up to each of its `items`, the last one stands for all of it. A question
        that waits for a whole answer and comes again is the same one, whatever was answered to it until now. Raises
        ValueError for an empty chain, or one that is not as long as `items`.
        """
        if not chain or len(chain) != len(items):
            raise ValueError(f"a conversation of {len(items)} items has a chain of {len(chain)} links")
        redactor = Redactor(secrets)
        with self._database.read() as db:
            there = blobs.known(db, chain)
        ready = blobs.pack_items(items, there, redactor)
        with self._database.write() as db:
            found = db.execute(
                """
                SELECT id FROM exchanges WHERE sandbox = ? AND key = ? AND kind = ? AND complete = 0 AND abandoned = 0
                ORDER BY id DESC LIMIT 1
                """,
                (sandbox, chain[-1], kind),
            ).fetchone()
            if found:
                _change(db, found[0], answered=None, released=None)
                return exchange_in(db, found[0])
            blobs.put_conversation(db, chain, items, ready, redactor)
            words = {"wire": wire, "model": model, "client": client, "agent": agent, "session": session}
            row = {name: redactor.text(value) for name, value in words.items()}
            row |= {"sandbox": sandbox, "kind": kind, "key": chain[-1], "asked": time.time(), "bytes_in": bytes_in}
            query = f"INSERT INTO exchanges ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})"
            made = db.execute(query, tuple(row.values())).lastrowid or 0
            if kind == "main":
                branches.seal_commands(db, sandbox, made)
            return exchange_in(db, made)

    def protected(
        self, identity: int, *, checkpoint: str | None, turn: int | None, protection: Protection, why: str = ""
    ) -> Exchange:
        """How safe the sandbox is: the checkpoint that was taken because of this question, and its turn.

        May be said again, with another checkpoint, if the question comes again after a recovery.
        """
        with self._database.write() as db:
            _change(db, identity, checkpoint=checkpoint, turn=turn, protection=protection, why=Redactor(()).text(why))
            exchange = exchange_in(db, identity)
            if checkpoint is not None:
                branches.tie(db, exchange.sandbox, identity, checkpoint)
            return exchange

    def mark(
        self, sandbox: str, checkpoint: str, turn: int | None = None, ended: Collection[int] | None = None
    ) -> None:
        """A checkpoint was taken without a question (by hand): what was recorded until now is in its past.

        `ended` are the commands that had ended when it was begun (`Outcomes.ended`); of those that ended while it was taken
        nobody can tell. Each one needs it. If a crash comes between the two: see `rewound`.
        """
        with self._database.write() as db:
            branches.mark(db, sandbox, checkpoint, turn, ended)

    def answered(
        self,
        identity: int,
        *,
        status: int,
        headers: Mapping[str, str],
        body: bytes,
        complete: bool,
        calls: int = 0,
        wait_ms: float = 0.0,
        secrets: Sequence[bytes] = (),
        standing: Standing | None = None,
    ) -> Exchange:
        """The answer came: on the disk when it returns, and with it how far the agent is then (if that is given).

        `body` is what the client gets, not compressed (credentials would not be found in it). Without `complete` it was
        cut, and the question stays open. A whole answer is never replaced: a second one changes nothing.
        """
        redactor = Redactor(secrets)
        clean, redacted = redactor.replaced(body)
        blob = blobs.packed(clean)
        kept = {name: redactor.text(value) for name, value in kept_headers(headers).items()}
        with self._database.write() as db:
            exchange = exchange_in(db, identity)
            if standing is not None:
                _stand(db, exchange.sandbox, standing)
            if exchange.complete:
                return exchange
            cut = db.execute("SELECT answer FROM exchanges WHERE id = ?", (identity,)).fetchone()[0]
            _change(
                db,
                identity,
                answered=time.time(),
                status=status,
                headers=msgspec.json.encode(kept).decode(),
                content_type=kept.get("content-type", ""),
                answer=blobs.put(db, blob),
                complete=complete,
                redacted=redacted,
                calls=calls,
                wait_ms=wait_ms,
                bytes_out=len(body),
            )
            blobs.let_go(db, digests=[cut])
            return exchange_in(db, identity)

    def released(self, identity: int, held_ms: float = 0.0) -> Exchange:
        """The answer was passed on."""
        return self._changed(identity, released=time.time(), held_ms=held_ms)

    def delivered(self, identity: int) -> None:
        """The agent has got the whole of it."""
        self._changed(identity, delivered=True)

    def failed(self, identity: int, status: int | None, note: str, secrets: Sequence[bytes] = ()) -> Exchange:
        """There was no answer this time (429, upstream down): the question stays open."""
        return self._changed(identity, status=status, note=Redactor(secrets).text(note))

    def abandon(self, identity: int, note: str = "", secrets: Sequence[bytes] = ()) -> Exchange:
        """Nobody will ask for it again: it and its outcomes count no more, and no rewind brings them back."""
        with self._database.write() as db:
            _change(db, identity, abandoned=branches.FOR_GOOD, note=Redactor(secrets).text(note))
            db.execute("UPDATE outcomes SET abandoned = 1 WHERE exchange = ? AND abandoned = 0", (identity,))
            return exchange_in(db, identity)

    def lose(self, exchange: Exchange) -> None:
        """It was asked before its sandbox died, and came to the record later."""
        self._changed(exchange.id, abandoned=branches.LOST)

    def recall(self, lost: Exchange) -> None:
        """The answer of one that was `lost` is given: once, as the question ends a new turn, whose exchange has it from
        then on."""
        self._changed(lost.id, abandoned=1)

    def stand(self, sandbox: str, standing: Standing) -> None:
        """How far the agent has come: on the disk when it returns."""
        with self._database.write() as db:
            _stand(db, sandbox, standing)

    def _changed(self, identity: int, **values: Any) -> Exchange:
        with self._database.write() as db:
            _change(db, identity, **values)
            return exchange_in(db, identity)

    # ---- branches, and the end

    def rewound(self, sandbox: str, kept_checkpoints: Set[str], head: str, ask_again: bool) -> None:
        """The sandbox was brought to checkpoint `head`; `kept_checkpoints` are all on the way there, before forks too.

        What is not in the past of the head is abandoned; what an earlier rewind abandoned and is in it counts again. The
        question at the head itself keeps its answer for whoever asks again, or with `ask_again` is abandoned; commands
        that followed it are abandoned in both cases. What was asked later can be had with `recall`, unless `ask_again`
        wants other answers. A command that was under way at the head is `intended` again.

        A head that the record has not heard of was published just before a crash: it is taken for the checkpoint of the
        newest question, if that has none yet, else for one without a question. Whether the commands that ran lately are in
        it nobody can tell then, so they are `intended`.
        """
        with self._database.write() as db:
            branches.rewind(db, sandbox, kept_checkpoints, head, ask_again)

    def forked(self, source: str, target: str, kept_checkpoints: Set[str], head: str) -> None:
        """`target` was forked at checkpoint `head`: it gets a copy of what came before the question at the head."""
        with self._database.write() as db:
            branches.fork(db, source, target, kept_checkpoints, head)

    def forget(self, sandbox: str) -> None:
        """Everything of a sandbox, and what only it needed. Others write meanwhile."""
        retention.forget(self._database, sandbox)

    def retain(self, max_age_seconds: float | None = None, max_bytes: int | None = None) -> int:
        """Let go of the content of abandoned exchanges older than that, and then of the oldest abandoned ones until
        `size().stored` is small enough. What counts stays (`crab.turns.retention`). Returns how many went."""
        return retention.retain(self._database, max_age_seconds, max_bytes)

    def size(self) -> Size:
        return retention.size(self._database)


def _change(db: sqlite3.Connection, identity: int, **values: Any) -> None:
    names = ", ".join(f"{name} = ?" for name in values)
    if not db.execute(f"UPDATE exchanges SET {names} WHERE id = ?", (*values.values(), identity)).rowcount:
        raise NotFound(f"there is no exchange {identity} in the record")


def _stand(db: sqlite3.Connection, sandbox: str, standing: Standing) -> None:
    given = msgspec.json.encode(standing.given).decode()
    values = (sandbox, standing.forwarding, standing.beyond, standing.exchange, given)
    db.execute("INSERT OR REPLACE INTO standings VALUES (?, ?, ?, ?, ?)", values)
