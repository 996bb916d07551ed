"""Anthropic's messages.

Knows the shape of its requests and answers. A request that counts tokens is none of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from crab.turns.identity import Calls, canonical
from crab.turns.wires import answers, shape
from crab.turns.wires.wire import Ask, Part, Reader

SHOWN = frozenset({"text", "thinking", "redacted_thinking"})
"""Blocks that nothing is done with but showing them. All others, known or not, are held like calls."""
SHOWN_DELTAS = frozenset({"text_delta", "thinking_delta", "signature_delta", "citations_delta"})


class Anthropic:
    """`POST /v1/messages`."""

    name = "anthropic"
    ping = b'event: ping\ndata: {"type": "ping"}\n\n'

    def takes(self, method: str, path: str) -> bool:
        # Without /v1 only at the root: OpenAI's threads have messages too.
        return method.upper() == "POST" and (
            shape.ends(path, "v1/messages") is not None or path.rstrip("/") == "/messages"
        )

    def read(self, path: str, body: bytes) -> Ask:
        asked = shape.asked(body)
        return Ask(
            wire=self.name,
            model=shape.model(asked),
            stream=asked.get("stream") is True,
            items=tuple(_items(asked)),
            tools=tuple(shape.text(t.get("name") or t.get("type")) for t in shape.records(asked.get("tools"))),
        )

    def reader(self, ask: Ask, content_type: str) -> Reader:
        return _Stream() if answers.streams(ask, content_type) else answers.Whole(_judge)


def _items(asked: dict[str, Any]) -> Iterator[bytes]:
    messages = shape.listed(asked, "messages")
    calls = Calls()
    if system := shape.blocks(asked.get("system"), "text"):
        yield canonical({"role": "system", "content": system}, instructions=True)
    for message in messages:
        content = [_block(block, calls) for block in shape.blocks(message.get("content"), "text")]
        instructions = message.get("role") in ("system", "developer")
        yield canonical({**message, "content": content}, instructions=instructions)


def _block(block: Any, calls: Calls) -> Any:
    if not isinstance(block, dict):
        return block
    if _calls(block):
        return {**block, "call": calls.made(block.get("id"))}
    if "tool_use_id" not in block:
        return block
    found = {**block, "result_of": calls.answered(block["tool_use_id"])}
    if isinstance(block.get("content"), str):
        found["content"] = shape.blocks(block["content"], "text")
    if block.get("is_error") is False:
        del found["is_error"]  # that is what it is if nothing is said
    return found


def _calls(block: dict[str, Any]) -> bool:
    return shape.text(block.get("type")).endswith("tool_use")  # also server_tool_use, mcp_tool_use


def _judge(answer: Any) -> tuple[int, bool]:
    message = shape.record(answer)
    whole = message.get("type") == "message" and isinstance(message.get("content"), list)
    return sum(map(_calls, shape.records(message.get("content")))), whole


class _Stream(answers.Events):
    def __init__(self) -> None:
        super().__init__()
        self._shown: set[Any] = set()
        """Numbers of the blocks that are only shown."""

    def part(self, name: str, event: dict[str, Any]) -> Part:
        kind = shape.text(event.get("type")) or name
        at = event.get("index") if isinstance(event.get("index"), int) else None
        match kind:
            case "ping":
                return Part.TEXT
            case "message_start":
                return Part.CALL if shape.record(event.get("message")).get("content") else Part.TEXT
            case "content_block_start":
                block = shape.record(event.get("content_block"))
                self.calls += _calls(block)
                if at is None or shape.text(block.get("type")) not in SHOWN:
                    self._shown.discard(at)
                    return Part.CALL
                self._shown.add(at)
                return Part.TEXT
            case "content_block_delta":
                delta = shape.text(shape.record(event.get("delta")).get("type"))
                return Part.TEXT if at in self._shown and delta in SHOWN_DELTAS else Part.CALL
            case "content_block_stop":
                return Part.TEXT if at in self._shown else Part.CALL
            case "message_delta":
                return Part.END if shape.record(event.get("delta")).get("stop_reason") is not None else Part.TEXT
            case "message_stop":
                self.complete = True
                return Part.END
            case "error":
                return self.failed()
            case _:
                return Part.CALL
