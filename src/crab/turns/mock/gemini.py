"""Gemini's generateContent: how a request is read, and how an answer is said, whole or as a stream.

A stream is one of server-sent events or, if nothing is said about it, a JSON list that grows. A call is never cut into pieces:
the API has no events for that.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import parse_qs

from crab.turns.mock.conversation import Conversation, Json, Said, Tool, text_of, tokens
from crab.turns.mock.script import Plan
from crab.turns.mock.sse import dumps, event, words
from crab.turns.wires.shape import record, records

STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
}
_PATH = re.compile(r"/models/([^/:]+):(generateContent|streamGenerateContent)$")


def takes(path: str) -> bool:
    """Whether a path belongs to this API."""
    return _PATH.search(path) is not None


def read(target: str, body: Json) -> Conversation:
    """What a request says."""
    path, _, query = target.partition("?")
    found = _PATH.search(path)
    said: list[Said] = []
    for message in records(body.get("contents")):
        for part in records(message.get("parts")):
            result, call = record(part.get("functionResponse")), record(part.get("functionCall"))
            if result:
                said.append(Said("result", dumps(result.get("response")), str(result.get("id") or "")))
            elif call:
                said.append(Said("model", f"{call.get('name')} {dumps(call.get('args'))}"))
            elif isinstance(part.get("text"), str):
                said.append(Said("model" if message.get("role") == "model" else "user", part["text"]))
    settings = record(body.get("generationConfig"))
    shape = settings.get("responseSchema") or settings.get("responseJsonSchema")
    return Conversation(
        model=found[1] if found else "",
        said=tuple(said),
        instructions=text_of(record(body.get("systemInstruction")).get("parts")),
        tools=tuple(one for tool in records(body.get("tools")) for one in _tools(tool)),
        shape=record(shape) if shape or settings.get("responseMimeType") == "application/json" else None,
        stream=bool(found and found[2].startswith("stream")),
        sse="sse" in parse_qs(query).get("alt", []),
    )


def whole(conversation: Conversation, plan: Plan) -> Json:
    """The answer in one piece."""
    parts: list[Json] = [{"text": plan.text}] if plan.text else []
    return _chunk(conversation, plan, parts + _calls(conversation, plan), ended=True)


def events(conversation: Conversation, plan: Plan) -> list[bytes]:
    """The answer as a stream."""
    parts: list[Json] = [{"text": word} for word in words(plan.text)] + _calls(conversation, plan)
    chunks = [_chunk(conversation, plan, [part]) for part in parts]
    chunks.append(_chunk(conversation, plan, [{"text": ""}], ended=True))
    if conversation.sse:
        return [event(chunk, end="\r\n\r\n") for chunk in chunks]
    texts = [dumps(chunk).encode(errors="replace") for chunk in chunks]
    return [b"[" + texts[0], *(b",\r\n" + text for text in texts[1:]), b"]"]


def error(status: int, message: str) -> Json:
    """A refusal."""
    return {"error": {"code": status, "message": message, "status": STATUSES.get(status, "UNAVAILABLE")}}


def _chunk(conversation: Conversation, plan: Plan, parts: list[Json], ended: bool = False) -> Json:
    candidate: dict[str, Any] = {"content": {"parts": parts, "role": "model"}, "index": 0}
    heard, said = conversation.tokens, tokens(plan.text + dumps([call.arguments for call in plan.calls]))
    return {
        "candidates": [candidate | ({"finishReason": "STOP"} if ended else {})],
        "usageMetadata": {"promptTokenCount": heard, "candidatesTokenCount": said, "totalTokenCount": heard + said},
        "modelVersion": conversation.model,
        "responseId": conversation.key,
    }


def _calls(conversation: Conversation, plan: Plan) -> list[Json]:
    return [
        {"functionCall": {"id": f"call_{conversation.key}_{number}", "name": call.tool, "args": call.arguments}}
        for number, call in enumerate(plan.calls)
    ]


def _tools(tool: Json) -> list[Tool]:
    return [
        Tool(str(one.get("name", "")), schema=record(one.get("parametersJsonSchema") or one.get("parameters")))
        for one in records(tool.get("functionDeclarations"))
    ]
