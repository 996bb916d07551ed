"""The whole way of an answer, over real sockets: from a server that misbehaves to a client that does."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import logging
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from unit.turns.stack import (
    BODY,
    CALL,
    CUT,
    END,
    KEY,
    MORE,
    RESET,
    STREAMS,
    TEXT,
    WHOLE,
    aio,
    asks,
    http,
    sse,
    stack,
    until,
)

from crab.host.zstd import zstd
from crab.model import ModelAccess
from crab.turns import delivery
from crab.turns.mock import Mock
from crab.turns.protection import Haste
from crab.turns.wires.sse import Splitter

PATHS = {
    "anthropic": "/v1/messages",
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "gemini": "/v1beta/models/m:streamGenerateContent?alt=sse",
}
ASKING: dict[str, dict[str, Any]] = {
    "anthropic": {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}]},
    "chat": {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}]},
    "responses": {"model": "m", "stream": True, "input": "hi"},
    "gemini": {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]},
}
RECORDED = sorted(path.stem for path in STREAMS.glob("*.sse"))
BROKEN_OFF = [name for name in RECORDED if "cut" in name]
REFUSED = ["anthropic-real-overloaded", "chat-real-error", "responses-real-error", "responses-real-failed"]
AGENT = {"User-Agent": "claude-cli/2.0", "anthropic-version": "2023-06-01"}


def anthropic(*words: str, stream: bool = True, tools: bool = True) -> bytes:
    asked = {**ASKING["anthropic"], "stream": stream, "tools": [{"name": "Bash", "input_schema": {}}] if tools else []}
    return json.dumps(asked | {"messages": [{"role": "user", "content": word} for word in words or ("hi",)]}).encode()


# ---------------------------------------------------------------- T01


@aio
async def test_hazard_t01_a_helper_request_is_answered_while_a_turn_is_not_safe_and_ends_none(tmp_path: Path) -> None:
    async with stack(tmp_path, sse((STREAMS / "anthropic-text.sse").read_bytes())) as s:
        s.safe.free.clear()
        reply = await s.ask(anthropic(tools=False), "/v1/messages", AGENT)
        assert reply.body == (STREAMS / "anthropic-text.sse").read_bytes() and reply.whole
        assert s.safe.calls == 0 and s.turns == []
        assert [one.kind for one in s.record.exchanges("s1")] == ["helper"]


@aio
async def test_hazard_t01_a_question_is_not_answered_by_a_helper_that_asks_the_same(tmp_path: Path) -> None:
    wait = asyncio.Event()
    answer = sse((STREAMS / "anthropic-text.sse").read_bytes())
    async with stack(tmp_path, [wait, *answer], answer) as s:
        async with await s.send(anthropic(tools=False), "/v1/messages", AGENT) as helper:
            await until(lambda: len(s.server.asked) == 1)
            reply = await s.ask(anthropic(), "/v1/messages", AGENT)
            assert reply.whole and len(s.server.asked) == 2
            wait.set()
            assert (await helper.reply()).whole
        assert sorted(one.kind for one in s.record.exchanges("s1")) == ["helper", "main"]
        assert [one.protection for one in s.turns] == ["durable"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/messages/count_tokens"),
        ("POST", "/v1/embeddings"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models?limit=1000&after=a%2Fb+c%20d&e="),
        ("GET", "/v1/files/a%2Fb%20c/content?x=%C3%A9&y=a=b&&z"),
        ("DELETE", "/v1/responses/resp_1"),
        ("OPTIONS", "/v1/chat/completions"),
        ("GET", "/v1/chat/completions"),
        ("PUT", "/anything//double/./dots/../x"),
    ],
)
@aio
async def test_what_asks_no_model_is_passed_through_as_it_is(tmp_path: Path, method: str, path: str) -> None:
    async with stack(tmp_path, http(b"\x00\xffbytes", more={"X-Other": "1"})) as s:
        s.safe.free.clear()
        sent = None if method in ("GET", "OPTIONS", "DELETE") else b'{"input": "caf\xc3\xa9 \xff"}'
        reply = await s.ask(sent, path, method=method)
        assert (reply.status, reply.body, reply.header("x-other")) == (200, b"\x00\xffbytes", "1")
        [asked] = s.server.asked
        assert asked.line == f"{method} {path} HTTP/1.1" and asked.body == (sent or b"")
        assert s.record.exchanges("s1") == [] and s.safe.calls == 0


@aio
async def test_a_request_with_a_body_that_is_passed_through_says_how_long_it_is(tmp_path: Path) -> None:
    async with stack(tmp_path, http(b"{}")) as s:
        await s.ask(b"x" * 300_000, "/v1/files")
        [asked] = s.server.asked
        assert asked.header("content-length") == "300000" and asked.header("transfer-encoding") == ""
        assert asked.body == b"x" * 300_000


@aio
async def test_a_head_request_gets_the_head(tmp_path: Path) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1234\r\nX-A: b\r\n\r\n"
    async with stack(tmp_path, head) as s:
        reply = await s.ask(None, "/v1/models", method="HEAD")
        assert (reply.status, reply.header("content-length"), reply.header("x-a")) == (200, "1234", "b")


# ---------------------------------------------------------------- T02


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("size", [7, 1 << 20])
def test_hazard_t02_every_recorded_stream_comes_through_unchanged_or_not_at_all(
    tmp_path: Path, name: str, size: int
) -> None:
    data = (STREAMS / f"{name}.sse").read_bytes()
    wire = name.partition("-")[0]

    @aio
    async def run() -> None:
        pieces = [data[at : at + size] for at in range(0, len(data), size)]
        async with stack(tmp_path, sse(*pieces)) as s:
            body = json.dumps(ASKING[wire]).encode()
            reply = await s.ask(body, PATHS[wire])
            if reply.whole:
                assert reply.body == data
            else:
                assert data.startswith(reply.body) and len(reply.body) <= len(data)
            await s.settled()
            [one] = s.record.exchanges("s1")
            assert one.complete == (reply.whole and name not in REFUSED)
            assert reply.whole or one.state == "open"
            if one.complete:
                assert s.record.answer(one.id) == data
            if name in REFUSED:
                assert reply.whole, "what the model says of itself is what the client hears"

    run()


@aio
async def test_hazard_t02_text_flows_while_the_sandbox_is_captured_and_calls_wait(tmp_path: Path) -> None:
    on, more = asyncio.Event(), asyncio.Event()
    async with stack(tmp_path, sse(TEXT, on, MORE, more, *CALL, *END)) as s:
        s.safe.free.clear()
        async with await s.send(asks("go")) as talk:
            await talk.sees(TEXT)
            await until(lambda: s.safe.running == 1, "the capture")
            on.set()
            await talk.sees(MORE)
            more.set()
            await talk.hears_nothing()
            await until(lambda: s.turns and s.turns[0].complete, "the record")
            await talk.hears_nothing()
            assert s.turns[0].state == "answered"
            s.safe.free.set()
            rest = await talk.sees(b"0\r\n\r\n")
            assert b"".join([*CALL, *END]) in rest
        await s.settled()
        assert (s.turns[0].state, s.turns[0].protection, s.turns[0].checkpoint) == ("released", "durable", "c1")


@aio
async def test_hazard_t02_headers_of_the_message_pass_both_ways_and_those_of_the_connection_do_not(
    tmp_path: Path,
) -> None:
    more = [
        ("request-id", "req_1"),
        ("anthropic-ratelimit-requests-remaining", "7"),
        ("Set-Cookie", "a=1; Path=/; HttpOnly"),
        ("Set-Cookie", "b=2"),
        ("Connection", "keep-alive, X-Hop"),
        ("X-Hop", "mine"),
        ("Keep-Alive", "timeout=5"),
        ("Server", "theirs"),
        ("Date", "Thu, 01 Jan 1970 00:00:00 GMT"),
    ]
    async with stack(tmp_path, http(BODY, more=more)) as s:
        sent = [
            ("anthropic-beta", "a,b"),
            ("X-Two", "1"),
            ("X-Two", "2"),
            ("Connection", "X-Secret-Hop"),
            ("X-Secret-Hop", "x"),
        ]
        sent += [("TE", "trailers"), ("Accept-Encoding", "gzip, br"), ("User-Agent", "test/1"), ("Cookie", "c=3; d=4")]
        reply = await s.ask(asks("hi", stream=False), headers=sent)
        assert reply.body == BODY
        assert reply.all("set-cookie") == ["a=1; Path=/; HttpOnly", "b=2"]
        assert [reply.header(name) for name in ("request-id", "anthropic-ratelimit-requests-remaining", "server", "date")] == [
            "req_1", "7", "theirs", "Thu, 01 Jan 1970 00:00:00 GMT"]  # fmt: skip
        assert reply.all("content-type") == ["application/json"]
        assert reply.header("x-hop") == reply.header("keep-alive") == ""
        [asked] = s.server.asked
        assert [value for key, value in asked.headers if key == "X-Two"] == ["1", "2"]
        assert asked.header("anthropic-beta") == "a,b" and asked.header("user-agent") == "test/1"
        assert asked.header("cookie") == "c=3; d=4" and asked.header("authorization") == f"Bearer {KEY}"
        assert asked.header("te") == asked.header("x-secret-hop") == ""
        assert asked.header("accept-encoding") == "identity", "what is passed on can be read along"
        assert asked.header("host") == s.server.url.removeprefix("http://")
        assert asked.header("accept") == ""
        # cookies that the model set are the client's business, and never another sandbox's
        again = await s.ask(asks("hi", "there", "again", stream=False))
        assert again.status == 200 and s.server.asked[1].header("cookie") == ""


@aio
async def test_hazard_t02_a_request_reaches_the_model_byte_by_byte(tmp_path: Path) -> None:
    body = b'  {"model":"m" , "stream":false,\r\n "messages":[{"role":"user","content":"caf\\u00e9 \xf0\x9f\xa6\x80"}],"tools":[{}],"new_field":{"a":[1e400]}}\n'
    async with stack(tmp_path, http(BODY)) as s:
        assert (await s.ask(body)).body == BODY
        assert s.server.asked[0].body == body
        assert len(s.turns) == 1


# ---------------------------------------------------------------- T03


@aio
async def test_hazard_t03_an_answer_that_was_held_too_long_goes_out_and_its_turn_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with stack(tmp_path, sse(WHOLE), access=ModelAccess(hold=0.1)) as s:
        s.safe.free.clear()
        reply = await s.ask(asks("go"))
        assert reply.whole and reply.body == WHOLE
        await until(lambda: s.turns and s.turns[0].state == "released")
        assert s.turns[0].protection == "unprotected" and "0.1 s" in s.turns[0].why
        assert "goes out all the same" in caplog.text
        s.safe.free.set()  # what is captured now may have in it what the agent did since
        await s.settled()
        assert (s.turns[0].protection, s.turns[0].checkpoint) == ("unprotected", None)


@aio
async def test_hazard_t03_whoever_makes_it_safe_hears_that_it_is_waited_for_and_says_what_it_waits_for(
    tmp_path: Path,
) -> None:
    class Told(Haste):
        said: ClassVar[list[object]] = []

        def answered(self, seconds: float) -> None:
            self.said.append(seconds >= 0.0)

        @contextlib.contextmanager
        def awaited(self) -> Iterator[None]:
            self.said.append("awaited")
            try:
                yield
            finally:
                self.said.append("no longer")

        def why_not_yet(self) -> str:
            return "9 jobs run"

    async with stack(tmp_path, sse(WHOLE), access=ModelAccess(hold=0.1)) as s:
        s.channel._protection.haste = Told()
        s.safe.free.clear()
        await s.ask(asks("go"))
        await until(lambda: s.turns and s.turns[0].why)
        assert s.turns[0].why == "the turn was not safe within 0.1 s: 9 jobs run"
        assert Told.said == [True, "awaited", "no longer"]


@aio
async def test_hazard_t03_a_turn_that_cannot_be_made_safe_delays_nothing_and_has_the_reason(tmp_path: Path) -> None:
    async with stack(tmp_path, sse(WHOLE)) as s:
        s.safe.error = OSError("the disk is full")
        began = asyncio.get_running_loop().time()
        assert (await s.ask(asks("go"))).body == WHOLE
        assert asyncio.get_running_loop().time() - began < 2
        await s.settled()
        assert (s.turns[0].protection, s.turns[0].why) == ("unprotected", "the disk is full")


@pytest.mark.parametrize("client", ["claude-cli/2.0", "somebody/1"])
@aio
async def test_hazard_t03_a_client_that_takes_pings_gets_them_between_events_while_it_waits(
    tmp_path: Path, client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "PING_SECONDS", 0.02)
    data = (STREAMS / "anthropic-call.sse").read_bytes()
    ping = b'event: ping\ndata: {"type": "ping"}\n\n'
    async with stack(tmp_path, sse(0.1, data[:100], 0.1, data[100:])) as s:
        s.safe.free.clear()
        async with await s.send(anthropic(), "/v1/messages", {"User-Agent": client}) as talk:
            await until(lambda: s.turns and s.turns[0].complete)
            await asyncio.sleep(0.15)
            s.safe.free.set()
            reply = await talk.reply()
        events = [event.raw for event in Splitter().feed(reply.body)]
        own = [event.raw for event in Splitter().feed(data)]
        if client == "claude-cli/2.0":
            assert reply.body.count(ping) >= 3
        added = len(events) - len(own)
        assert added == (0 if client == "somebody/1" else added)
        at = next(n for n, (a, b) in enumerate(zip(events, own, strict=False)) if a != b) if added else 0
        assert events[:at] + events[at + added :] == own, "nothing but pings, in one place, between events"
        assert not added or set(events[at : at + added]) == {ping}


@aio
async def test_no_ping_comes_into_an_answer_of_which_nothing_was_seen_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "PING_SECONDS", 0.02)
    async with stack(
        tmp_path, http(gzip.compress(WHOLE), kind="text/event-stream", more={"Content-Encoding": "gzip"})
    ) as s:
        s.safe.free.clear()
        async with await s.send(asks("go"), headers={"User-Agent": "opencode/1"}) as talk:
            await asyncio.sleep(0.15)
            s.safe.free.set()
            reply = await talk.reply()
        assert gzip.decompress(reply.body) == WHOLE and reply.header("content-encoding") == "gzip"
        await s.settled()
        assert s.record.answer(s.turns[0].id) == WHOLE, "the record has it in plain text"


@pytest.mark.parametrize("gate", ["none", "captured", "durable"])
@aio
async def test_an_answer_waits_as_the_gate_says(tmp_path: Path, gate: str) -> None:
    async with stack(tmp_path, sse(WHOLE), access=ModelAccess(gate=gate)) as s:  # type: ignore[arg-type]
        s.safe.free.clear()
        async with await s.send(asks("go")) as talk:
            await talk.sees(TEXT)
            if gate == "none":
                await talk.sees(END[-1])
            else:
                await until(lambda: s.turns and s.turns[0].complete)
                assert b"tool_calls" not in await talk.sees(MORE)
                await talk.hears_nothing()
                s.safe.free.set()
                await talk.sees(END[-1])


# ---------------------------------------------------------------- T04


@aio
async def test_hazard_t04_a_client_that_goes_away_while_its_answer_is_held_and_comes_back_joins_it(
    tmp_path: Path,
) -> None:
    async with stack(tmp_path, sse(WHOLE)) as s:
        s.safe.free.clear()
        for _ in range(3):
            async with await s.send(asks("go")) as talk:
                await talk.sees(TEXT)
        async with await s.send(asks("go")) as talk:
            s.safe.free.set()
            reply = await talk.reply()
        assert reply.whole and reply.body == WHOLE
        await s.settled()
        assert len(s.server.asked) == 1 and len(s.turns) == 1 and s.safe.calls == 1


@aio
async def test_hazard_t04_a_client_that_never_comes_back_leaves_a_whole_record_and_nothing_else(tmp_path: Path) -> None:
    on = asyncio.Event()
    async with stack(tmp_path, sse(TEXT, on, MORE, *CALL, *END)) as s:
        async with await s.send(asks("go")) as talk:
            await talk.sees(TEXT)
        on.set()
        await s.settled()
        assert s.turns[0].state == "released" and s.record.answer(s.turns[0].id) == WHOLE
        assert s.channel._running == {}
        # it comes back after all, much later: nobody is asked
        assert (await s.ask(asks("go"))).body == WHOLE
        assert len(s.server.asked) == 1
        # and then it has it: the same question is a new one
        await s.ask(asks("go"))
        assert len(s.server.asked) == 2


@aio
async def test_hazard_t04_a_retry_in_the_other_form_gets_the_same_answer_in_it(tmp_path: Path) -> None:
    data = (STREAMS / "anthropic-parallel.sse").read_bytes()
    wait = asyncio.Event()
    begin = data.index(b"\n\n") + 2
    async with stack(tmp_path, sse(data[:begin], wait, data[begin:])) as s:
        async with await s.send(anthropic(stream=True), "/v1/messages", AGENT) as talk:
            await talk.sees(b"message_start")
        async with await s.send(anthropic(stream=False), "/v1/messages", AGENT) as talk:
            await talk.hears_nothing()
            wait.set()
            reply = await talk.reply()
        assert reply.header("content-type") == "application/json" and reply.whole
        blocks = json.loads(reply.body)["content"]
        assert [block["type"] for block in blocks].count("tool_use") >= 2
        assert len(s.server.asked) == 1 and len(s.turns) == 1


@aio
async def test_hazard_t04_a_client_that_goes_away_before_its_whole_question_came_is_no_turn(tmp_path: Path) -> None:
    async with stack(tmp_path, http(BODY)) as s:
        body = asks("go")
        async with await s.send(body[:50], headers={"Content-Length": str(len(body))}):
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.05)
        assert s.server.asked == [] and s.record.exchanges("s1") == []


@aio
async def test_hazard_t04_many_clients_that_come_and_go_leave_nothing(tmp_path: Path) -> None:
    async with stack(tmp_path, sse(TEXT, 0.05, MORE, *CALL, *END)) as s:

        async def one(number: int) -> None:
            async with await s.send(asks(f"go {number % 20}")) as talk:
                await asyncio.sleep(number % 7 / 50)
                if number % 2:
                    await talk.reply()

        await asyncio.gather(*map(one, range(60)))
        await s.settled()
        assert s.channel._running == {} and all(one.complete for one in s.turns)


@pytest.mark.parametrize(
    ("body", "headers", "why"),
    [
        (b"{not json", {}, "JSON"),
        (b"[1, 2]", {}, ""),
        (b"\x1b\x03", {"Content-Encoding": "br"}, "encoded as br"),
        (b"no gzip", {"Content-Encoding": "gzip"}, ""),
    ],
)
@aio
async def test_a_question_that_cannot_be_read_is_passed_through_and_counted_and_is_no_turn(
    tmp_path: Path, body: bytes, headers: dict[str, str], why: str
) -> None:
    async with stack(tmp_path, http(b"{}", 400)) as s:
        reply = await s.ask(body, "/v1/messages", headers)
        assert (reply.status, reply.body) == (400, b"{}")
        assert s.turns == [] and s.safe.calls == 0
        assert s.server.asked[0].body == body, "as it came"
        assert (
            s.channel.unread == 1 and s.channel.unread_why.startswith("/v1/messages: ") and why in s.channel.unread_why
        )


# ---------------------------------------------------------------- T05


@aio
async def test_hazard_t05_an_upstream_that_is_down_is_said_and_the_turn_stays_open(tmp_path: Path) -> None:
    async with stack(tmp_path, sse(WHOLE)) as s:
        s.server._server.close()  # type: ignore[union-attr]
        reply = await s.ask(asks("go"))
        assert reply.status == 502 and "cannot be reached" in json.loads(reply.body)["error"]["message"]
        assert (await s.ask(None, "/v1/models", method="GET")).status == 502
        await s.settled()
        assert [(one.state, one.status) for one in s.turns] == [("open", 502)]


@pytest.mark.parametrize(
    ("status", "more"),
    [
        (401, {}),
        (429, {"retry-after": "7", "anthropic-ratelimit-tokens-reset": "x"}),
        (529, {}),
        (500, {"Content-Encoding": "br"}),
        (503, {"retry-after": "1"}),
    ],
)
@aio
async def test_hazard_t05_a_refusal_is_passed_on_as_it_is_and_the_retry_is_the_same_turn(
    tmp_path: Path, status: int, more: dict[str, str]
) -> None:
    error = b'{"type":"error","error":{"type":"overloaded_error"}}'
    async with stack(tmp_path, http(error, status, more=more), sse(WHOLE)) as s:
        s.safe.free.clear()  # who gets no answer need not wait
        reply = await s.ask(asks("go"))
        assert (reply.status, reply.body, reply.whole) == (status, error, True)
        assert {name: reply.header(name.lower()) for name in more} == more
        await until(lambda: s.turns and s.turns[0].status == status)
        assert s.turns[0].state == "open"
        s.safe.free.set()
        assert (await s.ask(asks("go"))).body == WHOLE
        await s.settled()
        assert [(one.state, one.status, one.protection) for one in s.turns] == [("released", 200, "durable")]
        assert len(s.server.asked) == 2


CUTS: dict[str, list[Any]] = {
    "before the first byte": [CUT],
    "by a reset before the first byte": [RESET],
    "before the first event": sse(CUT),
    "in text": sse(TEXT, CUT),
    "in an event": sse(TEXT, MORE[:9], CUT),
    "in a call": sse(TEXT, CALL[0], CUT),
    "after the call": sse(TEXT, *CALL, CUT),
    "by a reset after the call": sse(TEXT, *CALL, RESET),
    "after the reason to end": sse(TEXT, *CALL, END[0][:-2], CUT),
    "cleanly, after the call": sse(TEXT, *CALL),
    "cleanly, in an event": sse(TEXT, CALL[0][:20]),
}


@pytest.mark.parametrize("how", list(CUTS))
@pytest.mark.parametrize("version", ["1.1", "1.0"])
@aio
async def test_hazard_t05_of_a_stream_that_is_cut_no_half_call_comes_and_the_retry_gets_one_whole(
    tmp_path: Path, how: str, version: str
) -> None:
    async with stack(tmp_path, CUTS[how], sse(WHOLE)) as s:
        reply = await s.ask(asks("go"), version=version)
        if reply.status == 200:
            assert not reply.whole and b"tool_calls" not in reply.body
            assert (TEXT + MORE).startswith(reply.body)
        else:
            assert reply.status == 502
        await s.settled()
        assert [one.state for one in s.turns] == ["open"]
        again = await s.ask(asks("go"), version=version)
        assert again.whole and again.body == WHOLE
        await s.settled()
        assert [one.state for one in s.turns] == ["released"] and len(s.server.asked) == 2


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("kind", "page"),
    [
        ("text/html", b"<html>Sign in</html>"),
        ("", b"nothing known"),
        ("application/json", b'{"error": {"message": "quota"}}'),
    ],
)
@aio
async def test_hazard_t05_what_is_no_answer_is_passed_on_at_once_and_is_no_turn(
    tmp_path: Path, kind: str, page: bytes, stream: bool
) -> None:
    if stream and not kind:
        pytest.skip("that would be a stream")
    async with stack(tmp_path, http(page, kind=kind)) as s:
        s.safe.free.clear()
        reply = await s.ask(asks("go", stream=stream))
        assert (reply.status, reply.body, reply.whole) == (200, page, True)
        await until(lambda: s.turns and s.turns[0].note)
        assert s.turns[0].state == "open"


@pytest.mark.parametrize("name", ["chat-parallel.json", "gemini-parallel.json", "anthropic-parallel.json"])
@aio
async def test_hazard_t05_half_of_a_body_with_calls_never_comes(tmp_path: Path, name: str) -> None:
    """Some clients read JSON as it comes."""
    data = (STREAMS / name).read_bytes()
    wire = name.partition("-")[0]
    asking = json.dumps(ASKING[wire] | ({"stream": False} if wire != "gemini" else {})).encode()
    path = PATHS[wire].partition("?")[0]
    if wire == "gemini":
        data = b"[" + data + b"]"
    async with stack(tmp_path, http(data[:-3], length=False), http(data)) as s:
        reply = await s.ask(asking, path)
        assert not reply.whole and reply.body == b""
        again = await s.ask(asking, path)
        assert again.whole and again.body == data
        await s.settled()
        assert len(s.record.exchanges("s1")) == 1


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd"])
@pytest.mark.parametrize("cut", [0, 7])
@aio
async def test_hazard_t05_an_encoded_answer_is_read_along_and_passed_on_encoded(
    tmp_path: Path, encoding: str, cut: int
) -> None:
    pack = {"gzip": gzip.compress, "deflate": zlib.compress, "zstd": zstd().compress}[encoding]
    data = pack(WHOLE)
    answer = http(data[: len(data) - cut], kind="text/event-stream", more={"Content-Encoding": encoding})
    async with stack(tmp_path, answer) as s:
        reply = await s.ask(asks("go"))
        await s.settled()
        if cut:
            assert reply.body == b"" and not reply.whole and s.turns[0].state == "open"
        else:
            assert reply.body == data and reply.header("content-encoding") == encoding
            assert s.record.answer(s.turns[0].id) == WHOLE


@aio
async def test_an_answer_that_nobody_can_read_is_refused_with_the_reason(tmp_path: Path) -> None:
    async with stack(tmp_path, http(b"\x1b\x03", more={"Content-Encoding": "br"})) as s:
        reply = await s.ask(asks("go", stream=False))
        assert reply.status == 502 and b"encoded as br" in reply.body


@aio
async def test_what_is_passed_through_and_is_cut_is_seen_to_be_cut(tmp_path: Path) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"
    chunked = [head + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n", CUT]
    async with stack(tmp_path, chunked, [head + b"Content-Length: 10\r\n\r\nhello", CUT]) as s:
        for _ in range(2):
            reply = await s.ask(None, "/v1/files", method="GET")
            assert (reply.status, reply.body, reply.whole) == (200, b"hello", False)


# ---------------------------------------------------------------- T06


@aio
async def test_hazard_t06_what_makes_one_agent_s_turn_safe_does_not_release_another_that_asked_later(
    tmp_path: Path,
) -> None:
    async with stack(tmp_path, sse(WHOLE)) as s:
        s.safe.free.clear()
        async with await s.send(asks("first")) as first:
            await until(lambda: s.safe.running == 1)
            async with await s.send(asks("second")) as second:
                await until(lambda: len(s.turns) == 2 and all(one.complete for one in s.turns))
                s.safe.free.set()
                s.safe.free = type(s.safe.free)()  # whoever comes next waits again
                await first.sees(END[-1])
                assert b"tool_calls" not in await second.sees(MORE)
                await second.hears_nothing()
                assert [one.protection for one in s.turns] == ["durable", None]
                s.safe.free.set()
                await second.sees(END[-1])
        await s.settled()
        assert [one.checkpoint for one in s.turns] == ["c1", "c2"]


@aio
async def test_hazard_t06_parallel_agents_share_captures_and_each_gets_its_own_answer(tmp_path: Path) -> None:
    async with stack(tmp_path, answers=Mock()) as s:
        s.safe.seconds = 0.02
        s.safe.free.clear()

        async def one(number: int) -> None:
            reply = await s.ask(asks(f"$ echo {number};", stream=False))
            [call] = json.loads(reply.body)["choices"][0]["message"]["tool_calls"]
            assert json.loads(call["function"]["arguments"]) == {"command": f"echo {number};"}

        await asyncio.gather(*map(one, range(40)))
        await s.settled()
        assert len(s.turns) == 40 and {one.protection for one in s.turns} == {"durable"}
        assert s.safe.calls < 40


# ---------------------------------------------------------------- T07


@aio
async def test_hazard_t07_an_agent_that_is_restored_gets_its_answer_from_the_record(tmp_path: Path) -> None:
    async with stack(tmp_path, sse(WHOLE)) as s:
        assert (await s.ask(asks("go"))).body == WHOLE
        await s.settled()
        s.place.brought_back(["c1"], "c1", ask_again=False)
        assert (await s.ask(asks("go"))).body == WHOLE
        assert len(s.server.asked) == 1 and not s.place.forwarding
        s.place.brought_back(["c1"], "c1", ask_again=True)
        assert (await s.ask(asks("go"))).body == WHOLE
        assert len(s.server.asked) == 2, "a rewind wants another answer"


@aio
async def test_hazard_t07_an_agent_that_is_recovered_while_the_model_thinks_joins_its_question(tmp_path: Path) -> None:
    on = asyncio.Event()
    async with stack(tmp_path, sse(TEXT, on, MORE, *CALL, *END)) as s:
        async with await s.send(asks("go")) as talk:
            await talk.sees(TEXT)
            await until(lambda: s.turns and s.turns[0].checkpoint)
        s.place.brought_back(["c1"], "c1", ask_again=False)
        async with await s.send(asks("go")) as talk:
            await talk.sees(TEXT)
            on.set()
            await talk.sees(END[-1])
        await s.settled()
        assert len(s.server.asked) == 1 and [one.state for one in s.turns] == ["released"]
        assert s.place._standing.exchange == s.turns[0].id


@aio
async def test_hazard_t07_a_rewind_while_the_model_thinks_asks_anew_and_the_old_answer_moves_nothing(
    tmp_path: Path,
) -> None:
    on = asyncio.Event()
    async with stack(tmp_path, sse(WHOLE), sse(TEXT, on, MORE, *CALL, *END), sse(TEXT, *CALL, *END)) as s:
        assert (await s.ask(asks("one"))).body == WHOLE
        async with await s.send(asks("one", "two", "three")) as talk:
            await talk.sees(TEXT)
            await until(lambda: len(s.turns) == 2 and s.turns[1].checkpoint == "c2")
        s.place.brought_back(["c1", "c2"], "c2", ask_again=True)
        async with await s.send(asks("one", "two", "three")) as talk:
            reply = await talk.reply()
            assert reply.body == TEXT + b"".join([*CALL, *END]), "not the answer that is still under way"
        at = s.place._standing
        on.set()
        await s.settled()
        assert s.place._standing == at, "an answer of an earlier life moves nobody"
        first, old, new = s.turns
        assert (first.state, old.state, new.state) == ("released", "abandoned", "released")
        assert at.exchange == new.id and len(s.server.asked) == 3


@aio
async def test_hazard_t07_a_capture_that_was_late_for_a_rewind_belongs_to_no_question(tmp_path: Path) -> None:
    async with stack(tmp_path, sse(WHOLE)) as s:
        await s.ask(asks("one"))
        s.safe.free.clear()
        async with await s.send(asks("one", "two", "three")):
            await until(lambda: len(s.turns) == 2 and s.turns[1].complete)
        s.place.brought_back(["c1"], "c1", ask_again=True)
        s.safe.free.set()
        await s.settled()
        assert s.turns[1].checkpoint is None and s.turns[1].abandoned


@aio
async def test_hazard_t07_after_a_divergence_an_agent_outside_goes_on_from_the_state_of_that_point(
    tmp_path: Path,
) -> None:
    for inside, brought in ((False, ["c2"]), (True, [])):
        folder = tmp_path / str(inside)
        folder.mkdir()
        async with stack(folder, sse(WHOLE), inside=inside) as s:
            await s.ask(asks("one"))
            await s.ask(asks("one", "two", "three"))
            await s.settled()
            s.place.brought_back(["c1", "c2"], "c2", ask_again=False)
            await s.ask(asks("one"))
            assert s.place.forwarding and len(s.server.asked) == 2
            await s.ask(asks("one", "two", "something else"))
            assert s.brought == brought and not s.place.forwarding and len(s.server.asked) == 3


# ---------------------------------------------------------------- T08


@aio
async def test_hazard_t08_no_key_reaches_the_disk_or_a_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    keys = [KEY, "sk-ant-0123456789", "AIza0123456789abc", "sk-real-filled-in-987"]
    echo = http(
        json.dumps({"id": "c", "choices": [{"index": 0, "message": {"content": f"you sent {keys[0]}"}}]}).encode()
    )
    body = {"id": "c", "choices": [{"index": 0, "message": {"content": f"you sent {keys[3]}"}}]}
    async with stack(tmp_path, echo, http(b"{}", 401), [CUT], http(json.dumps(body).encode())) as s:
        s.keys["openai"] = keys[3]
        await s.ask(asks("go", stream=False))
        headers = {"x-api-key": keys[1], "api-key": keys[1]}
        await s.ask(asks("my key is " + keys[1], stream=False), headers=headers)
        await s.ask(asks(f"and {keys[2]}", stream=False), f"/v1/chat/completions?key={keys[2]}")
        await s.ask(asks("filled", stream=False), headers={"X-Key": "sk-crab-placeholder"})
        assert s.server.asked[-1].header("x-key") == keys[3]
        await s.ask(b"{broken", f"/v1/chat/completions?key={keys[2]}")
        await s.settled()
        written = b"".join(path.read_bytes() for path in tmp_path.rglob("turns.db*"))
        for key in keys:
            assert key.encode() not in written and key not in caplog.text
        for number in (0, -1):
            assert b"[redacted]" in s.record.answer(s.turns[number].id), "also the key that was filled in"


@aio
async def test_keys_that_are_told_later_are_filled_in_and_only_for_their_own_api(tmp_path: Path) -> None:
    async with stack(tmp_path, http(BODY)) as s:
        held = {"X-Key": "Bearer sk-crab-placeholder"}
        await s.ask(asks("one", stream=False), headers=held)
        s.keys |= {"openai": "sk-later-1", "gemini": "AIza-later"}
        await s.ask(asks("two", stream=False), headers=held)
        await s.ask(None, "/v1beta/models?key=sk-crab-placeholder", method="GET")
        await s.ask(anthropic(stream=False), "/v1/messages", held)
        seen = [asked.header("x-key") for asked in s.server.asked]
        assert seen == ["Bearer sk-crab-placeholder", "Bearer sk-later-1", "", "Bearer sk-crab-placeholder"]
        assert s.server.asked[2].line == "GET /v1beta/models?key=AIza-later HTTP/1.1"


# ---------------------------------------------------------------- the record


@aio
async def test_a_record_that_cannot_be_written_is_said_and_the_agent_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with stack(tmp_path, sse(WHOLE)) as s:
        s.record._database._db.execute("PRAGMA max_page_count = 1")
        for _ in range(2):
            assert (await s.ask(asks(os.urandom(100_000).hex()))).body == WHOLE
        assert "cannot be recorded" in caplog.text
        await s.settled()


@aio
async def test_a_damaged_answer_is_asked_for_again(tmp_path: Path) -> None:
    async with stack(tmp_path, sse(WHOLE)) as s:
        await s.ask(asks("go"))
        await s.settled()
        with s.record._database.write() as db:
            db.execute("UPDATE blobs SET data = x'00'")
        s.place.brought_back(["c1"], "c1", ask_again=False)
        assert (await s.ask(asks("go"))).body == WHOLE
        assert len(s.server.asked) == 2


@aio
async def test_a_sandbox_that_is_forgotten_while_its_answer_is_under_way_gets_it_all_the_same(tmp_path: Path) -> None:
    on = asyncio.Event()
    async with stack(tmp_path, sse(TEXT, on, MORE, *CALL, *END)) as s:
        async with await s.send(asks("go")) as talk:
            await talk.sees(TEXT)
            await until(lambda: s.turns and s.turns[0].checkpoint)
            s.record.forget("s1")
            on.set()
            await talk.sees(END[-1])


# ---------------------------------------------------------------- load


@aio
async def test_sixty_four_streams_of_a_megabyte_at_once_are_whole_and_copied_once(tmp_path: Path) -> None:
    text = b"".join(
        b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"%05d%s"}}]}\n\n' % (n, b"x" * 930)
        for n in range(1024)
    )
    data = text + b"".join([*CALL, *END])
    async with stack(tmp_path, sse(*(data[at : at + 16_384] for at in range(0, len(data), 16_384)))) as s:
        replies = await asyncio.gather(*(s.ask(asks(f"go {n}")) for n in range(64)))
        assert all(reply.body == data for reply in replies)
        await s.settled()
        assert s.record.size().content < 2 * len(data), "one answer, kept once"


@aio
async def test_an_answer_whose_turn_nobody_made_safe_passes_the_gate_when_it_is_given_again(tmp_path: Path) -> None:
    async with stack(tmp_path, sse(WHOLE)) as s:
        s.safe.free.clear()
        async with await s.send(asks("go")) as talk:
            await talk.sees(TEXT)
            await until(lambda: s.turns and s.turns[0].complete, "the record")
        s.channel._running.clear()  # as for a daemon that begins where another one was killed
        async with await s.send(asks("go")) as talk:
            assert b"tool_calls" not in await talk.sees(MORE)
            await talk.hears_nothing()
            s.safe.free.set()
            assert b"".join([*CALL, *END]) in await talk.sees(END[-1])
        await s.settled()
        assert len(s.server.asked) == 1, "no model was asked twice"
        assert [one.state for one in s.turns] == ["abandoned", "released"] and s.turns[1].protection == "durable"


@aio
async def test_it_is_recorded_whether_a_client_took_its_answer_to_the_end(tmp_path: Path) -> None:
    async with stack(tmp_path, http(BODY)) as made:
        made.safe.free.clear()
        async with await made.send(asks("left", stream=False)):
            await until(lambda: made.safe.running, "the question")
        await until(lambda: made.turns and made.turns[0].complete, "its answer")
        made.safe.free.set()
        await made.settled()
        assert (await made.ask(asks("stayed", stream=False))).whole
        await made.settled()
        assert [one.delivered for one in made.turns] == [False, True]
