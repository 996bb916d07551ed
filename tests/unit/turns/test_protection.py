"""Captures for requests: none began before its request, one at a time, and none too many."""

from __future__ import annotations

import asyncio
import threading
import time

from hypothesis import given, settings
from hypothesis import strategies as st
from unit.turns.stack import aio, until

from crab.turns.protection import Protection, Safety


class Work:
    def __init__(self) -> None:
        self.free = threading.Event()
        self.free.set()
        self.began: list[float] = []
        self.together = 0
        self.most = 0

    def __call__(self) -> Safety:
        self.began.append(time.perf_counter())
        self.together += 1
        self.most = max(self.most, self.together)
        self.free.wait(60)
        self.together -= 1
        return Safety(protection="durable", turn=len(self.began))


@aio
async def test_who_asks_during_a_capture_gets_the_next_one_and_shares_it() -> None:
    work = Work()
    work.free.clear()
    protection = Protection(work)
    first = protection.ask()
    await until(lambda: work.together)
    others = [protection.ask() for _ in range(10)]
    assert len({id(other) for other in others}) == 1 and others[0] is not first
    work.free.set()
    assert (await first).turn == 1 and {(await other).turn for other in others} == {2}
    assert len(work.began) == 2


@aio
async def test_what_fails_is_unprotected_with_the_reason_and_the_next_one_is_tried() -> None:
    answers = iter([ValueError("no room"), None])

    def work() -> Safety:
        if error := next(answers):
            raise error
        return Safety(protection="captured")

    protection = Protection(work)
    assert await protection.ask() == Safety(protection="unprotected", why="no room")
    assert await protection.ask() == Safety(protection="captured")


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.001, 0.004]), min_size=1, max_size=12), st.sampled_from([0.0, 0.003]))
def test_every_request_is_covered_by_a_capture_that_began_after_it(pauses: list[float], seconds: float) -> None:
    work = Work()

    def slow() -> Safety:
        made = work()
        time.sleep(seconds)
        return made

    @aio
    async def run() -> None:
        protection, asked = Protection(slow), list[tuple[float, asyncio.Future[Safety]]]()
        for pause in pauses:
            asked.append((time.perf_counter(), protection.ask()))
            await asyncio.sleep(pause)
        for when, future in asked:
            turn = (await future).turn
            assert turn and work.began[turn - 1] >= when
        assert work.most == 1 and len(work.began) <= len(pauses)

    run()
