"""Which part of the record is in the past of a sandbox, after it was brought to a checkpoint.

A sandbox at a checkpoint has in its past what was recorded before that checkpoint on its way there: the *line* of checkpoints
from the first one to the head. Everything that is recorded is therefore tied to a checkpoint (*sealed*) as soon as one
comes after it, and the rest is a question of membership: no clock decides, and a rewind that is taken back finds again what
the first one abandoned. Knows nothing of how a checkpoint is restored.

The checkpoint of an exchange was taken when the question came, so it is before the exchange: several answers may have been
given from there, each on a branch of its own. A command is before a checkpoint if it was begun before the question that the
checkpoint belongs to, or until that was reported: it may be in it. If it ended only after the question, or while the
checkpoint was taken, it may have been under way in what is restored, and so it is `intended` again: whoever comes back finds
it there, or nobody knows how it ended.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Collection, Sequence, Set

from crab.model import Struct
from crab.turns import blobs

FOR_GOOD = 2
"""Of `abandoned`: no rewind brings it back. 1 is by a rewind, 0 is not at all."""
LOST = 3
"""The sandbox died before the turn was safe. Nobody wanted another answer, so it still answers exactly that question."""


class Place(Struct):
    """Where an exchange lies."""

    id: int
    kind: str
    abandoned: int
    waits: bool
    """Nobody has said yet how safe the sandbox is."""
    checkpoints: frozenset[str] = frozenset()
    """Taken because of its question: one, or one each time it came."""
    seals: frozenset[str] = frozenset()
    """On each branch, the first checkpoint that came after it."""


class Command(Struct):
    """Where a command lies."""

    id: int
    exchange: int
    place: int
    begun_by: int | None
    """The first exchange that came after its beginning."""
    ended_by: int | None
    """And the first after its end."""


# ---- decisions


def line_to(places: Sequence[Place], kept: Set[str], head: str) -> set[str]:
    """The line of checkpoints, with the head: those that are known, and removed ones whose exchanges are in its past."""
    earlier: dict[str, set[str]] = {}
    for place in places:
        for seal in place.seals:
            earlier.setdefault(seal, set()).update(place.checkpoints)
    line = {*kept, head}
    waiting = list(line)
    while waiting:
        found = earlier.get(waiting.pop(), set()) - line
        line |= found
        waiting += found
    return line


def past(places: Sequence[Place], line: Set[str], head: str) -> set[int]:
    """The exchanges that came before the head. `line` has the head in it."""
    return {
        place.id
        for place in places
        if place.abandoned != FOR_GOOD and head not in place.checkpoints and not line.isdisjoint(place.seals)
    }


def abandoned(places: Sequence[Place], line: Set[str], head: str, ask_again: bool) -> dict[int, int]:
    """For each exchange, whether it is abandoned from now on."""
    before = past(places, line, head)
    heard_of = any(head in place.checkpoints for place in places)

    def one(place: Place) -> int:
        if place.abandoned == FOR_GOOD:
            return FOR_GOOD
        if place.id in before:
            return 0
        if head in place.checkpoints:  # one that an earlier rewind wanted a new answer for does not come back
            return 1 if ask_again and place.kind == "main" else place.abandoned
        if place.kind == "helper" and not ask_again:  # its answer makes nobody act: it is as good as it was
            return place.abandoned
        if not heard_of and not line.isdisjoint(
            place.checkpoints
        ):  # the question is before the head; more is not known
            return place.abandoned
        return LOST if place.kind == "main" and not ask_again and place.abandoned in (0, LOST) else 1

    return {place.id: one(place) for place in places}


def commands_before(places: Sequence[Place], commands: Sequence[Command], line: Set[str], head: str) -> dict[int, bool]:
    """The commands whose effect is in the head, and whether each had ended there. Of those of the head's own exchange
    there is none."""
    before = past(places, line, head) | {0}
    sealed = {place.id for place in places if not line.isdisjoint(place.checkpoints or place.seals)}
    newest = {
        (command.exchange, command.place): command
        for command in sorted(commands, key=lambda command: command.id)
        if command.exchange in before and command.begun_by in sealed
    }
    return {command.id: command.ended_by in sealed for command in newest.values()}


def continues(places: Sequence[Place], line: Set[str]) -> bool:
    """Whether nothing is rolled back to before the newest checkpoint that was heard of."""
    known = [place for place in places if place.checkpoints and not place.abandoned]
    return not known or not line.isdisjoint(max(known, key=lambda place: place.id).checkpoints)


# ---- what they are made of


def mark(
    db: sqlite3.Connection,
    sandbox: str,
    checkpoint: str,
    turn: int | None = None,
    ended: Collection[int] | None = None,
) -> int:
    """A checkpoint that came without a question: it is after all that was recorded until now, and of commands only the ends
    that are given (all). Returns its id."""
    query = "INSERT INTO exchanges (sandbox, kind, key, asked, checkpoint, turn) VALUES (?, 'mark', x'', ?, ?, ?)"
    made = db.execute(query, (sandbox, time.time(), checkpoint, turn)).lastrowid or 0
    seal_commands(db, sandbox, made, ended)
    tie(db, sandbox, made, checkpoint)
    return made


def seal_commands(db: sqlite3.Connection, sandbox: str, exchange: int, ended: Collection[int] | None = None) -> None:
    """An exchange comes after all commands that were begun, and all that have ended until now (or those)."""
    _seal_begun(db, sandbox, exchange)
    over = ended_since(db, sandbox)
    rows = [(exchange, command) for command in (over if ended is None else over.intersection(ended))]
    db.executemany("UPDATE outcomes SET ended_by = ? WHERE id = ?", rows)


def ended_since(db: sqlite3.Connection, sandbox: str) -> frozenset[int]:
    """The commands that have ended, and no exchange came since."""
    query = "SELECT id FROM outcomes WHERE sandbox = ? AND ended_by IS NULL AND ended IS NOT NULL AND abandoned = 0"
    return frozenset(row[0] for row in db.execute(query, (sandbox,)))


def _seal_begun(db: sqlite3.Connection, sandbox: str, exchange: int) -> None:
    # one that has an end has a beginning: the first condition is what the index knows
    unsealed = "sandbox = ? AND ended_by IS NULL AND begun_by IS NULL AND abandoned = 0"
    db.execute(f"UPDATE outcomes SET begun_by = ? WHERE {unsealed}", (exchange, sandbox))


def tie(db: sqlite3.Connection, sandbox: str, exchange: int, checkpoint: str) -> None:
    """A checkpoint was taken because of an exchange: it comes after earlier ones, and after those that have one already."""
    db.execute("INSERT OR IGNORE INTO ties VALUES (?, ?, 1)", (exchange, checkpoint))
    if db.execute("SELECT abandoned FROM exchanges WHERE id = ?", (exchange,)).fetchone()[0]:
        return
    _seal_begun(db, sandbox, exchange)
    earlier = """
        sandbox = :sandbox AND unsealed = 1 AND abandoned = 0 AND id != :exchange AND checkpoint IS NOT :checkpoint
        AND (id < :exchange OR checkpoint IS NOT NULL)
    """
    values = {"sandbox": sandbox, "exchange": exchange, "checkpoint": checkpoint}
    db.execute(f"INSERT OR IGNORE INTO ties SELECT id, :checkpoint, 0 FROM exchanges WHERE {earlier}", values)
    db.execute(f"UPDATE exchanges SET unsealed = 0 WHERE {earlier}", values)


def _places(db: sqlite3.Connection, sandbox: str) -> list[Place]:
    tied: dict[tuple[int, int], set[str]] = {}
    query = "SELECT exchange, own, ties.checkpoint FROM ties JOIN exchanges ON id = exchange WHERE sandbox = ?"
    for exchange, own, checkpoint in db.execute(query, (sandbox,)):
        tied.setdefault((exchange, own), set()).add(checkpoint)
    query = "SELECT id, kind, abandoned, protection IS NULL FROM exchanges WHERE sandbox = ?"
    found: list[Place] = []
    for exchange, kind, verdict, waits in db.execute(query, (sandbox,)):
        own, seals = (frozenset(tied.get((exchange, own), ())) for own in (1, 0))
        found.append(Place(exchange, kind, verdict, bool(waits), own, seals))
    return found


def _commands(db: sqlite3.Connection, sandbox: str) -> list[Command]:
    rows = db.execute("SELECT id, exchange, place, begun_by, ended_by FROM outcomes WHERE sandbox = ?", (sandbox,))
    return [Command(*row) for row in rows]


# ---- what follows from them


def rewind(db: sqlite3.Connection, sandbox: str, kept: Set[str], head: str, ask_again: bool) -> None:
    """What `crab.turns.record.Record.rewound` says, in the transaction of the caller."""
    _hear_of(db, sandbox, kept | {head}, head)
    places = _places(db, sandbox)
    line = line_to(places, kept, head)
    verdicts = abandoned(places, line, head, ask_again)
    changed = [(verdicts[place.id], place.id) for place in places if verdicts[place.id] != place.abandoned]
    db.executemany("UPDATE exchanges SET abandoned = ? WHERE id = ?", changed)
    db.execute("UPDATE exchanges SET delivered = 0 WHERE sandbox = ? AND delivered", (sandbox,))
    # on this branch nobody has seen the answer yet
    there = [(place.id,) for place in places if head in place.checkpoints]
    db.executemany("UPDATE exchanges SET released = NULL WHERE id = ?", there)
    before = past(places, line, head)
    db.executemany(
        "UPDATE exchanges SET unsealed = ? WHERE id = ?", [(place.id not in before, place.id) for place in places]
    )
    found = commands_before(places, _commands(db, sandbox), line, head)
    db.execute("UPDATE outcomes SET abandoned = 1 WHERE sandbox = ? AND abandoned = 0", (sandbox,))
    db.executemany("UPDATE outcomes SET abandoned = 0 WHERE id = ?", [(command,) for command in found])
    unknown = [command for command, over in found.items() if not over]
    results = [db.execute("SELECT result FROM outcomes WHERE id = ?", (one,)).fetchone()[0] for one in unknown]
    db.executemany(
        """
        UPDATE outcomes SET state = 'intended', result = NULL, redacted = 0, ended = NULL, ended_by = NULL
        WHERE id = ?
        """,
        [(command,) for command in unknown],
    )
    blobs.let_go(db, digests=results)


def _hear_of(db: sqlite3.Connection, sandbox: str, line: Set[str], head: str) -> None:
    """Tie a head that was published just before a crash to what it was taken for."""
    places = _places(db, sandbox)
    if any(head in place.checkpoints for place in places) or not continues(places, line):
        return
    questions = [place for place in places if place.kind == "main" and not place.abandoned]
    newest = max(questions, key=lambda place: place.id, default=None)
    if newest and newest.waits:
        db.execute("UPDATE exchanges SET checkpoint = ? WHERE id = ?", (head, newest.id))
        tie(db, sandbox, newest.id, head)
    elif places:
        made = mark(db, sandbox, head)
        db.execute("UPDATE outcomes SET ended_by = NULL WHERE ended_by = ?", (made,))


def fork(db: sqlite3.Connection, source: str, target: str, kept: Set[str], head: str) -> None:
    """What `crab.turns.record.Record.forked` says, in the transaction of the caller."""
    _hear_of(db, source, kept | {head}, head)
    places = _places(db, source)
    line = line_to(places, kept, head)
    names = [row["name"] for row in db.execute("PRAGMA table_info(exchanges)")]
    same = ", ".join(name for name in names if name not in ("id", "sandbox", "abandoned", "delivered"))
    new = {0: 0}
    commands = _commands(db, source)
    found = commands_before(places, commands, line, head)
    before = past(places, line, head)
    seals = {exchange for one in commands if one.id in found for exchange in (one.begun_by, one.ended_by)}
    # of the head's own question there is nothing but the checkpoints that were taken when it came earlier
    where = {
        place.id: left
        for place in places
        if (left := ((place.checkpoints or place.seals) & line) - {head}) or head not in place.checkpoints
    }
    for old in sorted(where.keys() & (before | seals)):
        if old not in before:  # a question that was asked anew since; what was done before it is before its checkpoint
            new[old] = _mark_at(db, target, where[old])
            continue
        query = f"INSERT INTO exchanges (sandbox, {same}) SELECT ?, {same} FROM exchanges WHERE id = ?"
        new[old] = db.execute(query, (target, old)).lastrowid or 0
        db.execute("INSERT INTO ties SELECT ?, checkpoint, own FROM ties WHERE exchange = ?", (new[old], old))
    begin = mark(db, target, head)
    for old, over in found.items():
        _copy_command(db, old, target, over, new, begin)


def _mark_at(db: sqlite3.Connection, sandbox: str, checkpoints: Set[str]) -> int:
    """A mark at checkpoints that are there already: it comes after nothing but what is tied to it."""
    query = "INSERT INTO exchanges (sandbox, kind, key, asked, checkpoint) VALUES (?, 'mark', x'', ?, ?)"
    made = db.execute(query, (sandbox, time.time(), min(checkpoints, default=None))).lastrowid or 0
    db.executemany("INSERT INTO ties VALUES (?, ?, 1)", [(made, checkpoint) for checkpoint in checkpoints])
    return made


def _copy_command(db: sqlite3.Connection, old: int, target: str, over: bool, new: dict[int, int], begin: int) -> None:
    row = dict(db.execute("SELECT * FROM outcomes WHERE id = ?", (old,)).fetchone())
    del row["id"]
    row |= {"sandbox": target, "exchange": new[row["exchange"]], "abandoned": 0}
    row["begun_by"] = new.get(row["begun_by"], begin)
    row["ended_by"] = new.get(row["ended_by"], begin) if over else None
    if not over:
        row |= {"state": "intended", "result": None, "redacted": 0, "ended": None}
    holes = ", ".join("?" * len(row))
    db.execute(f"INSERT INTO outcomes ({', '.join(row)}) VALUES ({holes})", tuple(row.values()))
