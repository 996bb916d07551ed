"""The wires: which requests they take, what they read in them, and which part of an answer each event is.

`streams/` has answers of a stand-in for the APIs (`-text`, `-call`, `-parallel`, `-cut-…`), recorded with httpx, and
`-real-…`: what the APIs send today, written by hand after their documentation.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crab.turns import wires
from crab.turns.clients import classify
from crab.turns.identity import chain
from crab.turns.wires.wire import Ask, Part, Reader, Wire

STREAMS = Path(__file__).with_name("streams")
LETTERS = {Part.TEXT: "T", Part.CALL: "C", Part.END: "E"}
WIRES = {wire.name: wire for wire in wires.ALL}


def reader(name: str, content_type: str = "text/event-stream; charset=utf-8", stream: bool = True) -> Reader:
    return WIRES[name].reader(Ask(wire=name, model="m", stream=stream, items=()), content_type)


def read(name: str, *pieces: bytes, content_type: str = "text/event-stream") -> tuple[str, int, bool]:
    """Parts as letters, number of calls, whether it is whole."""
    one = reader(name, content_type)
    found = [piece for data in pieces for piece in one.feed(data)] + one.close()
    assert b"".join(piece.raw for piece in found) == b"".join(pieces)
    return "".join(LETTERS[piece.part] for piece in found), one.calls, one.complete


@pytest.mark.parametrize(
    ("method", "path", "name"),
    [
        ("POST", "/v1/messages", "anthropic"),
        ("post", "/v1/messages/", "anthropic"),
        ("POST", "/anthropic/v1/messages", "anthropic"),
        ("POST", "/messages", "anthropic"),
        ("POST", "/v1/chat/completions", "chat"),
        ("POST", "/openai/v1/chat/completions", "chat"),
        ("POST", "/openai/deployments/gpt/chat/completions", "chat"),
        ("POST", "/v1/responses", "responses"),
        ("POST", "/openai/v1/responses", "responses"),
        ("POST", "/v1beta/models/gemini-2.5-pro:generateContent", "gemini"),
        ("POST", "/v1beta/models/gemini-2.5-pro:streamGenerateContent", "gemini"),
        ("POST", "/v1/projects/p/locations/l/publishers/google/models/g:streamGenerateContent", "gemini"),
        ("GET", "/v1/messages", None),
        ("HEAD", "/", None),
        ("POST", "/v1/messages/count_tokens", None),
        ("POST", "/v1/messages/batches", None),
        ("POST", "/v1/threads/t/messages", None),
        ("GET", "/v1/models", None),
        ("POST", "/v1/embeddings", None),
        ("GET", "/v1/responses/resp_1", None),
        ("POST", "/v1/responses/resp_1/cancel", None),
        ("POST", "/v1/responses/input_tokens", None),
        ("POST", "/v1beta/models/g:countTokens", None),
        ("POST", "/v1beta/models/g:embedContent", None),
        ("POST", "/xchat/completions", None),
    ],
)  # fmt: skip
def test_requests_for_an_answer_are_taken_and_no_others(method: str, path: str, name: str | None) -> None:
    found = wires.find(method, path)
    assert (found.name if found else None) == name


PARTS = {
    "anthropic-text": ("TTTTTTEE", 0, True),
    "anthropic-call": ("TTCCCCEE", 1, True),
    "anthropic-parallel": ("TTCCCCCCCCEE", 2, True),
    "anthropic-cut-in-call": ("TTCC", 1, False),
    "anthropic-cut-after-call": ("TTCCCC", 1, False),
    "anthropic-real-thinking": ("TTTTTTTTTTTCCCCCEE", 1, True),
    "anthropic-real-search": ("TCCCCCTTTTEE", 1, True),
    "anthropic-real-overloaded": ("TTTTTE", 0, False),
    "chat-text": ("TTTETE", 0, True),
    "chat-call": ("TCCCETE", 1, True),
    "chat-parallel": ("TCCCCCCETE", 2, True),
    "chat-cut-in-call": ("TCCC", 1, False),
    "chat-cut-after-call": ("TCCCE", 1, True),  # the reason to finish came: the answer is whole
    "chat-real-parallel": ("TCCCCETE", 2, True),
    "chat-real-reasoning": ("TTTTETE", 0, True),
    "chat-real-function": ("CCEE", 1, True),
    "chat-real-no-done": ("TE", 0, True),
    "chat-real-call-and-reason": ("CE", 1, True),
    "chat-real-error": ("TEE", 0, False),
    "responses-text": ("TTTTTTTTTE", 0, True),
    "responses-call": ("TTCCCCCE", 1, True),
    "responses-parallel": ("TTCCCCCCCCCCE", 2, True),
    "responses-cut-in-call": ("TTCC", 1, False),
    "responses-cut-after-call": ("TTCCCCC", 1, False),
    "responses-real-reasoning": ("TTTTTTTTTTTTTTCCCCCCE", 2, True),
    "responses-real-incomplete": ("TTE", 0, True),
    "responses-real-failed": ("TE", 0, False),
    "responses-real-search": ("TCCCCE", 1, True),
    "responses-real-error": ("TE", 0, False),
    "gemini-text": ("E", 0, True),
    "gemini-call": ("C", 1, True),
    "gemini-parallel": ("C", 2, True),
    "gemini-real-call": ("TTCE", 2, True),
    "gemini-real-cut": ("TT", 0, False),
    "gemini-real-blocked": ("E", 0, True),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(path.stem for path in STREAMS.glob("*.sse")))
def test_every_event_of_a_stream_is_the_part_that_it_is(name: str) -> None:
    data = (STREAMS / f"{name}.sse").read_bytes()
    wire = name.partition("-")[0]
    assert read(wire, data) == PARTS[name]
    assert read(wire, *(data[n : n + 7] for n in range(0, len(data), 7))) == PARTS[name]


@pytest.mark.parametrize("name", sorted(path.stem for path in STREAMS.glob("*.sse")))
def test_a_stream_cut_anywhere_before_its_end_is_not_whole_and_never_raises(name: str) -> None:
    data = (STREAMS / f"{name}.sse").read_bytes()
    wire = name.partition("-")[0]
    said = {
        "anthropic": rb"event: message_stop",
        "responses": rb"event: response\.(compl|incompl)",
        "chat": rb'"finish_reason": ?"',
        "gemini": rb"finishReason|blockReason",
    }
    found = re.search(said[wire], data)
    for at in range(0, found.start() if found else len(data), 5):
        assert not read(wire, data[:at])[2]


@pytest.mark.parametrize("name", sorted(path.stem for path in STREAMS.glob("*.json")))
def test_a_body_that_is_no_stream_is_one_piece(name: str) -> None:
    data = (STREAMS / f"{name}.json").read_bytes()
    wire, _, what = name.partition("-")
    calls = 2 if what == "parallel" else 0
    assert read(wire, data[:9], data[9:], content_type="application/json") == ("C" if calls else "E", calls, True)
    assert read(wire, data[:-3], content_type="application/json") == ("E", 0, False)


ERRORS = [
    b'{"error": {"message": "no"}}',
    b'{"type": "error"}',
    b"[]",
    b"null",
    b"7",
    b"<html>",
    b"\xff\x00",
    b'{"a":' * 5000,
]


@pytest.mark.parametrize("name", WIRES)
@pytest.mark.parametrize("body", ERRORS)
def test_a_body_that_is_no_answer_passes_and_is_not_whole(name: str, body: bytes) -> None:
    assert read(name, body, content_type="application/json") == ("E", 0, False)


@pytest.mark.parametrize("name", WIRES)
def test_an_empty_body_has_no_piece(name: str) -> None:
    assert read(name, content_type="application/json") == ("", 0, False)
    assert read(name) == ("", 0, False)


@pytest.mark.parametrize("name", WIRES)
def test_an_event_that_cannot_be_read_is_held_and_the_answer_is_not_whole(name: str) -> None:
    data = (STREAMS / f"{name}-text.sse").read_bytes()
    parts, _, whole = read(name, b"data: {not json\n\n", data)
    assert parts[0] == "C" and not whole


@pytest.mark.parametrize("name", WIRES)
@pytest.mark.parametrize(
    "body", [b"data: {}\n\n", b'data: {"type": "new"}\n\n', b'event: new\ndata: {"x": [1]}\n\n', b"data: [1]\n\n"]
)
def test_an_event_that_nobody_knows_is_held_if_it_could_hold_a_call(name: str, body: bytes) -> None:
    parts = read(name, body)[0]
    assert parts == "C" or (name == "gemini" and parts == "T"), "Gemini has no types of events: its calls are parts"


@pytest.mark.parametrize(
    ("name", "event"),
    [
        ("anthropic", {"type": "content_block_start", "index": 0, "content_block": {"type": "new"}}),
        ("anthropic", {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a block that never began"}}),
        ("chat", {"choices": [{"index": 0, "delta": {"new_calls": [{"name": "bash"}]}}]}),
        ("responses", {"type": "response.output_item.added", "item": {"type": "new_call"}}),
        ("responses", {"type": "response.mcp_call_arguments.delta", "delta": "{"}),
        ("gemini", {"candidates": [{"content": {"parts": [{"newCall": {}}]}}]}),
    ],
)  # fmt: skip
def test_a_new_kind_of_call_is_held(name: str, event: dict[str, Any]) -> None:
    assert read(name, f"data: {json.dumps(event)}\n\n".encode())[0] == "C"


@pytest.mark.parametrize("name", WIRES)
def test_the_ping_shows_nothing_and_can_stand_between_any_two_events(name: str) -> None:
    for kind in ("text", "call"):
        data = (STREAMS / f"{name}-{kind}.sse").read_bytes()
        delimiter = b"\r\n\r\n" if name == "gemini" else b"\n\n"
        pinged = b"".join(e + delimiter + WIRES[name].ping for e in data.split(delimiter)[:-1])
        parts, calls, whole = read(name, pinged)
        assert (parts[::2], calls, whole) == PARTS[f"{name}-{kind}"]
        assert set(parts[1::2]) == {"T"}


def test_an_answer_without_a_type_is_read_as_what_was_asked_for() -> None:
    data = (STREAMS / "chat-text.sse").read_bytes()
    assert read("chat", data, content_type="") == PARTS["chat-text"]
    one = reader("chat", "", stream=False)
    assert one.feed(data) == []


def test_gemini_without_events_is_an_array_that_is_held_as_a_whole() -> None:
    text = json.dumps(
        [
            {"candidates": [{"content": {"parts": [{"text": "a"}]}}]},
            {"candidates": [{"content": {"parts": [{"functionCall": {"name": "f"}}]}, "finishReason": "STOP"}]},
        ]
    )
    assert read("gemini", text.encode(), content_type="application/json") == ("C", 1, True)


@pytest.mark.parametrize("end", [b"", b"data: [DONE]", b"data: [DONE]\n"])
def test_chat_servers_may_end_without_their_last_line(end: bytes) -> None:
    data = (STREAMS / "chat-real-no-done.sse").read_bytes()
    assert read("chat", data + end)[2]
    assert not read("chat", data + b'data: {"cho')[2]


values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(
        ["type", "index", "choices", "delta", "tool_calls", "item", "response", "output", "candidates", "content", "parts", "content_block", "error", "finish_reason", "message", "messages", "input", "contents", "role", "tools", "system", "call_id", "id", "model", "instructions", "function", "name"]
    ), inner, max_size=5)),
    max_leaves=15,
)  # fmt: skip


@given(st.sampled_from(wires.ALL), values)
def test_no_answer_makes_a_wire_raise_and_it_does_not_matter_how_it_is_cut(wire: Wire, value: Any) -> None:
    text = json.dumps(value).encode()
    for data, kind in ((b"data: " + text + b"\n\n", "text/event-stream"), (text, "application/json")):
        half = len(data) // 2
        whole, cut = (read(wire.name, *pieces, content_type=kind) for pieces in ((data,), (data[:half], data[half:])))
        assert whole[1:] == cut[1:]


PATHS = {
    "anthropic": "/v1/messages",
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "gemini": "/v1beta/models/m:generateContent",
}


def damaged(value: Any, strange: Any, choose: Any) -> Any:
    """The value with something strange at one place in it."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    if not keys or choose(st.integers(0, 4)) == 0:
        return strange
    at = choose(st.sampled_from(keys))
    inner = damaged(value[at], strange, choose)
    if isinstance(value, dict):
        return {**value, at: inner}
    return [*value[:at], inner, *value[at + 1 :]]


