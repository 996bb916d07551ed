"""Where the runs of a task are killed, one kill a run: pure decisions, the same for every policy."""

from __future__ import annotations

import random

from crab.replay.kills import Kill


def every(turns: int) -> tuple[Kill, ...]:
    """In the middle and at the end of each turn."""
    return tuple(Kill(turn, at_end) for turn in range(1, turns + 1) for at_end in (False, True))


def sample(task: str, turns: int, count: int) -> tuple[Kill, ...]:
    """Some of them: the run is cut into `count` pieces of equal length, and in each piece one turn is drawn, by turns for a
    kill at its end and in its middle. The seed is the task's name."""
    count = min(count, turns)
    source = random.Random(f"kills of {task}")
    first = source.random() < 0.5
    found: list[Kill] = []
    for piece in range(count):
        low, high = piece * turns // count + 1, (piece + 1) * turns // count
        found.append(Kill(source.randint(low, high), (piece % 2 == 0) == first))
    return tuple(found)
