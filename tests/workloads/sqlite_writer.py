"""SQLite in WAL mode: a writer with a transaction open over rounds, a reader process, integrity checked."""

import os
import sqlite3

from heartbeat import child, keep, scratch, talk

scratch()
for end in ("", "-wal", "-shm"):
    if os.path.exists(f"data.db{end}"):
        os.unlink(f"data.db{end}")
db = sqlite3.connect("data.db", isolation_level=None)
db.execute("PRAGMA journal_mode=WAL")
db.execute("CREATE TABLE t (n INTEGER PRIMARY KEY, text TEXT)")
reader = child("sqlite3", "-batch", "data.db")
committed = written = 0


def count(connection):
    return connection.execute("SELECT count(*) FROM t").fetchone()[0]


def check(counter):
    global committed, written
    if counter % 5 == 1:
        db.execute("BEGIN IMMEDIATE")
    written += 1
    db.execute("INSERT INTO t VALUES (?, ?)", (written, "x" * 500))
    if int(talk(reader, b"SELECT count(*) FROM t;")) != committed or count(db) != written:
        return f"{committed} committed, {written} written"
    if counter % 5 == 0:
        db.execute("COMMIT")
        committed = written
    if counter % 50 == 0:
        return db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    return True


keep(check)
