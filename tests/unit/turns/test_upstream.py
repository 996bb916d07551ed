"""Where answers come from: real ones over HTTP, recorded ones from a file."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from unit.turns.stack import BODY, CUT, Server, aio, http, sse

from crab.errors import InvalidRequest
from crab.host.zstd import zstd
from crab.turns import upstream
from crab.turns.upstream import FAILURES, PLACEHOLDER, Real, Replay, family, passed_on, secrets


async def heard(model: upstream.Upstream, target: str = "/v1/x", headers: upstream.Headers | None = None, body: Any = None) -> tuple[int, bytes]:  # fmt: skip
    async with model.ask("POST", target, headers or [], body) as answer:
        return answer.status, b"".join([data async for data in answer.chunks()])


@pytest.mark.parametrize(
    ("path", "headers", "which"),
    [
        ("/v1/chat/completions", {}, "openai"),
        ("/v1/messages", {}, "anthropic"),
        ("/v1/models", {"anthropic-version": "1"}, "anthropic"),
        ("/v1beta/models/m:generateContent", {}, "gemini"),
        ("/v1/models", {"x-goog-api-key": "k"}, "gemini"),
    ],
)
def test_the_api_is_told_by_path_and_headers(path: str, headers: dict[str, str], which: str) -> None:
    assert family(path, headers) == which


def test_what_belongs_to_a_connection_is_not_passed_on() -> None:
    headers = [
        ("Connection", "close, X-Mine"),
        ("x-mine", "1"),
        ("TE", "trailers"),
        ("Upgrade", "h2c"),
        ("X-Kept", "1"),
    ]
    assert passed_on(headers) == [("X-Kept", "1")]


@pytest.mark.parametrize("target", ["//[x/v1/messages?key=abcdefgh", "/x?key=abcdefgh&key=abcdefgh", "/x?a=1&api_key=abcdefgh"])  # fmt: skip
def test_credentials_are_found_wherever_a_request_carries_them(target: str) -> None:
    headers = [("Authorization", "Bearer tok"), ("X-API-Key", PLACEHOLDER), ("api-key", " "), ("x-goog-api-key", "goo")]
    assert secrets(target, headers) == [b"tok", b"goo", b"abcdefgh"]


@aio
async def test_a_session_adds_nothing_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".netrc").write_text("default login root password secret")
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    async with Server(http(b"", more={"Set-Cookie": "a=1"})) as server, upstream.session() as session:
        for _ in range(2):
            await heard(Real(session, server.url), headers=[("Authorization", "Bearer mine")], body=b"x")
            await heard(Real(session, server.url), body=b"x")
        assert [asked.header("authorization") for asked in server.asked] == ["Bearer mine", "", "Bearer mine", ""]
        assert {asked.header("cookie") for asked in server.asked} == {""}
        names = {key.lower() for asked in server.asked for key, _ in asked.headers}
        assert names == {"host", "content-length", "authorization"}


@aio
async def test_a_model_that_says_nothing_for_too_long_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "SILENCE_SECONDS", 0.1)
    async with Server(sse(b"data: a\n\n", 5.0)) as server, upstream.session() as session:
        with pytest.raises(FAILURES):
            await asyncio.wait_for(heard(Real(session, server.url), body=b"x"), 3)


@aio
async def test_a_question_is_never_sent_twice_by_itself() -> None:
    async with Server(http(BODY), [CUT], http(BODY)) as server, upstream.session() as session:
        await heard(Real(session, server.url), body=b"x")  # the connection is kept, and is dead at the next request
        with pytest.raises(aiohttp.ClientError):
            await heard(Real(session, server.url), body=b"x")
        assert len(server.asked) == 2


@aio
async def test_the_host_s_proxy_is_used_but_not_for_what_is_excepted(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Server(http(b"by proxy")) as proxy, Server(http(b"direct")) as server, upstream.session() as session:
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert (await heard(Real(session, server.url), body=b"x"))[1] == b"direct"
        assert (await heard(Real(session, "http://model.example"), body=b"x"))[1] == b"by proxy"
        assert proxy.asked[0].line == "POST http://model.example/v1/x HTTP/1.1"


@aio
async def test_recorded_answers_come_in_order_whatever_a_request_is_encoded_as(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text('{"body": "one"}\n\n{"body": "two", "status": 500}\n')
    model = Replay(path)
    first = json.dumps({"messages": [{"role": "user"}]}).encode()
    second = json.dumps({"messages": [{"role": "user"}, {"role": "assistant"}, {"role": "tool"}]}).encode()
    third = json.dumps(
        {"input": [{"role": "assistant"}, {}, {"type": "function_call"}, {"type": "reasoning"}, {}]}
    ).encode()
    assert await heard(model, body=first) == (200, b"one")
    for encoding, body in (("", second), ("gzip", gzip.compress(second)), ("zstd", zstd().compress(second))):
        assert await heard(model, headers=[("Content-Encoding", encoding)], body=body) == (500, b"two")
    assert (await heard(model, body=third))[0] == 404
    for body in (b"[]", b"7", b"{", b'{"messages": 7}', b'{"messages": [7]}', None):
        assert await heard(model, body=body) == (200, b"one")


@pytest.mark.parametrize("text", ["{", '{"status": 200}', '{"body": 7}'])
def test_a_file_of_answers_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "answers").write_text(text)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        Replay(tmp_path / "answers")
    with pytest.raises(InvalidRequest):
        Replay(tmp_path / "none")
