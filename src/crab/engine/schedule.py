"""Which jobs begin now: a pure function over what waits, what runs and what the host can bear.

What it holds to (tests/unit/engine/test_schedule.py, over random queues):
- **Nothing stands still.** While anything waits, something of its pool runs.
- **Who waits comes first.** No job for which nobody waits begins while one for which somebody does could.
- **Short before long, but not for ever.** Among the urgent the shortest is first, as that makes the sum of all waits
  least; a second of waiting makes up for a second of work, so nobody is overtaken by one that came more than its own
  length (and `MOST_OWED`) later.
- **Fair.** A sandbox that had much of the host lately counts as longer, by `MOST_OWED` at most.
- **Deadlines.** Of those for which nobody waits yet, the one with the least time left goes first: until its answer is
  expected, less the work that it is. `PATIENCE` makes urgent.
- **Room for the urgent.** A long job that nobody waits for does not take the last slot. Background jobs need an idle
  host; one that was put off for `LONGEST_PUT_OFF` does not.
- **Two pools.** Uploads wait for the network, all else for a processor; neither waits for the other.
- **No jam.** What writes waits while the disk is too far behind, unless nothing runs: a sandbox whose dump is throttled
  by the kernel stays frozen all the while.
"""

from __future__ import annotations

from collections.abc import Sequence

from crab.engine.jobs import Capacity, Job, Queue, Urgency
from crab.model import Struct

MOST_OWED = 1.0
PATIENCE = 30.0
LONGEST_PUT_OFF = 300.0
LONG = 0.25
"""Seconds from which on a job is one that an urgent one should not have to wait for."""


class Choice(Struct, kw_only=True):
    """What to do now."""

    begin: tuple[int, ...] = ()
    """Numbers of the jobs that begin, in their order."""
    reasons: dict[int, str] = {}
    """Why each of the others waits."""


def choose(queue: Queue, capacity: Capacity) -> Choice:
    """The jobs that begin now."""
    running, unwritten = list(queue.running), queue.unwritten
    begin: list[int] = []
    reasons: dict[int, str] = {}
    jammed = False
    for ahead, job in enumerate(sorted(queue.waiting, key=lambda job: rank(job, queue))):
        rivals = [other for other in running if other.pool == job.pool]
        most = capacity.slots if job.pool == "slots" else capacity.transfers
        reason = _no_slot(job, rivals, queue.now, most)
        if not reason and job.writes and running and (jammed or unwritten + job.writes > capacity.unwritten):
            jammed = True  # nobody who writes overtakes it, else it might never fit
            reason = f"the disk has {unwritten >> 20} MB to write"
        if reason:
            before = ahead - len(begin)
            reasons[job.number] = f"{reason}, {before} more wait before it" if before else reason
        else:
            begin.append(job.number)
            running.append(job)
            unwritten += job.writes
    return Choice(begin=tuple(begin), reasons=reasons)


def rank(job: Job, queue: Queue) -> tuple[int, float, int]:
    """Its place in the queue: the smaller, the sooner."""
    urgency, since = urgent(job, queue.now)
    if urgency == Urgency.URGENT:
        owed = min(queue.served.get(job.sandbox, 0.0), MOST_OWED)
        return urgency, job.seconds + owed - (queue.now - since), job.number
    return urgency, job.due - job.seconds if urgency == Urgency.NORMAL else job.since, job.number


def urgent(job: Job, now: float) -> tuple[Urgency, float]:
    """How urgent a job is by now, and since when."""
    patience = LONGEST_PUT_OFF if job.urgency == Urgency.BACKGROUND else PATIENCE
    if job.urgency == Urgency.URGENT or now - job.since >= patience:
        return Urgency.URGENT, min(job.urgent_since, job.since + patience)
    return job.urgency, job.since


def _no_slot(job: Job, running: Sequence[Job], now: float, slots: int) -> str:
    """Why a job gets no slot of its pool, where these run; empty if it does."""
    free = slots - len(running)
    if free <= 0:
        return f"{len(running)} {'uploads' if job.pool == 'transfers' else 'jobs'} run"
    if not running or urgent(job, now)[0] == Urgency.URGENT:
        return ""
    if job.urgency == Urgency.BACKGROUND:
        return "the host has other work"
    if free == 1 and job.seconds >= LONG:
        return "it is long, nobody waits for it, and the last slot is kept for who does"
    return ""
