"""The scripted model: what it reads out of a conversation, how it says it in each API, and what it breaks when told to."""

import asyncio
import gzip
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import aiohttp
import msgspec
import pytest

from crab.turns.mock import Asked, Fault, Mock
from crab.turns.mock.conversation import Said, Tool
from crab.turns.mock.script import FENCE, GREETING, HELPER, SUBMIT, Step, find, parse
from crab.turns.mock.serve import application
from crab.turns.mock.tools import command, finish, shell, value

TOOLS = {path.stem: json.loads(path.read_text()) for path in (Path(__file__).parent / "tools").glob("*.json")}
PATHS = {
    "anthropic": "/v1/messages",
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "gemini": "/v1beta/models/some-model:{}",
}
PROMPT = "> I look, Grüße.\n$ echo one >> log\n$& echo two\n$& echo three\n> finished"


# ---------------------------------------------------------------- one small client for all four APIs


def api_of(path: str) -> str:
    return next(
        name
        for name, end in {
            "anthropic": "/messages",
            "chat": "/completions",
            "responses": "/responses",
            "gemini": "/models/",
        }.items()
        if end in path
    )


def target_of(api: str, stream: bool) -> str:
    method = "streamGenerateContent?alt=sse" if stream else "generateContent"
    return PATHS[api].format(method)


def declared(api: str) -> list:
    schema = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
    return {
        "anthropic": [{"name": "bash", "input_schema": schema}],
        "chat": [{"type": "function", "function": {"name": "bash", "parameters": schema}}],
        "responses": [{"type": "function", "name": "bash", "parameters": schema}],
        "gemini": [{"functionDeclarations": [{"name": "bash", "parameters": schema}]}],
    }[api]


def body_of(api: str, prompt: str, stream: bool = True, tools: list | None = None, rounds: list | None = None) -> dict:
    """A request; `rounds` are answers as `heard` gives them, each followed by results for its calls."""
    tools = declared(api) if tools is None else tools
    items: list = [
        {"role": "user", "parts": [{"text": prompt}]} if api == "gemini" else {"role": "user", "content": prompt}
    ]
    for said in rounds or []:
        text, calls = said["text"], said["calls"]
        if api == "anthropic":
            blocks = [{"type": "text", "text": text}] if text else []
            blocks += [
                {"type": "tool_use", "id": one["id"], "name": one["name"], "input": one["arguments"]} for one in calls
            ]
            items.append({"role": "assistant", "content": blocks})
            items.append(
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": one["id"], "content": "ok"} for one in calls],
                }
            )
        elif api == "chat":
            made = [
                {
                    "id": one["id"],
                    "type": "function",
                    "function": {"name": one["name"], "arguments": json.dumps(one["arguments"])},
                }
                for one in calls
            ]
            items.append({"role": "assistant", "content": text, "tool_calls": made})
            items += [{"role": "tool", "tool_call_id": one["id"], "content": "ok"} for one in calls]
        elif api == "responses":
            items += (
                [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}]
                if text
                else []
            )
            for one in calls:  # in turn, as some versions of Codex write it
                items.append(
                    {
                        "type": "function_call",
                        "call_id": one["id"],
                        "name": one["name"],
                        "arguments": json.dumps(one["arguments"]),
                    }
                )
                items.append({"type": "function_call_output", "call_id": one["id"], "output": "ok"})
        else:
            items.append(
                {
                    "role": "model",
                    "parts": [
                        {"functionCall": {"id": one["id"], "name": one["name"], "args": one["arguments"]}}
                        for one in calls
                    ],
                }
            )
            items.append(
                {
                    "role": "user",
                    "parts": [
                        {"functionResponse": {"id": one["id"], "name": one["name"], "response": {"output": "ok"}}}
                        for one in calls
                    ],
                }
            )
    if api == "gemini":
        return {"contents": items, "tools": tools}
    more = {"stream_options": {"include_usage": True}} if api == "chat" and stream else {}
    return {
        "model": "some-model",
        "stream": stream,
        "tools": tools,
        "input" if api == "responses" else "messages": items,
        **more,
    }