EVENTS = [
    (path.stem.partition("-")[0], json.loads(line[6:]))
    for path in sorted(STREAMS.glob("*.sse"))
    for line in path.read_text().splitlines()
    if line.startswith("data: {")
]
ASKED = [json.loads(path.read_text()) for path in sorted(Path(__file__).with_name("requests").glob("*.json"))]


@given(st.lists(st.sampled_from(EVENTS), min_size=1, max_size=3), values, st.data())
@settings(max_examples=500)
def test_no_damage_to_an_event_makes_a_wire_raise(
    events: list[tuple[str, Any]], strange: Any, data: st.DataObject
) -> None:
    wire = events[0][0]
    bad = [
        f"data: {json.dumps(damaged(event, strange, data.draw))}\n\n".encode() for name, event in events if name == wire
    ]
    parts = read(wire, *bad)[0]
    assert len(parts) == len(bad)


@given(st.sampled_from(ASKED), values, st.data())
@settings(max_examples=500)
def test_a_damaged_request_is_read_or_refused_in_words(sample: Any, strange: Any, data: st.DataObject) -> None:
    path = sample["path"].partition("?")[0]
    wire = wires.find("POST", path)
    assert wire
    try:
        ask = wire.read(path, json.dumps(damaged(sample["body"], strange, data.draw)).encode())
    except ValueError as error:
        assert str(error)
    else:
        assert chain(ask) and classify(sample["headers"], ask).why


