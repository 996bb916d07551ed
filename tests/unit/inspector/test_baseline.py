"""What is remembered of a sandbox survives the daemon, or is not there at all."""

from __future__ import annotations

from pathlib import Path

from unit.inspector.test_tasks import TASK

from crab.inspector import baseline as baselines
from crab.inspector.baseline import Baseline, Holdings, Process
from crab.inspector.tables import Tables, changes

TABLES = Tables(mounts=("a",), names=("host", "(none)"))
KNOWN = Baseline(
    boot="b", checkpoint="c1", files_from="c1", processes_from="c1", epoch=3, init=50, tables=TABLES,
    processes={(50, 1000): Process(name="sleep", number=3, threads=[TASK], outside=b"\0\xff", holds=Holdings(frozenset({1}), frozenset({"/a"})))},
)  # fmt: skip


def test_a_new_daemon_reads_what_the_dead_one_wrote(tmp_path: Path) -> None:
    baselines.save(tmp_path / "s.1", KNOWN)
    assert baselines.load(tmp_path / "s.1") == KNOWN
    baselines.forget(tmp_path / "s.1")
    baselines.forget(tmp_path / "s.1")
    assert baselines.load(tmp_path / "s.1") is None


def test_what_was_cut_or_damaged_is_nothing(tmp_path: Path) -> None:
    baselines.save(tmp_path / "s.1", KNOWN)
    data = (tmp_path / "s.1").read_bytes()
    for piece in (b"", data[:-1], data[: len(data) // 2], b"\xff" + data, b"{}"):
        (tmp_path / "s.1").write_bytes(piece)
        assert baselines.load(tmp_path / "s.1") is None


def test_each_kernel_table_has_its_own_words() -> None:
    assert changes(TABLES, TABLES) == []
    for name in ("mounts", "shared_memory", "semaphores", "message_queues"):
        assert len(changes(TABLES, Tables(**{"mounts": ("a",), "names": ("host", "(none)"), name: ("x",)}))) == 1
    assert "name" in changes(TABLES, Tables(mounts=("a",), names=("other", "(none)")))[0]
