"""Fast-forward: what to do with a request, given what was recorded. Pure.

An agent that comes back (its process was restored or started anew, its connection was cut, its sandbox was brought back)
asks again what it asked before. What was answered is answered from the record, at once, until the agent is where the
sandbox is: at the *head*, the newest exchange of the sandbox's branch. If it asks something else on the way, it has diverged:
from there on it goes on by itself, from the state that the sandbox had at that point.
"""

from __future__ import annotations

from typing import Literal

from crab.model import Struct

StepKind = Literal["replay", "ask", "diverged"]


class Known(Struct, kw_only=True):
    """A recorded exchange, as far as the decision goes."""

    id: int
    session: str = ""
    """Of the client that asked; empty if it names none."""
    whole: bool = False
    """Its answer was recorded to the end."""
    safe: bool = True
    """Its turn was made safe, or that was given up visibly."""
    delivered: bool = False
    """Somebody got that answer to the end, while the sandbox was as it is now."""


class Situation(Struct, kw_only=True):
    """What is known when a request of the main loop comes."""

    forwarding: bool
    """The agent may be behind its sandbox: one of them was brought back, and the agent has not caught up yet."""
    session: str = ""
    same: Known | None = None
    """The newest exchange in which exactly this was asked."""
    position: Known | None = None
    """The newest exchange whose conversation this one goes on from (or is)."""
    head: Known | None = None
    """The newest exchange of the branch."""
    went_on: bool = True
    """After `position` (of an agent that is not behind: after `same`) something was asked in its conversation."""
    beyond: bool = False
    """The sandbox is past what followed the head's answer: it stands where the next question was asked (after a rewind or
    fork, which want another answer to that)."""
    followed: bool = False
    """Commands that followed the head's answer are in the sandbox (it is at a checkpoint that was taken between two of them, or
    during one): an agent that has that answer is still behind them."""


class Step(Struct, kw_only=True):
    """What to do."""

    kind: StepKind
    exchange: int | None = None
    """To replay; or, after a divergence, the last one that the agent agrees with."""
    guarded: bool = False
    """What is given again has to pass the gate: nobody knows whether its turn was safe."""
    caught_up: bool = False
    """The agent is where its sandbox is: nothing that it does from now on was done before."""
    why: str


def decide(now: Situation) -> Step:
    """The step for one request of a main loop."""
    same = now.same
    if now.forwarding:
        at_head = now.head is None or (same is not None and same.id == now.head.id)
        if same is not None and same.whole:
            why = "it was asked before and answered"
            caught_up = at_head and not now.beyond and not now.followed
            return Step(kind="replay", exchange=same.id, guarded=not same.safe, caught_up=caught_up, why=why)
        if at_head:
            return Step(kind="ask", caught_up=True, why="nothing was answered yet from here on")
        if now.position is None:  # not a word of it was said before: another task, and no other way of the same one
            return Step(kind="ask", caught_up=True, why="it begins a conversation of its own")
        if not now.went_on:
            return Step(kind="ask", caught_up=True, why="it goes on from the newest question of its conversation")
        why = "the agent asks something else than it did"
        return Step(kind="diverged", exchange=now.position.id, caught_up=True, why=why)
    lost = same is not None and same.whole and not same.delivered and same.session == now.session
    if same is not None and lost and not now.went_on:
        why = "its answer was lost on the way to the agent"
        return Step(kind="replay", exchange=same.id, guarded=not same.safe, caught_up=True, why=why)
    return Step(kind="ask", caught_up=True, why="it is new")


# ---------------------------------------------------------------- commands


class Kept(Struct, kw_only=True):
    """A recorded command of the agent, whose effect the sandbox has in it."""

    index: int
    """Its place among those between two answers."""
    command: bytes
    """Digest of what was run."""


class Progress(Struct, kw_only=True):
    """What is known when an agent that may be behind its sandbox runs a command."""

    kept: tuple[Kept, ...] = ()
    """The commands that followed the answer that it had last."""
    under_way: tuple[Kept, ...] = ()
    """Those of which nobody knows how they ended: in the state that the sandbox was brought back to they were begun."""
    at_head: bool = True
    """That answer is the newest one, and what followed it is not all in the sandbox."""
    new: bool = False
    """The state of the sandbox was chosen (a rewind, a fork), and nothing was given to this agent yet, nor has it asked."""


class CommandStep(Struct, kw_only=True):
    """What to do with a command."""

    kind: Literal["replay", "resume", "run", "diverged"]
    """`resume`: it was begun, so it is waited for and not started again."""
    index: int = 0
    """Of the recorded one that is given back or waited for."""
    caught_up: bool = False
    why: str = ""


def decide_command(now: Progress, command: bytes, given: frozenset[int] = frozenset()) -> CommandStep:
    """The step for one command; `given` are the places whose outcomes were given back, or are waited for, already.

    Agents run several tools at once, so what comes next may come in another order than it did.
    """
    left = [kept for kept in now.kept if kept.index not in given]
    for kept in left:
        if kept.command == command:
            return CommandStep(
                kind="replay", index=kept.index, why="it was run before, and the sandbox has what it did"
            )
    for begun in now.under_way:
        if begun.command == command and begun.index not in given:
            return CommandStep(kind="resume", index=begun.index, why="it was begun before, and nobody saw its end")
    if now.new:
        return CommandStep(kind="run", caught_up=True, why="it is a new agent's, in the state that was chosen")
    if left or not now.at_head:
        return CommandStep(kind="diverged", caught_up=True, why="the agent runs another command than it did")
    waits = any(begun.index not in given for begun in now.under_way)  # another of those at once may still ask for one
    return CommandStep(kind="run", caught_up=not waits, why="it was not run yet")
