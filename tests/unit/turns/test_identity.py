"""Identity: what makes two requests the same question, and what does not."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crab.turns import identity, wires
from crab.turns.identity import Calls, canonical, chain, link, plain, root
from crab.turns.wires.wire import Ask

REQUESTS = Path(__file__).with_name("requests")
WIRES = {wire.name: wire for wire in wires.ALL}
PATHS = {
    "anthropic": "/v1/messages",
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "gemini": "/v1beta/models/m:generateContent",
}


def ask(name: str, body: dict[str, Any], path: str = "") -> Ask:
    return WIRES[name].read(path or PATHS[name], json.dumps(body).encode())


def recorded(name: str) -> tuple[str, dict[str, Any], str]:
    sample = json.loads((REQUESTS / f"{name}.json").read_text())
    wire = wires.find("POST", sample["path"].partition("?")[0])
    assert wire
    return wire.name, sample["body"], sample["path"]


def last(name: str, body: dict[str, Any]) -> bytes:
    return chain(ask(name, body))[-1]


# ---------------------------------------------------------------- real clients


@pytest.mark.parametrize(
    ("first", "next_"),
    [
        ("claude-code-main-first", "claude-code-main-after-tool"),
        ("codex-first", "codex-after-tool"),
        ("gemini-cli-first", "gemini-cli-after-tool"),
        ("mini-swe-agent-first", "mini-swe-agent-after-tool"),
        ("opencode-main-first", "opencode-retry-after-cut"),
        ("opencode-retry-after-cut", "opencode-tool-aborted-by-cut"),
    ],
)  # fmt: skip
def test_a_request_is_the_beginning_of_the_next_one_of_its_agent(first: str, next_: str) -> None:
    one, other = chain(ask(*recorded(first))), chain(ask(*recorded(next_)))
    assert other[: len(one)] == one and len(other) > len(one)


@pytest.mark.parametrize("name", sorted(path.stem for path in REQUESTS.glob("*.json")))
def test_a_request_sent_again_without_stream_asks_the_same(name: str) -> None:
    wire, body, path = recorded(name)
    again = {key: value for key, value in body.items() if key != "stream"}
    assert chain(ask(wire, body, path)) == chain(ask(wire, again, path))


def test_requests_of_different_loops_are_different() -> None:
    main, sub, title = (
        chain(ask(*recorded(f"claude-code-{name}"))) for name in ("main-first", "sub-agent", "helper-title")
    )
    assert not set(main) & set(sub) and not set(main) & set(title)


# ---------------------------------------------------------------- any conversation, as each wire says it

word = st.text('abc xyz\n"\\🦀<', min_size=1, max_size=8)
step = st.tuples(st.sampled_from(["user", "model", "calls"]), st.lists(word, min_size=1, max_size=3))
conversation = st.tuples(word, st.lists(step, min_size=1, max_size=4).map(lambda steps: [("user", ["go"]), *steps]))
noise = st.fixed_dictionaries({
    "id": st.text("0123456789abcdef", min_size=4, max_size=4), "marked": st.booleans(), "blocks": st.booleans(),
    "thought": st.sampled_from([None, "hm", "so"]), "day": st.integers(1, 28), "uuid": st.uuids(), "stream": st.booleans(),
})  # fmt: skip


def anthropic(said: Any, n: dict[str, Any]) -> dict[str, Any]:
    mark: dict[str, Any] = {"cache_control": {"type": "ephemeral"}} if n["marked"] else {}

    def block(text: str) -> Any:
        return [{"type": "text", "text": text, **mark}] if n["blocks"] else text

    messages: list[Any] = []
    for at, (kind, words) in enumerate(said[1]):
        if kind == "user":
            messages.append({"role": "user", "content": block(words[0])})
        elif kind == "model":
            thought = [{"type": "thinking", "thinking": n["thought"], "signature": n["id"]}] if n["thought"] else []
            messages.append({"role": "assistant", "content": [*thought, *({"type": "text", "text": w} for w in words)]})
        else:
            ids = [f"toolu_{n['id']}_{at}_{i}" for i in range(len(words))]
            messages.append(
                {
                    "role": "assistant",
                    "content": [
                        {"type": "tool_use", "id": i, "name": "f", "input": {"id": w}}
                        for i, w in zip(ids, words, strict=True)
                    ],
                }
            )
            messages.append(
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": i, "content": block(w), **mark}
                        for i, w in zip(ids, words, strict=True)
                    ],
                }
            )
    return {"model": "m", "system": block(system(said[0], n)), "messages": messages, "stream": n["stream"]}


def chat(said: Any, n: dict[str, Any]) -> dict[str, Any]:
    def block(text: str) -> Any:
        return [{"type": "text", "text": text}] if n["blocks"] else text

    messages: list[Any] = [{"role": "system", "content": block(system(said[0], n))}]
    for at, (kind, words) in enumerate(said[1]):
        if kind == "user":
            messages.append({"role": "user", "content": block(words[0])})
        elif kind == "model":
            thought = {"reasoning_content": n["thought"]} if n["thought"] else {}
            messages.append({"role": "assistant", "content": block("".join(words)), **thought})
        else:
            ids = [f"call_{n['id']}_{at}_{i}" for i in range(len(words))]
            calls = [
                {"id": i, "type": "function", "function": {"name": "f", "arguments": w}}
                for i, w in zip(ids, words, strict=True)
            ]
            messages.append({"role": "assistant", "content": None if n["blocks"] else "", "tool_calls": calls})
            messages += [
                {"role": "tool", "tool_call_id": i, "content": block(w)} for i, w in zip(ids, words, strict=True)
            ]
    return {"model": "m", "messages": messages, "stream": n["stream"]}


def responses(said: Any, n: dict[str, Any]) -> dict[str, Any]:
    items: list[Any] = []
    for at, (kind, words) in enumerate(said[1]):
        if kind == "user":
            content = [{"type": "input_text", "text": words[0]}] if n["blocks"] else words[0]
            items.append({"role": "user", "content": content} | ({"type": "message"} if n["marked"] else {}))
        elif kind == "model":
            if n["thought"]:
                items.append(
                    {"type": "reasoning", "id": f"rs_{n['id']}", "summary": [], "encrypted_content": n["thought"]}
                )
            items.append(
                {
                    "type": "message",
                    "id": f"msg_{n['id']}",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": w} for w in words],
                }
            )
        else:
            ids = [f"call_{n['id']}_{at}_{i}" for i in range(len(words))]
            status = {"status": "completed"} if n["marked"] else {}
            items += [
                {"type": "function_call", "id": f"fc_{i}", "call_id": i, "name": "f", "arguments": w, **status}
                for i, w in zip(ids, words, strict=True)
            ]
            items += [
                {"type": "function_call_output", "call_id": i, "output": w} for i, w in zip(ids, words, strict=True)
            ]
    return {
        "model": "m",
        "instructions": system(said[0], n),
        "input": items,
        "stream": n["stream"],
        "prompt_cache_key": n["id"],
    }


def gemini(said: Any, n: dict[str, Any]) -> dict[str, Any]:
    seal = {"thoughtSignature": n["id"]} if n["marked"] else {}
    contents: list[Any] = []
    for at, (kind, words) in enumerate(said[1]):
        if kind == "user":
            contents.append({"parts": [{"text": words[0]}]} | ({"role": "user"} if n["blocks"] else {}))
        elif kind == "model":
            thought = [{"text": n["thought"], "thought": True}] if n["thought"] else []
            contents.append({"role": "model", "parts": [*thought, *({"text": w} for w in words)]})
        else:
            ids = [f"{n['id']}_{at}_{i}" for i in range(len(words))]
            contents.append(
                {
                    "role": "model",
                    "parts": [
                        {"functionCall": {"id": i, "name": "f", "args": {"id": w}}, **seal}
                        for i, w in zip(ids, words, strict=True)
                    ],
                }
            )
            contents.append(
                {
                    "role": "user",
                    "parts": [
                        {"functionResponse": {"id": i, "name": "f", "response": {"id": w}}}
                        for i, w in zip(ids, words, strict=True)
                    ],
                }
            )
    return {"systemInstruction": {"parts": [{"text": system(said[0], n)}]}, "contents": contents}


def system(text: str, n: dict[str, Any]) -> str:
    return f"{text}\nToday's date: 2026-11-{n['day']:02}\nSession {n['uuid']}, now 2026-11-{n['day']:02}T10:00:{n['day']:02}Z"


SAY: dict[str, Callable[[Any, dict[str, Any]], dict[str, Any]]] = {
    "anthropic": anthropic,
    "chat": chat,
    "responses": responses,
    "gemini": gemini,
}
names = st.sampled_from(sorted(SAY))


@given(names, conversation, noise, noise)
def test_nothing_volatile_changes_the_identity(
    name: str, said: Any, one: dict[str, Any], other: dict[str, Any]
) -> None:
    assert chain(ask(name, SAY[name](said, one))) == chain(ask(name, SAY[name](said, other)))


@given(names, conversation, noise, st.data())
def test_every_text_is_part_of_the_identity(name: str, said: Any, n: dict[str, Any], data: st.DataObject) -> None:
    changed = copy.deepcopy(said)
    kind, words = data.draw(st.sampled_from(changed[1]))
    at = 0 if kind == "user" else data.draw(st.integers(0, len(words) - 1))
    words[at] += "!"
    assert last(name, SAY[name](said, n)) != last(name, SAY[name](changed, n))
    assert last(name, SAY[name](said, n)) != last(name, SAY[name]((said[0] + "!", said[1]), n))


@given(names, conversation, noise, noise)
def test_a_shorter_conversation_is_the_beginning_of_a_longer_one(
    name: str, said: Any, one: dict[str, Any], other: dict[str, Any]
) -> None:
    longer = (said[0], [*said[1], ("calls", ["a", "b"]), ("user", ["more"])])
    short, whole = chain(ask(name, SAY[name](said, one))), chain(ask(name, SAY[name](longer, other)))
    assert whole[: len(short)] == short and len(set(whole)) == len(whole)


@pytest.mark.parametrize("name", SAY)
def test_which_result_belongs_to_which_call_is_part_of_the_identity(name: str) -> None:
    n = {"id": "0", "marked": False, "blocks": True, "thought": None, "day": 1, "uuid": "", "stream": True}
    body = SAY[name](("s", [("user", ["go"]), ("calls", ["a", "b"])]), n)
    text = json.dumps(body)
    crossed = (
        text[: text.rindex("0_1_0")]
        + "0_1_1"
        + text[text.rindex("0_1_0") + 5 : text.rindex("0_1_1")]
        + "0_1_0"
        + text[text.rindex("0_1_1") + 5 :]
    )
    assert last(name, body) != last(name, json.loads(crossed))


# ---------------------------------------------------------------- single rules


def test_wire_and_model_are_part_of_the_identity() -> None:
    assert root("chat", "a") != root("chat", "b") != root("responses", "b")
    assert root("a", "bc") != root("ab", "c")


def test_a_link_is_no_link_of_another_split() -> None:
    parent = root("chat", "m")
    assert link(parent, b"ab") != link(link(parent, b"a"), b"b")
    assert link(parent, b"") != parent and len(link(parent, b"x")) == 32


def test_a_conversation_that_the_server_keeps_is_part_of_the_identity() -> None:
    asked = [
        last("responses", {"input": "a", **more})
        for more in ({}, {"previous_response_id": "resp_1"}, {"previous_response_id": "resp_2"}, {"conversation": "c"})
    ]
    assert len(set(asked)) == 4
    assert last("responses", {"input": "a", "conversation": {"id": "c"}}) == asked[3]
    assert last("responses", {"input": [{"type": "item_reference", "id": "a"}]}) != last(
        "responses", {"input": [{"type": "item_reference", "id": "b"}]}
    )


def test_an_id_that_comes_twice_is_two_calls() -> None:
    calls = Calls()
    assert [calls.made("a"), calls.answered("a"), calls.made("a"), calls.answered("a"), calls.answered("b")] == [
        1,
        1,
        2,
        2,
        0,
    ]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Today's date is Monday, November 30, 2026 (formatted by locale).", "Today's date is Tuesday, December 1, 2026 (formatted by locale)."),
        ("Today's date: Mon Nov 30 2026\nx", "Today's date: Tue Dec 1 2026\nx"),
        ("<current_date>2026-11-30</current_date>", "<current_date>2027-01-01</current_date>"),
        ("It is 2026-11-30T10:00:00.123Z", "It is 2026-12-01 11:30:00+01:00"),
        ("on 30.11.2026 at 10:00:00", "on 1.12.2026 at 9:15:59 PM"),
        ("in /tmp/claude-0/-work/1b4e28ba-2fa1-11d2-883f-0016d3cca427/scratchpad", "in /tmp/claude-0/-work/00000000-2fa1-11d2-883f-0016d3cca427/scratchpad"),
        ("in /tmp/tmpab12cd_e/x", "in /tmp/tmpzz99yy_x/x"),
        ("in /tmp/tmp.aB3dE6gH9k", "in /tmp/tmp.0000000000"),
        ("in /tmp/build-aB3dE6/x", "in /tmp/build-Zz9yX1/x"),
        ("x-anthropic-billing-header: cc_version=2.1.197.ed5; cch=1;", "x-anthropic-billing-header: cc_version=2.1.197.532; cch=2;"),
        ("This is the git status at the start of the conversation. Snapshot.\nStatus:\nM a", "This is the git status at the start of the conversation. Snapshot.\nStatus:\n(clean)"),
        ("/work/\n├───a.txt\n│   └───b\nend", "/work/\n├───new.txt\nend"),
    ],
)  # fmt: skip
def test_instructions_that_differ_in_times_and_snapshots_only_are_the_same(one: str, other: str) -> None:
    assert plain(one) == plain(other)
    assert last("anthropic", {"system": one, "messages": [{"role": "user", "content": "x"}]}) == last(
        "anthropic", {"system": other, "messages": [{"role": "user", "content": "x"}]}
    )
    for tag in ("system-reminder", "environment_context", "session_context", "env"):
        a, b = ([{"role": "user", "content": f"do\n<{tag}>\n{text}\n</{tag}>"}] for text in (one, other))
        assert last("chat", {"messages": a}) == last("chat", {"messages": b})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("version 1.2.3", "version 1.2.4"),
        ("use /tmp/target", "use /tmp/result"),
        ("use /work/tmpab12cd_e", "use /work/tmpzz99yy_x"),
        ("at most 3 files", "at most 4 files"),
        ("<env>2026-11-30</env> a", "<env>2026-11-30</env> b"),
    ],
)
def test_everything_else_in_instructions_counts(one: str, other: str) -> None:
    assert plain(one) != plain(other)


def test_what_users_and_tools_say_counts_with_its_dates() -> None:
    a, b = ({"messages": [{"role": "user", "content": f"due {day}"}]} for day in ("2026-11-30", "2026-12-01"))
    assert last("chat", a) != last("chat", b)


def test_how_long_a_command_took_is_no_part_of_what_it_said() -> None:
    def said(head: str, output: str) -> tuple[bytes, bytes]:
        text = f"{head}\nProcess exited with code 0\nOutput:\n{output}"
        result = {"type": "function_call_output", "call_id": "c", "output": text}
        message = {"role": "tool", "tool_call_id": "c", "content": text}
        user = {"role": "user", "content": "go"}
        responses = ask("responses", {"model": "m", "input": [user, result]})
        return responses.items[-1], ask("chat", {"model": "m", "messages": [user, message]}).items[-1]

    first = said("Chunk ID: 12ab9f\nWall time: 0.0123 seconds", "Wall time: 1.0 seconds\n")
    assert first == said("Chunk ID: 0a1b2c\nWall time: 2.5 seconds", "Wall time: 1.0 seconds\n")
    for one, other in zip(
        first, said("Chunk ID: 12ab9f\nWall time: 0.0123 seconds", "Wall time: 2.0 seconds\n"), strict=True
    ):
        assert one != other


def test_what_a_tool_gets_counts_whatever_its_name() -> None:
    def call(arguments: dict[str, Any]) -> dict[str, Any]:
        return {
            "messages": [
                {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": arguments}]}
            ]
        }

    assert last("anthropic", call({"id": 1})) != last("anthropic", call({"id": 2}))
    assert last("anthropic", call({"status": None})) != last("anthropic", call({}))


def test_canonical_is_one_form_whatever_the_order_and_the_writing() -> None:
    assert canonical({"b": "ü", "a": [1, None]}) == '{"a":[1,null],"b":"ü"}'.encode()
    assert canonical(json.loads(r'{"a": "\u00fc\ud800"}')) == b'{"a":"\xc3\xbc\xed\xa0\x80"}'


def test_every_rule_has_its_reason() -> None:
    assert all(identity.FIELDS.values()) and all(reason for _, _, reason in identity.TEXTS)


def test_reading_a_large_request_takes_a_small_part_of_a_second() -> None:
    instructions = "You are an agent that works in /tmp/work-dir on 2026-11-30. Be kind - and quick.\n" * 1200
    messages = [{"role": "user", "content": [{"type": "text", "text": "x" * 1000}]}] * 200
    body = json.dumps({"system": instructions, "messages": messages}).encode()
    began = time.process_time()
    chain(WIRES["anthropic"].read("/v1/messages", body))
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("Chunk ID: 3f\nWall time: 0.5 seconds\nExit\n", "Chunk ID: 40\nWall time: 0.61 seconds\nExit\n", True),
        ("Wall time: 0.5 seconds\n", "Wall time: 0.6 seconds\n", False),
        ("a\nChunk ID: 3f\nWall time: 0.5 seconds\n", "a\nChunk ID: 40\nWall time: 0.5 seconds\n", False),
        (
            "Output: a\nProcess Group PGID: 12\n</untrusted_context>",
            "Output: a\nProcess Group PGID: 9\n</untrusted_context>",
            True,
        ),
        ("Process Group PGID: 12\nOutput: a", "Process Group PGID: 13\nOutput: a", False),
    ],
)
def test_what_a_client_writes_around_a_result_is_no_part_of_the_identity(one: str, other: str, same: bool) -> None:
    assert (canonical({"output": one}) == canonical({"output": other})) is same
    assert (canonical({"response": {"output": one}}) == canonical({"response": {"output": other}})) is same
