"""A recorded answer in the other form: a stream as a whole body, a whole body as a stream.

Some clients ask again for the same in the other form (Claude Code without `stream` after its stream was cut). What they get
says the same as what was recorded; only the framing is made here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from crab.turns.wires.sse import Splitter

Json = dict[str, Any]


def whole(wire: str, stream: bytes) -> bytes | None:
    """The body that says what a stream said; None if it cannot be made."""
    make = _WHOLE.get(wire)
    try:
        made = make(list(_events(stream))) if make else None
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        return None
    return None if made is None else json.dumps(made, ensure_ascii=False).encode()


def streamed(wire: str, body: bytes) -> bytes | None:
    """The stream that says what a body said; None if it cannot be made."""
    make = _STREAMED.get(wire)
    try:
        return make(json.loads(body)) if make else None
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        return None


def _events(stream: bytes) -> Iterable[Json]:
    splitter = Splitter()
    first = splitter.feed(stream)
    for event in (*first, *splitter.close()[0]):
        if event.data and event.data != "[DONE]":
            yield json.loads(event.data)


def _event(data: Json, name: str = "") -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


# ---------------------------------------------------------------- Anthropic messages


def _anthropic_whole(events: list[Json]) -> Json | None:
    message: Json = {}
    blocks: dict[int, Json] = {}
    arguments: dict[int, str] = {}
    for event in events:
        kind = event["type"]
        if kind == "message_start":
            message = dict(event["message"])
        elif kind == "content_block_start":
            blocks[event["index"]] = dict(event["content_block"])
        elif kind == "content_block_delta":
            _anthropic_add(blocks[event["index"]], event["delta"], arguments, event["index"])
        elif kind == "content_block_stop" and event["index"] in arguments:
            blocks[event["index"]]["input"] = json.loads(arguments[event["index"]] or "{}")
        elif kind == "message_delta":
            message |= event["delta"]
            message["usage"] = message.get("usage", {}) | (event.get("usage") or {})
    return message | {"content": [blocks[index] for index in sorted(blocks)]} if message else None


def _anthropic_add(block: Json, delta: Json, arguments: dict[int, str], index: int) -> None:
    kind = delta["type"]
    if kind == "input_json_delta":
        arguments[index] = arguments.get(index, "") + delta["partial_json"]
    elif kind == "citations_delta":
        block["citations"] = [*(block.get("citations") or []), delta["citation"]]
    else:
        field = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}[kind]
        block[field] = block.get(field, "") + delta[field]


def _anthropic_streamed(message: Json) -> bytes:
    stop = {"stop_reason": message.get("stop_reason"), "stop_sequence": message.get("stop_sequence")}
    begin = message | {"content": [], "stop_reason": None, "stop_sequence": None}
    made = [_event({"type": "message_start", "message": begin}, "message_start")]
    for index, block in enumerate(message["content"]):
        empty, deltas = _anthropic_parts(block)
        made.append(
            _event({"type": "content_block_start", "index": index, "content_block": empty}, "content_block_start")
        )
        for delta in deltas:
            made.append(_event({"type": "content_block_delta", "index": index, "delta": delta}, "content_block_delta"))
        made.append(_event({"type": "content_block_stop", "index": index}, "content_block_stop"))
    usage = message.get("usage") or {}
    made.append(_event({"type": "message_delta", "delta": stop, "usage": usage}, "message_delta"))
    made.append(_event({"type": "message_stop"}, "message_stop"))
    return b"".join(made)


def _anthropic_parts(block: Json) -> tuple[Json, list[Json]]:
    """A block as it begins, and what fills it."""
    kind = block["type"]
    if kind == "text":
        return block | {"text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if kind == "thinking":
        deltas = [{"type": "thinking_delta", "thinking": block["thinking"]}]
        if block.get("signature"):
            deltas.append({"type": "signature_delta", "signature": block["signature"]})
        return block | {"thinking": "", "signature": ""}, deltas
    if "input" in block:
        text = json.dumps(block["input"], ensure_ascii=False)
        return block | {"input": {}}, [{"type": "input_json_delta", "partial_json": text}]
    return block, []


# ---------------------------------------------------------------- OpenAI


def _chat_whole(events: list[Json]) -> Json | None:
    if not events:
        return None
    made = {key: value for key, value in events[0].items() if key not in ("choices", "usage")}
    choices: dict[int, Json] = {}
    for event in events:
        if event.get("usage"):
            made["usage"] = event["usage"]
        for part in event.get("choices") or []:
            empty: Json = {
                "index": part["index"],
                "message": {"role": "assistant", "content": None},
                "finish_reason": None,
            }
            choice = choices.setdefault(part["index"], empty)
            choice["finish_reason"] = part.get("finish_reason") or choice["finish_reason"]
            _chat_add(choice["message"], part.get("delta") or {})
    return made | {"object": "chat.completion", "choices": [choices[index] for index in sorted(choices)]}


def _chat_add(message: Json, delta: Json) -> None:
    for key, value in delta.items():
        if key == "tool_calls":
            calls = message.setdefault("tool_calls", [])
            for part in value:
                while len(calls) <= part["index"]:
                    calls.append({"type": "function", "function": {"name": "", "arguments": ""}})
                call = calls[part["index"]]
                call |= {name: text for name, text in part.items() if name in ("id", "type") and text}
                for name, text in (part.get("function") or {}).items():
                    call["function"][name] = call["function"].get(name, "") + (text or "")
        elif isinstance(value, str) and key != "role":
            message[key] = (message.get(key) or "") + value
        elif value is not None and key != "role":
            message[key] = value


def _chat_streamed(body: Json) -> bytes:
    head = {key: value for key, value in body.items() if key not in ("choices", "usage")}
    head["object"] = "chat.completion.chunk"
    made: list[bytes] = []
    for choice in body["choices"]:
        delta = dict(choice["message"])
        if calls := delta.get("tool_calls"):
            delta["tool_calls"] = [call | {"index": number} for number, call in enumerate(calls)]
        for part, reason in ((delta, None), ({}, choice.get("finish_reason"))):
            made.append(
                _event(head | {"choices": [{"index": choice["index"], "delta": part, "finish_reason": reason}]})
            )
    if body.get("usage"):
        made.append(_event(head | {"choices": [], "usage": body["usage"]}))
    return b"".join([*made, b"data: [DONE]\n\n"])


def _responses_whole(events: list[Json]) -> Json | None:
    ends = [event["response"] for event in events if event["type"] in ("response.completed", "response.incomplete")]
    return ends[-1] if ends else None


def _responses_streamed(response: Json) -> bytes:
    begin = response | {"status": "in_progress", "output": []}
    events: list[Json] = [{"type": "response.created", "response": begin}]
    for index, item in enumerate(response["output"]):
        events.append({"type": "response.output_item.added", "output_index": index, "item": item})
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    events.append({"type": f"response.{response.get('status', 'completed')}", "response": response})
    return b"".join(_event(event | {"sequence_number": number}, event["type"]) for number, event in enumerate(events))


# ---------------------------------------------------------------- Gemini


def _gemini_whole(events: list[Json]) -> Json | None:
    if not events:
        return None
    made = dict(events[-1])
    parts: list[Json] = []
    for event in events:
        for candidate in event.get("candidates") or []:
            for part in (candidate.get("content") or {}).get("parts") or []:
                if parts and set(part) == {"text"} == set(parts[-1]):
                    parts[-1] = {"text": parts[-1]["text"] + part["text"]}
                else:
                    parts.append(part)
    last = next((event["candidates"][0] for event in reversed(events) if event.get("candidates")), None)
    if last is None:
        return made  # it was blocked
    return made | {"candidates": [last | {"content": {"role": "model", "parts": parts}}]}


def _gemini_streamed(body: Json) -> bytes:
    return _event(body)


_WHOLE: dict[str, Callable[[list[Json]], Json | None]] = {
    "anthropic": _anthropic_whole,
    "chat": _chat_whole,
    "responses": _responses_whole,
    "gemini": _gemini_whole,
}
_STREAMED: dict[str, Callable[[Json], bytes]] = {
    "anthropic": _anthropic_streamed,
    "chat": _chat_streamed,
    "responses": _responses_streamed,
    "gemini": _gemini_streamed,
}
