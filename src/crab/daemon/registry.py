"""The registry: which sandboxes exist, and an index of the checkpoints.

One SQLite file, written by the one process that owns the state directory. Of a sandbox it is the only record; of a
checkpoint the manifest in the store is the truth and a row here can be made again from it.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from crab.errors import AlreadyExists, Damaged, Incompatible, NotFound
from crab.host.processes import ProcessId
from crab.model import Checkpoint, Return, SandboxSpec, State, Struct

VERSION = 1
_SCHEMA = """
CREATE TABLE sandboxes (
    id TEXT PRIMARY KEY, name TEXT NOT NULL UNIQUE, slot INTEGER NOT NULL UNIQUE, generation INTEGER NOT NULL,
    record BLOB NOT NULL
) STRICT;
CREATE TABLE checkpoints (
    id TEXT PRIMARY KEY, sandbox TEXT NOT NULL, turn INTEGER NOT NULL, created REAL NOT NULL, parent TEXT,
    label TEXT NOT NULL, record BLOB NOT NULL
) STRICT;
CREATE INDEX checkpoints_of ON checkpoints (sandbox, created);
"""


class Owed(Struct, kw_only=True):
    """What the record of an agent has to hear (`crab.daemon.past`): its sandbox stands at its head again. Kept beside what
    makes it so until it was said: whoever owns the sandbox next says it, if its owner died in between."""

    ask_again: bool
    """The question that was asked there is a new one."""
    goes_on: bool = False
    """The agent did it itself, from outside: what it does from now on is new."""


class Record(Struct, kw_only=True):
    """All that must be known of a sandbox to find or rebuild it."""

    id: str
    name: str
    slot: int = -1
    """Number of its range of host ids; `Registry.add` gives it."""
    generation: int
    spec: SandboxSpec
    created: float
    image_fingerprint: str
    runtime: str
    """Name of what it stands on (`crab.sandbox.runtime`)."""
    wanted: State
    """What it was brought to last: created, running, paused or stopped. (`lost` is found, not wanted.)"""
    process: ProcessId | None = None
    head: str | None = None
    turn: int = 0
    forked_from: str | None = None
    returns: tuple[Return, ...] = ()
    owed: Owed | None = None
    """None: the record of its agent knows all."""


_COLUMNS = "id, name, generation, record"


class Broken(Struct, kw_only=True):
    """A sandbox whose record cannot be read: what the columns beside it say."""

    id: str
    name: str
    generation: int
    why: str


class Registry:
    """See the module. Safe from any thread."""

    def __init__(self, path: Path) -> None:
        """Open or make the file. Raises `Damaged` or `Incompatible`."""
        self._lock = threading.RLock()
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        try:
            self._db.execute("PRAGMA journal_mode=WAL")
            self._durable(True)
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version == 0:
                self._db.executescript(f"BEGIN;{_SCHEMA}PRAGMA user_version={VERSION};COMMIT;")
            elif version != VERSION:
                raise Incompatible(
                    f"the registry {path} has version {version}, this Crab reads {VERSION}",
                    remedy="use the Crab that wrote it, or upgrade",
                )
        except sqlite3.DatabaseError as error:
            raise Damaged(
                f"the registry {path} cannot be read: {error}",
                remedy="move it away: checkpoints are found again from their manifests",
            ) from error

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    # ---- sandboxes

    def add(self, record: Record, slots: int) -> Record:
        """Add a sandbox and give it the lowest of `slots` ranges of ids that no other has; returns it with that.

        Raises `AlreadyExists` if the name is taken and `NotFound` if no range is free.
        """
        with self._transaction() as db:
            if db.execute("SELECT 1 FROM sandboxes WHERE name = ?", (record.name,)).fetchone():
                raise AlreadyExists(
                    f"a sandbox named {record.name!r} exists", remedy=f"choose another name, or `crab rm {record.name}`"
                )
            taken = {row[0] for row in db.execute("SELECT slot FROM sandboxes")}
            slot = next((number for number in range(slots) if number not in taken), None)
            if slot is None:
                raise NotFound(f"all {slots} ranges of ids are taken", remedy="remove sandboxes")
            record = msgspec.structs.replace(record, slot=slot)
            db.execute("INSERT INTO sandboxes VALUES (?, ?, ?, ?, ?)", self._row(record))
        return record

    def save(self, record: Record) -> Record:
        """Replace the record of a sandbox; returns it. Raises `NotFound` if it was removed meanwhile."""
        with self._transaction() as db:
            self._put(db, record)
        return record

    def _put(self, db: sqlite3.Connection, record: Record) -> None:
        row = self._row(record)
        query = "UPDATE sandboxes SET name = ?, slot = ?, generation = ?, record = ? WHERE id = ?"
        if not db.execute(query, (*row[1:], row[0])).rowcount:
            raise NotFound(f"sandbox {record.name} was removed meanwhile", remedy="`crab ls` shows what exists")

    @staticmethod
    def _row(record: Record) -> tuple[str, str, int, int, bytes]:
        return (record.id, record.name, record.slot, record.generation, msgspec.json.encode(record))

    def remove(self, identity: str) -> None:
        with self._transaction() as db:
            db.execute("DELETE FROM sandboxes WHERE id = ?", (identity,))

    def find(self, name: str) -> Record:
        """A sandbox by name, id or unique beginning of its id. Raises `NotFound`, which says what exists, or `Damaged`."""
        name = name.encode(errors="replace").decode()  # SQLite takes nothing that is no UTF-8
        with self._lock:
            rows = self._db.execute(
                f"SELECT {_COLUMNS} FROM sandboxes WHERE name = ? OR id = ?", (name, name)
            ).fetchall()
            if not rows and len(name) >= 4:
                rows = self._db.execute(
                    f"SELECT {_COLUMNS} FROM sandboxes WHERE substr(id, 1, ?) = ?", (len(name), name)
                ).fetchall()
        if len(rows) != 1:
            existing = ", ".join(record.name for record in self.all()[:20]) or "none"
            raise NotFound(f"there is no sandbox {name!r}", remedy=f"existing sandboxes: {existing}")
        found = _decoded(rows[0])
        if isinstance(found, Broken):
            raise Damaged(
                f"the record of sandbox {found.name} cannot be read: {found.why}",
                remedy=f"put a copy of registry.db back, or give it up with `crab rm --force {found.name}`",
            )
        return found

    def all(self) -> list[Record]:
        """All sandboxes that can be read, oldest first."""
        found = [record for record in self._sandboxes() if isinstance(record, Record)]
        return sorted(found, key=lambda record: record.created)

    def broken(self) -> list[Broken]:
        """The others. What they own is nobody else's to touch."""
        return [record for record in self._sandboxes() if isinstance(record, Broken)]

    def _sandboxes(self) -> list[Record | Broken]:
        with self._lock:
            return [_decoded(row) for row in self._db.execute(f"SELECT {_COLUMNS} FROM sandboxes")]

    # ---- checkpoints

    def index(self, checkpoint: Checkpoint) -> Checkpoint:
        """Add or replace a checkpoint; returns it."""
        with self._transaction() as db:
            self._index(db, checkpoint)
        return checkpoint

    def advance(self, record: Record, checkpoint: Checkpoint, durable: bool = True) -> None:
        """A checkpoint and the record of its sandbox, whose head it is, in one transaction.

        Without `durable` a crash of the host (not of a process) may lose it: the head is then an older checkpoint.
        """
        with self._lock:
            self._durable(durable)
            try:
                with self._transaction() as db:
                    self._index(db, checkpoint)
                    self._put(db, record)
            finally:
                self._durable(True)

    def _durable(self, on: bool) -> None:
        """Whether a transaction ends only when it is on the disk (WAL mode: one fsync) or when it is written."""
        self._db.execute(f"PRAGMA synchronous={'FULL' if on else 'NORMAL'}")

    def _index(self, db: sqlite3.Connection, checkpoint: Checkpoint) -> None:
        db.execute(
            "INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                checkpoint.id,
                checkpoint.sandbox,
                checkpoint.turn,
                checkpoint.created,
                checkpoint.parent,
                checkpoint.label,
                msgspec.json.encode(checkpoint),
            ),
        )

    def unindex(self, identity: str) -> None:
        with self._transaction() as db:
            db.execute("DELETE FROM checkpoints WHERE id = ?", (identity,))

    def checkpoints(self, sandbox: str | None = None) -> list[Checkpoint]:
        """Checkpoints of one sandbox or of all, oldest first."""
        query = "SELECT record FROM checkpoints" + (" WHERE sandbox = ?" if sandbox else "") + " ORDER BY created, turn"
        with self._lock:
            return _checkpoints(self._db.execute(query, (sandbox,) if sandbox else ()).fetchall())

    def related(self, identity: str) -> list[Checkpoint]:
        """The other checkpoints that say something of this one: children, and those that have a part from it."""
        query = "SELECT record FROM checkpoints WHERE id != ?1 AND (parent = ?1 OR instr(record, CAST(?1 AS BLOB)))"
        with self._lock:
            found = _checkpoints(self._db.execute(query, (identity,)).fetchall())
        return [one for one in found if identity in (one.parent, one.files_from, one.processes_from)]

    def checkpoint(self, identity: str) -> Checkpoint | None:
        with self._lock:
            row = self._db.execute("SELECT record FROM checkpoints WHERE id = ?", (identity,)).fetchone()
        with suppress(msgspec.DecodeError):
            return msgspec.json.decode(row[0], type=Checkpoint) if row else None
        return None


def _checkpoints(rows: Iterable[tuple[bytes]]) -> list[Checkpoint]:
    """One that cannot be read is as if it were not in the index: the next owner takes it from its manifest."""
    found: list[Checkpoint] = []
    for (row,) in rows:
        with suppress(msgspec.DecodeError):
            found.append(msgspec.json.decode(row, type=Checkpoint))
    return found


def _decoded(row: tuple[str, str, int, bytes]) -> Record | Broken:
    identity, name, generation, record = row
    try:
        return msgspec.json.decode(record, type=Record)
    except msgspec.DecodeError as error:
        return Broken(id=identity, name=name, generation=generation, why=str(error))
