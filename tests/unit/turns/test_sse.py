"""The splitter of event streams: no byte is changed, and no cut changes an event."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crab.turns.wires.sse import Event, Splitter


def split(*pieces: bytes) -> tuple[list[Event], bytes]:
    splitter = Splitter()
    events = [event for piece in pieces for event in splitter.feed(piece)]
    last, rest = splitter.close()
    return events + last, rest


def seen(stream: bytes) -> list[tuple[str, str]]:
    """What a client sees."""
    return [(event.name, event.data) for event in split(stream)[0] if event.data is not None]


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b"data: a\n\n", [("", "a")]),
        (b"data: a\r\n\r\n", [("", "a")]),
        (b"data: a\r\r", [("", "a")]),
        (b"data: a\r\n\n", [("", "a")]),
        (b"data: a\n\r\n", [("", "a")]),
        (b"data: a\n\rdata: b\r\r", [("", "a"), ("", "b")]),
        (b"event: x\ndata: a\n\ndata: b\n\n", [("x", "a"), ("", "b")]),
        (b"event: x\nevent: y\ndata: a\n\n", [("y", "a")]),
        (b"data: a\ndata: b\n\n", [("", "a\nb")]),
        (b"data:a\n\n", [("", "a")]),
        (b"data:  a\n\n", [("", " a")]),
        (b"data\n\n", [("", "")]),
        (b"data: a: b\n\n", [("", "a: b")]),
        (b": comment\n\n", []),
        (b": comment\ndata: a\n\n", [("", "a")]),
        (b"event: x\n\n", []),
        (b"id: 7\nretry: 10\nother: x\ndata: a\n\n", [("", "a")]),
        (b"\n\n\ndata: a\n\n\n", [("", "a")]),
        (b"\xef\xbb\xbfdata: a\n\n", [("", "a")]),
        (b"\xef\xbb\xbf\n\ndata: a\n\n", [("", "a")]),
        (b"data: a\n\n\xef\xbb\xbfdata: b\n\n", [("", "a")]),
        ("data: 🦀\n\n".encode(), [("", "🦀")]),
        (b"data: \xff\n\n", [("", "�")]),
        (b"data: a\n", []),
        (b"data: a", []),
    ],
)  # fmt: skip
def test_events_are_what_the_standard_says(stream: bytes, events: list[tuple[str, str]]) -> None:
    assert seen(stream) == events


def test_an_event_without_its_delimiter_is_left_over() -> None:
    assert split(b"data: a\n\ndata: b\n")[1] == b"data: b\n"


def test_a_delimiter_in_two_pieces_belongs_to_one_event() -> None:
    events, rest = split(b"data: a\r\n\r", b"\ndata: b\r\n\r\n")
    assert [event.raw for event in events] == [b"data: a\r\n\r\n", b"data: b\r\n\r\n"]
    assert rest == b""


lines = st.sampled_from(
    [b"\n", b"\r", b"\r\n", b":", b"data", b"data: x", b"event: y", b" ", b"\xef\xbb\xbf", "🦀".encode()]
)
streams = st.one_of(st.binary(max_size=60), st.lists(lines, max_size=30).map(b"".join))


def cut(stream: bytes, places: list[int]) -> list[bytes]:
    at = sorted({0, len(stream), *(place % (len(stream) + 1) for place in places)})
    return [stream[a:b] for a, b in itertools.pairwise(at)]


@given(streams, st.lists(st.integers(0, 1000), max_size=10))
def test_any_bytes_in_any_pieces_come_out_unchanged_and_as_the_same_events(stream: bytes, places: list[int]) -> None:
    events, rest = split(*cut(stream, places))
    assert b"".join(event.raw for event in events) + rest == stream
    assert (events, rest) == split(stream)
    assert (events, rest) == split(*(bytes([byte]) for byte in stream))


def test_an_event_comes_as_soon_as_its_delimiter_is_there() -> None:
    splitter = Splitter()
    assert splitter.feed(b"data: a\n") == []
    assert [event.data for event in splitter.feed(b"\n")] == ["a"]


def test_a_long_event_in_small_pieces_costs_no_more_than_its_length() -> None:
    piece, splitter = b"x" * 1000, Splitter()
    began = time.process_time()
    splitter.feed(b"data: ")
    for _ in range(10_000):
        splitter.feed(piece)
    [event] = splitter.feed(b"\n\n")
    assert event.data == "x" * 10_000_000
    assert time.process_time() - began < 2, "looking again at what was seen would take minutes"
