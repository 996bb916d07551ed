"""Which jobs begin: what `crab.engine.schedule` holds to, over random queues."""

from __future__ import annotations

import math

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from crab.engine.jobs import Capacity, Job, Queue, Urgency
from crab.engine.schedule import LONG, LONGEST_PUT_OFF, MOST_OWED, PATIENCE, choose, rank, urgent


def spans(least: float, most: float) -> st.SearchStrategy[float]:
    """Seconds that floating point adds and subtracts exactly, so that a tie is a tie."""
    return st.integers(int(least * 1024), int(most * 1024)).map(lambda number: number / 1024)


seconds = spans(0, 100)


@st.composite
def jobs(draw: st.DrawFn, number: int = 0, now: float = 1000.0) -> Job:
    urgency = draw(st.sampled_from(Urgency))
    since = now - draw(spans(0, 400))
    return Job(
        number=number,
        sandbox=draw(st.sampled_from("abcdef")),
        kind=draw(st.sampled_from(["capture", "restore", "upload"])),
        urgency=urgency,
        since=since,
        urgent_since=draw(spans(since, now)) if urgency == Urgency.URGENT else math.inf,
        due=now + draw(spans(-10, 60)) if urgency == Urgency.NORMAL else math.inf,
        seconds=draw(spans(0, 5)),
        writes=draw(st.integers(0, 1 << 31)),
    )


@st.composite
def queues(draw: st.DrawFn) -> tuple[Queue, Capacity]:
    slots = draw(st.integers(1, 6))
    waiting = tuple(draw(jobs(number)) for number in range(draw(st.integers(0, 12))))
    drawn = [draw(jobs(100 + number)) for number in range(draw(st.integers(0, slots + 2)))]
    by_pool = {pool: [job for job in drawn if job.pool == pool] for pool in ("slots", "transfers")}
    running = (*by_pool["slots"][:slots], *by_pool["transfers"][:2])
    served = {name: draw(seconds) for name in "abcdef"}
    queue = Queue(now=1000.0, waiting=waiting, running=running, unwritten=draw(st.integers(0, 1 << 32)), served=served)
    return queue, Capacity(slots=slots, unwritten=draw(st.integers(0, 1 << 32)))


@given(queues())
def test_every_job_begins_or_has_a_reason_and_slots_are_kept(given: tuple[Queue, Capacity]) -> None:
    queue, capacity = given
    choice = choose(queue, capacity)
    assert sorted([*choice.begin, *choice.reasons]) == [job.number for job in queue.waiting]
    begun = [job for job in queue.waiting if job.number in choice.begin]
    for pool, most in (("slots", capacity.slots), ("transfers", capacity.transfers)):
        assert sum(job.pool == pool for job in (*queue.running, *begun)) <= most
    assert all(choice.reasons.values())


@given(queues())
def test_nothing_stands_still(given: tuple[Queue, Capacity]) -> None:
    queue, capacity = given
    begin = choose(queue, capacity).begin
    if queue.waiting and not queue.running:
        assert begin
    uploads = {job.number for job in queue.waiting if job.pool == "transfers"}
    if any(job.pool == "transfers" and not job.writes for job in queue.waiting):
        assert uploads & set(begin) or any(job.pool == "transfers" for job in queue.running)


@given(queues())
def test_who_waits_comes_first(given: tuple[Queue, Capacity]) -> None:
    """Unless the disk is jammed: then those who write nothing may go on."""
    queue, capacity = given
    choice = choose(queue, capacity)
    urgencies = {job.number: urgent(job, queue.now)[0] for job in queue.waiting}
    pools = {job.number: job.pool for job in queue.waiting}
    for begun in choice.begin:
        if urgencies[begun] != Urgency.URGENT:
            waits = [n for n in choice.reasons if urgencies[n] == Urgency.URGENT and pools[n] == pools[begun]]
            assert all("the disk has" in choice.reasons[number] for number in waits)


@given(queues())
def test_what_the_disk_cannot_take_begins_only_if_nothing_runs(given: tuple[Queue, Capacity]) -> None:
    queue, capacity = given
    known = {job.number: job for job in queue.waiting}
    unwritten, running = queue.unwritten, len(queue.running)
    for number in choose(queue, capacity).begin:
        unwritten += known[number].writes
        assert not running or not known[number].writes or unwritten <= capacity.unwritten
        running += 1


@given(queues())
def test_a_choice_is_made_once(given: tuple[Queue, Capacity]) -> None:
    """What begins next was not put off for nothing: with those that begin running, nobody else begins. (Of jobs that write, one
    that waited behind a larger one may, once that one lacks a slot and not the disk.)"""
    queue, capacity = given
    plain = tuple(msgspec.structs.replace(job, writes=0) for job in queue.waiting)
    queue = msgspec.structs.replace(queue, waiting=plain)
    begin = choose(queue, capacity).begin
    later = msgspec.structs.replace(
        queue,
        waiting=tuple(job for job in queue.waiting if job.number not in begin),
        running=(*queue.running, *(job for job in queue.waiting if job.number in begin)),
        unwritten=queue.unwritten + sum(job.writes for job in queue.waiting if job.number in begin),
    )
    assert choose(later, capacity).begin == ()


