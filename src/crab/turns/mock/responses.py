"""OpenAI's responses: how a request is read, and how an answer is said, whole or as a stream.

Does not know answers that a request only names (`previous_response_id`): nothing is remembered.
"""

from __future__ import annotations

import itertools
from typing import Any

from crab.turns.mock.chat import CREATED, error
from crab.turns.mock.conversation import Conversation, Json, Said, Tool, text_of, tokens
from crab.turns.mock.script import Plan
from crab.turns.mock.sse import dumps, event, pieces, words
from crab.turns.mock.tools import SECONDS, Call
from crab.turns.wires.shape import record, records

__all__ = ["error", "events", "read", "takes", "whole"]


def takes(path: str) -> bool:
    """Whether a path belongs to this API."""
    return path.endswith("/responses")


def read(target: str, body: Json) -> Conversation:
    """What a request says."""
    given = body.get("input")
    system, said = [text_of(body.get("instructions"))], list[Said]()
    for item in [{"role": "user", "content": given}] if isinstance(given, str) else records(given):
        kind, role = str(item.get("type", "message")), item.get("role")
        if kind == "message" and role in ("system", "developer"):
            system.append(text_of(item.get("content")))
        elif kind == "message":
            said.append(Said("model" if role == "assistant" else "user", text_of(item.get("content"))))
        elif kind.endswith("_output"):
            output = item.get("output")
            text = text_of(output) or dumps(output)
            said.append(Said("result", text, str(item.get("call_id") or item.get("id") or "")))
        elif kind.endswith("_call"):
            told = item.get("arguments") or item.get("input") or dumps(item.get("action"))
            said.append(Said("model", f"{item.get('name', kind)} {told}"))
    asked = record(record(body.get("text")).get("format"))
    return Conversation(
        model=str(body.get("model", "")),
        said=tuple(said),
        instructions="\n".join(system),
        tools=tuple(_tool(tool) for tool in records(body.get("tools"))),
        shape=record(asked.get("schema")) if asked.get("type") in ("json_schema", "json_object") else None,
        stream=body.get("stream") is True,
    )


def whole(conversation: Conversation, plan: Plan) -> Json:
    """The answer in one piece."""
    key = conversation.key
    output: list[Json] = []
    if plan.text:
        content = [{"type": "output_text", "text": plan.text, "annotations": [], "logprobs": []}]
        output.append({"id": f"msg_{key}", "type": "message", "role": "assistant", "content": content})
    output += [_item(call, f"{key}_{number}") for number, call in enumerate(plan.calls)]
    said, heard = tokens(dumps(output)), conversation.tokens
    return {
        "id": f"resp_{key}",
        "object": "response",
        "created_at": CREATED,
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": conversation.model,
        "output": [item | {"status": "completed"} for item in output],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "temperature": 1.0,
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "usage": {
            "input_tokens": heard,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": said,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": heard + said,
        },
    }


def events(conversation: Conversation, plan: Plan) -> list[bytes]:
    """The answer as a stream."""
    response = whole(conversation, plan)
    begun = response | {"status": "in_progress", "output": [], "usage": None}
    told: list[tuple[str, Json]] = [("created", {"response": begun}), ("in_progress", {"response": begun})]
    for index, item in enumerate(response["output"]):
        at = {"output_index": index}
        told.append(("output_item.added", at | {"item": _empty(item)}))
        told += _parts(item, at | {"item_id": item["id"]})
        told.append(("output_item.done", at | {"item": item}))
    told.append(("completed", {"response": response}))
    number = itertools.count()
    return [
        event({"type": f"response.{name}", "sequence_number": next(number)} | data, f"response.{name}")
        for name, data in told
    ]


def _parts(item: Json, at: Json) -> list[tuple[str, Json]]:
    """What is said of an item between its beginning and its end."""
    if item["type"] == "message":
        part, at = item["content"][0], at | {"content_index": 0}
        return [
            ("content_part.added", at | {"part": part | {"text": ""}}),
            *(("output_text.delta", at | {"delta": word, "logprobs": []}) for word in words(part["text"])),
            ("output_text.done", at | {"text": part["text"], "logprobs": []}),
            ("content_part.done", at | {"part": part}),
        ]
    names = {"function_call": ("function_call_arguments", "arguments")}
    names["custom_tool_call"] = ("custom_tool_call_input", "input")
    if item["type"] not in names:
        return []  # calls of the API's own shells come in one piece
    name, field = names[item["type"]]
    deltas = [(f"{name}.delta", at | {"delta": piece}) for piece in pieces(item[field])]
    return [*deltas, (f"{name}.done", at | {field: item[field]})]


def _empty(item: Json) -> Json:
    """An item of which nothing was said yet."""
    blank: dict[str, Any] = {"content": [], "arguments": "", "input": ""}
    return item | {key: value for key, value in blank.items() if key in item} | {"status": "in_progress"}


def _item(call: Call, key: str) -> Json:
    """A call of a tool; `key` tells it from the other calls."""
    known: Json = {"call_id": f"call_{key}"}
    if call.kind == "custom":
        return {"id": f"ctc_{key}", "type": "custom_tool_call"} | known | {"name": call.tool, "input": call.text}
    if call.kind == "local_shell":
        action = {"type": "exec", "command": ["bash", "-lc", call.text], "env": {}, "timeout_ms": SECONDS * 1000}
        return {"id": f"lsh_{key}", "type": "local_shell_call"} | known | {"action": action}
    if call.kind == "shell":
        acted = {"commands": [call.text], "timeout_ms": SECONDS * 1000, "max_output_length": None}
        return {"id": f"sh_{key}", "type": "shell_call"} | known | {"action": acted}
    return (
        {"id": f"fc_{key}", "type": "function_call"} | known | {"name": call.tool, "arguments": dumps(call.arguments)}
    )


def _tool(tool: Json) -> Tool:
    kind = tool.get("type")
    name = str(tool.get("name", kind))
    if kind == "function":
        return Tool(name, schema=record(tool.get("parameters")))
    if kind == "custom" or kind == "local_shell" or kind == "shell":
        return Tool(name, kind)
    return Tool(name, "other")
