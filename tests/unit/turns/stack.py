"""A proxy between two ends that a test controls byte by byte: a server that says what it is told, and a client that sees all.

Between them is the real thing: proxy, channel, record in a file, gate. Only who makes the sandbox safe is the test's.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import socket
import struct
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from crab.model import ModelAccess
from crab.turns import coordinator, proxy, upstream
from crab.turns.channel import Channel
from crab.turns.place import Place
from crab.turns.protection import Protection, Safety
from crab.turns.record import Record

STREAMS = Path(__file__).parent / "streams"
CUT, RESET = "cut", "reset"
"""Steps of a script: the connection is closed, or reset."""
Step = bytes | float | str | asyncio.Event
Headers = Mapping[str, str] | list[tuple[str, str]]
KEY = "sk-test-0123456789abcdef"
TOOL = {
    "type": "function",
    "function": {"name": "bash", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}},
}


def aio(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """A test within an event loop, that may not hang."""

    @functools.wraps(test)
    def run(*args: Any, **named: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **named), 30))

    return run


async def until(condition: Callable[[], Any], what: str = "the condition", seconds: float = 5.0) -> None:
    end = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < end, f"waited in vain for {what}"
        await asyncio.sleep(0.005)


# ---------------------------------------------------------------- messages


def http(
    body: bytes = b"", status: int = 200, kind: str = "application/json", more: Headers = (), length: bool = True
) -> bytes:  # type: ignore[assignment]
    """A response; without `length` its end is the end of the connection."""
    pairs = [("Content-Type", kind), *(more.items() if isinstance(more, Mapping) else more)]
    pairs += [("Content-Length", str(len(body)))] if length else [("Connection", "close")]
    head = "".join(f"{key}: {value}\r\n" for key, value in pairs if value)
    return f"HTTP/1.1 {status} Some Reason\r\n{head}\r\n".encode("latin-1") + body


def sse(*steps: Step) -> list[Step]:
    """A streamed response, whose pieces are chunks."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunks = [b"%x\r\n%s\r\n" % (len(step), step) if isinstance(step, bytes) else step for step in steps]
    return [head, *chunks, *([] if steps and steps[-1] in (CUT, RESET) else [b"0\r\n\r\n"])]


def said(delta: dict[str, Any] | None = None, end: str | None = None) -> bytes:
    """One event of a chat completion."""
    choice = {"index": 0, "delta": delta or {}, "finish_reason": end}
    return f"data: {json.dumps({'id': 'c', 'choices': [choice]})}\n\n".encode()


