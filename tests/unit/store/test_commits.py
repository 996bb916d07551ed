"""Commits that are shared: whoever is told that it is durable was covered by one that began after it asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from crab.store.commits import Commits


class Disk:
    """Notes what was committed, and lets a commit take as long as the test wants."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()
        self.began = threading.Semaphore(0)
        self.rounds: list[list[str]] = []
        self.at_once = self.most = 0
        self.error: Exception | None = None

    def commit(self, members: Sequence[str]) -> None:
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        self.rounds.append(list(members))
        self.began.release()
        self.go.wait(60)
        self.at_once -= 1
        if self.error:
            raise self.error


def until(true: object, what: str) -> None:
    end = time.monotonic() + 60
    while not true():  # type: ignore[operator]
        assert time.monotonic() < end, what
        time.sleep(0.001)


def test_who_asks_during_a_commit_is_covered_by_the_next_one_with_all_the_others() -> None:
    disk = Disk()
    commits = Commits(disk.commit)
    disk.go.clear()
    with ThreadPoolExecutor(21) as pool:
        first = pool.submit(commits.join, "first")
        assert disk.began.acquire(timeout=60)
        others = [pool.submit(commits.join, f"{number}") for number in range(20)]
        until(lambda: len(commits._next.members) == 20, "all ask")
        assert not any(other.done() for other in others)
        disk.go.set()
        first.result(60)
        for other in others:
            other.result(60)
    assert disk.most == 1
    assert [len(members) for members in disk.rounds] == [1, 20]


def test_a_commit_that_fails_fails_for_all_whom_it_was_to_cover_and_for_nobody_else() -> None:
    disk = Disk()
    commits = Commits(disk.commit)
    disk.go.clear()
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(commits.join, "first")
        assert disk.began.acquire(timeout=60)
        others = [pool.submit(commits.join, name) for name in ("second", "third")]
        until(lambda: len(commits._next.members) == 2, "both ask")
        disk.error = OSError(5, "the disk is broken")
        disk.go.set()
        for asked in (first, *others):
            with pytest.raises(OSError, match="broken"):
                asked.result(60)
    disk.error = None
    commits.join("fourth")


def test_a_commit_that_is_interrupted_makes_nobody_durable() -> None:
    def commit(members: Sequence[str]) -> None:
        began.release()
        go.wait(60)
        raise KeyboardInterrupt

    began, go = threading.Semaphore(0), threading.Event()
    commits = Commits(commit)
    with ThreadPoolExecutor(2) as pool:
        leads = pool.submit(commits.join, "leads")
        assert began.acquire(timeout=60)
        mine = commits._next
        commits._commit = lambda members: None
        follows = pool.submit(commits.join, "follows")
        until(lambda: mine.members, "the second asks")
        go.set()
        with pytest.raises(KeyboardInterrupt):
            leads.result(60)
        follows.result(60)


def test_nobody_returns_before_a_commit_that_began_after_it_asked() -> None:
    began: dict[str, int] = {}
    ended: dict[str, int] = {}
    clock = iter(range(10**9))

    def commit(members: Sequence[str]) -> None:
        start = next(clock)
        time.sleep(0.0005)
        for member in members:
            began[member], ended[member] = start, next(clock)

    commits = Commits(commit)

    def one(number: int) -> None:
        for turn in range(20):
            name = f"{number}.{turn}"
            asked = next(clock)
            commits.join(name)
            assert asked < began[name] < ended[name] < next(clock)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(8)))
    assert len(ended) == 160
