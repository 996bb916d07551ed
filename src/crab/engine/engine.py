"""The engine: who works on the checkpoints of a host asks it for his turn.

It has no threads. A job is a block in the thread of whoever wants it done; the engine lets it begin when `schedule.choose`
says so, and learns from what it cost. A thread holds one job at most: two that each wait for the other's slot would
stand still for ever.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator

import msgspec

from crab.engine.estimates import Cost, Costs, Served, Waits
from crab.engine.jobs import TRANSFERS, Capacity, Job, JobKind, Queue, Urgency
from crab.engine.schedule import Choice, choose, urgent
from crab.errors import Busy
from crab.host import capacity
from crab.model import EngineState, JobView

SLOTS = "CRAB_SLOTS"
"""How many jobs may run at once; unset: as many as there are processors (docs/engine.md)."""
NICE = 10
"""How much less of the processors a job gets for which nobody waits."""
KEPT = 512
"""Waits in the queue that quantiles are made of."""
log = logging.getLogger("crab.engine")


@dataclasses.dataclass(eq=False)
class Place:
    """A job's place in the queue, and then what it came to."""

    job: Job
    begins: threading.Event
    began: float = 0.0
    writes: int = 0
    """Bytes that it really wrote; whoever does the job says so."""
    given_up: bool = False
    ran: bool = False

    @property
    def queued_ms(self) -> float:
        """How long it waited for its turn."""
        return (self.began - self.job.since) * 1e3


