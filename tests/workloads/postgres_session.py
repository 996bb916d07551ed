"""PostgreSQL as its own user: a psql session inside a transaction, another that sees only what is committed."""

import os
import shutil
import subprocess

from heartbeat import child, keep, scratch, talk, wait_for

PROGRAMS = "/usr/lib/postgresql/15/bin"
home = scratch()
os.chmod("/tmp/work", 0o755)
shutil.rmtree("pg", ignore_errors=True)
os.mkdir("pg")
shutil.chown("pg", "postgres", "postgres")
as_postgres = ["su", "postgres", "-s", "/bin/sh", "-c"]
subprocess.run([*as_postgres, f"{PROGRAMS}/initdb -D {home}/pg/data --no-sync >{home}/pg/initdb.log"], check=True)
serve = f"exec {PROGRAMS}/postgres -D {home}/pg/data -k {home}/pg -h 127.0.0.1 -p 5433 >{home}/pg/log 2>&1"
server = subprocess.Popen([*as_postgres, serve])
ready = [*as_postgres, f"{PROGRAMS}/pg_isready -q -h {home}/pg -p 5433"]
wait_for(lambda: subprocess.run(ready, check=False).returncode == 0, 60)
session = child(*as_postgres, f"psql -qAt -h {home}/pg -p 5433")
other = child(*as_postgres, "psql -qAt -h 127.0.0.1 -p 5433")
session.stdin.write(
    b"CREATE TABLE t (n int PRIMARY KEY, text text); CREATE TEMP TABLE mine (n int); SET work_mem = '7MB';\n"
)
committed = written = 0


def check(counter):
    global committed, written
    if counter % 5 == 1:
        session.stdin.write(b"BEGIN ISOLATION LEVEL REPEATABLE READ;\n")
    written += 1
    session.stdin.write(
        b"INSERT INTO t VALUES (%d, repeat('x', 500)); INSERT INTO mine VALUES (%d);\n" % (written, written)
    )
    own = talk(session, b"SELECT count(*), (SELECT count(*) FROM mine), current_setting('work_mem') FROM t;")
    if own != b"%d|%d|7MB" % (written, written):
        return f"{own!r} in the session instead of {written}"
    seen = int(talk(other, b"SELECT count(*) FROM t;"))
    if seen != committed:
        return f"another session sees {seen} rows instead of {committed}"
    if counter % 5 == 0:
        session.stdin.write(b"COMMIT;\n")
        committed = written
        if talk(session, b"SELECT 'done';") != b"done":
            return "commit"
    return True


keep(check, period=0.1)
