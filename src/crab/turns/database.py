"""The database of the record: one SQLite file that one process writes, from any of its threads.

Knows how the file is opened, what is done about one that is damaged, that writes come one after the other and are on the disk
when a transaction ends, and which error is whose. Does not know what the rows mean.
"""

from __future__ import annotations

import itertools
import logging
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from crab.errors import CrabError, Damaged, Incompatible, NoSpace

log = logging.getLogger("crab.turns")

VERSION = 3
_SCHEMA = """
CREATE TABLE blobs (
    digest BLOB PRIMARY KEY,     -- BLAKE3 of the content
    size INTEGER NOT NULL,       -- of the content
    data BLOB NOT NULL           -- zstd
) STRICT;
CREATE TABLE nodes (
    id BLOB PRIMARY KEY,         -- link of a chain: stands for the conversation up to here
    parent BLOB, item BLOB NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX nodes_after ON nodes (parent);
CREATE INDEX nodes_with ON nodes (item);
CREATE TABLE exchanges (
    id INTEGER PRIMARY KEY AUTOINCREMENT, sandbox TEXT NOT NULL, kind TEXT NOT NULL, key BLOB NOT NULL,
    turn INTEGER, checkpoint TEXT, protection TEXT, why TEXT NOT NULL DEFAULT '',
    wire TEXT NOT NULL DEFAULT '', model TEXT NOT NULL DEFAULT '', client TEXT NOT NULL DEFAULT '',
    agent TEXT NOT NULL DEFAULT '', session TEXT NOT NULL DEFAULT '',
    asked REAL NOT NULL, answered REAL, released REAL,
    status INTEGER, headers TEXT NOT NULL DEFAULT '{}', content_type TEXT NOT NULL DEFAULT '',
    complete INTEGER NOT NULL DEFAULT 0, redacted INTEGER NOT NULL DEFAULT 0, calls INTEGER NOT NULL DEFAULT 0,
    held_ms REAL NOT NULL DEFAULT 0, wait_ms REAL NOT NULL DEFAULT 0,
    bytes_in INTEGER NOT NULL DEFAULT 0, bytes_out INTEGER NOT NULL DEFAULT 0,
    abandoned INTEGER NOT NULL DEFAULT 0,   -- 1: by a rewind, which another one may undo; 2: for good;
                                            -- 3: lost with its sandbox
    note TEXT NOT NULL DEFAULT '',
    answer BLOB,                 -- digest
    unsealed INTEGER NOT NULL DEFAULT 1,    -- on its present branch no checkpoint has come after it yet
    delivered INTEGER NOT NULL DEFAULT 0    -- somebody got the answer to its end, in the present life of the sandbox
) STRICT;
CREATE INDEX exchanges_asking ON exchanges (key, sandbox);
CREATE INDEX exchanges_of ON exchanges (sandbox);
CREATE INDEX exchanges_with ON exchanges (answer);
CREATE TABLE ties (
    exchange INTEGER NOT NULL, checkpoint TEXT NOT NULL,
    own INTEGER NOT NULL,        -- 1: taken because of its question; 0: on some branch, the first one after it (a seal)
    PRIMARY KEY (exchange, checkpoint)
) STRICT, WITHOUT ROWID;
CREATE TABLE outcomes (
    id INTEGER PRIMARY KEY AUTOINCREMENT, sandbox TEXT NOT NULL, exchange INTEGER NOT NULL, place INTEGER NOT NULL,
    command BLOB NOT NULL, state TEXT NOT NULL, result BLOB, redacted INTEGER NOT NULL DEFAULT 0,
    started REAL NOT NULL, ended REAL, abandoned INTEGER NOT NULL DEFAULT 0,
    begun_by INTEGER,            -- the first exchange that came after its beginning
    ended_by INTEGER             -- and the first after its end
) STRICT;
CREATE UNIQUE INDEX outcomes_at ON outcomes (sandbox, exchange, place) WHERE abandoned = 0;
CREATE INDEX outcomes_of ON outcomes (sandbox, ended_by);
CREATE INDEX outcomes_after ON outcomes (exchange);
CREATE INDEX outcomes_with ON outcomes (result);
CREATE TABLE standings (
    sandbox TEXT PRIMARY KEY,
    forwarding INTEGER NOT NULL, -- the agent may be behind its sandbox
    beyond INTEGER NOT NULL,     -- the sandbox is where the question after the newest answer was asked
    exchange INTEGER NOT NULL,   -- whose answer the agent had last; 0: none
    given TEXT NOT NULL DEFAULT '[]' -- places of the commands since then whose outcomes it had (JSON)
) STRICT;
"""
_NEWER = {
    1: """
        ALTER TABLE exchanges ADD COLUMN delivered INTEGER NOT NULL DEFAULT 0;
        ALTER TABLE standings ADD COLUMN given TEXT NOT NULL DEFAULT '[]';
    """,
    2: """
        CREATE INDEX nodes_after ON nodes (parent);
        CREATE INDEX nodes_with ON nodes (item);
        DROP INDEX exchanges_asking;
        CREATE INDEX exchanges_asking ON exchanges (key, sandbox);
        CREATE INDEX exchanges_with ON exchanges (answer);
        CREATE INDEX outcomes_after ON outcomes (exchange);
        CREATE INDEX outcomes_with ON outcomes (result);
    """,
}
"""What makes the next version of each one: a record outlives the Crab that began it."""
_SMALL = 64 << 20
"""Files up to here are read as a whole when they are opened (0.1 s); of larger ones damage is found where it is met."""
_FULL = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE}
"""SQLite knows ENOSPC; an exceeded quota or file size is an error of writing to it."""
_DAMAGE = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_FILES = ("", "-wal", "-shm")


