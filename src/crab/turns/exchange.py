"""What the record holds, as data: exchanges with a model, outcomes of commands, sizes.

Knows the columns that they are kept in, and nothing of how rows are found or when they stop to count.
"""

from __future__ import annotations

import sqlite3
from typing import Literal

import msgspec

from crab.model import Struct

Kind = Literal["main", "helper", "mark"]
ExchangeState = Literal["open", "answered", "released", "abandoned"]
Protection = Literal["durable", "captured", "none", "unprotected"]
OutcomeState = Literal["intended", "done", "failed"]


class Exchange(Struct, kw_only=True):
    """One question of an agent to its model, and its answer. (A `mark` is a checkpoint that came without a question.)"""

    id: int
    """Grows with every question, whichever the sandbox."""
    sandbox: str
    kind: Kind
    """`main`: the agent's own loop, it ends a turn. `helper`: a title, a summary, a probe."""
    state: ExchangeState
    """`open`: there is no answer yet, or a cut one that was not passed on. `abandoned` goes before the others."""
    key: bytes
    """The last link of the conversation's chain: equal keys, equal questions."""
    turn: int | None = None
    checkpoint: str | None = None
    """Id of the one that holds the sandbox as it was when the question came."""
    protection: Protection | None = None
    """How safe the sandbox was when the answer was passed on; None: that is not known yet."""
    why: str = ""
    """Reason for it."""
    wire: str = ""
    model: str = ""
    client: str = ""
    agent: str = ""
    session: str = ""
    asked: float
    answered: float | None = None
    released: float | None = None
    status: int | None = None
    """Of HTTP, of the newest attempt."""
    headers: dict[str, str] = {}
    """Of the answer; names in lower case, only those that `crab.turns.redact.kept_headers` lets through."""
    content_type: str = ""
    complete: bool = False
    """The answer is whole. Only such an answer is ever given again."""
    redacted: bool = False
    """A credential was taken out of the answer: the bytes that are kept are not the bytes that came."""
    calls: int = 0
    """Calls of tools in the answer."""
    held_ms: float = 0.0
    """How long the answer was kept back."""
    wait_ms: float = 0.0
    """How long the model took."""
    bytes_in: int = 0
    """Size of the request's body."""
    bytes_out: int = 0
    """Size of the answer's body."""
    abandoned: bool = False
    """It is not in the past of the sandbox as it is now."""
    delivered: bool = False
    """Somebody got the whole answer, while the sandbox was as it is now."""
    note: str = ""


class Outcome(Struct, kw_only=True):
    """How a command of an agent ended in a sandbox, or that it was begun."""

    id: int
    sandbox: str
    exchange: int
    """Id of the newest one that had been released when the command began; 0: there was none."""
    index: int
    """Its place among the commands of that exchange."""
    command: bytes
    """Digest of it; the caller knows of what."""
    state: OutcomeState
    """`intended`: it was begun and nothing tells how it ended."""
    result: bytes | None = None
    """As the caller encoded it; credentials are masked, byte for byte."""
    redacted: bool = False
    started: float
    ended: float | None = None
    abandoned: bool = False
    """Its effect is not in the sandbox as it is now."""


class Standing(Struct, kw_only=True):
    """How far the agent of a sandbox has come in its own past."""

    forwarding: bool = False
    """It may be behind its sandbox: what it asks and runs was done before, until it has caught up."""
    beyond: bool = False
    """The sandbox is where the question after the newest answer was asked: all that followed that answer is in it."""
    exchange: int = 0
    """The one whose answer the agent had last; 0: none."""
    given: tuple[int, ...] = ()
    """Places of the commands after that whose outcomes it was given, or waits for."""


class Size(Struct, kw_only=True):
    """How much the record holds. Sizes in bytes."""

    exchanges: int
    outcomes: int
    items: int
    """Of conversations; an item that several have in common counts once."""
    content: int
    """Everything that was said, if it lay there as it came, equal pieces once."""
    stored: int
    """The same, as it lies there."""
    file: int
    """The database with its write-ahead log."""


EXCHANGE = ", ".join(name for name in Exchange.__struct_fields__ if name != "state")
OUTCOME = "id, sandbox, exchange, place, command, state, result, redacted, started, ended, abandoned"


def exchange_of(row: sqlite3.Row) -> Exchange:
    """The exchange in a row of `EXCHANGE`."""
    values = dict(row)
    values["headers"] = msgspec.json.decode(values["headers"], type=dict[str, str])
    for name in ("complete", "redacted", "abandoned", "delivered"):
        values[name] = bool(values[name])
    values["state"] = (
        "abandoned"
        if values["abandoned"]
        else "released"
        if values["released"] is not None
        else "answered"
        if values["complete"]
        else "open"
    )
    return Exchange(**values)


def outcome_of(row: sqlite3.Row, result: bytes | None) -> Outcome:
    """The outcome in a row of `OUTCOME`, with what its digest stands for."""
    values = dict(row)
    values |= {"index": values.pop("place"), "result": result}
    for name in ("redacted", "abandoned"):
        values[name] = bool(values[name])
    return Outcome(**values)
