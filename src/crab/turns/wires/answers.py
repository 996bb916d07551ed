"""How an answer is read, whichever the API: event by event, or as one body.

Knows how bytes become pieces. Which part a piece is, a wire says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from crab.turns.wires import shape
from crab.turns.wires.sse import Splitter
from crab.turns.wires.wire import Ask, Part, Piece


class Events:
    """Reads a stream of events. A wire derives from it and says what an event is."""

    def __init__(self) -> None:
        self.complete = False
        self.calls = 0
        self.refused = False
        self.broken = False
        """An event said that the answer failed, or could not be read: whatever follows, it is not whole."""
        self._acts = False
        """A piece of it could make an agent act."""
        self._events = Splitter()

    def feed(self, data: bytes) -> list[Piece]:
        """The events that are whole now."""
        return [Piece(event.raw, self._part(event.name, event.data)) for event in self._events.feed(data)]

    def close(self) -> list[Piece]:
        """What is left: an event without its delimiter, which clients drop."""
        events, rest = self._events.close()
        pieces = [Piece(event.raw, self._part(event.name, event.data)) for event in events]
        self.ended(rest.strip())
        self.complete = self.complete and not self.broken
        return [*pieces, Piece(rest, Part.END)] if rest else pieces

    def part(self, name: str, event: dict[str, Any]) -> Part:
        """What an event does, by its name (empty if it has none) and its data."""
        raise NotImplementedError

    def ended(self, rest: bytes) -> None:
        """The body ended, `rest` being what was left of it."""

    def done(self) -> Part:
        """The marker `[DONE]`, which is no JSON."""
        return Part.END

    def failed(self) -> Part:
        """What an event is that says that the answer failed."""
        self.refused |= not self.broken and not self._acts
        self.broken, self.complete = True, False
        return Part.END

    def _part(self, name: str, data: str | None) -> Part:
        if not data:
            return Part.TEXT  # comments and the like, which no client sees
        part = self._read(name, data)
        if part is Part.CALL:
            self._acts, self.refused = True, False
        return part

    def _read(self, name: str, data: str) -> Part:
        if data.strip() == "[DONE]":
            return self.done()
        event = shape.parse(data)
        if isinstance(event, dict):
            part = self.part(name, event)
            self.complete = self.complete and not self.broken
            return part
        self.broken, self.complete = True, False
        return Part.CALL  # nobody knows what is in it


class Whole:
    """Reads an answer that is one body: one piece, at its end."""

    def __init__(self, judge: Callable[[Any], tuple[int, bool]]) -> None:
        self.complete = False
        self.calls = 0
        self.refused = True
        self._judge = judge
        """The number of calls in the JSON of a body, and whether it is an answer of the API."""
        self._body: list[bytes] = []

    def feed(self, data: bytes) -> list[Piece]:
        """Nothing: it is passed on whole."""
        self._body.append(data)
        return []

    def close(self) -> list[Piece]:
        """The body."""
        raw = b"".join(self._body)
        self._body.clear()
        if not raw:
            return []
        said = shape.parse(raw)
        self.calls, self.complete = self._judge(said)
        half = said is None and raw.lstrip()[:1] in (b"{", b"[")  # some clients read JSON as it comes
        self.refused = not (self.complete or self.calls or half)
        return [Piece(raw, Part.CALL if self.calls else Part.END)]


def streams(ask: Ask, content_type: str) -> bool:
    """Whether an answer is a stream of events: it says so, or was asked to be one and says nothing."""
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "text/event-stream" or (ask.stream and not kind)
