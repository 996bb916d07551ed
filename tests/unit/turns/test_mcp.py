"""MCP at the door: what each request is answered, byte for byte, and that the official client understands it."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
from unit.turns.stack import Reply, Stack, aio, http, stack, until

from crab.turns import mcp
from crab.turns.mcp import Desk, Told

NEW = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
RESUMABLE = {**NEW, "MCP-Protocol-Version": "2025-11-25"}


class Kit:
    """Tools that say what they were called with; the test says when."""

    instructions = "save often"

    def __init__(self) -> None:
        self.free = threading.Event()
        self.free.set()
        self.calls: list[str] = []
        self.at_once = self.most = 0
        self.lost_calls = 0

    def described(self) -> list[dict[str, Any]]:
        return [{"name": "echo", "description": "d", "inputSchema": {"type": "object", "properties": {}}}]

    def use(self, name: str, arguments: dict[str, Any]) -> Told:
        if name != "echo":
            raise LookupError(f"there is no tool {name!r}")
        self.calls.append(name)
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        self.free.wait(10)
        self.at_once -= 1
        return Told(text=json.dumps(arguments), failed="bad" in arguments)

    def lost(self) -> Told:
        self.lost_calls += 1
        return Told(text="you are back")


def tools(s: Stack) -> Kit:
    kit = Kit()
    s.channel.tools = Desk(kit, s.place)
    return kit


async def post(s: Stack, message: Any, headers: dict[str, str] = NEW, **named: Any) -> Reply:
    body = message if isinstance(message, bytes) else json.dumps(message).encode()
    return await s.ask(body, mcp.PATH, headers, **named)


def request(method: str, number: Any = 1, **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "method": method, "params": params}


@aio
async def test_each_method_has_its_answer(tmp_path: Path) -> None:
    async with stack(tmp_path) as s:
        tools(s)
        begun = await post(s, request("initialize", protocolVersion="2025-06-18", capabilities={}))
        said = json.loads(begun.body)["result"]
        assert (said["protocolVersion"], said["capabilities"]) == ("2025-06-18", {"tools": {}})
        assert said["serverInfo"]["name"] == "crab" and said["instructions"] == "save often"
        unknown = json.loads((await post(s, request("initialize", protocolVersion="2999-01-01"))).body)
        assert unknown["result"]["protocolVersion"] == mcp.VERSIONS[0]
        ready = await post(s, {"jsonrpc": "2.0", "method": "notifications/initialized"})
        assert (ready.status, ready.body) == (202, b"")
        assert json.loads((await post(s, request("ping", "p"))).body) == {"jsonrpc": "2.0", "id": "p", "result": {}}
        listed = json.loads((await post(s, request("tools/list"))).body)
        assert [tool["name"] for tool in listed["result"]["tools"]] == ["echo"]
        called = json.loads((await post(s, request("tools/call", 5, name="echo", arguments={"a": 1}))).body)
        assert called == {
            "jsonrpc": "2.0",
            "id": 5,
            "result": {"content": [{"type": "text", "text": '{"a": 1}'}], "isError": False},
        }
        failed = json.loads((await post(s, request("tools/call", name="echo", arguments={"bad": 1}))).body)
        assert failed["result"]["isError"] is True
        assert s.server.asked == [], "none of it is anything to a model"
        assert s.turns == []


@aio
async def test_what_is_no_call_is_refused_by_name(tmp_path: Path) -> None:
    async with stack(tmp_path) as s:
        kit = tools(s)
        assert (await s.ask(None, mcp.PATH, method="GET")).status == 405
        assert (await s.ask(None, mcp.PATH, method="DELETE")).header("allow") == "POST"
        assert (await post(s, request("ping"), {"Content-Type": "text/plain"})).status == 415
        assert (await post(s, request("ping"), {**NEW, "Origin": "http://evil.example"})).status == 403
        assert (await post(s, request("ping"), {**NEW, "Origin": "http://localhost:3000"})).status == 200
        assert (await post(s, b"x" * (mcp.LARGEST + 1))).status == 413

        async def code(message: Any) -> tuple[int, int]:
            reply = await post(s, message)
            return reply.status, json.loads(reply.body)["error"]["code"]

        assert await code(b"{") == (400, mcp.PARSE)
        assert await code(b"[" * 100_000) == (400, mcp.PARSE)
        assert await code([request("ping")]) == (400, mcp.INVALID)
        assert await code({"id": 1, "method": "ping"}) == (400, mcp.INVALID)
        assert await code(request("ping", [1])) == (400, mcp.INVALID)
        assert await code(request("resources/list")) == (200, mcp.NO_METHOD)
        assert await code(request("tools/call", name=1)) == (200, mcp.PARAMETERS)
        assert await code(request("tools/call", name="rm")) == (200, mcp.PARAMETERS)
        assert await code(request("tools/call", name="echo", arguments=[1])) == (200, mcp.PARAMETERS)
        assert (await post(s, {"jsonrpc": "2.0", "id": 1, "result": {}})).status == 202
        assert kit.calls == []


@aio
async def test_without_tools_or_at_the_host_s_address_there_is_nothing(tmp_path: Path) -> None:
    async with stack(tmp_path, http(b"from upstream")) as s:
        assert (await post(s, request("ping"))).status == 404
        assert s.server.asked == []
    async with stack(tmp_path, http(b"from upstream"), inside=False) as s:
        tools(s)
        assert (await post(s, request("ping"))).status == 404
        assert s.server.asked == []


@aio
async def test_a_call_is_a_stream_that_can_be_asked_for_again(tmp_path: Path) -> None:
    async with stack(tmp_path) as s:
        kit = tools(s)
        kit.free.clear()
        talk = await s.send(json.dumps(request("tools/call", "a b", name="echo")).encode(), mcp.PATH, RESUMABLE)
        begun = await talk.sees(b"data:\n\n")
        assert b"text/event-stream" in begun
        event = begun.partition(b"id: ")[2].partition(b"\n")[0].decode()
        talk.leave()
        kit.free.set()
        again = await s.ask(None, mcp.PATH, {"Last-Event-ID": event}, method="GET")
        message = json.loads(again.body.partition(b"data: ")[2])
        assert (message["id"], message["result"]["content"][0]["text"]) == ("a b", "you are back")
        assert (await s.ask(None, mcp.PATH, {"Last-Event-ID": "%5B1%5D"}, method="GET")).status == 400
        whole = await post(s, request("tools/call", 3, name="echo"), RESUMABLE)
        assert whole.whole and b'"id": 3' in whole.body
        assert kit.calls == ["echo", "echo"] and kit.lost_calls == 1


@aio
async def test_a_call_that_takes_long_gives_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp, "BEAT_SECONDS", 0.02)
    async with stack(tmp_path) as s:
        kit = tools(s)
        kit.free.clear()
        async with await s.send(json.dumps(request("tools/call", name="echo")).encode(), mcp.PATH, RESUMABLE) as talk:
            alive = await talk.sees(b": under way\n\n")
            assert b"event: message" not in alive, "the tool has not answered yet"
            kit.free.set()
            rest = await talk.sees(b"isError")
            assert b"event: message" in rest and kit.calls == ["echo"]


@aio
async def test_no_sandbox_takes_more_than_its_share_and_who_has_gone_is_not_served(tmp_path: Path) -> None:
    async with stack(tmp_path) as s:
        kit = tools(s)
        kit.free.clear()
        body = json.dumps(request("tools/call", name="echo")).encode()
        talks = [await s.send(body, mcp.PATH, NEW) for _ in range(mcp.MOST_CALLS + 3)]
        await until(lambda: len(kit.calls) == mcp.MOST_CALLS, "the first calls")
        await talks[0].hears_nothing()
        for talk in talks[mcp.MOST_CALLS :]:
            talk.leave()
        await asyncio.sleep(0.05)
        kit.free.set()
        for talk in talks[: mcp.MOST_CALLS]:
            assert (await talk.reply()).status == 200
            talk.leave()
        await asyncio.sleep(0.05)
        assert (len(kit.calls), kit.most) == (mcp.MOST_CALLS, mcp.MOST_CALLS)


@aio
async def test_while_a_sandbox_is_brought_back_nobody_is_told_where_it_is(tmp_path: Path) -> None:
    async with stack(tmp_path) as s:
        kit = tools(s)
        with s.place.returning():
            talk = await s.send(None, mcp.PATH, {"Last-Event-ID": "7"}, method="GET")
            await talk.hears_nothing()
            assert kit.lost_calls == 0
        async with talk:
            assert b"you are back" in (await talk.reply()).body


@aio
async def test_the_official_client_speaks_with_it_and_finds_the_answer_to_a_call_that_was_cut(tmp_path: Path) -> None:
    sdk = pytest.importorskip("mcp")
    http_client = pytest.importorskip("mcp.client.streamable_http")
    connect = getattr(http_client, "streamable_http_client", None) or http_client.streamablehttp_client
    async with stack(tmp_path) as s:
        kit = tools(s)
        async with (
            connect(f"http://127.0.0.1:{s.port}{mcp.PATH}") as streams,
            sdk.ClientSession(*streams[:2]) as session,
        ):
            begun = await session.initialize()
            assert begun.instructions == "save often"
            listed = await session.list_tools()
            assert [tool.name for tool in listed.tools] == ["echo"]
            said = await session.call_tool("echo", {"a": 1})
            assert said.content[0].text == '{"a": 1}'
            await session.send_ping()
            kit.free.clear()
            calling = asyncio.ensure_future(session.call_tool("echo", {}))
            await until(lambda: len(kit.calls) == 2, "the call")
            cut(s.port)
            assert (await calling).content[0].text == "you are back"
            kit.free.set()
    await asyncio.sleep(0.1)


def cut(port: int) -> None:
    """Reset the connections of this process to a port, as a restore does."""
    for entry in list(os.scandir("/proc/self/fd")):
        if not os.path.lexists(entry.path) or not os.readlink(entry.path).startswith("socket:"):
            continue
        with socket.socket(fileno=os.dup(int(entry.name))) as sock:
            try:
                theirs = sock.getsockname()[1] == port and sock.getpeername()
            except (OSError, IndexError):
                continue
            if theirs:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.shutdown(socket.SHUT_RDWR)
