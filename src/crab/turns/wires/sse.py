"""Server-sent events out of bytes that come in any pieces, by the rules of the WHATWG.

Knows lines, fields and delimiters, and where one event ends; changes no byte. Knows nothing of what events mean. An event
here is everything up to and including an empty line: a comment, or an empty line too many, is one without data.
https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import re

from crab.model import Struct

LINE_END = re.compile(rb"\r\n|\r|\n")
MARK = b"\xef\xbb\xbf"
"""Byte order mark: allowed once, before everything else."""


class Event(Struct):
    """One event as it came."""

    raw: bytes
    """With its delimiter."""
    name: str
    """Empty if it has none."""
    data: str | None
    """Its lines of data, joined by line feeds; bytes that are no UTF-8 are replaced. None if it has none: then no client
    sees an event."""


class Splitter:
    """Takes bytes, gives events; what is not whole yet stays inside.

    How the bytes are cut does not change the events. A carriage return at the very end waits for the next byte, which may be
    the other half of the delimiter.
    """

    def __init__(self) -> None:
        self._held = bytearray()
        self._line = 0
        """Where the line begins that is not whole yet."""
        self._seen = 0
        """No line ends before that: every byte is looked at once, however long an event is."""
        self._mark: int | None = None
        """Length of the byte order mark; None before the first line is whole."""

    def feed(self, data: bytes) -> list[Event]:
        """The events that are whole now."""
        self._held += data
        return self._take(final=False)

    def close(self) -> tuple[list[Event], bytes]:
        """Nothing more comes: a last event, if a carriage return ended it, and the bytes of one that is not whole."""
        events = self._take(final=True)
        rest = bytes(self._held)
        self._held.clear()
        self._line = self._seen = 0
        return events, rest

    def _take(self, *, final: bool) -> list[Event]:
        events: list[Event] = []
        begin = 0
        while found := LINE_END.search(self._held, self._seen):
            if found.end() == len(self._held) and found[0] == b"\r" and not final:
                self._seen = found.start()
                break
            if self._mark is None:
                self._mark = len(MARK) if self._held.startswith(MARK) else 0
                self._line = self._mark
            empty = found.start() == self._line
            self._line = self._seen = found.end()
            if empty:
                raw = bytes(self._held[begin : self._line])
                events.append(_event(raw, self._mark))
                self._mark, begin = 0, self._line
        else:
            self._seen = len(self._held)
        del self._held[:begin]
        self._line, self._seen = self._line - begin, self._seen - begin
        return events


def _event(raw: bytes, mark: int) -> Event:
    name, data = b"", list[bytes]()
    for line in LINE_END.split(raw[mark:]):
        field, _, value = line.partition(b":")  # a comment is a field without a name
        value = value.removeprefix(b" ")
        if field == b"event":
            name = value
        elif field == b"data":
            data.append(value)
    text = b"\n".join(data).decode(errors="replace") if data else None
    return Event(raw=raw, name=name.decode(errors="replace"), data=text)
