"""What the coordinator has to know of a model's API, whichever it is.

A *wire* reads a request far enough to say whether two requests ask the same, and an answer far enough to say which of its
bytes can make an agent act. It changes no byte of either. One module for each API; `crab.turns.wires.find` picks.
"""

from __future__ import annotations

import enum
from typing import Protocol

from crab.model import Struct


class Part(enum.Enum):
    """What a piece of an answer does to the agent that gets it."""

    TEXT = "text"
    """Shows something. May be passed on as it comes."""
    CALL = "call"
    """Belongs to a call of a tool: its beginning, its arguments or its end."""
    END = "end"
    """Says that the answer is whole (or why it ended). Agents that read commands out of text act then."""


class Piece(Struct):
    """A part of an answer that is passed on whole: one event of a stream, delimiters included, or a whole body."""

    raw: bytes
    part: Part


class Ask(Struct, kw_only=True):
    """A request to a model, as far as its identity and its place in a conversation go."""

    wire: str
    """Name of the wire."""
    model: str
    stream: bool
    items: tuple[bytes, ...]
    """The conversation in order, instructions first: canonical JSON of each item without what changes from one sending to
    the next (ids, cache markers; see `crab.turns.identity`). Item n of a request is item n of the next one."""
    tools: tuple[str, ...] = ()
    """Names of the tools that the model may call, in the order of the request."""


class Reader(Protocol):
    """Reads one answer, as it comes."""

    complete: bool
    """The answer said itself that it is whole. One that ends without was cut."""
    calls: int
    """Calls of tools that it contains so far."""
    refused: bool
    """It is no answer, and says so itself (an error, the page of a gateway), before anything that could make an agent act."""

    def feed(self, data: bytes) -> list[Piece]:
        """The pieces that are whole now; their `raw`, joined, are the bytes that came in."""
        ...

    def close(self) -> list[Piece]:
        """The end of the body: what is left. A piece that is not whole is an END."""
        ...


class Wire(Protocol):
    """One API."""

    name: str
    ping: bytes
    """What may be put between two events of a stream to keep a client waiting: the protocol's own ping, or a comment."""

    def takes(self, method: str, path: str) -> bool:
        """Whether a request of that method and path (no query) asks the model for an answer in this API."""
        ...

    def read(self, path: str, body: bytes) -> Ask:
        """What a request asks. Raises ValueError, in words, if it is none of this API (then it is passed through)."""
        ...

    def reader(self, ask: Ask, content_type: str) -> Reader:
        """What reads the answer to it; `content_type` tells a stream from a whole body."""
        ...
