"""The record when something breaks: SIGKILL, damaged and newer files, a torn log, a full disk."""

from __future__ import annotations

import logging
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from random import Random

import pytest

from crab.errors import Damaged, Incompatible, NoSpace
from crab.turns.database import VERSION
from crab.turns.exchange import Standing
from crab.turns.record import Record

SOURCE = Path(__file__).parents[3] / "src"


def script(text: str, *arguments: str) -> list[str]:
    head = f"import os, sys\nsys.path.insert(0, {str(SOURCE)!r})\nfrom pathlib import Path\nfrom crab.turns.record import Record\n"
    return [sys.executable, "-c", head + textwrap.dedent(text), *arguments]


def turn(record: Record, word: bytes, sandbox: str = "s1") -> int:
    made = record.begin(sandbox, chain=[b"root", word], items=[b"instructions", word])
    return record.answered(made.id, status=200, headers={}, body=b"to " + word, complete=True).id


WRITER = """
    record = Record.open(Path(sys.argv[1]))
    number = int(sys.argv[2])
    while True:
        word = b"%d" % number
        made = record.begin("s1", chain=[b"root", word], items=[b"instructions", word])
        os.write(1, b"asked %d %s\\n" % (made.id, word))
        record.protected(made.id, checkpoint=f"c{number}", turn=number, protection="durable")
        record.answered(made.id, status=200, headers={}, body=b"to " + word + bytes(number % 7 * 5000), complete=True)
        os.write(1, b"answered %d %s\\n" % (made.id, word))
        begun = record.outcomes.begin("s1", made.id, 0, b"d")
        os.write(1, b"begun %d 0\\n" % made.id)
        record.outcomes.end(begun.id, "done", b"result of " + word)
        os.write(1, b"ended %d %s\\n" % (made.id, word))
        number += 1
"""


