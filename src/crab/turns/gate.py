"""The gate: which bytes of an answer go to the agent, and when. A pure state machine.

What only shows something flows. From the first piece that can make an agent act, everything waits until the model's
answer is whole *and* kept *and* the turn is safe (law: no tool call before safety). An answer that is cut short never gives
up what was held: half an answer with a whole call in it makes some clients run that call and then ask again.

Order is kept and no byte is changed. Knows no clocks, sockets or sandboxes: the caller tells what happened and does what it
is told.
"""

from __future__ import annotations

import enum

from msgspec.structs import replace

from crab.model import Struct
from crab.turns.wires.wire import Part


class Answer(enum.Enum):
    """How far the model's answer has come."""

    AWAITED = "awaited"
    WHOLE = "whole"
    CUT = "cut"
    """It ended before it was whole."""


class Move(enum.Enum):
    """What to do now."""

    NOTHING = "nothing"
    PASS = "pass"
    """Give the piece to the agent."""
    HOLD = "hold"
    """Keep the piece, after those that are kept already."""
    RELEASE = "release"
    """Give the agent all that was kept, in order; that was the whole answer."""
    BREAK = "break"
    """Forget what was kept and break the connection: the agent must see that there is no whole answer."""


class Gate(Struct, kw_only=True):
    """One answer on its way."""

    answer: Answer = Answer.AWAITED
    safe: bool = False
    """The turn need not be waited for any longer: it is safe, or was given up, visibly."""
    recorded: bool = False
    """The whole answer is on disk, so that nobody has to ask for it again."""
    holds: bool = False
    """A piece is kept: all that follow are."""
    over: bool = False
    """The agent has got all that it will get."""


def arrived(gate: Gate, part: Part) -> tuple[Gate, Move]:
    """A piece of the answer has come. Raises ValueError after its end."""
    if gate.answer != Answer.AWAITED:
        raise ValueError("a piece came after the end of the answer")
    if part == Part.TEXT and not gate.holds:
        return gate, Move.PASS
    return replace(gate, holds=True), Move.HOLD


def ended(gate: Gate, complete: bool) -> tuple[Gate, Move]:
    """The model says no more. Raises ValueError if it said so before."""
    if gate.answer != Answer.AWAITED:
        raise ValueError("the answer has ended already")
    if not complete:
        return replace(gate, answer=Answer.CUT, over=True), Move.BREAK
    return _after(replace(gate, answer=Answer.WHOLE))


def recorded(gate: Gate) -> tuple[Gate, Move]:
    """The whole answer is on disk (or cannot be, and that was said)."""
    return _after(replace(gate, recorded=True))


def settled(gate: Gate) -> tuple[Gate, Move]:
    """The turn is safe, or was given up."""
    return _after(replace(gate, safe=True))


def _after(gate: Gate) -> tuple[Gate, Move]:
    if gate.over or not (gate.answer == Answer.WHOLE and gate.safe and gate.recorded):
        return gate, Move.NOTHING
    return replace(gate, over=True), Move.RELEASE
