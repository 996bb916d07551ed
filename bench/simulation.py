"""What would happen on a larger host: `python -m bench.simulation [--sandboxes 1000] [--cpus 64] [--full] [--json]`.

A discrete-event simulation, driven by the very function that schedules real hosts (`crab.engine.schedule`). Agents work
(`TOOLS`), ask, and wait as recorded agents did (`bench.waiting.RECORDED`); each question is a capture, whose cost is drawn from
`ADAPTIVE` (or `FULL`). A capture has a part that only one can do at a time, since the daemon is one Python interpreter, and the rest, which
takes a slot; then a commit, shared with others as in `crab.store.commits`. What it leaves out: that the tools of agents, and
the captures among each other, take the processors from each other; a host whose processors are busy is slower than this.

  exposed_wait_ms_p50, _p99   how long a whole answer was kept back
  turns_per_s                 answers that were given out
  interpreter                 share of the time in which the daemon's interpreter was busy: near 1 it is the limit
  slots_busy                  share of the slots that were taken
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable

import click
import msgspec

from bench.figures import quantile, report
from bench.waiting import RECORDED, drawn
from crab.engine.estimates import Cost, Costs, Served, Waits
from crab.engine.jobs import Capacity, Job, Queue, Urgency
from crab.engine.schedule import choose
from crab.model import Struct

TOOLS = {0.5: 0.03, 0.75: 0.65, 0.9: 20.0, 1.0: 30.0}
"""Seconds that commands of recorded terminal work took: quantiles."""


class Kind(Struct, kw_only=True):
    """Turns of one kind."""

    share: float
    """Of all turns."""
    interpreter: float
    """Seconds of a capture that are Python, one after the other."""
    rest: float
    """Seconds of the rest: CRIU, the kernel."""
    spread: float = 0.3
    """Of the rest: standard deviation of its logarithm."""


ADAPTIVE = {
    "none": Kind(share=0.62, interpreter=0.008, rest=0.002),
    "files": Kind(share=0.28, interpreter=0.012, rest=0.005),
    "full": Kind(share=0.09, interpreter=0.016, rest=0.020),
    "large": Kind(share=0.01, interpreter=0.020, rest=0.300),
}
"""Shares of recorded work. Costs of the reference machine: a turn took the interpreter for 10 ms on average (py-spy --gil at
bench.density, 24 sandboxes), proxy and record included; the rest as bench.latency shows it."""
FULL = {
    "full": Kind(share=0.95, interpreter=0.016, rest=0.020),
    "large": Kind(share=0.05, interpreter=0.020, rest=0.300),
}
COMMIT = 0.004


@dataclasses.dataclass
class Turn:
    """One question on its way."""

    sandbox: str
    kind: Kind
    answers: float
    """When the model has answered."""
    durable: float = math.inf


class Simulation:
    """A host with so many slots. `run` returns its figures."""

    def __init__(self, sandboxes: int, slots: int, kinds: dict[str, Kind], seed: int = 1) -> None:
        self._draw = random.Random(seed)
        self._capacity = Capacity(slots=slots, unwritten=1 << 62)
        self._kinds = list(kinds.values())
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._waiting: dict[int, Job] = {}
        self._running: dict[int, Job] = {}
        self._turns: dict[int, Turn] = {}
        self._began: dict[int, float] = {}
        self._interpreter: deque[tuple[float, Callable[[], None]]] = deque()
        self._interpreting = self._committing = False
        self._commits: list[Turn] = []
        self._costs, self._waits, self._served = Costs(), Waits(), Served()
        self.exposed: list[float] = []
        """Milliseconds."""
        self.interpreted = self.occupied = 0.0
        for number in range(sandboxes):
            self._at(self._draw.uniform(0, 5), lambda name=f"s{number}": self._ask(name))

    def run(self, seconds: float) -> dict[str, float]:
        """Let so much time pass; the first fifth of it is not counted."""
        begin = seconds / 5
        skipped = 0
        while self._events and self._events[0][0] < seconds:
            self._now, _, happen = heapq.heappop(self._events)
            if self._now < begin:
                skipped, self.interpreted, self.occupied = len(self.exposed), 0.0, 0.0
            happen()
        exposed = self.exposed[skipped:]
        return {
            "exposed_wait_ms_p50": quantile(exposed, 0.5),
            "exposed_wait_ms_p99": quantile(exposed, 0.99),
            "turns_per_s": round(len(exposed) / (seconds - begin), 1),
            "interpreter": round(self.interpreted / (seconds - begin), 3),
            "slots_busy": round(self.occupied / (seconds - begin) / self._capacity.slots, 3),
        }

    def _at(self, when: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), happen))

    # ---- agents

    def _ask(self, sandbox: str) -> None:
        kind = self._draw.choices(self._kinds, [kind.share for kind in self._kinds])[0]
        wait = drawn(RECORDED, self._draw.random())
        cost = self._costs.expect("capture", sandbox)
        job = Job(
            number=next(self._order),
            sandbox=sandbox,
            kind="capture",
            urgency=Urgency.NORMAL,
            since=self._now,
            due=self._now + self._waits.expect(sandbox),
            seconds=cost.seconds,
        )
        self._waiting[job.number] = job
        self._turns[job.number] = turn = Turn(sandbox, kind, self._now + wait)
        self._at(turn.answers, lambda: self._answer(job.number, turn, wait))
        self._choose()

    def _answer(self, number: int, turn: Turn, wait: float) -> None:
        self._waits.learn(turn.sandbox, wait)
        if turn.durable <= self._now:
            self._release(turn)
        elif number in self._waiting:
            job = self._waiting[number]
            self._waiting[number] = msgspec.structs.replace(job, urgency=Urgency.URGENT, urgent_since=self._now)
            self._choose()

    def _release(self, turn: Turn) -> None:
        self.exposed.append(max(0.0, self._now - turn.answers) * 1e3)
        self._at(self._now + drawn(TOOLS, self._draw.random()), lambda: self._ask(turn.sandbox))

    # ---- the host

    def _choose(self) -> None:
        if len(self._running) >= self._capacity.slots or not self._waiting:
            return
        served = {job.sandbox: self._served.of(job.sandbox, self._now) for job in self._waiting.values()}
        queue = Queue(
            now=self._now, waiting=tuple(self._waiting.values()), running=tuple(self._running.values()), served=served
        )
        for number in choose(queue, self._capacity).begin:
            self._running[number] = self._waiting.pop(number)
            self._began[number] = self._now
            self._interpret(self._turns[number].kind.interpreter, lambda number=number: self._rest(number))

    def _interpret(self, seconds: float, then: Callable[[], None]) -> None:
        self._interpreter.append((seconds, then))
        if not self._interpreting:
            self._next()

    def _next(self) -> None:
        self._interpreting = bool(self._interpreter)
        if self._interpreting:
            seconds, then = self._interpreter.popleft()
            self.interpreted += seconds
            self._at(self._now + seconds, lambda: (then(), self._next()))

    def _rest(self, number: int) -> None:
        kind = self._turns[number].kind
        seconds = kind.rest * self._draw.lognormvariate(0, kind.spread)
        self._at(self._now + seconds, lambda: self._done(number))

    def _done(self, number: int) -> None:
        job, turn = self._running.pop(number), self._turns.pop(number)
        seconds = self._now - self._began.pop(number)
        self.occupied += seconds
        self._costs.learn("capture", job.sandbox, Cost(seconds=seconds))
        self._served.add(job.sandbox, seconds, self._now)
        self._commits.append(turn)
        if not self._committing:
            self._commit()
        self._choose()

    def _commit(self) -> None:
        covered, self._commits = self._commits, []
        self._committing = bool(covered)
        if covered:
            self._at(self._now + COMMIT, lambda: self._committed(covered))

    def _committed(self, covered: list[Turn]) -> None:
        for turn in covered:
            turn.durable = self._now
            if turn.answers <= self._now:
                self._release(turn)
        self._commit()


@click.command(help=__doc__.splitlines()[0] if __doc__ else "")
@click.option("--sandboxes", default="1,100,1000,1500,2000", show_default=True, help="How many, with commas.")
@click.option("--cpus", default=64, show_default=True, help="Slots of the host.")
@click.option("--full", is_flag=True, help="Every turn is captured whole.")
@click.option("--seconds", default=120.0, show_default=True, help="Simulated time.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on the last line.")
def main(sandboxes: str, cpus: int, full: bool, seconds: float, as_json: bool) -> None:
    kinds = FULL if full else ADAPTIVE
    found = {f"{count}": Simulation(int(count), cpus, kinds).run(seconds) for count in sandboxes.split(",")}
    report(f"{cpus} slots, {'every turn whole' if full else 'what changed'}", found, as_json)


if __name__ == "__main__":
    main()