def test_whatever_a_call_returned_for_survives_a_kill(tmp_path: Path) -> None:
    path, random, promised = tmp_path / "turns.db", Random(7), list[list[bytes]]()
    for round in range(20):
        process = subprocess.Popen(script(WRITER, str(path), str(round * 100_000)), stdout=subprocess.PIPE)
        assert process.stdout
        promised.append(process.stdout.readline().split())  # it is up
        time.sleep(random.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        lines = process.stdout.read().split(b"\n")
        process.wait()
        promised += [line.split() for line in lines[:-1]]
        record = Record.open(path)
        assert record.set_aside is None
        for what, number, word in promised:
            if what == b"asked":
                assert record.conversation(int(number)) == [b"instructions", word]
            elif what == b"answered":
                assert record.answer(int(number)).startswith(b"to " + word)
                found = record.find("s1", word)
                assert found and found.id == int(number)
            else:
                outcome = record.outcomes.at("s1", int(number), 0)
                assert outcome and (what == b"begun" or outcome.result == b"result of " + word)
        record.close()
        promised = promised[-40:]
    assert len(promised) == 40


@pytest.mark.parametrize("content", [b"not a database at all" * 100, b"SQLite format 3\0" + bytes(5000)])
def test_a_file_that_is_no_record_is_set_aside_and_the_next_one_begins(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "turns.db"
    path.write_bytes(content)
    (tmp_path / "turns.db.damaged-1").write_bytes(b"an earlier one")
    with caplog.at_level(logging.ERROR):
        record = Record.open(path)
    assert record.set_aside == tmp_path / "turns.db.damaged-2" and record.set_aside.read_bytes() == content
    assert "turns.db.damaged-2" in caplog.text
    assert record.answer(turn(record, b"a")) == b"to a"
    record.close()
    assert Record.open(path).set_aside is None


def test_a_database_of_somebody_else_is_set_aside_whole(tmp_path: Path) -> None:
    path = tmp_path / "turns.db"
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE mine (a)")
    db.execute("INSERT INTO mine VALUES (7)")
    db.commit()
    db.close()
    record = Record.open(path)
    assert record.set_aside
    assert sqlite3.connect(record.set_aside).execute("SELECT a FROM mine").fetchone() == (7,)


@pytest.mark.parametrize("what", ["overwritten", "cut"])
def test_a_record_with_a_damaged_middle_is_set_aside(tmp_path: Path, what: str) -> None:
    path = tmp_path / "turns.db"
    record = Record.open(path)
    for number in range(50):
        turn(record, Random(number).randbytes(3000))
    record.close()
    size = path.stat().st_size
    if what == "cut":
        os.truncate(path, size // 2)
    else:
        with path.open("r+b") as file:
            file.seek(4096 * 2)
            file.write(os.urandom(size // 2))
    assert Record.open(path).set_aside


def test_damage_of_one_content_is_reported_and_costs_nothing_else(tmp_path: Path) -> None:
    record = Record.open(tmp_path / "turns.db")
    bad, good = turn(record, b"bad"), turn(record, b"good")
    with record._database.write() as db:
        db.execute("UPDATE blobs SET data = x'00' WHERE digest = (SELECT answer FROM exchanges WHERE id = ?)", (bad,))
    with pytest.raises(Damaged):
        record.answer(bad)
    assert record.answer(good) == b"to good" and record.conversation(bad)[1] == b"bad"


def test_a_record_of_a_newer_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "turns.db"
    record = Record.open(path)
    kept = turn(record, b"a")
    with record._database.write() as db:
        db.execute("PRAGMA user_version = 99")
    record.close()
    with pytest.raises(Incompatible) as caught:
        Record.open(path)
    assert "99" in caught.value.message and [found.name for found in tmp_path.glob("*damaged*")] == []
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA user_version = {VERSION}")
    db.close()
    assert Record.open(path).answer(kept) == b"to a"


def test_a_record_that_an_older_crab_began_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "turns.db"
    record = Record.open(path)
    kept = turn(record, b"a")
    record.stand("s1", Standing(forwarding=True, exchange=kept))
    with record._database.write() as db:
        for name in ("nodes_after", "nodes_with", "exchanges_with", "outcomes_after", "outcomes_with"):
            db.execute(f"DROP INDEX {name}")
        db.execute("ALTER TABLE exchanges DROP COLUMN delivered")
        db.execute("ALTER TABLE standings DROP COLUMN given")
        db.execute("PRAGMA user_version = 1")
    record.close()
    for _ in range(2):
        record = Record.open(path)
        assert record.set_aside is None and record.answer(kept) == b"to a"
        assert record.standing("s1") == Standing(forwarding=True, exchange=kept)
        record.delivered(turn(record, b"b"))
        record.close()


def torn(tmp_path: Path) -> tuple[Path, list[int]]:
    """A record as a killed process left it: five turns, all of them in the log."""
    path = tmp_path / "turns.db"
    code = """
        record = Record.open(Path(sys.argv[1]))
        for number in range(5):
            word = b"%d" % number
            made = record.begin("s1", chain=[b"root", word], items=[b"instructions", word])
            record.answered(made.id, status=200, headers={}, body=b"to " + word, complete=True)
        os.kill(os.getpid(), 9)
    """
    subprocess.run(script(code, str(path)), check=False)
    assert path.with_name("turns.db-wal").stat().st_size > 10_000
    return path, [1, 2, 3, 4, 5]


def test_a_torn_end_of_the_log_costs_what_had_not_been_written(tmp_path: Path) -> None:
    path, made = torn(tmp_path)
    with path.with_name("turns.db-wal").open("ab") as file:
        file.write(os.urandom(6000))
    record = Record.open(path)
    assert [record.answer(number) for number in made] == [b"to %d" % number for number in range(5)]


def test_a_log_that_was_cut_costs_its_end_only(tmp_path: Path) -> None:
    path, made = torn(tmp_path)
    wal = path.with_name("turns.db-wal")
    os.truncate(wal, wal.stat().st_size - 100)
    record = Record.open(path)
    assert record.set_aside is None
    assert [record.answer(number) for number in made[:4]] == [b"to %d" % number for number in range(4)]
    assert record.conversation(5)[1] == b"4" and not record.get(5).complete


def test_a_full_disk_is_reported_and_the_record_goes_on_when_there_is_room(tmp_path: Path) -> None:
    record = Record.open(tmp_path / "turns.db")
    kept = turn(record, b"a")
    with record._database.write() as db:
        pages = db.execute("PRAGMA page_count").fetchone()[0]
        db.execute(f"PRAGMA max_page_count = {pages + 2}")
    large = Random(1).randbytes(100_000)
    with pytest.raises(NoSpace) as caught:
        turn(record, large)
    assert "turns.db" in caught.value.message
    assert record.answer(kept) == b"to a" and record.find("s1", large) is None
    with record._database.write() as db:
        db.execute("PRAGMA max_page_count = 1000000")
    assert record.answer(turn(record, large)) == b"to " + large


def test_a_file_that_may_not_grow_is_the_same_as_a_full_disk(tmp_path: Path) -> None:
    code = """
        import resource
        from crab.errors import NoSpace
        record = Record.open(Path(sys.argv[1]))
        kept = record.begin("s1", chain=[b"a"], items=[b"kept"])
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
        try:
            record.begin("s1", chain=[b"b"], items=[os.urandom(1_000_000)])
        except NoSpace as error:
            print("refused:", error)
        assert record.conversation(kept.id) == [b"kept"] and len(record.exchanges("s1")) == 1
        small = record.begin("s1", chain=[b"c"], items=[b"small"])
        assert record.conversation(small.id) == [b"small"]
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        large = record.begin("s1", chain=[b"b"], items=[os.urandom(1_000_000)])
        assert len(record.conversation(large.id)[0]) == 1_000_000
    """
    done = subprocess.run(script(code, str(tmp_path / "turns.db")), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("refused: the record")


def test_conversations_are_nobody_else_s_to_read(tmp_path: Path) -> None:
    record = Record.open(tmp_path / "turns.db")
    turn(record, b"a")
    assert {found.stat().st_mode & 0o077 for found in tmp_path.iterdir()} == {0}