@pytest.mark.parametrize("strange", [[], {}, [[]], 7, None])
def test_a_type_that_is_no_text_is_held(strange: Any) -> None:
    for name, event in (
        ("anthropic", {"type": "content_block_start", "index": 0, "content_block": {"type": strange}}),
        ("anthropic", {"type": "content_block_delta", "index": 0, "delta": {"type": strange}}),
        ("anthropic", {"type": strange}),
        ("responses", {"type": "response.output_item.added", "item": {"type": strange}}),
        ("responses", {"type": strange}),
    ):
        assert read(name, f"data: {json.dumps(event)}\n\n".encode())[0] == "C"


def test_thoughts_alone_ask_nothing() -> None:
    with pytest.raises(ValueError, match="asks nothing"):
        WIRES["responses"].read("/v1/responses", b'{"input": [{"type": "reasoning", "summary": []}]}')


@given(st.sampled_from(wires.ALL), values)
def test_a_request_of_any_shape_is_read_or_refused_in_words(wire: Wire, value: Any) -> None:
    try:
        ask = wire.read(PATHS[wire.name], json.dumps(value).encode())
    except ValueError as error:
        assert str(error)
    else:
        assert ask.items


@pytest.mark.parametrize("name", WIRES)
@pytest.mark.parametrize(
    "body",
    [
        *ERRORS,
        b"",
        b"{}",
        b'{"messages": [], "contents": [], "input": []}',
        b'{"messages": [1], "contents": [1], "input": [1]}',
    ],
)
def test_what_asks_nothing_is_refused_in_words(name: str, body: bytes) -> None:
    with pytest.raises(ValueError, match="request"):
        WIRES[name].read(PATHS[name], body)


