"""Gemini's generateContent.

Knows the shape of its requests and answers. The path names the model and says whether the answer is a stream. One that streams
an array of JSON instead of events is read like a whole body: it has no pieces that may be passed on alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from crab.turns.identity import Calls, canonical
from crab.turns.wires import answers, shape
from crab.turns.wires.wire import Ask, Part, Reader

PATH = r"models/(?P<model>[^/:]+):(?P<how>generateContent|streamGenerateContent)"
SHOWN = frozenset({"text", "thought", "thoughtSignature", "inlineData", "partMetadata", "videoMetadata"})
"""Fields of a part that nothing is done with but showing them. All others, known or not, are held like calls."""


class Gemini:
    """`POST /v1beta/models/MODEL:generateContent` and `:streamGenerateContent`."""

    name = "gemini"
    ping = b": waiting\n\n"

    def takes(self, method: str, path: str) -> bool:
        return method.upper() == "POST" and shape.ends(path, PATH) is not None

    def read(self, path: str, body: bytes) -> Ask:
        found = shape.ends(path, PATH)
        if not found:
            raise ValueError("the path names no model")
        asked = shape.asked(body)
        return Ask(
            wire=self.name,
            model=found["model"],
            stream=found["how"] == "streamGenerateContent",
            items=tuple(_items(asked)),
            tools=tuple(_tools(asked)),
        )

    def reader(self, ask: Ask, content_type: str) -> Reader:
        return _Stream() if answers.streams(ask, content_type) else answers.Whole(_judge)


def _tools(asked: dict[str, Any]) -> Iterator[str]:
    for tool in shape.records(asked.get("tools")):
        declared = shape.records(tool.get("functionDeclarations") or tool.get("function_declarations"))
        yield from (shape.text(function.get("name")) for function in declared)
        if not declared:
            yield from tool  # {"googleSearch": {}}


def _items(asked: dict[str, Any]) -> Iterator[bytes]:
    calls = Calls()
    contents = shape.listed(asked, "contents")
    system = asked.get("systemInstruction") or asked.get("system_instruction")
    if system:
        parts = system if isinstance(system, str) else shape.record(system).get("parts")
        yield canonical({"role": "system", "parts": _parts(parts, calls)}, instructions=True)
    for content in contents:
        item = {"role": "user", **content}
        yield canonical({**item, "parts": _parts(content.get("parts"), calls)})


def _parts(parts: Any, calls: Calls) -> list[Any]:
    if isinstance(parts, str):
        return [{"text": parts}]
    found: list[dict[str, Any]] = []
    for part in [parts] if isinstance(parts, dict) else shape.records(parts):
        made, result = shape.record(part.get("functionCall")), shape.record(part.get("functionResponse"))
        if "id" in made:
            part = {**part, "call": calls.made(made["id"])}
        if "id" in result:
            part = {**part, "result_of": calls.answered(result["id"])}
        found.append(part)
    return found


def _answered(answer: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for candidate in shape.records(answer.get("candidates")):
        found += shape.records(shape.record(candidate.get("content")).get("parts"))
    return found


def _blocked(answer: dict[str, Any]) -> bool:
    return bool(shape.record(answer.get("promptFeedback")).get("blockReason"))


def _judge(answer: Any) -> tuple[int, bool]:
    pieces = shape.records(answer) if isinstance(answer, list) else [shape.record(answer)]
    calls = sum("functionCall" in part for piece in pieces for part in _answered(piece))
    finished = any(c.get("finishReason") for piece in pieces for c in shape.records(piece.get("candidates")))
    failed = any("error" in piece for piece in pieces)
    return calls, not failed and (finished or any(map(_blocked, pieces)))


class _Stream(answers.Events):
    def __init__(self) -> None:
        super().__init__()
        self._finished: dict[str, bool] = {}
        """By the number of the candidate; what comes after a reason to finish takes it back."""

    def part(self, name: str, event: dict[str, Any]) -> Part:
        if event.get("error") or name == "error":
            return self.failed()
        parts = _answered(event)
        self.calls += sum("functionCall" in part for part in parts)
        if _blocked(event):
            self._finished["prompt"] = True
        for candidate in shape.records(event.get("candidates")):
            self._finished[str(candidate.get("index", 0))] = bool(candidate.get("finishReason"))
        if any(part.keys() - SHOWN for part in parts):
            return Part.CALL
        if _blocked(event) or any(c.get("finishReason") for c in shape.records(event.get("candidates"))):
            return Part.END
        return Part.TEXT

    def ended(self, rest: bytes) -> None:
        self.complete = not rest and bool(self._finished) and all(self._finished.values())
