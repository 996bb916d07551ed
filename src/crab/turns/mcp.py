"""MCP at the door of a sandbox: JSON-RPC over streamable HTTP, for an agent inside that may use tools on its own sandbox.

Knows the protocol and nothing of what the tools do. Nothing is remembered between two requests, so nothing is lost with a
sandbox or a daemon. A call whose caller was brought back to the middle of it is answered once more: its answer is a stream that
begins with an id, and a client that finds its stream cut asks for the rest by that id (protocol 2025-11-25, *Resumability*).
"""

from __future__ import annotations

import asyncio
import json
import urllib.parse
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

from aiohttp import web

from crab import __version__
from crab.model import Struct
from crab.turns import refusals
from crab.turns.place import Place

T = TypeVar("T")
PATH = "/crab/mcp"
VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
RESUMABLE = VERSIONS[0]
"""Older clients take an event without data for a broken one."""
LARGEST = 1 << 20
"""Bytes of a request."""
MOST_CALLS = 4
"""Calls of one sandbox that are worked on at the same time. The threads for them are everybody's."""
BEAT_SECONDS = 15.0
"""Between two signs of life of a call that takes long."""
RETRY_MS = 200
LOCAL = ("127.0.0.1", "localhost", "::1")
PARSE, INVALID, NO_METHOD, PARAMETERS = -32700, -32600, -32601, -32602


class Told(Struct, kw_only=True):
    """What a tool says."""

    text: str
    failed: bool = False


class Tools(Protocol):
    """What can be called."""

    instructions: str

    def described(self) -> list[dict[str, Any]]:
        """Each with `name`, `description` and `inputSchema`."""
        ...

    def use(self, name: str, arguments: dict[str, Any]) -> Told:
        """Call one; blocks. Says what went wrong; raises `LookupError` if there is none of that name."""
        ...

    def lost(self) -> Told:
        """What to say to who has lost the answer of a call; blocks."""
        ...


class Desk:
    """The tools of one sandbox, and how many calls may be under way. Used within one event loop."""

    def __init__(self, tools: Tools, place: Place) -> None:
        self.tools, self._place = tools, place
        self._free = asyncio.Semaphore(MOST_CALLS)

    async def do(self, work: Callable[[], T]) -> T:
        """Do what blocks, when it is its turn. Goes on to its end if the caller is cancelled.

        Who comes while its sandbox is being brought back waits for the end of that: nobody could tell it where it is.
        """
        await self._free.acquire()
        try:
            if not self._place.is_ready:
                await asyncio.to_thread(self._place.ready)
        except BaseException:
            self._free.release()
            raise
        running = asyncio.ensure_future(asyncio.to_thread(work))
        running.add_done_callback(lambda _: self._free.release())
        return await asyncio.shield(running)


async def answer(request: web.Request, desk: Desk | None) -> web.StreamResponse:
    """The answer to a request for `PATH`; without a desk there is nothing here."""
    if desk is None:
        return _refused(404, "there are no tools here; they are for agents in sandboxes that were made with --tools")
    origin = urllib.parse.urlsplit(request.headers.get("Origin", f"http://{LOCAL[0]}"))
    if origin.hostname not in LOCAL:  # a page that a browser in the sandbox shows is not the agent
        return _refused(403, "pages of other hosts have no tools here")
    if request.method == "GET" and (event := request.headers.get("Last-Event-ID")):
        return await _resumed(request, desk, event)
    if request.method != "POST":
        return _refused(405, "there is no stream of events; POST calls", {"Allow": "POST"})
    if request.content_type != "application/json":
        return _refused(415, "calls are JSON-RPC, of type application/json")
    body = bytearray()
    async for data in request.content.iter_any():
        body += data
        if len(body) > LARGEST:
            return _refused(413, f"a call has at most {LARGEST} bytes")
    try:
        message = json.loads(body)
    except (ValueError, RecursionError):
        return _json(_error(None, PARSE, "this is no JSON"), 400)
    if not isinstance(message, dict) or message.get("jsonrpc") != "2.0":
        return _json(_error(None, INVALID, "this is no message of JSON-RPC 2.0, or several at once"), 400)
    return await _answered(request, desk, cast("dict[str, Any]", message))