TOOLS = [
    ("anthropic", {"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "f"}, {"type": "web_search_20250305", "name": "web_search"}]}, ("f", "web_search")),
    ("chat", {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "function": {"name": "f"}}, {"type": "custom", "custom": {"name": "g"}}], "functions": [{"name": "h"}]}, ("f", "g", "h")),
    ("responses", {"input": "a", "tools": [{"type": "function", "name": "f"}, {"type": "local_shell"}]}, ("f", "local_shell")),
    ("gemini", {"contents": [{"parts": [{"text": "a"}]}], "tools": [{"functionDeclarations": [{"name": "f"}]}, {"googleSearch": {}}]}, ("f", "googleSearch")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "body", "tools"), TOOLS)
def test_the_names_of_tools_are_read_however_they_are_declared(
    name: str, body: dict[str, Any], tools: tuple[str, ...]
) -> None:
    assert WIRES[name].read(PATHS[name], json.dumps(body).encode()).tools == tools


def test_gemini_says_model_and_streaming_in_its_path() -> None:
    body = b'{"contents": [{"parts": [{"text": "a"}]}]}'
    ask = WIRES["gemini"].read("/v1beta/models/gemini-2.5-pro:streamGenerateContent?alt=sse", body)
    assert (ask.model, ask.stream) == ("gemini-2.5-pro", True)
    assert not WIRES["gemini"].read("/v1beta/models/gemini-2.5-pro:generateContent", body).stream
