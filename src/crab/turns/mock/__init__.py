"""A scripted model that needs no network: answers in the APIs of Anthropic, OpenAI (both) and Gemini, told by the prompt.

A script is lines of a user's text:

    $ command      one call of the client's shell tool
    $& command     such lines in a row are calls of one answer, at once
    > text         before a command: said in the same answer; at the end: the final text (default: done)
    ~ 2.5          the next answer waits that many seconds before its first byte

In a text of one line, steps stand apart by ` ;; `: `$ echo one >> log ;; $ echo two >> log ;; > finished`. Which step is next
is told by the conversation alone, so the model can be killed and started again, and the same conversation gets the same
bytes. It knows nothing of turns or sandboxes: to the coordinator it is one more upstream.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Literal, Protocol

import aiohttp

from crab.model import Struct
from crab.turns import bodies
from crab.turns.mock import anthropic, chat, gemini, probes, responses, script
from crab.turns.mock.conversation import Conversation, Json
from crab.turns.mock.sse import dumps
from crab.turns.upstream import Answer, Headers, family
from crab.turns.wires.shape import record

__all__ = ["Asked", "Fault", "Mock"]

PIECE = 64
"""Bytes that an answer without a stream comes in: few, so that it can be cut too."""


class Fault(Struct, kw_only=True, forbid_unknown_fields=True):
    """Something that goes wrong with an answer to the main loop."""

    nth: int
    """From which request of the main loop on, counted from one since the model began."""
    kind: Literal["status", "cut", "stall", "rst"]
    """A refusal; an answer that ends too early; one that pauses; one whose connection is reset."""
    times: int = 1
    """How many requests in a row."""
    after: int = 3
    """Events that still come (of an answer without a stream: pieces of 64 bytes); negative: counted from the end."""
    status: int = 500
    headers: Mapping[str, str] = {}
    """Of the refusal: `retry-after`."""
    seconds: float = 0.0
    """How long a pause takes, or what happens before a refusal."""


class Asked(Struct, kw_only=True):
    """A request, for who counts them. Holds nothing of its headers."""

    number: int
    path: str
    wire: str = ""
    """The API; empty for what asks for no answer."""
    kind: Literal["main", "helper", "other"] = "other"
    step: int = 0
    line: str = ""
    """The part of the script that was answered."""
    size: int
    fault: str = ""


class _Api(Protocol):
    def takes(self, path: str) -> bool: ...
    def read(self, target: str, body: Json) -> Conversation: ...
    def whole(self, conversation: Conversation, plan: script.Plan) -> Json: ...
    def events(self, conversation: Conversation, plan: script.Plan) -> list[bytes]: ...
    def error(self, status: int, message: str) -> Json: ...


_APIS: dict[str, _Api] = {"anthropic": anthropic, "chat": chat, "responses": responses, "gemini": gemini}


class _Answer:
    def __init__(self, status: int, body: Json | list[bytes], kind: str = "application/json") -> None:
        self.status = status
        self.headers: Headers = [("Content-Type", kind)]
        self.wait = 0.0
        self.fault: Fault | None = None
        if isinstance(body, dict):
            data = dumps(body).encode(errors="replace")
            body = [data[at : at + PIECE] for at in range(0, len(data), PIECE)]
        self._pieces = body

    async def chunks(self) -> AsyncIterator[bytes]:
        count, fault = len(self._pieces), self.fault
        after = -1 if fault is None else min(fault.after, count) if fault.after >= 0 else max(count + fault.after, 0)
        for number, piece in enumerate([*self._pieces, b""]):
            if fault is not None and number == after:
                if fault.kind == "cut":
                    raise aiohttp.ClientPayloadError("the scripted model cut its answer")
                if fault.kind == "rst":
                    raise ConnectionResetError("the scripted model reset the connection")
                await asyncio.sleep(fault.seconds)
            if piece:
                yield piece


class Mock:
    """The model, as an upstream. Its only state is the number of requests, for the faults."""

    def __init__(self, faults: Iterable[Fault] = (), told: Callable[[Asked], None] | None = None) -> None:
        """`told` is called with each request, before it is answered."""
        self._faults = list(faults)
        self._told = told
        self._requests = 0
        self._main = 0

    @asynccontextmanager
    async def ask(
        self, method: str, target: str, headers: Headers, body: bytes | AsyncIterator[bytes] | None
    ) -> AsyncIterator[Answer]:
        data = body if isinstance(body, bytes) else b"".join([part async for part in body]) if body else b""
        named = {key.lower(): value for key, value in headers}
        answer = self._answer(method, target, named, data)
        await asyncio.sleep(answer.wait)
        yield answer

    def _answer(self, method: str, target: str, headers: Mapping[str, str], data: bytes) -> _Answer:
        self._requests += 1
        path = target.partition("?")[0]  # Gemini's clients may put a key into the rest
        asked = Asked(number=self._requests, path=path, size=len(data))
        wire = next((name for name, api in _APIS.items() if method == "POST" and api.takes(path)), "")
        speaks = family(path, headers)
        api = _APIS[wire or ("chat" if speaks == "openai" else speaks)]
        try:
            body = _json(data, headers)
        except ValueError as error:
            self._tell(asked)
            return _Answer(400, api.error(400, f"the request cannot be read: {error}"))
        if not wire:
            self._tell(asked)
            small = probes.answer(method, path, speaks, body)
            return _Answer(404, api.error(404, f"no such path: {path}")) if small is None else _Answer(200, small)
        return self._say(wire, api.read(target, body), asked)

    def _say(self, wire: str, conversation: Conversation, asked: Asked) -> _Answer:
        api, plan = _APIS[wire], script.plan(conversation)
        fault = self._fault() if plan.main else None
        self._tell(
            Asked(
                number=asked.number,
                path=asked.path,
                wire=wire,
                kind="main" if plan.main else "helper",
                step=plan.step,
                line=plan.line,
                size=asked.size,
                fault=fault.kind if fault else "",
            )
        )
        if fault is not None and fault.kind == "status":
            answer = _Answer(fault.status, api.error(fault.status, "a fault of the scripted model"))
            answer.headers += fault.headers.items()
            answer.wait = fault.seconds
            return answer
        if conversation.stream:
            kind = "text/event-stream; charset=utf-8" if conversation.sse else "application/json"
            answer = _Answer(200, api.events(conversation, plan), kind)
        else:
            answer = _Answer(200, api.whole(conversation, plan))
        answer.fault, answer.wait = fault, plan.wait
        return answer

    def _fault(self) -> Fault | None:
        self._main += 1
        return next((one for one in self._faults if one.nth <= self._main < one.nth + one.times), None)

    def _tell(self, asked: Asked) -> None:
        if self._told is not None:
            self._told(asked)


def _json(data: bytes, headers: Mapping[str, str]) -> Json:
    """The object in a body; of an empty one, or of JSON that is none, an empty one. Raises ValueError."""
    try:
        data = bodies.decoded(list(headers.items()), data)
    except OSError as error:
        raise ValueError(str(error)) from None
    return record(json.loads(data)) if data.strip() else {}
