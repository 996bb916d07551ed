"""A recorded answer in the other form says the same."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.turns.stack import STREAMS

from crab.turns import forms
from crab.turns.wires import ALL
from crab.turns.wires.wire import Ask

WIRES = {wire.name: wire for wire in ALL}
NAMES = sorted(path.stem for path in STREAMS.glob("*.sse"))


def judged(wire: str, body: bytes, kind: str) -> tuple[bool, int]:
    reader = WIRES[wire].reader(Ask(wire=wire, model="m", stream=kind == "text/event-stream", items=()), kind)
    reader.feed(body)
    reader.close()
    return reader.complete, reader.calls


@pytest.mark.parametrize("name", NAMES)
def test_a_stream_as_a_body_and_back_is_as_whole_and_calls_as_much(name: str) -> None:
    wire, stream = name.partition("-")[0], (STREAMS / f"{name}.sse").read_bytes()
    complete, calls = judged(wire, stream, "text/event-stream")
    if not complete:
        pytest.skip("only whole answers are given again")
    body = forms.whole(wire, stream)
    assert body is not None and judged(wire, body, "application/json") == (True, calls)
    again = forms.streamed(wire, body)
    assert again is not None and judged(wire, again, "text/event-stream") == (True, calls)
    assert json.loads(forms.whole(wire, again) or b"") == json.loads(body) | (
        {} if wire != "chat" else {"object": "chat.completion"}
    )


@pytest.mark.parametrize("name", ["anthropic-parallel", "anthropic-text", "chat-parallel", "chat-text", "responses-parallel", "responses-text", "gemini-parallel", "gemini-text"])  # fmt: skip
def test_a_stream_says_what_the_recorded_body_of_the_same_answer_says(name: str) -> None:
    wire = name.partition("-")[0]
    made = json.loads(forms.whole(wire, (STREAMS / f"{name}.sse").read_bytes()) or b"")
    real = json.loads((STREAMS / f"{name}.json").read_bytes())
    part = {
        "anthropic": lambda body: [(one["type"], one.get("text"), one.get("input")) for one in body["content"]],
        "chat": lambda body: [
            (one["message"].get("content") or None, [call["function"] for call in one["message"].get("tool_calls", [])])
            for one in body["choices"]
        ],
        "responses": lambda body: [(one["type"], one.get("arguments")) for one in body["output"]],
        "gemini": lambda body: body["candidates"][0]["content"]["parts"],
    }[wire]
    assert part(made) == part(real)


@pytest.mark.parametrize("wire", [*WIRES, "unknown"])
@given(st.binary(max_size=80))
def test_what_cannot_be_made_is_none_and_no_error(wire: str, data: bytes) -> None:
    for make in (forms.whole, forms.streamed):
        made = make(wire, data)
        assert made is None or isinstance(made, bytes)
        make(wire, b'data: {"type": 7, "choices": [7], "candidates": 1}\n\n')
        make(wire, b'{"content": 7, "choices": {}, "output": [7]}')
        make(wire, b"[]")
