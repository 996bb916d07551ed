"""Requests that are large, encoded, strange or none at all: each passes as it came, or is refused in words."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from pathlib import Path

import pytest
from unit.turns.stack import (
    BODY,
    WHOLE,
    aio,
    asks,
    http,
    sse,
    stack,
)

from crab.host.zstd import zstd
from crab.turns import bodies


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'{"messages": "no list"}',
        b'{"messages": []}',
        b'{"messages": [1]}',
        b'{"model": 7, "messages": [{}]}',
        b"\xff\xfe\x00",
        b'{"messages": [' + b"[" * 50_000,
        b'{"messages": [{"content": ' + b"[" * 5000 + b"]" * 5000 + b"}]}",
    ],
)
@aio
async def test_a_request_that_cannot_be_read_is_passed_through_counted_and_no_turn(tmp_path: Path, body: bytes) -> None:
    refusal = b'{"error": "what is that"}'
    async with stack(tmp_path, http(refusal, 400)) as s:
        reply = await s.ask(body)
        assert (reply.status, reply.body) == (400, refusal)
        assert s.server.asked[0].body == body and s.channel.unread == 1
        assert s.record.exchanges("s1") == [] and s.safe.calls == 0


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd", "two gzips", "br", "cut gzip"])
@aio
async def test_an_encoded_request_is_read_and_passed_on_as_it_came(tmp_path: Path, encoding: str) -> None:
    plain = asks("go", stream=False)
    body = {
        "gzip": gzip.compress(plain),
        "deflate": zlib.compress(plain),
        "zstd": zstd().compress(plain),
        "two gzips": gzip.compress(plain[:50]) + gzip.compress(plain[50:]),
        "br": b"\x1b\x03\x00",
        "cut gzip": gzip.compress(plain)[:-9],
    }[encoding]
    async with stack(tmp_path, http(BODY)) as s:
        assert (await s.ask(body, headers={"Content-Encoding": encoding.split()[-1].removesuffix("s")})).body == BODY
        assert s.server.asked[0].body == body
        assert (len(s.turns), s.channel.unread) == ((0, 1) if encoding in ("br", "cut gzip") else (1, 0))


@aio
async def test_a_request_that_unpacks_to_more_than_any_api_takes_costs_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "LARGEST", 1 << 20)
    async with stack(tmp_path, http(BODY)) as s:
        for body, encoding in ((gzip.compress(b" " * (8 << 20)), "gzip"), (zstd().compress(b" " * (8 << 20)), "zstd")):
            assert (await s.ask(body, headers={"Content-Encoding": encoding})).status == 200
        assert s.channel.unread == 2
        large = b" " * (3 << 20)  # itself too large: passed through in pieces
        assert (await s.ask(large)).status == 200
        assert s.server.asked[-1].body == large and s.turns == []


@aio
async def test_a_chunked_request_is_read(tmp_path: Path) -> None:
    body = asks("go", stream=False)
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(body[at : at + 11]), body[at : at + 11]) for at in range(0, len(body), 11))
    async with stack(tmp_path, http(BODY)) as s:
        reply = await s.ask(chunks + b"0\r\n\r\n", headers={"Transfer-Encoding": "chunked"})
        assert reply.body == BODY and s.server.asked[0].body == body and len(s.turns) == 1


@aio
async def test_a_client_that_expects_to_be_told_to_go_on_is_told(tmp_path: Path) -> None:
    body = asks("go", stream=False)
    async with stack(tmp_path, http(BODY)) as s:
        async with await s.send(b"", headers={"Expect": "100-continue", "Content-Length": str(len(body))}) as talk:
            await talk.sees(b"100 Continue\r\n\r\n")
            talk.writer.write(body)
            assert (await talk.reply()).body == BODY
        assert s.server.asked[0].header("expect") == ""


@aio
async def test_fifty_megabytes_with_images_pass_and_stop_nobody_else(tmp_path: Path) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBORw0KGgoAAAAN" * (50 << 16)}}
    body = json.dumps({"model": "m", "tools": [{}], "messages": [{"role": "user", "content": [image]}]}).encode()
    assert len(body) > 50_000_000
    async with stack(tmp_path, http(BODY)) as s:
        large = asyncio.create_task(s.ask(body))
        slowest = 0.0
        clock = asyncio.get_running_loop().time
        while not large.done():
            began = clock()
            await s.ask(None, "/v1/models", method="GET")
            slowest = max(slowest, clock() - began)
        assert (await large).body == BODY
        assert next(asked for asked in s.server.asked if asked.line.startswith("POST")).body == body
        await s.settled()
        assert len(s.turns) == 1 and s.turns[0].bytes_in == len(body)
        assert slowest < 10  # on a machine that does other things


@pytest.mark.parametrize("stream", [True, False])
@aio
async def test_a_client_of_http_1_0_gets_its_answer_and_the_end_of_the_connection(tmp_path: Path, stream: bool) -> None:
    async with stack(tmp_path, sse(WHOLE) if stream else http(BODY)) as s:
        reply = await s.ask(asks("go", stream=stream), version="1.0")
        assert reply.body == (WHOLE if stream else BODY)
        assert reply.header("transfer-encoding") == ""


@aio
async def test_a_websocket_is_not_opened_and_the_client_is_told_what_the_model_says_to_that(tmp_path: Path) -> None:
    headers = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Key": "x", "Sec-WebSocket-Version": "13"}
    async with stack(tmp_path, http(b"use POST", 426)) as s:
        reply = await s.ask(None, "/v1/responses", headers, "GET")
        assert (reply.status, reply.body) == (426, b"use POST")
        assert s.server.asked[0].header("upgrade") == "" and s.record.exchanges("s1") == []


@pytest.mark.parametrize("line", ["GET http://evil.example/v1/models HTTP/1.1", "GET //evil.example/v1/models HTTP/1.1", "GET @evil.example/ HTTP/1.1", "CONNECT evil.example:443 HTTP/1.1", "OPTIONS * HTTP/1.1", "POST //[x/v1/chat/completions HTTP/1.1"])  # fmt: skip
@aio
async def test_no_request_goes_anywhere_but_to_its_model(tmp_path: Path, line: str) -> None:
    async with stack(tmp_path, http(BODY)) as s:
        async with await s.connect() as talk:
            body = asks("go", stream=False) if line.startswith("POST") else b""
            talk.writer.write(
                f"{line}\r\nHost: a\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body
            )
            reply = await asyncio.wait_for(talk.reply(), 5)
        assert reply.status
        for asked in s.server.asked:
            assert asked.header("host") == s.server.url.removeprefix("http://") and asked.line.split()[1].startswith(
                "/"
            )
        assert (await s.ask(asks("go", stream=False))).body == BODY, "it goes on"


@aio
async def test_headers_that_are_no_ascii_and_long_ones_stop_nothing(tmp_path: Path) -> None:
    async with stack(tmp_path, http(BODY, more={"X-Name": "caf\xe9", "X-Long": "x" * 7000})) as s:
        reply = await s.ask(asks("go", stream=False), headers={"X-Token": "t" * 20_000, "X-Odd": "caf\xe9"})
        assert reply.body == BODY and len(reply.header("x-long")) == 7000
        assert len(s.server.asked[0].header("x-token")) == 20_000


@aio
async def test_requests_on_one_connection_are_answered_one_after_the_other(tmp_path: Path) -> None:
    async with stack(tmp_path, http(BODY)) as s:
        async with await s.connect() as talk:
            for number in range(5):
                body = asks(f"go {number}", stream=False)
                talk.writer.write(
                    b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
                )
            for _ in range(5):
                assert (await talk.reply()).body == BODY
        await s.settled()
        assert len(s.turns) == 5
