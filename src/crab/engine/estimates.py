"""What jobs are expected to take, and how long models are expected to think: from what was seen so far.

Knows numbers only. Used under the engine's lock.
"""

from __future__ import annotations

import math
from collections import deque

from crab.engine.jobs import JobKind
from crab.model import Struct

WEIGHT = 0.3
"""Of the newest measurement: three of them make most of an estimate, so that it follows a heap that grows."""
ENOUGH = 4
"""Waits of a sandbox from which on they, and not those of all, say what to expect."""
EARLY = 0.25
"""The quantile of waits at which an answer is taken to be due: too early costs an order, too late costs the agent."""


class Cost(Struct, kw_only=True):
    """Of one job."""

    seconds: float = 0.0
    writes: float = 0.0
    """Bytes."""

    def mixed(self, newest: Cost) -> Cost:
        """With a measurement taken in."""
        return Cost(
            seconds=self.seconds + WEIGHT * (newest.seconds - self.seconds),
            writes=self.writes + WEIGHT * (newest.writes - self.writes),
        )


class Costs:
    """By kind and sandbox; of a sandbox of which nothing is known, what others of that kind cost."""

    def __init__(self) -> None:
        self._known: dict[tuple[JobKind, str], Cost] = {}

    def expect(self, kind: JobKind, sandbox: str) -> Cost:
        """What a job is expected to cost; nothing if none was seen."""
        return self._known.get((kind, sandbox)) or self._known.get((kind, "")) or Cost()

    def learn(self, kind: JobKind, sandbox: str, cost: Cost) -> None:
        """A job has ended."""
        for key in _keys(kind, sandbox):
            known = self._known.get(key)
            self._known[key] = cost if known is None else known.mixed(cost)

    def forget(self, sandbox: str) -> None:
        """A sandbox is gone."""
        for key in [key for key in self._known if key[1] == sandbox]:
            del self._known[key]


def _keys(kind: JobKind, sandbox: str) -> tuple[tuple[JobKind, str], ...]:
    return (kind, sandbox), (kind, "")


class Waits:
    """Seconds that models took to answer, by sandbox."""

    def __init__(self) -> None:
        self._own: dict[str, deque[float]] = {}
        self._all: deque[float] = deque(maxlen=256)

    def learn(self, sandbox: str, seconds: float) -> None:
        """An answer has come."""
        self._own.setdefault(sandbox, deque(maxlen=32)).append(seconds)
        self._all.append(seconds)

    def expect(self, sandbox: str) -> float:
        """Seconds until the next answer may be there; 0 as long as nothing is known."""
        own = self._own.get(sandbox, ())
        known = sorted(own if len(own) >= ENOUGH else self._all)
        return known[math.ceil(EARLY * len(known)) - 1] if known else 0.0

    def forget(self, sandbox: str) -> None:
        """A sandbox is gone."""
        self._own.pop(sandbox, None)


class Served:
    """Seconds of work that each sandbox had lately: each second that passes takes a share of them away."""

    HALF_LIFE = 5.0

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, float]] = {}

    def add(self, sandbox: str, seconds: float, now: float) -> None:
        """A job of it has ended."""
        self._known[sandbox] = (self.of(sandbox, now) + seconds, now)

    def of(self, sandbox: str, now: float) -> float:
        """What is left of it."""
        seconds, then = self._known.get(sandbox, (0.0, now))
        return seconds * 0.5 ** ((now - then) / self.HALF_LIFE)

    def forget(self, sandbox: str) -> None:
        """A sandbox is gone."""
        self._known.pop(sandbox, None)
