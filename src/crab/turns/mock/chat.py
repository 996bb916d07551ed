"""OpenAI's chat/completions: how a request is read, and how an answer is said, whole or as a stream."""

from __future__ import annotations

from typing import Any

from crab.turns.mock.conversation import Conversation, Json, Said, Tool, text_of, tokens
from crab.turns.mock.script import Plan
from crab.turns.mock.sse import dumps, event, pieces, words
from crab.turns.wires.shape import record, records

CREATED = 1_700_000_000
"""When every answer was made: the same conversation gets the same bytes."""
TYPES = {400: "invalid_request_error", 401: "invalid_request_error", 404: "invalid_request_error", 429: "requests"}


def takes(path: str) -> bool:
    """Whether a path belongs to this API."""
    return path.endswith("/chat/completions")


def read(target: str, body: Json) -> Conversation:
    """What a request says."""
    system, said = list[str](), list[Said]()
    for message in records(body.get("messages")):
        role, text = message.get("role"), text_of(message.get("content"))
        if role in ("system", "developer"):
            system.append(text)
        elif role == "tool":
            said.append(Said("result", text, str(message.get("tool_call_id", ""))))
        elif role == "assistant":
            calls = [record(call.get("function")) for call in records(message.get("tool_calls"))]
            said.append(Said("model", text + "".join(f"{one.get('name')} {one.get('arguments')}" for one in calls)))
        else:
            said.append(Said("user", text))
    asked = record(body.get("response_format"))
    shape = record(record(asked.get("json_schema")).get("schema"))
    return Conversation(
        model=str(body.get("model", "")),
        said=tuple(said),
        instructions="\n".join(system),
        tools=tuple(_tool(tool) for tool in records(body.get("tools"))),
        shape=shape if asked.get("type") in ("json_schema", "json_object") else None,
        stream=body.get("stream") is True,
        usage=record(body.get("stream_options")).get("include_usage") is True,
    )


def whole(conversation: Conversation, plan: Plan) -> Json:
    """The answer in one piece."""
    calls = _calls(conversation, plan)
    message: Json = {"role": "assistant", "content": plan.text or None, "refusal": None, "annotations": []}
    choice = {"index": 0, "message": message | ({"tool_calls": calls} if calls else {}), "logprobs": None}
    return {
        **_head(conversation, "chat.completion"),
        "choices": [choice | {"finish_reason": "tool_calls" if calls else "stop"}],
        "usage": _usage(conversation, plan),
    }


def events(conversation: Conversation, plan: Plan) -> list[bytes]:
    """The answer as a stream."""
    head = _head(conversation, "chat.completion.chunk")

    def chunk(delta: Json, reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return event(head | {"choices": [choice]} | ({"usage": None} if conversation.usage else {}))

    found = [chunk({"role": "assistant", "content": "" if plan.text else None})]
    found += [chunk({"content": word}) for word in words(plan.text)]
    for index, call in enumerate(_calls(conversation, plan)):
        function = call["function"]
        begun = {"index": index} | call | {"function": function | {"arguments": ""}}
        found.append(chunk({"tool_calls": [begun]}))
        for piece in pieces(function["arguments"]):
            found.append(chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]}))
    found.append(chunk({}, "tool_calls" if plan.calls else "stop"))
    if conversation.usage:
        found.append(event(head | {"choices": [], "usage": _usage(conversation, plan)}))
    return [*found, b"data: [DONE]\n\n"]


def error(status: int, message: str) -> Json:
    """A refusal."""
    return {"error": {"message": message, "type": TYPES.get(status, "server_error"), "param": None, "code": None}}


def _head(conversation: Conversation, kind: str) -> Json:
    return {"id": f"chatcmpl-{conversation.key}", "object": kind, "created": CREATED, "model": conversation.model}


def _calls(conversation: Conversation, plan: Plan) -> list[dict[str, Any]]:
    return [
        {
            "id": f"call_{conversation.key}_{number}",
            "type": "function",
            "function": {"name": call.tool, "arguments": dumps(call.arguments)},
        }
        for number, call in enumerate(plan.calls)
    ]


def _usage(conversation: Conversation, plan: Plan) -> Json:
    said = tokens(plan.text + dumps([call.arguments for call in plan.calls]))
    heard = conversation.tokens
    return {"prompt_tokens": heard, "completion_tokens": said, "total_tokens": heard + said}


def _tool(tool: Json) -> Tool:
    function = record(tool.get("function"))
    if "name" in function:
        return Tool(str(function["name"]), schema=record(function.get("parameters")))
    return Tool(str(record(tool.get("custom")).get("name", tool.get("type"))), "other")