def parsed(data: bytes) -> list[dict]:
    """The data of a stream's events; every event has the shape that its name says."""
    found = []
    for raw in data.replace(b"\r\n", b"\n").split(b"\n\n"):
        fields = dict(line.split(": ", 1) for line in raw.decode().splitlines())
        if fields and fields["data"] != "[DONE]":
            found.append(json.loads(fields["data"]))
            assert fields.get("event") in (None, found[-1].get("type"))
    return found


def heard(api: str, stream: bool, data: bytes) -> dict:
    """Text and calls of an answer; of a stream put together from its deltas alone."""
    return (heard_in_stream if stream else heard_whole)(api, data)


def heard_whole(api: str, data: bytes) -> dict:
    body, text, calls = json.loads(data), "", []
    if api == "anthropic":
        for block in body["content"]:
            text += block.get("text", "")
            if block["type"] == "tool_use":
                calls.append({"id": block["id"], "name": block["name"], "arguments": block["input"]})
        assert body["stop_reason"] == ("tool_use" if calls else "end_turn")
    elif api == "chat":
        message = body["choices"][0]["message"]
        text = message["content"] or ""
        calls = [
            {"id": one["id"], "name": one["function"]["name"], "arguments": json.loads(one["function"]["arguments"])}
            for one in message.get("tool_calls", [])
        ]
        assert body["choices"][0]["finish_reason"] == ("tool_calls" if calls else "stop")
    elif api == "responses":
        for item in body["output"]:
            if item["type"] == "message":
                text += item["content"][0]["text"]
            else:
                calls.append({"id": item["call_id"], "name": item["name"], "arguments": json.loads(item["arguments"])})
        assert body["status"] == "completed"
    else:
        for part in body["candidates"][0]["content"]["parts"]:
            text += part.get("text", "")
            if "functionCall" in part:
                one = part["functionCall"]
                calls.append({"id": one["id"], "name": one["name"], "arguments": one["args"]})
    return {"text": text, "calls": calls}


def heard_in_stream(api: str, data: bytes) -> dict:
    text, calls, arguments = "", {}, {}
    for one in parsed(data):
        if api == "anthropic":
            at, block, delta = one.get("index"), one.get("content_block", {}), one.get("delta", {})
            if block.get("type") == "tool_use":
                assert block["input"] == {}
                calls[at] = {"id": block["id"], "name": block["name"]}
            text += delta.get("text", "")
            arguments[at] = arguments.get(at, "") + delta.get("partial_json", "")
        elif api == "chat":
            for choice in one["choices"]:
                text += choice["delta"].get("content") or ""
                for call in choice["delta"].get("tool_calls", []):
                    at = call["index"]
                    if "id" in call:
                        calls[at] = {"id": call["id"], "name": call["function"]["name"]}
                    arguments[at] = arguments.get(at, "") + call["function"]["arguments"]
        elif api == "responses":
            at = one.get("output_index")
            if one["type"] == "response.output_item.added" and one["item"]["type"] == "function_call":
                calls[at] = {"id": one["item"]["call_id"], "name": one["item"]["name"]}
            text += one["delta"] if one["type"] == "response.output_text.delta" else ""
            if one["type"] == "response.function_call_arguments.delta":
                arguments[at] = arguments.get(at, "") + one["delta"]
        else:
            for part in one["candidates"][0]["content"]["parts"]:
                text += part.get("text", "")
                if "functionCall" in part:
                    call = part["functionCall"]
                    calls[call["id"]] = {"id": call["id"], "name": call["name"]}
                    arguments[call["id"]] = json.dumps(call["args"])
    return {"text": text, "calls": [call | {"arguments": json.loads(arguments[at])} for at, call in calls.items()]}


