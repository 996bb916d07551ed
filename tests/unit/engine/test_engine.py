"""The engine at work: real threads, a clock and a disk of the test's own."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from crab.engine.engine import NICE, Engine
from crab.engine.estimates import EARLY, Cost, Costs, Served, Waits
from crab.engine.jobs import Urgency
from crab.errors import Busy


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Works:
    """Jobs in threads of their own, each of which ends when it is told to."""

    def __init__(self, slots: int = 1, unwritten: int = 0) -> None:
        self.clock = Clock()
        self.dirty = unwritten
        self.engine = Engine(slots, clock=self.clock, unwritten=lambda: self.dirty, most_unwritten=lambda: 100)
        self.began: list[str] = []
        self._ends: dict[str, threading.Event] = {}
        self._pool = ThreadPoolExecutor(64)
        self.futures: dict[str, Future[None]] = {}

    def ask(
        self, name: str, urgency: Urgency = Urgency.URGENT, sandbox: str = "", writes: int = 0, fails: bool = False
    ) -> None:
        self._ends[name] = threading.Event()

        def work() -> None:
            with self.engine.job("capture", sandbox or name, urgency) as place:
                self.began.append(name)
                assert self._ends[name].wait(60)
                place.writes = writes
                if fails:
                    raise ValueError(name)

        before = self.count()
        self.futures[name] = self._pool.submit(work)
        until(lambda: self.count() > before, f"{name} asks")

    def count(self) -> int:
        state = self.engine.state()
        return len(state.waiting) + len(state.running) + sum(state.done.values())

    def end(self, name: str) -> None:
        self._ends[name].set()
        until(self.futures[name].done, f"{name} ends")

    def close(self) -> None:
        for event in self._ends.values():
            event.set()
        self._pool.shutdown()


def until(true: Callable[[], object], what: str) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.001)


@pytest.fixture
def works():
    made: list[Works] = []

    def make(**options: int) -> Works:
        made.append(Works(**options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_as_many_run_as_there_are_slots_and_the_next_begins_when_one_ends(works) -> None:
    one = works(slots=2)
    for name in "abc":
        one.ask(name)
    until(lambda: len(one.began) == 2, "two begin")
    state = one.engine.state()
    assert [view.sandbox for view in state.waiting] == ["c"] and "2 jobs run" in state.waiting[0].reason
    one.end("a")
    until(lambda: one.began == ["a", "b", "c"], "the third begins")


def test_who_is_waited_for_overtakes(works) -> None:
    one = works()
    one.ask("running")
    for name in "abc":
        one.ask(name, Urgency.NORMAL)
    with one.engine.awaited("c"):
        assert {view.sandbox: view.urgency for view in one.engine.state().waiting}["c"] == "urgent"
        one.end("running")
        until(lambda: len(one.began) == 2, "one begins")
    assert one.began[1] == "c"


def test_nobody_waits_for_what_is_done_in_the_background(works) -> None:
    one = works()
    one.ask("running")
    one.ask("proof", Urgency.BACKGROUND, sandbox="s")
    with one.engine.awaited("s"):
        one.engine.hurry("s")
        assert {view.urgency for view in one.engine.state().waiting} == {"background"}


def test_a_job_that_never_began_costs_nothing_that_is_remembered(works) -> None:
    one = works()
    one.ask("running")
    with pytest.raises(Busy, match=r"after 0\.0 s: 1 jobs run"), one.engine.job("capture", "late", seconds=0.01):
        pass
    assert one.engine.state().done == {} and not one.engine.state().waiting


def test_who_is_waited_for_already_is_urgent_when_he_comes(works) -> None:
    one = works()
    one.ask("running")
    one.ask("early", Urgency.NORMAL)
    with one.engine.awaited("late"):
        one.ask("late", Urgency.NORMAL)
    one.end("running")
    until(lambda: len(one.began) == 2, "one begins")
    assert one.began[1] == "late"
    one.ask("late again", Urgency.NORMAL, sandbox="late")
    assert {view.urgency for view in one.engine.state().waiting} == {"normal"}


def test_a_job_that_fails_gives_its_slot_back(works) -> None:
    one = works()
    one.ask("fails", fails=True)
    one.ask("next")
    one.end("fails")
    with pytest.raises(ValueError, match="fails"):
        one.futures["fails"].result()
    until(lambda: one.began == ["fails", "next"], "the next begins")


def test_a_wait_that_is_interrupted_leaves_the_queue(works, monkeypatch: pytest.MonkeyPatch) -> None:
    one = works()
    one.ask("running")
    broken = threading.Event()

    def wait(self: threading.Event, timeout: float | None = None) -> bool:
        raise KeyboardInterrupt

    def interrupted() -> None:
        monkeypatch.setattr(threading.Event, "wait", wait)
        try:
            with one.engine.job("capture", "gone"):
                raise AssertionError("it began")
        except KeyboardInterrupt:
            pass
        finally:
            monkeypatch.undo()
            broken.set()

    interrupted()
    assert broken.is_set() and not one.engine.state().waiting


def test_a_job_within_a_job_is_refused() -> None:
    engine = Engine(4)
    with engine.job("capture", "a"), pytest.raises(AssertionError, match="within"), engine.job("restore", "a"):
        pass
    with engine.job("capture", "a"):
        pass


def test_what_the_disk_cannot_take_waits(works) -> None:
    one = works(slots=3, unwritten=60)
    one.ask("learn", sandbox="big", writes=50)
    one.end("learn")
    one.ask("running")
    one.ask("big")
    (waits,) = one.engine.state().waiting
    assert waits.expected_bytes == 50 and "the disk has 0 MB" in waits.reason
    one.dirty = 0
    one.end("running")
    until(lambda: "big" in one.began, "it begins")


def test_background_work_is_nice_and_only_while_it_lasts() -> None:
    engine = Engine(4)
    thread = threading.get_native_id()
    before = os.getpriority(os.PRIO_PROCESS, thread)
    with engine.job("verify", "a", Urgency.BACKGROUND):
        assert os.getpriority(os.PRIO_PROCESS, thread) == min(before + NICE, 19)
    if os.geteuid() == 0:
        assert os.getpriority(os.PRIO_PROCESS, thread) == before


def test_at_the_end_nobody_waits_for_the_turn_of_a_background_job(works) -> None:
    one = works()
    one.ask("running")
    one.ask("proof", Urgency.BACKGROUND)
    one.ask("wanted", Urgency.NORMAL)
    one.engine.give_up_background()
    with pytest.raises(Busy, match="the daemon ends"):
        one.futures["proof"].result(60)
    with pytest.raises(Busy, match="the daemon ends"), one.engine.job("verify", "late", Urgency.BACKGROUND):
        pass
    assert [view.sandbox for view in one.engine.state().waiting] == ["wanted"]
    one.end("running")
    until(lambda: "wanted" in one.began, "what is wanted is done")


def test_the_slots_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRAB_SLOTS", "7")
    assert Engine().slots == 7
    monkeypatch.setenv("CRAB_SLOTS", "many")
    assert Engine().slots >= 1


def test_costs_follow_the_newest_and_are_guessed_from_others() -> None:
    costs = Costs()
    assert costs.expect("capture", "a") == Cost()
    costs.learn("capture", "a", Cost(seconds=1.0, writes=10))
    assert costs.expect("capture", "b") == Cost(seconds=1.0, writes=10)
    for _ in range(20):
        costs.learn("capture", "a", Cost(seconds=3.0, writes=0))
    assert 2.9 < costs.expect("capture", "a").seconds <= 3.0
    assert costs.expect("restore", "a") == Cost()
    costs.forget("a")
    assert costs.expect("capture", "a") == costs.expect("capture", "b")


def test_waits_are_those_of_the_sandbox_once_there_are_enough() -> None:
    waits = Waits()
    assert waits.expect("a") == 0.0
    for seconds in (10.0, 20.0, 30.0, 40.0):
        waits.learn("b", seconds)
    assert waits.expect("a") == waits.expect("b") == 10.0 and EARLY == 0.25
    for seconds in (1.0, 2.0, 3.0, 4.0):
        waits.learn("a", seconds)
    assert waits.expect("a") == 1.0
    waits.forget("a")
    assert waits.expect("a") == 2.0


def test_what_a_sandbox_was_given_fades() -> None:
    served = Served()
    served.add("a", 2.0, 100.0)
    served.add("a", 1.0, 100.0 + Served.HALF_LIFE)
    assert served.of("a", 100.0 + Served.HALF_LIFE) == 2.0
    assert served.of("b", 100.0) == 0.0
    served.forget("a")
    assert served.of("a", 200.0) == 0.0
