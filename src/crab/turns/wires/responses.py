"""OpenAI's responses.

Knows the shape of its requests and answers. A conversation that the server keeps is known by the name it has there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from crab.turns.identity import Calls, canonical, is_thought
from crab.turns.wires import answers, shape
from crab.turns.wires.wire import Ask, Part, Reader

SHOWN = frozenset({"message", "reasoning"})
"""Items of an answer that nothing is done with but showing them. All others, known or not, are held like calls."""
SHOWN_EVENTS = (
    *("response.created", "response.queued", "response.in_progress", "keepalive", "ping"),
    *("response.content_part.", "response.output_text.", "response.refusal.", "response.reasoning"),
)
"""What the types of harmless events begin with."""
ENDS = {"response.completed": True, "response.incomplete": True, "response.failed": False, "response.cancelled": False}
"""Events that end an answer, and whether it is whole then. One that ran into a limit is whole: it was not cut on its way."""


class Responses:
    """`POST /v1/responses`."""

    name = "responses"
    ping = b": waiting\n\n"

    def takes(self, method: str, path: str) -> bool:
        return method.upper() == "POST" and shape.ends(path, "responses") is not None

    def read(self, path: str, body: bytes) -> Ask:
        asked = shape.asked(body)
        items = tuple(_items(asked))
        if not items:
            raise ValueError("the request asks nothing: there are only thoughts in it")
        return Ask(
            wire=self.name,
            model=shape.model(asked),
            stream=asked.get("stream") is True,
            items=items,
            tools=tuple(shape.text(t.get("name") or t.get("type")) for t in shape.records(asked.get("tools"))),
        )

    def reader(self, ask: Ask, content_type: str) -> Reader:
        return _Stream() if answers.streams(ask, content_type) else answers.Whole(_judge)


def _items(asked: dict[str, Any]) -> Iterator[bytes]:
    calls = Calls()
    said = asked.get("input")
    listed = [{"role": "user", "content": said}] if isinstance(said, str) and said else shape.listed(asked, "input")
    if instructions := asked.get("instructions"):
        yield canonical({"type": "message", "role": "system", "content": instructions}, instructions=True)
    for field in ("previous_response_id", "conversation"):
        if earlier := asked.get(field):
            yield canonical({"earlier": shape.record(earlier).get("id", earlier)})
    for item in listed:
        if not is_thought(item):
            yield canonical(_item(item, calls), instructions=item.get("role") in ("system", "developer"))


def _item(item: dict[str, Any], calls: Calls) -> dict[str, Any]:
    kind = shape.text(item.get("type")) or "message"
    found = {**item, "type": kind}
    if kind == "message":
        text = "output_text" if item.get("role") == "assistant" else "input_text"
        found["content"] = shape.blocks(item.get("content"), text)
    elif kind == "item_reference":
        found["item"] = item.get("id")  # it has nothing else
    elif "call_id" in item and kind.endswith("_output"):
        found["result_of"] = calls.answered(item["call_id"])
    elif "call_id" in item:
        found["call"] = calls.made(item["call_id"])
    return found


def _calls(output: Any) -> int:
    kinds = [shape.text(item.get("type")) for item in shape.records(output)]
    return sum(kind not in SHOWN and not kind.endswith("_output") for kind in kinds)


def _judge(answer: Any) -> tuple[int, bool]:
    response = shape.record(answer)
    output = response.get("output")
    whole = isinstance(output, list) and response.get("status", "completed") in ("completed", "incomplete")
    return _calls(output), whole


class _Stream(answers.Events):
    def __init__(self) -> None:
        super().__init__()
        self._made: set[str] = set()

    def part(self, name: str, event: dict[str, Any]) -> Part:
        kind = shape.text(event.get("type")) or name
        response = shape.record(event.get("response"))
        if kind in ("response.output_item.added", "response.output_item.done"):
            item = shape.record(event.get("item"))
            if shape.text(item.get("type")) in SHOWN:
                return Part.TEXT
            if _calls([item]):
                self._made.add(str(event.get("output_index", item.get("id"))))
                self.calls = len(self._made)
            return Part.CALL
        if kind in ENDS:
            self.calls = max(self.calls, _calls(response.get("output")))
            if not ENDS[kind]:
                return self.failed()
            self.complete = True
            return Part.END
        if kind == "error":
            return self.failed()
        return Part.TEXT if kind.startswith(SHOWN_EVENTS) and not _calls(response.get("output")) else Part.CALL
