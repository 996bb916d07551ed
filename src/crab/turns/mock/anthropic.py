"""Anthropic's messages: how a request is read, and how an answer is said, whole or as a stream."""

from __future__ import annotations

from typing import Any

from crab.turns.mock.conversation import Conversation, Json, Said, Tool, text_of, tokens
from crab.turns.mock.script import Plan
from crab.turns.mock.sse import dumps, event, pieces, words
from crab.turns.wires.shape import record, records

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}


def takes(path: str) -> bool:
    """Whether a path belongs to this API."""
    return path.endswith("/messages")


def read(target: str, body: Json) -> Conversation:
    """What a request says."""
    system, said = [text_of(body.get("system"))], list[Said]()
    for message in records(body.get("messages")):
        content, role = message.get("content"), message.get("role")
        if role == "system":  # Claude Code puts some between the messages
            system.append(text_of(content))
            continue
        for part in records(content) if isinstance(content, list) else [{"type": "text", "text": text_of(content)}]:
            if part.get("type") == "tool_result":
                said.append(Said("result", text_of(part.get("content")), str(part.get("tool_use_id", ""))))
            elif part.get("type") == "tool_use":
                said.append(Said("model", f"{part.get('name')} {dumps(part.get('input'))}"))
            elif isinstance(part.get("text"), str):
                said.append(Said("model" if role == "assistant" else "user", part["text"]))
    output = record(body.get("output_config")).get("format") or body.get("output_format")
    return Conversation(
        model=str(body.get("model", "")),
        said=tuple(said),
        instructions="\n".join(system),
        tools=tuple(_tool(tool) for tool in records(body.get("tools"))),
        shape=record(record(output)["schema"]) if "schema" in record(output) else None,
        stream=body.get("stream") is True,
    )


def whole(conversation: Conversation, plan: Plan) -> Json:
    """The answer in one piece."""
    key = conversation.key
    content: list[Json] = [{"type": "text", "text": plan.text}] if plan.text else []
    content += [
        {"type": "tool_use", "id": f"toolu_{key}_{number}", "name": call.tool, "input": call.arguments}
        for number, call in enumerate(plan.calls)
    ]
    usage = {
        "input_tokens": conversation.tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": tokens(dumps(content)),
        "service_tier": "standard",
    }
    return {
        "id": f"msg_{key}",
        "type": "message",
        "role": "assistant",
        "model": conversation.model,
        "content": content,
        "stop_reason": "tool_use" if plan.calls else "end_turn",
        "stop_sequence": None,
        "usage": usage,
    }


def events(conversation: Conversation, plan: Plan) -> list[bytes]:
    """The answer as a stream."""
    message = whole(conversation, plan)
    begun = message | {"content": [], "stop_reason": None, "usage": message["usage"] | {"output_tokens": 1}}
    found = [_event("message_start", message=begun), _event("ping")]
    for index, block in enumerate(message["content"]):
        if block["type"] == "text":
            empty: Json = {"type": "text", "text": ""}
            deltas = [{"type": "text_delta", "text": word} for word in words(block["text"])]
        else:
            empty = block | {"input": {}}
            # The first piece of the real API is empty.
            texts = ["", *pieces(dumps(block["input"]))]
            deltas = [{"type": "input_json_delta", "partial_json": text} for text in texts]
        found.append(_event("content_block_start", index=index, content_block=empty))
        found += [_event("content_block_delta", index=index, delta=delta) for delta in deltas]
        found.append(_event("content_block_stop", index=index))
    ended = {"stop_reason": message["stop_reason"], "stop_sequence": None}
    return [*found, _event("message_delta", delta=ended, usage=message["usage"]), _event("message_stop")]


def error(status: int, message: str) -> Json:
    """A refusal."""
    return {"type": "error", "error": {"type": TYPES.get(status, "api_error"), "message": message}}


def _event(name: str, **data: Any) -> bytes:
    return event({"type": name} | data, name)


def _tool(tool: Json) -> Tool:
    name, schema = str(tool.get("name", "")), tool.get("input_schema")
    if isinstance(schema, dict):
        return Tool(name, schema=record(schema))
    if str(tool.get("type")).startswith("bash_"):  # the API knows its arguments
        return Tool(name, schema={"properties": {"command": {"type": "string"}}, "required": ["command"]})
    return Tool(name, "other")