async def _answered(request: web.Request, desk: Desk, message: dict[str, Any]) -> web.StreamResponse:
    method, number, given = message.get("method"), message.get("id"), message.get("params")
    if not isinstance(method, str) or number is None:
        return web.Response(status=202)  # a notification, or the answer to a question that was never asked
    if not isinstance(number, str | int):
        return _json(_error(None, INVALID, "an id is a text or a whole number"), 400)
    parameters: dict[str, Any] = given if isinstance(given, dict) else {}
    match method:
        case "initialize":
            wanted = parameters.get("protocolVersion")
            return _json(
                _result(
                    number,
                    {
                        "protocolVersion": wanted if wanted in VERSIONS else VERSIONS[0],
                        "capabilities": {"tools": {}},
                        "serverInfo": {"name": "crab", "version": __version__},
                        "instructions": desk.tools.instructions,
                    },
                )
            )
        case "ping":
            return _json(_result(number, {}))
        case "tools/list":
            return _json(_result(number, {"tools": desk.tools.described()}))
        case "tools/call":
            return await _called(request, desk, number, parameters)
        case _:
            return _json(_error(number, NO_METHOD, f"there is no method {method[:100]}"))


async def _called(
    request: web.Request, desk: Desk, number: str | int, parameters: dict[str, Any]
) -> web.StreamResponse:
    name, arguments = parameters.get("name"), parameters.get("arguments") or {}
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return _json(_error(number, PARAMETERS, "a call has the name of a tool, and arguments"))

    def use() -> dict[str, Any]:
        try:
            return told(number, desk.tools.use(name, arguments))
        except LookupError as error:
            return _error(number, PARAMETERS, str(error))

    streams = "text/event-stream" in request.headers.get("Accept", "")
    if not streams or request.headers.get("MCP-Protocol-Version") != RESUMABLE:
        return _json(await desk.do(use))
    response = await _stream(request)
    event = urllib.parse.quote(json.dumps(number))
    await response.write(f"id: {event}\nretry: {RETRY_MS}\ndata:\n\n".encode())
    work = asyncio.ensure_future(desk.do(use))
    try:
        while not (await asyncio.wait([work], timeout=BEAT_SECONDS))[0]:
            await response.write(b": under way\n\n")
    finally:
        work.cancel()  # if the caller has gone: what was not begun is not wanted any more
    return await _last(response, work.result())


async def _resumed(request: web.Request, desk: Desk, event: str) -> web.StreamResponse:
    """The answer to a call that was cut."""
    try:
        number = json.loads(urllib.parse.unquote(event))
    except (ValueError, RecursionError):
        number = None
    if not isinstance(number, str | int):
        return _refused(400, "no call has this id")
    said = await desk.do(desk.tools.lost)
    return await _last(await _stream(request), told(number, said))


async def _stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
    await response.prepare(request)
    return response


async def _last(response: web.StreamResponse, message: dict[str, Any]) -> web.StreamResponse:
    await response.write(b"event: message\ndata: " + _encoded(message) + b"\n\n")
    await response.write_eof()
    return response


def told(number: str | int, said: Told) -> dict[str, Any]:
    """The message with what a tool said."""
    return _result(number, {"content": [{"type": "text", "text": said.text}], "isError": said.failed})


def _result(number: str | int, result: dict[str, Any]) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "result": result}


def _error(number: str | int | None, code: int, text: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": text}}


def _encoded(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode()  # ASCII, so that names of files that are no UTF-8 break nothing


def _json(message: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(status=status, body=_encoded(message), content_type="application/json")


def _refused(status: int, why: str, headers: dict[str, str] | None = None) -> web.Response:
    body = refusals.body("invalid_request_error", why)
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)