class Engine:
    """See the module. Its methods are safe from any thread."""

    def __init__(
        self,
        slots: int | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        unwritten: Callable[[], int] = capacity.unwritten,
        most_unwritten: Callable[[], int] = capacity.most_unwritten,
    ) -> None:
        """`slots`: jobs at once; None: what `$CRAB_SLOTS` says, or as many as there are processors."""
        self.slots = slots or _slots()
        self._clock, self._unwritten, self._most_unwritten = clock, unwritten, most_unwritten
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._waiting: dict[int, Place] = {}
        self._running: dict[int, Place] = {}
        self._costs, self._waits, self._served = Costs(), Waits(), Served()
        self._awaited: Counter[str] = Counter()
        self._ends = False
        self._done: Counter[str] = Counter()
        self._queued: deque[float] = deque(maxlen=KEPT)
        self._mine = threading.local()

    # ---- jobs

    @contextlib.contextmanager
    def job(
        self, kind: JobKind, sandbox: str, urgency: Urgency = Urgency.URGENT, seconds: float | None = None
    ) -> Iterator[Place]:
        """A block that begins when it is its turn. Raises `Busy` if that has not come after so many seconds."""
        assert not getattr(self._mine, "busy", False), "a job within a job: each might wait for the other's slot"
        place = self._join(kind, sandbox, urgency)
        try:
            if not place.begins.wait(seconds):
                why = self.why(sandbox)
                raise Busy(f"its turn had not come after {seconds:.1f} s: {why}", remedy="`crab jobs` shows the queue")
            if place.given_up:
                raise Busy("the daemon ends, and nobody waits for this", remedy="the next daemon does it")
            self._mine.busy = place.ran = True
            with _nice() if urgency == Urgency.BACKGROUND else contextlib.nullcontext():
                yield place
        finally:
            self._mine.busy = False
            self._leave(place)

    def _join(self, kind: JobKind, sandbox: str, urgency: Urgency) -> Place:
        with self._lock:
            now = self._clock()
            cost = self._costs.expect(kind, sandbox)
            if urgency == Urgency.NORMAL and self._awaited.get(sandbox):
                urgency = Urgency.URGENT
            job = Job(
                number=next(self._numbers),
                sandbox=sandbox,
                kind=kind,
                urgency=urgency,
                since=now,
                urgent_since=now if urgency == Urgency.URGENT else math.inf,
                due=now + self._waits.expect(sandbox) if urgency == Urgency.NORMAL else math.inf,
                seconds=cost.seconds,
                writes=int(cost.writes),
            )
            place = self._waiting[job.number] = Place(job, threading.Event())
            self._choose(now)
            self._give_up()
            return place

    def is_awaited(self) -> bool:
        """Whether somebody waits for a job that has not begun."""
        with self._lock:
            return any(place.job.urgency == Urgency.URGENT for place in self._waiting.values())

    def give_up_background(self) -> None:
        """Begin no job any more for which nobody waits; those that wait for their turn raise `Busy`."""
        with self._lock:
            self._ends = True
            self._give_up()

    def _give_up(self) -> None:
        for place in self._waiting.values() if self._ends else ():
            if place.job.urgency == Urgency.BACKGROUND:
                place.given_up = True
                place.begins.set()

    def _leave(self, place: Place) -> None:
        with self._lock:
            now = self._clock()
            job = place.job
            if self._waiting.pop(job.number, None) is None:
                del self._running[job.number]
            if place.ran:
                seconds = now - place.began
                self._costs.learn(job.kind, job.sandbox, Cost(seconds=seconds, writes=place.writes))
                self._served.add(job.sandbox, seconds, now)
                self._done[job.kind] += 1
            self._choose(now)

    def _choose(self, now: float) -> None:
        """Let those begin whose turn it is. Under the lock. Quick when there is no slot: whatever happens comes by here."""
        busy = Counter(place.job.pool for place in self._running.values())
        free = {"slots": self.slots - busy["slots"], "transfers": TRANSFERS - busy["transfers"]}
        if not any(free[place.job.pool] > 0 for place in self._waiting.values()):
            return
        for number in self._choice(now).begin:
            place = self._running[number] = self._waiting.pop(number)
            place.began = now
            self._queued.append(place.queued_ms)
            place.begins.set()

    def _choice(self, now: float) -> Choice:
        waiting = tuple(place.job for place in self._waiting.values() if not place.given_up)
        queue = Queue(
            now=now,
            waiting=waiting,
            running=tuple(place.job for place in self._running.values()),
            unwritten=self._unwritten() if any(job.writes for job in waiting) else 0,
            served={job.sandbox: self._served.of(job.sandbox, now) for job in waiting},
        )
        return choose(queue, Capacity(slots=self.slots, unwritten=self._most_unwritten()))

    # ---- who waits for what

    def hurry(self, sandbox: str) -> None:
        """Somebody waits for what is in the queue for a sandbox. (Never for what is done in the background.)"""
        with self._lock:
            self._hurry(sandbox)

    def _hurry(self, sandbox: str) -> None:
        now = self._clock()
        late = [p for p in self._waiting.values() if p.job.sandbox == sandbox and p.job.urgency == Urgency.NORMAL]
        for place in late:
            place.job = msgspec.structs.replace(place.job, urgency=Urgency.URGENT, urgent_since=now)
        if late:
            self._choose(now)

    @contextlib.contextmanager
    def awaited(self, sandbox: str) -> Iterator[None]:
        """For the length of the block somebody waits for what is done for a sandbox, be it in the queue by now or not."""
        with self._lock:
            self._awaited[sandbox] += 1
            self._hurry(sandbox)
        try:
            yield
        finally:
            with self._lock:
                self._awaited[sandbox] -= 1
                self._awaited += Counter()  # drops those that are zero

    def answered(self, sandbox: str, seconds: float) -> None:
        """The model of a sandbox took so long to answer."""
        with self._lock:
            self._waits.learn(sandbox, seconds)

    def why(self, sandbox: str) -> str:
        """What a job of a sandbox waits for; empty if none waits."""
        with self._lock:
            mine = next((number for number, place in self._waiting.items() if place.job.sandbox == sandbox), 0)
            return self._choice(self._clock()).reasons.get(mine, "") if mine else ""

    def forget(self, sandbox: str) -> None:
        """A sandbox is gone."""
        with self._lock:
            for known in (self._costs, self._waits, self._served):
                known.forget(sandbox)

    # ---- for people

    def state(self) -> EngineState:
        """What waits, what runs, what was done."""
        with self._lock:
            now = self._clock()
            queued = sorted(self._queued)
            reasons = self._choice(now).reasons
            return EngineState(
                slots=self.slots,
                unwritten=self._unwritten(),
                most_unwritten=self._most_unwritten(),
                running=tuple(_view(place, now, "") for place in self._running.values()),
                waiting=tuple(_view(place, now, reasons.get(number, "")) for number, place in self._waiting.items()),
                done=dict(self._done),
                queued_ms_p50=queued[len(queued) // 2] if queued else 0.0,
                queued_ms_p99=queued[int(len(queued) * 0.99)] if queued else 0.0,
            )


def _view(place: Place, now: float, reason: str) -> JobView:
    job = place.job
    return JobView(
        kind=job.kind,
        sandbox=job.sandbox,
        urgency=urgent(job, now)[0].name.lower(),
        waited_ms=((place.began or now) - job.since) * 1e3,
        runs_ms=(now - place.began) * 1e3 if place.began else 0.0,
        expected_ms=job.seconds * 1e3,
        expected_bytes=job.writes,
        reason=reason,
    )


def _slots() -> int:
    setting = os.environ.get(SLOTS, "")
    if setting.isdecimal() and int(setting) > 0:
        return int(setting)
    if setting:
        log.error("%s=%s is no number of jobs; it is left out", SLOTS, setting)
    return capacity.processors()


@contextlib.contextmanager
def _nice() -> Iterator[None]:
    """This thread, and the processes that it starts, give way to all others."""
    thread = threading.get_native_id()
    before = os.getpriority(os.PRIO_PROCESS, thread)
    os.setpriority(os.PRIO_PROCESS, thread, before + NICE)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # not without CAP_SYS_NICE; the threads of a pool end up nicer, no more
            os.setpriority(os.PRIO_PROCESS, thread, before)
