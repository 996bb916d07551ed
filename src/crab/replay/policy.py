"""What a run saves, and what that makes of a crash: pure decisions over plain data.

A policy says at the end of a turn whether a checkpoint is taken, and how a crash is recovered from. Which turn comes next
after a crash follows from the policy's way of recovery, the newest checkpoint and the kill alone (`resume`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Protocol

from crab.errors import InvalidRequest
from crab.model import PolicyName, Struct
from crab.replay.kills import Kill
from crab.replay.trajectory import TurnKind


class Recovery(enum.StrEnum):
    """What there is to go on with after a crash."""

    CHECKPOINT = "checkpoint"
    """Files and processes of the newest checkpoint; the turn after it comes next."""
    FILES = "files"
    """Files of the newest checkpoint and no process; the turn after it comes next."""
    CONVERSATION = "conversation"
    """What the model was told, and a fresh sandbox: the agent goes on as if nothing had happened."""
    RESTART = "restart"
    """Nothing: a fresh sandbox, and all over from the first turn."""


class TurnEnd(Struct, kw_only=True):
    """What a policy may look at when a turn has ended. Turn 0 is the end of the set-up."""

    turn: int
    turns: int
    kind: TurnKind | None
    """None: the set-up."""
    exit_code: int | None
    """None: runs in the background."""


class Policy(Protocol):
    """A rule for checkpoints. Called for turn 0 and then in the order in which turns end, repeated ones included."""

    @property
    def name(self) -> str:
        """As on the command line."""
        ...

    @property
    def recovery(self) -> Recovery:
        """What a crash is recovered with."""
        ...

    def capture(self, end: TurnEnd) -> PolicyName | None:
        """The checkpoint to take now, or None for none."""
        ...


class Every(Struct):
    """A checkpoint at the end of the set-up and of every n-th turn."""

    name: str
    wanted: PolicyName
    recovery: Recovery
    interval: int = 1

    def capture(self, end: TurnEnd) -> PolicyName | None:
        return self.wanted if end.turn % self.interval == 0 else None


class Never(Struct):
    """No checkpoint at all."""

    name: str
    recovery: Recovery

    def capture(self, end: TurnEnd) -> PolicyName | None:
        del end
        return None


class Resume(Struct):
    """How a run goes on after a crash."""

    recovery: Recovery
    turn: int
    """The turn that comes next; one more than the run has, if nothing is left to do."""


def resume(recovery: Recovery, head: int | None, kill: Kill) -> Resume:
    """How a run goes on that was killed then and whose newest checkpoint is of turn `head` (None: there is none).

    A turn whose command was cut short has no outcome: the agent never heard of it, so not even its conversation knows it,
    and it acts again. A checkpoint that should be there but is not leaves only to begin anew.
    """
    match recovery:
        case Recovery.CONVERSATION:
            return Resume(recovery, kill.turn + 1 if kill.at_end else kill.turn)
        case Recovery.CHECKPOINT | Recovery.FILES if head is not None:
            return Resume(recovery, head + 1)
        case _:
            return Resume(Recovery.RESTART, 1)


def repeated(after: Resume, kill: Kill) -> range:
    """The turns that had ended before the kill and have to be run once more."""
    return range(after.turn, kill.turn + 1 if kill.at_end else kill.turn)


def answered(after: Resume, known: int) -> int:
    """Up to which turn the model need not be asked again after a crash, if it had been asked for the turns up to `known`.

    Its answers belong to the conversation, and are recorded with every other way of recovery but a restart.
    """
    return 0 if after.recovery == Recovery.RESTART else known


POLICIES: dict[str, Callable[[], Policy]] = {
    "adaptive": lambda: Every("adaptive", "adaptive", Recovery.CHECKPOINT),
    "oracle": lambda: Every("oracle", "oracle", Recovery.CHECKPOINT),
    "always": lambda: Every("always", "always", Recovery.CHECKPOINT),
    "files": lambda: Every("files", "files", Recovery.FILES),
    "none": lambda: Never("none", Recovery.CONVERSATION),
    "restart": lambda: Never("restart", Recovery.RESTART),
}
"""By their names on the command line; `every:N` besides."""

FORMS = "adaptive, oracle, always, every:N, files, none or restart"


def policy(name: str) -> Policy:
    """The policy of that name. Raises InvalidRequest."""
    if name in POLICIES:
        return POLICIES[name]()
    word, _, number = name.partition(":")
    if word == "every" and number.isascii() and number.isdigit() and int(number[:9]) >= 1 and len(number) < 9:
        return Every(name, "always", Recovery.CHECKPOINT, int(number))
    raise InvalidRequest(f"{name!r} is no checkpoint policy", remedy=f"choose {FORMS}")
