"""OpenAI's chat completions, and what others made like them.

Knows the shape of requests and answers, with the fields that other servers add to them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from crab.turns.identity import Calls, canonical
from crab.turns.wires import answers, shape
from crab.turns.wires.wire import Ask, Part, Reader

SHOWN = frozenset(
    {"role", "content", "refusal", "audio", "annotations", "reasoning", "reasoning_content", "reasoning_details"}
)
"""Fields of a delta that nothing is done with but showing them. Others that have parts of their own are held like calls."""


class Chat:
    """`POST /v1/chat/completions`."""

    name = "chat"
    ping = b": waiting\n\n"

    def takes(self, method: str, path: str) -> bool:
        return method.upper() == "POST" and shape.ends(path, "chat/completions") is not None

    def read(self, path: str, body: bytes) -> Ask:
        asked = shape.asked(body)
        return Ask(
            wire=self.name,
            model=shape.model(asked),
            stream=asked.get("stream") is True,
            items=tuple(_items(asked)),
            tools=tuple(_tools(asked)),
        )

    def reader(self, ask: Ask, content_type: str) -> Reader:
        return _Stream() if answers.streams(ask, content_type) else answers.Whole(_judge)


def _tools(asked: dict[str, Any]) -> Iterator[str]:
    for tool in shape.records(asked.get("tools")):
        inner = shape.record(tool.get(shape.text(tool.get("type"))))  # {"type": "function", "function": {…}}
        yield shape.text(inner.get("name") or tool.get("name") or tool.get("type"))
    for function in shape.records(asked.get("functions")):  # before there were tools
        yield shape.text(function.get("name"))


def _items(asked: dict[str, Any]) -> Iterator[bytes]:
    calls = Calls()
    for message in shape.listed(asked, "messages"):
        item = {**message, "content": shape.blocks(message.get("content"), "text")}
        if made := shape.records(message.get("tool_calls")):
            item["tool_calls"] = [{**call, "call": calls.made(call.get("id"))} for call in made]
        else:
            item.pop("tool_calls", None)
        if "tool_call_id" in message:
            item["result_of"] = calls.answered(message["tool_call_id"])
        yield canonical(item, instructions=message.get("role") in ("system", "developer"))


def _judge(answer: Any) -> tuple[int, bool]:
    choices = shape.records(shape.record(answer).get("choices"))
    messages = [shape.record(choice.get("message")) for choice in choices]
    calls = sum(len(shape.records(m.get("tool_calls"))) + bool(m.get("function_call")) for m in messages)
    return calls, bool(messages) and all(messages)


class _Stream(answers.Events):
    def __init__(self) -> None:
        super().__init__()
        self._made: set[tuple[str, str]] = set()
        self._finished: dict[str, bool] = {}
        """By the number of the choice."""

    def part(self, name: str, event: dict[str, Any]) -> Part:
        if event.get("error") or name == "error":
            return self.failed()
        part = Part.TEXT
        for choice in shape.records(event.get("choices")):
            at = str(choice.get("index"))
            finished = choice.get("finish_reason") is not None
            self._finished[at] = finished or self._finished.get(at, False)
            if self._calls(at, shape.record(choice.get("delta"))) or "message" in choice:
                part = Part.CALL
            elif finished and part is Part.TEXT:
                part = Part.END
        if "choices" not in event:
            return Part.CALL  # none of this API's
        return part

    def _calls(self, at: str, delta: dict[str, Any]) -> bool:
        self._made |= {(at, str(call.get("index", n))) for n, call in enumerate(shape.records(delta.get("tool_calls")))}
        if delta.get("function_call"):
            self._made.add((at, "function"))
        self.calls = len(self._made)
        return any(isinstance(value, dict | list) and value for key, value in delta.items() if key not in SHOWN)

    def done(self) -> Part:
        self.complete = not self.broken
        return Part.END

    def ended(self, rest: bytes) -> None:
        # Some servers send no [DONE], or end without an empty line after it.
        whole = rest in (b"", b"data: [DONE]", b"data:[DONE]")
        self.complete |= whole and bool(self._finished) and all(self._finished.values())
