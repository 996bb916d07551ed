"""When a replay is killed: plans such as `3,7m,random:2`, as pure data. Knows nothing of how a sandbox is killed."""

from __future__ import annotations

import random
import re

from crab.errors import InvalidRequest
from crab.model import Struct

FORMS = (
    "7 (at the end of turn 7), 5m (in the middle of the command of turn 5), random:2 and random:2m; several with commas"
)
_FIXED = re.compile(r"([0-9]{1,9})(m?)")
_RANDOM = re.compile(r"random:([0-9]{1,9})(m?)")


class Kill(Struct, order=True):
    """One crash of the sandbox."""

    turn: int
    """1 is the first."""
    at_end: bool = True
    """After the turn and its checkpoint; else while its command runs."""

    def __str__(self) -> str:
        return f"{self.turn}" if self.at_end else f"{self.turn}m"


def parse(plan: str, turns: int, seed: int = 0) -> tuple[Kill, ...]:
    """The kills of a plan for a run of that many turns, in the order in which they strike; an empty plan has none.

    The same plan, number of turns and seed always give the same kills. Random ones never coincide with another kill of the
    same sort. Raises InvalidRequest.
    """
    words = [word.strip() for word in plan.split(",")] if plan.strip() else []
    kills: set[Kill] = set()
    drawn: list[tuple[int, bool]] = []
    for word in words:
        if match := _FIXED.fullmatch(word):
            kill = Kill(int(match[1]), not match[2])
            if not 1 <= kill.turn <= turns:
                raise InvalidRequest(
                    f"the plan kills at turn {kill.turn}, but the run has {turns}", remedy=f"choose from 1 to {turns}"
                )
            kills.add(kill)
        elif match := _RANDOM.fullmatch(word):
            drawn.append((int(match[1]), not match[2]))
        else:
            raise InvalidRequest(f"{word!r} is no plan of kills", remedy=f"write {FORMS}")
    # drawn last, so that `random:1,3` and `3,random:1` are the same plan
    source = random.Random(seed)
    for count, at_end in sorted(drawn):
        free = [Kill(turn, at_end) for turn in range(1, turns + 1) if Kill(turn, at_end) not in kills]
        if count > len(free):
            raise InvalidRequest(
                f"{count} random kills do not fit into a run with {len(free)} turns to kill at",
                remedy=f"ask for at most {len(free)}",
            )
        kills.update(source.sample(free, count))
    return tuple(sorted(kills))  # False sorts first: a turn is killed in its middle before it can be killed at its end