@given(jobs(1), jobs(2), spans(0, 20), seconds, seconds)
def test_nobody_who_is_waited_for_is_overtaken_by_one_that_came_much_later(
    old: Job, new: Job, between: float, served: float, other: float
) -> None:
    now = 1000.0
    old = msgspec.structs.replace(
        old, urgency=Urgency.URGENT, since=now - between, urgent_since=now - between, sandbox="a"
    )
    new = msgspec.structs.replace(new, urgency=Urgency.URGENT, since=now, urgent_since=now, sandbox="b")
    queue = Queue(now=now, waiting=(old, new), served={"a": served, "b": other})
    if between > old.seconds + MOST_OWED:
        assert rank(old, queue) < rank(new, queue)
    later = msgspec.structs.replace(queue, now=now + 50)
    assert (rank(old, queue) < rank(new, queue)) == (rank(old, later) < rank(new, later))


def _job(number: int, urgency: Urgency = Urgency.NORMAL, **rest: float) -> Job:
    fields = {"sandbox": f"s{number}", "kind": "capture", "since": 100.0, "due": 103.0} | rest
    if urgency == Urgency.URGENT:
        fields.setdefault("urgent_since", 100.0)
    return msgspec.convert({"number": number, "urgency": urgency} | fields, Job)


def order(*waiting: Job, now: float = 100.0, slots: int = 1, **rest: object) -> list[int]:
    """In which order jobs begin that end at once."""
    found: list[int] = []
    left = list(waiting)
    while left:
        queue = Queue(now=now, waiting=tuple(left), **rest)  # type: ignore[arg-type]
        begin = choose(queue, Capacity(slots=slots, unwritten=1 << 30)).begin
        found += begin
        left = [job for job in left if job.number not in begin]
    return found


def test_among_the_urgent_the_short_goes_first() -> None:
    assert order(_job(1, Urgency.URGENT, seconds=2.0), _job(2, Urgency.URGENT, seconds=0.1)) == [2, 1]


def test_a_long_wait_makes_up_for_length() -> None:
    long, short = _job(1, Urgency.URGENT, seconds=2.0, urgent_since=97.0), _job(2, Urgency.URGENT, seconds=0.1)
    assert order(long, short) == [1, 2]


def test_who_had_much_lately_goes_later() -> None:
    assert order(_job(1, Urgency.URGENT), _job(2, Urgency.URGENT), served={"s1": 0.5}) == [2, 1]


def test_the_answer_that_is_expected_first_is_prepared_for_first() -> None:
    assert order(_job(1, due=105.0), _job(2, due=102.0), _job(3, due=104.0, seconds=3.0)) == [3, 2, 1]


def test_an_answer_that_is_there_comes_before_all_that_are_expected() -> None:
    assert order(_job(1, due=100.0), _job(2, Urgency.URGENT, seconds=9.0)) == [2, 1]


def test_the_last_slot_is_kept_for_who_waits() -> None:
    running = (_job(9, seconds=LONG),)
    long = _job(1, seconds=LONG)
    capacity = Capacity(slots=2, unwritten=0)
    kept = choose(Queue(now=100.0, waiting=(long,), running=running), capacity)
    assert kept.begin == () and "the last slot" in kept.reasons[1]
    wanted = msgspec.structs.replace(long, urgency=Urgency.URGENT, urgent_since=100.0)
    assert choose(Queue(now=100.0, waiting=(wanted,), running=running), capacity).begin == (1,)


def test_background_waits_for_an_idle_host_but_not_for_ever() -> None:
    background = _job(1, Urgency.BACKGROUND, due=math.inf)
    capacity = Capacity(slots=4, unwritten=0)
    busy = Queue(now=100.0, waiting=(background,), running=(_job(9),))
    assert choose(busy, capacity).begin == ()
    assert choose(msgspec.structs.replace(busy, running=()), capacity).begin == (1,)
    assert choose(msgspec.structs.replace(busy, now=100.0 + LONGEST_PUT_OFF), capacity).begin == (1,)


def test_patience_ends() -> None:
    tired, fresh = _job(1, since=100.0, due=math.inf), _job(2, since=129.0, due=130.0)
    now = 100.0 + PATIENCE
    assert order(fresh, tired, now=now) == [1, 2]


def test_nobody_who_writes_overtakes_one_that_waits_for_the_disk() -> None:
    capacity = Capacity(slots=4, unwritten=100)
    waiting = (
        _job(1, Urgency.URGENT, writes=90, seconds=0.1),
        _job(2, Urgency.URGENT, writes=5, seconds=0.2),
        _job(3, Urgency.URGENT, seconds=0.3),
    )
    choice = choose(Queue(now=100.0, waiting=waiting, running=(_job(9),), unwritten=50), capacity)
    assert choice.begin == (3,)
    assert choice.reasons == {1: "the disk has 0 MB to write", 2: "the disk has 0 MB to write, 1 more wait before it"}
    alone = Queue(now=100.0, waiting=waiting, unwritten=50)
    assert choose(alone, capacity).begin[0] == 1, "with nothing running the first begins whatever the disk says"