TEXT = said({"role": "assistant", "content": "I look "})
MORE = said({"content": "around."})
CALL = [
    said(
        {
            "tool_calls": [
                {"index": 0, "id": "call_1", "type": "function", "function": {"name": "bash", "arguments": ""}}
            ]
        }
    ),
    said({"tool_calls": [{"index": 0, "function": {"arguments": '{"command": "ls"}'}}]}),
]
END = [said(end="tool_calls"), b"data: [DONE]\n\n"]
WHOLE = b"".join([TEXT, MORE, *CALL, *END])
"""A streamed answer with a call."""
BODY = json.dumps({"id": "c", "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}}]}).encode()


def asks(*words: str, stream: bool = True, **more: Any) -> bytes:
    """A request for a chat completion of an agent."""
    messages = [{"role": ("user", "assistant")[n % 2], "content": word} for n, word in enumerate(words)]
    return json.dumps({"model": "m", "messages": messages, "stream": stream, "tools": [TOOL], **more}).encode()


# ---------------------------------------------------------------- the server


@dataclass
class Asked:
    """A request as it came to the server."""

    line: str
    headers: list[tuple[str, str]]
    body: bytes
    raw: bytes = b""

    def header(self, name: str) -> str:
        return next((value for key, value in self.headers if key.lower() == name), "")


class Server:
    """Answers each request with the next script; the last one again and again."""

    def __init__(self, *scripts: bytes | list[Step]) -> None:
        self.scripts = [[script] if isinstance(script, bytes) else script for script in scripts]
        self.asked: list[Asked] = []
        self.open = 0
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Server:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=1 << 26)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        try:
            while (asked := await request_of(reader)) is not None:
                self.asked.append(asked)
                for step in self.scripts[min(len(self.asked), len(self.scripts)) - 1]:
                    if isinstance(step, bytes):
                        writer.write(step)
                        await writer.drain()
                    elif isinstance(step, asyncio.Event):
                        await step.wait()
                    elif step == RESET:
                        sock = writer.get_extra_info("socket")
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        return writer.transport.abort()
                    elif step == CUT:
                        return None
                    else:
                        await asyncio.sleep(float(step))
                if asked.line.startswith("POST") and b"Connection: close" in b"".join(
                    step
                    for step in self.scripts[min(len(self.asked), len(self.scripts)) - 1]
                    if isinstance(step, bytes)
                ):
                    return None
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.open -= 1
            writer.close()


async def request_of(reader: asyncio.StreamReader) -> Asked | None:
    head = await _head(reader)
    if not head:
        return None
    line, headers = head
    asked = Asked(line, headers, b"")
    asked.body, asked.raw = await _body(reader, headers, None)
    return asked


async def _head(reader: asyncio.StreamReader) -> tuple[str, list[tuple[str, str]]] | None:
    try:
        data = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    line, *rest = data[:-4].decode("latin-1").split("\r\n")
    return line, [(key, value.strip()) for key, _, value in (entry.partition(":") for entry in rest)]


async def _body(
    reader: asyncio.StreamReader, headers: list[tuple[str, str]], default: int | None
) -> tuple[bytes, bytes]:
    """The content, and the bytes as they came. Raises IncompleteReadError."""
    named = {key.lower(): value for key, value in headers}
    if "chunked" in named.get("transfer-encoding", ""):
        body, raw = b"", b""
        while True:
            line = await reader.readline()
            if not line.endswith(b"\n"):
                raise asyncio.IncompleteReadError(body, None)
            try:
                data = await reader.readexactly(int(line, 16) + 2)
            except asyncio.IncompleteReadError as error:
                raise asyncio.IncompleteReadError(body + error.partial, None) from None
            raw += line + data
            if len(data) == 2:
                return body, raw
            body += data[:-2]
    length = int(named.get("content-length", default or 0))
    body = await reader.readexactly(length)
    return body, body


# ---------------------------------------------------------------- the client


@dataclass
class Reply:
    """What a client got."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes = b""
    whole: bool = True
    """The body ended as HTTP says that it does."""

    def header(self, name: str) -> str:
        return next((value for key, value in self.headers if key.lower() == name), "")

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name]


class Talk:
    """One connection of a client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def __aenter__(self) -> Talk:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        self.writer.close()

    async def reply(self, bodiless: bool = False) -> Reply:
        """The response to its end."""
        head = await _head(self.reader)
        if head is None:
            return Reply(0, [], whole=False)
        reply = Reply(int(head[0].split()[1]), head[1])
        if bodiless:
            return reply
        try:
            if "content-length" in {key.lower() for key, _ in reply.headers} or reply.header("transfer-encoding"):
                reply.body, _ = await _body(self.reader, reply.headers, None)
            else:
                reply.body = await self.reader.read()
        except asyncio.IncompleteReadError as error:
            reply.body, reply.whole = error.partial, False
        except ConnectionError:
            reply.whole = False
        return reply

    async def sees(self, data: bytes) -> bytes:
        """Wait for bytes in what comes."""
        try:
            return await asyncio.wait_for(self.reader.readuntil(data), 5)
        except asyncio.IncompleteReadError as error:
            raise AssertionError(f"{data!r} did not come: {error.partial!r}") from None

    async def hears_nothing(self, seconds: float = 0.08) -> None:
        try:
            data = await asyncio.wait_for(self.reader.read(1 << 16), seconds)
        except TimeoutError:
            return
        assert not data.strip(), f"something came: {data!r}"  # the end of a chunk is nothing new
        await self.hears_nothing(seconds)


# ---------------------------------------------------------------- the stack


class Safe:
    """Who makes the sandbox safe; the test says how long it takes and what comes of it."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.free.set()
        self.calls = 0
        self.running = 0
        self.error: Exception | None = None
        self.answer: Safety | None = None
        self.seconds = 10.0

    def __call__(self) -> Safety:
        self.calls += 1
        number = self.calls
        self.running += 1
        try:
            self.free.wait(self.seconds)
        finally:
            self.running -= 1
        if self.error is not None:
            raise self.error
        return self.answer or Safety(protection="durable", checkpoint=f"c{number}", turn=number)


@dataclass
class Stack:
    """See the module."""

    port: int
    server: Server
    record: Record
    place: Place
    channel: Channel
    safe: Safe
    keys: dict[str, str]
    folder: Path
    brought: list[str] = field(default_factory=list)

    async def connect(self) -> Talk:
        return Talk(*await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 26))

    async def send(
        self,
        body: bytes | None = None,
        path: str = "/v1/chat/completions",
        headers: Headers = (),  # type: ignore[assignment]
        method: str = "POST",
        version: str = "1.1",
    ) -> Talk:
        """A request on a connection of its own."""
        talk = await self.connect()
        pairs = [
            ("Host", "model.example"),
            ("Authorization", f"Bearer {KEY}"),
            *(headers.items() if isinstance(headers, Mapping) else headers),
        ]
        if body is not None and not any(key.lower() in ("content-length", "transfer-encoding") for key, _ in pairs):
            pairs.append(("Content-Length", str(len(body))))
        head = "".join(f"{key}: {value}\r\n" for key, value in pairs)
        talk.writer.write(f"{method} {path} HTTP/{version}\r\n{head}\r\n".encode("latin-1") + (body or b""))
        await talk.writer.drain()
        return talk

    async def ask(self, body: bytes | None = None, *args: Any, **named: Any) -> Reply:
        """A request, and its answer to the end."""
        async with await self.send(body, *args, **named) as talk:
            return await asyncio.wait_for(talk.reply(named.get("method") == "HEAD"), 15)

    @property
    def turns(self) -> list[Any]:
        return [one for one in self.record.exchanges("s1") if one.kind == "main"]

    async def settled(self) -> None:
        """Until nothing is under way any more."""
        await until(lambda: not self.channel._tasks, "the end of all exchanges")


@asynccontextmanager
async def stack(
    folder: Path,
    *scripts: bytes | list[Step],
    access: ModelAccess | None = None,
    answers: upstream.Upstream | None = None,
    inside: bool = True,
) -> AsyncIterator[Stack]:
    """A proxy in front of a server with these scripts (or of `answers`). At its end no task and no descriptor may be left."""
    before = opened()
    async with Server(*(scripts or (http(),))) as server:
        record, safe, keys, brought = Record.open(folder / "turns.db"), Safe(), dict[str, str](), list[str]()
        place, session = Place(record, "s1"), upstream.session()
        model = answers or upstream.Real(session, server.url, keys)
        channel = Channel("s1", access or ModelAccess(), record, place, model, Protection(safe), brought.append)

        async def find(request: web.Request) -> tuple[Channel, str]:
            return channel, coordinator._target(request)

        runner = coordinator._runner(proxy.application(find, inside))
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            port = runner.addresses[0][1]
            yield Stack(port, server, record, place, channel, safe, keys, folder, brought)
        finally:
            safe.free.set()
            await channel.drain(3)
            await runner.cleanup()
            await session.close()
    await until(lambda: len(asyncio.all_tasks()) <= 2, "the end of all tasks", 3)
    record.close()
    assert not channel._running and not channel._tasks
    await until(lambda: not opened() - before, "the end of all sockets and files", 3)


def opened() -> set[str]:
    """The sockets, and the files of the record, that this process has open."""
    found: set[str] = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the folder itself
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
    return {one for one in found if one.startswith("socket") or "turns.db" in one}