class Database:
    """See the module. Every method raises `NoSpace`, `Damaged` or `CrabError` for what SQLite says."""

    def __init__(self, path: Path) -> None:
        """Open or make the file. A damaged one is set aside, and an empty one is begun. Raises `Incompatible`."""
        self.path = path
        self.set_aside: Path | None = None
        """Where the damaged file lies that was found, if one was."""
        self._lock = threading.RLock()
        self._reading = threading.RLock()
        try:
            self._db = _opened(path)
        except Damaged as error:
            self.set_aside = _put_aside(path)
            log.error("%s; it lies in %s now, what agents asked before is not known any more", error, self.set_aside)
            self._db = _opened(path)
        self._reader = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._reader.row_factory = sqlite3.Row
        self._reader.execute("PRAGMA query_only=1")

    def close(self) -> None:
        with self._lock, self._reading:
            self._reader.close()
            self._db.close()

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """A connection that sees what is on the disk, for as long as no other thread may have it. Nobody waits for the
        disk here: a question that comes is not held up by an answer that is being kept."""
        with self._reading, _explained(self.path):
            yield self._reader

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """Another one, in a transaction: when it ends all of it is on the disk, when it raises nothing of it."""
        with self._lock, _explained(self.path):
            db = self._db
            try:
                db.execute("BEGIN IMMEDIATE")
                yield db
                db.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    if db.in_transaction:  # SQLite ends it by itself after some errors
                        db.execute("ROLLBACK")
                raise

    def shrink(self, pages: int) -> bool:
        """Give so many pages that were freed back to the file system; whether any are left."""
        with self._lock, _explained(self.path):
            # a script is run to its end; `execute` stops this pragma, which has no rows, after its first page
            self._db.executescript(f"PRAGMA incremental_vacuum({pages})")
            if self._db.execute("PRAGMA freelist_count").fetchone()[0]:
                return True
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            return False

    def file_size(self) -> int:
        found = 0
        for suffix in _FILES[:2]:
            with suppress(FileNotFoundError):
                found += os.stat(f"{self.path}{suffix}").st_size
        return found


def _opened(path: Path) -> sqlite3.Connection:
    with _explained(path):
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # conversations are private
        except OSError as error:
            raise CrabError(f"the record {path} cannot be opened: {error.strerror}") from error
        db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        try:
            db.row_factory = sqlite3.Row
            db.execute("PRAGMA auto_vacuum=INCREMENTAL")  # counts for a new file only
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=FULL")
            db.execute("PRAGMA secure_delete=FAST")
            db.execute(f"PRAGMA journal_size_limit={16 << 20}")
            _check(db, path)
        except BaseException:
            db.close()
            raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(folder)  # that the file exists
    finally:
        os.close(folder)
    return db


def _check(db: sqlite3.Connection, path: Path) -> None:
    version = db.execute("PRAGMA user_version").fetchone()[0]
    tables = {row[0] for row in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
    if version == 0 and not tables:
        db.executescript(f"BEGIN;{_SCHEMA}PRAGMA user_version={VERSION};COMMIT;")
    elif version > VERSION:
        raise Incompatible(
            f"the record {path} has version {version}, this Crab reads {VERSION}",
            remedy="use the Crab that wrote it, or upgrade",
        )
    elif version < 1 or not {"blobs", "nodes", "exchanges", "ties", "outcomes", "standings"} <= tables:
        raise Damaged(f"{path} is no record of turns")
    elif path.stat().st_size <= _SMALL and (found := db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
        raise Damaged(f"the record {path} is damaged: {found}")
    elif version < VERSION:
        steps = "".join(_NEWER[one] for one in range(version, VERSION))
        db.executescript(f"BEGIN;{steps}PRAGMA user_version={VERSION};COMMIT;")


def _put_aside(path: Path) -> Path:
    names = (path.with_name(f"{path.name}.damaged-{number}") for number in itertools.count(1))
    target = next(name for name in names if not os.path.lexists(name))
    for suffix in _FILES:
        with suppress(FileNotFoundError):
            os.rename(f"{path}{suffix}", f"{target}{suffix}")
    return target


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0)
        if code in _FULL:
            raise NoSpace(
                f"the record {path} cannot be written: {error} (the file system is full, or a quota is reached)",
                remedy="make room in the state directory",
            ) from error
        if code & 0xFF in _DAMAGE:
            raise Damaged(
                f"the record {path} is damaged: {error}",
                remedy="restart the daemon: it sets the file aside; sandboxes and checkpoints are not in it",
            ) from error
        raise CrabError(f"the record {path} cannot be used: {error}") from error