async def asked(
    mock: Mock, method: str, target: str, body: dict | bytes = b"", headers: list | None = None
) -> tuple[int, dict, list[bytes]]:
    """Status, headers and chunks of an answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with mock.ask(method, target, headers or [], data) as answer:
        return answer.status, dict(answer.headers), [chunk async for chunk in answer.chunks()]


def answer(
    target: str, body: dict | bytes, mock: Mock | None = None, method: str = "POST", headers: list | None = None
) -> bytes:
    status, _, chunks = asyncio.run(asked(mock or Mock(), method, target, body, headers))
    assert status == 200
    return b"".join(chunks)


def said_by(api: str, prompt: str, rounds: list | None = None, tools: list | None = None) -> dict:
    return heard(api, True, answer(target_of(api, True), body_of(api, prompt, tools=tools, rounds=rounds)))


def commands(said: dict) -> list[str]:
    return [one["arguments"]["command"] for one in said["calls"]]


# ---------------------------------------------------------------- scripts


def steps(*groups: str | tuple[str, ...], last: str = "done") -> tuple[Step, ...]:
    return (*(Step(commands=(one,) if isinstance(one, str) else one) for one in groups), Step(text=last))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$ echo one >> log\n$ echo two\n> finished", steps("echo one >> log", "echo two", last="finished")),
        ("$ ls", steps("ls")),
        ("> hello", steps(last="hello")),
        ("> a\n> b", steps(last="a\nb")),
        ("$ echo one >> log ;; $ echo two >> log ;; > finished", steps("echo one >> log", "echo two >> log", last="finished")),
        ("$ case x in x) echo y ;; esac", steps("case x in x) echo y ;; esac")),
        ("$ a ;; $& b ;; $& c ;; $ d", steps("a", ("b", "c"), "d")),
        ("$& a\n$& b\n\n$& c", steps(("a", "b"), "c")),
        ("$ echo note: > file", steps("echo note: > file")),
        ("Please solve this issue: $ a ;; > b\n\nYou can execute commands.", steps("a", last="b")),
        ('"$ echo \\"x\\" ;; > b"', steps('echo "x"', last="b")),
        ('Task: "$ a ;; > b"', steps("a", last="b")),
        ("<task>\n$ a\n> b\n</task>", steps("a", last="b")),
        ("<user_query>$ a\n> b</user_query>\nBe quick.", steps("a", last="b")),
        ("<system-reminder>\n$ no\n> no\n</system-reminder>\n$ a", steps("a")),
        ("  $ a\r\n\t> b  ", steps("a", last="b")),
        ("It costs $5 -> more ~ 3", ()),
        ("~ soon", ()),
        ("", ()),
    ],
)  # fmt: skip
def test_a_script_is_found_whatever_a_client_wraps_it_in(text, expected):
    assert parse(text) == expected


def test_text_and_waits_belong_to_the_answer_after_them():
    assert parse("~ 2.5\n> look\n$ a\n~ 1 ;; > end") == (
        Step(commands=("a",), text="look", wait=2.5),
        Step(text="end", wait=1.0),
    )


def test_the_newest_script_counts_and_its_results_only():
    said = (
        Said("user", "$ a"),
        Said("model", ""),
        Said("result", ""),
        Said("user", "$ b\n$ c"),
        Said("model", ""),
        Said("result", ""),
        Said("result", ""),
        Said("user", "go on"),
    )
    found, number = find(said)
    assert (found, number) == (steps("b", "c"), 1)


# ---------------------------------------------------------------- the four APIs


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("api", PATHS)
def test_a_script_is_played_to_its_end_in_every_api(api, stream):
    rounds = []
    for number in range(3):
        said = heard(api, stream, answer(target_of(api, stream), body_of(api, PROMPT, stream, rounds=rounds)))
        rounds.append(said)
        assert commands(said) == [["echo one >> log"], ["echo two", "echo three"], []][number]
        assert said["text"] == ["I look, Grüße.", "", "finished"][number]
    assert len({one["id"] for said in rounds for one in said["calls"]}) == 3


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("api", PATHS)
def test_an_equal_conversation_gets_equal_bytes_from_a_model_that_was_started_again(api, stream):
    body = body_of(api, PROMPT, stream)
    assert answer(target_of(api, stream), body) == answer(target_of(api, stream), body)
    assert answer(target_of(api, stream), body) != answer(target_of(api, stream), body_of(api, PROMPT + "!", stream))


@pytest.mark.parametrize("api", PATHS)
def test_a_stream_comes_in_several_events_that_never_hold_two(api):
    _, headers, chunks = asyncio.run(asked(Mock(), "POST", target_of(api, True), body_of(api, PROMPT)))
    assert headers["Content-Type"].startswith("text/event-stream")
    assert len(chunks) > 4
    assert all(len(chunk.replace(b"\r\n", b"\n").split(b"\n\n")) == 2 for chunk in chunks)


@pytest.mark.parametrize("api", ["anthropic", "chat", "responses"])
def test_the_arguments_of_a_call_are_spread_over_several_events(api):
    _, _, chunks = asyncio.run(
        asked(Mock(), "POST", target_of(api, True), body_of(api, "$ echo 0123456789012345678901234567890123456789"))
    )
    marks = {"anthropic": b"input_json_delta", "chat": b'"arguments":', "responses": b"arguments.delta"}
    assert sum(marks[api] in chunk for chunk in chunks) > 3


def test_ids_are_the_same_in_a_stream_and_whole():
    for api in PATHS:
        stream, whole = (
            heard(api, one, answer(target_of(api, one), body_of(api, PROMPT, one))) for one in (True, False)
        )
        assert stream == whole


def test_gemini_without_alt_sse_is_a_list():
    chunks = json.loads(answer("/v1beta/models/m:streamGenerateContent", body_of("gemini", PROMPT)))
    assert len(chunks) > 2
    assert chunks[-1]["candidates"][0]["finishReason"] == "STOP"


def test_the_tokens_used_are_said_in_a_chat_stream_only_if_they_are_asked_for():
    body = body_of("chat", "$ ls")
    assert b'"usage":{' in answer(PATHS["chat"], body)
    del body["stream_options"]
    assert b"usage" not in answer(PATHS["chat"], body)


@pytest.mark.parametrize("api", PATHS)
def test_without_a_script_there_is_one_text(api):
    said = said_by(api, "What is the time?")
    assert said == {"text": GREETING, "calls": []}


@pytest.mark.parametrize("api", PATHS)
def test_requests_without_tools_are_helpers_and_get_a_short_text(api):
    told: list[Asked] = []
    data = answer(target_of(api, True), body_of(api, "<session>$ rm -r /</session>", tools=[]), Mock(told=told.append))
    assert heard(api, True, data) == {"text": HELPER, "calls": []}
    assert [(one.kind, one.wire) for one in told] == [("helper", api)]


def test_a_helper_that_wants_json_gets_what_its_schema_takes():
    schema = {
        "type": "object",
        "properties": {"title": {"type": "string"}, "new": {"type": "boolean"}},
        "required": ["title", "new"],
    }
    asked_by = {
        "anthropic": {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
        "chat": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        "responses": {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}},
        "gemini": {"generationConfig": {"responseMimeType": "application/json", "responseJsonSchema": schema}},
    }
    for api, more in asked_by.items():
        said = heard(api, False, answer(target_of(api, False), body_of(api, "hi", False, tools=[]) | more))
        assert json.loads(said["text"]) == {"title": HELPER, "new": False}


# ---------------------------------------------------------------- the tools of clients

EXPECTED = {
    "claude-code": ("Bash", {"command": "ls"}),
    "codex": ("exec_command", {"cmd": "ls"}),
    "codex-arrays": ("shell", {"command": ["bash", "-lc", "ls"]}),
    "gemini-cli": ("run_shell_command", {"command": "ls"}),
    "opencode": ("bash", {"command": "ls"}),
    "mini-swe-agent": ("bash", {"command": "ls"}),
    "inspect-ai-anthropic": ("bash", {"command": "ls"}),
    "inspect-ai-chat": ("bash", {"command": "ls"}),
    "inspect-ai-responses": ("bash", {"command": "ls"}),
    "agents-sdk": ("in_the_box", {"line": "ls"}),
    "openhands": ("terminal", {"command": "ls", "security_risk": "LOW"}),
}


@pytest.mark.parametrize("client", EXPECTED)
def test_each_client_is_called_by_its_own_tool(client):
    path, tools = TOOLS[client]["path"], TOOLS[client]["tools"]
    said = heard(api_of(path), True, answer(path, body_of(api_of(path), "$ ls", tools=tools)))
    assert [(one["name"], one["arguments"]) for one in said["calls"]] == [EXPECTED[client]]


@pytest.mark.parametrize("client", ["inspect-ai-anthropic", "inspect-ai-chat", "inspect-ai-responses", "openhands"])
def test_the_final_text_goes_through_a_tool_that_takes_it(client):
    path, tools = TOOLS[client]["path"], TOOLS[client]["tools"]
    said = said_by(api_of(path), "> the end", tools=tools)
    name, field = ("finish", "message") if client == "openhands" else ("submit", "answer")
    assert [(one["name"], one["arguments"]) for one in said["calls"]] == [(name, {field: "the end"})]


@pytest.mark.parametrize(
    ("client", "kind", "field", "expected"),
    [
        (
            "codex-local-shell",
            "local_shell_call",
            "action",
            {"type": "exec", "command": ["bash", "-lc", "ls"], "env": {}, "timeout_ms": 60000},
        ),
        ("codex-custom", "custom_tool_call", "input", "ls"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_tools_that_are_no_functions_are_called_in_their_own_shape(client, kind, field, expected, stream):
    body = body_of("responses", "$ ls\n> end", stream, tools=TOOLS[client]["tools"])
    data = answer(PATHS["responses"], body)
    response = parsed(data)[-1]["response"] if stream else json.loads(data)
    [item] = response["output"]
    assert (item["type"], item[field]) == (kind, expected)
    body["input"] += [item, {"type": f"{kind}_output", "call_id": item["call_id"], "output": "ok"}]
    assert b'"end"' in answer(PATHS["responses"], body)


def test_the_bash_tool_that_anthropic_defines_needs_no_schema():
    assert commands(said_by("anthropic", "$ ls", tools=[{"type": "bash_20250124", "name": "bash"}])) == ["ls"]


def test_without_a_shell_the_answer_says_so():
    assert "web_search" in said_by("responses", "$ ls", tools=[{"type": "web_search"}])["text"]


def test_mini_swe_agent_ends_by_a_command_that_prints_its_mark():
    prompt = f"Please solve this issue: $ ls ;; > it's done\n\nTo finish, run `echo {SUBMIT}`."
    tools = TOOLS["mini-swe-agent"]["tools"]
    first = said_by("chat", prompt, tools=tools)
    last = said_by("chat", prompt, [first], tools)
    printed = subprocess.run(["bash", "-c", *commands(last)], capture_output=True, text=True, check=True).stdout
    assert printed == f"{SUBMIT}\nit's done\n"


@pytest.mark.parametrize("api", ["chat", "anthropic"])
def test_mini_swe_agent_without_tools_gets_commands_in_the_text(api):
    messages = [
        {"role": "system", "content": f"Answer with one {FENCE} block."},
        {"role": "user", "content": "Task: $ cat notes ;; $ ls ;; > end"},
    ]
    got = []
    for _ in range(3):
        said = heard(api, False, answer(PATHS[api], {"model": "m", "messages": messages}))["text"]
        got.append(said.split(FENCE + "\n")[1].removesuffix("\n```"))
        # What a command prints is no script.
        messages += [
            {"role": "assistant", "content": said},
            {"role": "user", "content": "<output>\n$ not a step\n</output>"},
        ]
    assert got == ["cat notes", "ls", f"echo {SUBMIT} && echo end"]


def test_arguments_that_a_schema_demands_are_filled():
    schema = {
        "type": "OBJECT",
        "properties": {
            "cmd": {"type": "STRING"},
            "description": {"type": "STRING"},
            "timeout_ms": {"type": "INTEGER"},
            "quiet": {"type": "boolean"},
            "where": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "options": {"type": "object", "properties": {"n": {"type": "number", "minimum": 3}}, "required": ["n"]},
            "more": {"type": "array"},
        },
        "required": ["cmd", "description", "timeout_ms", "quiet", "where", "options", "more"],
    }
    call = command(Tool("x", schema=schema), "ls")
    assert call.arguments == {
        "cmd": "ls",
        "description": "scripted",
        "timeout_ms": 60000,
        "quiet": False,
        "where": None,
        "options": {"n": 3},
        "more": [],
    }
    assert value("x", {"enum": ["a", "b"], "default": "b"}) == "b"


def test_a_finishing_tool_is_never_taken_for_a_shell():
    submit = Tool("submit", schema={"properties": {"answer": {"type": "string"}}, "required": ["answer"]})
    assert shell([submit]) is None
    call = finish([Tool("finish")], "x")
    assert call and call.arguments == {}


# ---------------------------------------------------------------- what else clients ask


@pytest.mark.parametrize(
    ("method", "path", "headers", "field"),
    [
        ("POST", "/v1/messages/count_tokens?beta=true", [], "input_tokens"),
        ("GET", "/v1/models", [], "object"),
        ("GET", "/v1/models", [("anthropic-version", "2023-06-01")], "has_more"),
        ("GET", "/v1beta/models", [], "models"),
        ("GET", "/v1/models/some-model", [], "id"),
        ("POST", "/v1beta/models/m:countTokens", [], "totalTokens"),
        ("POST", "/v1beta/models/m:embedContent", [], "embedding"),
        ("POST", "/v1/embeddings", [], "data"),
        ("HEAD", "/", [], "status"),
        ("GET", "/api/hello", [], "status"),
    ],
)
def test_probes_get_small_answers_and_are_told_of(method, path, headers, field):
    told: list[Asked] = []
    assert field in json.loads(
        answer(path, {"input": ["a"]} if method == "POST" else b"", Mock(told=told.append), method, headers)
    )
    assert [(one.kind, one.wire, one.path) for one in told] == [("other", "", path.partition("?")[0])]


def test_a_key_in_the_address_is_not_told():
    told: list[Asked] = []
    answer("/v1beta/models/m:generateContent?key=secret", body_of("gemini", "hi"), Mock(told=told.append))
    assert b"secret" not in msgspec.json.encode(told)


def test_a_body_may_be_compressed_or_come_in_parts():
    body = json.dumps(body_of("chat", "$ ls")).encode()
    plain = answer(PATHS["chat"], body)
    assert answer(PATHS["chat"], gzip.compress(body), headers=[("Content-Encoding", "gzip")]) == plain

    async def parts():
        for at in range(0, len(body), 100):
            yield body[at : at + 100]

    async def whole() -> bytes:
        async with Mock().ask("POST", PATHS["chat"], [], parts()) as got:
            return b"".join([chunk async for chunk in got.chunks()])

    assert asyncio.run(whole()) == plain


@pytest.mark.parametrize("api", PATHS)
@pytest.mark.parametrize("body", [b"{", b"\xff", b"nonsense"])
def test_what_is_no_json_is_refused_in_words(api, body):
    status, _, chunks = asyncio.run(asked(Mock(), "POST", target_of(api, False), body))
    assert status == 400
    assert "cannot be read" in str(json.loads(b"".join(chunks))["error"])


@pytest.mark.parametrize("api", PATHS)
@pytest.mark.parametrize(
    "junk", [None, 3, "x", [], {}, [3], [{"role": 3, "content": {"a": 1}, "parts": [None], "type": 7}]]
)
def test_unexpected_fields_do_no_harm(api, junk):
    fields = (
        "messages",
        "input",
        "contents",
        "tools",
        "system",
        "instructions",
        "systemInstruction",
        "text",
        "response_format",
        "generationConfig",
    )
    body = dict.fromkeys(fields, junk) | {"model": junk}
    said = json.loads(answer(target_of(api, False), body))
    assert isinstance(said, dict) and "error" not in {key for key, value in said.items() if value}


def test_an_unknown_path_is_not_found():
    status, _, _ = asyncio.run(asked(Mock(), "GET", "/v1/nothing"))
    assert status == 404


# ---------------------------------------------------------------- faults


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("api", PATHS)
@pytest.mark.parametrize(("kind", "error"), [("cut", aiohttp.ClientPayloadError), ("rst", ConnectionResetError)])
def test_a_cut_answer_is_the_beginning_of_the_whole_one(api, stream, kind, error):
    target, body = target_of(api, stream), body_of(api, PROMPT, stream)
    got: list[bytes] = []

    async def cut() -> None:
        async with Mock([Fault(nth=1, kind=kind, after=2)]).ask("POST", target, [], json.dumps(body).encode()) as one:
            async for chunk in one.chunks():
                got.append(chunk)

    with pytest.raises(error):
        asyncio.run(cut())
    assert got == asyncio.run(asked(Mock(), "POST", target, body))[2][:2]


@pytest.mark.parametrize(("after", "left"), [(0, None), (-1, 1), (-999, None), (999, 0)])
def test_a_cut_is_counted_from_either_end(after, left):
    whole = asyncio.run(asked(Mock(), "POST", PATHS["chat"], body_of("chat", "$ ls")))[2]
    got: list[bytes] = []

    async def cut() -> None:
        async with Mock([Fault(nth=1, kind="cut", after=after)]).ask(
            "POST", PATHS["chat"], [], json.dumps(body_of("chat", "$ ls")).encode()
        ) as one:
            async for chunk in one.chunks():
                got.append(chunk)

    with pytest.raises(aiohttp.ClientPayloadError):
        asyncio.run(cut())
    assert got == (whole[: len(whole) - left] if left is not None else [])


@pytest.mark.parametrize("api", PATHS)
def test_a_refusal_hits_the_main_loop_only_and_as_often_as_it_is_told(api):
    told: list[Asked] = []
    mock = Mock([Fault(nth=2, kind="status", status=429, headers={"retry-after": "3"}, times=2)], told.append)
    main, helper = body_of(api, PROMPT), body_of(api, PROMPT, tools=[])

    async def run() -> list[tuple[int, dict, list[bytes]]]:
        return [
            await asked(mock, "POST", target_of(api, True), body) for body in (main, helper, main, helper, main, main)
        ]

    answers = asyncio.run(run())
    assert [status for status, _, _ in answers] == [200, 200, 429, 200, 429, 200]
    assert answers[2][1]["retry-after"] == "3"
    assert "error" in json.loads(b"".join(answers[2][2]))
    assert [one.fault for one in told] == ["", "", "status", "", "status", ""]


def test_a_stall_pauses_an_answer_and_a_wait_delays_it():
    async def run(prompt: str, faults: list[Fault]) -> list[float]:
        began, times = time.monotonic(), []
        async with Mock(faults).ask("POST", PATHS["chat"], [], json.dumps(body_of("chat", prompt)).encode()) as one:
            async for _ in one.chunks():
                times.append(time.monotonic() - began)
        return times

    stalled = asyncio.run(run("$ ls", [Fault(nth=1, kind="stall", after=2, seconds=0.2)]))
    assert stalled[2] - stalled[1] > 0.19
    assert asyncio.run(run("~ 0.2 ;; $ ls", []))[0] > 0.19


# ---------------------------------------------------------------- the server


@pytest.fixture
def served(tmp_path):
    """Starts servers; gives address, process and log of each."""
    running = []

    def start(faults: str = "[]", log: str = "log") -> tuple[str, subprocess.Popen, Path]:
        arguments = [sys.executable, "-m", "crab.turns.mock", "0", "--log", str(tmp_path / log), "--faults", faults]
        source = str(Path(application.__code__.co_filename).parents[3])
        process = subprocess.Popen(
            arguments, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": source}
        )
        running.append(process)
        assert process.stdout
        return process.stdout.readline().strip(), process, tmp_path / log

    yield start
    for process in running:
        process.kill()
        process.wait()
        process.stdout.close()


def post(base: str, path: str, body: dict) -> bytes:
    request = urllib.request.Request(base + path, json.dumps(body).encode(), {"Authorization": "Bearer sk-secret"})
    with urllib.request.urlopen(request) as response:
        return response.read()


def test_the_server_says_what_the_model_says_and_logs_no_headers(served):
    base, process, log = served()
    body = body_of("chat", PROMPT)
    assert post(base, PATHS["chat"] + "?key=sk-secret", body) == answer(PATHS["chat"], body)
    with urllib.request.urlopen(urllib.request.Request(base, method="HEAD")) as response:
        assert response.status == 200
    first, second = (json.loads(line) for line in log.read_text().splitlines())
    assert first == {
        "number": 1,
        "path": PATHS["chat"],
        "wire": "chat",
        "kind": "main",
        "step": 0,
        "line": "echo one >> log",
        "size": len(json.dumps(body)),
        "fault": "",
    }
    assert second["kind"] == "other"
    assert "secret" not in log.read_text()
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0


@pytest.mark.parametrize("kind", ["cut", "rst"])
def test_the_server_breaks_the_connection_in_the_middle(served, kind):
    base, _, _ = served(json.dumps([{"nth": 1, "kind": kind, "after": 2}]))

    async def run() -> tuple[bytes, BaseException]:
        got = b""
        async with aiohttp.ClientSession() as session:
            async with session.post(base + PATHS["chat"], json=body_of("chat", PROMPT)) as response:
                with pytest.raises((aiohttp.ClientError, ConnectionResetError)) as raised:
                    async for data in response.content.iter_any():
                        got += data
        return got, raised.value

    got, error = asyncio.run(run())
    whole = answer(PATHS["chat"], body_of("chat", PROMPT))
    assert whole.startswith(got)
    assert kind == "rst" or got == b"".join(
        asyncio.run(asked(Mock(), "POST", PATHS["chat"], body_of("chat", PROMPT)))[2][:2]
    )
    assert ("reset" in f"{error} {error.__cause__}".lower()) == (kind == "rst")
    post(base, PATHS["chat"], body_of("chat", PROMPT))


def test_the_server_refuses_with_the_headers_it_was_given(served):
    base, _, _ = served('[{"nth": 1, "kind": "status", "status": 529, "headers": {"retry-after": "7"}}]')
    with pytest.raises(urllib.error.HTTPError) as raised:
        post(base, PATHS["anthropic"], body_of("anthropic", PROMPT))
    assert (raised.value.code, raised.value.headers["retry-after"]) == (529, "7")
    assert json.loads(raised.value.read())["error"]["type"] == "overloaded_error"


def test_faults_that_make_no_sense_are_refused(served):
    base, process, _ = served('[{"nth": 1, "kind": "melt"}]')
    assert base == ""
    assert process.wait(10) == 2
