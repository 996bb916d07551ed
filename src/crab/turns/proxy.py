"""The proxy: HTTP on one side of a channel. Passes every byte on as it is, in both directions.

One application for each way in: the door of a sandbox, or the host's own address, where the path says for which sandbox.
Requests that ask a model something become exchanges of the channel; all others are passed through untouched.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable

from aiohttp import HttpVersion11, web

from crab.turns import bodies, clients, identity, mcp, refusals, wires
from crab.turns.channel import Call, Channel
from crab.turns.delivery import Broken, Delivery
from crab.turns.upstream import FAILURES, Headers, passed_on, reason
from crab.turns.wires.wire import Ask, Wire

SMALL = 1 << 15
"""Bytes of a request that are read in no time."""
log = logging.getLogger("crab.turns")

Find = Callable[[web.Request], Awaitable[tuple[Channel, str] | None]]
"""The channel that a request is for, and its target there (path and query); None: there is none."""


def application(find: Find, inside: bool) -> web.Application:
    """What listens. Run it with `auto_decompress=False` and `handler_cancellation`."""

    async def handle(request: web.Request) -> web.StreamResponse:
        found = await find(request)
        if found is None:
            text = refusals.body(
                "not_found_error", "no sandbox is reached here; `crab inspect` shows the address of one"
            )
            return web.Response(status=404, body=text, content_type="application/json")
        channel, target = found
        if target.partition("?")[0] == mcp.PATH:
            return await mcp.answer(request, channel.tools if inside else None)
        return await _handled(request, channel, target, inside)

    app = web.Application(client_max_size=0)
    app.router.add_route("*", "/{path:.*}", handle)
    return app


async def _handled(request: web.Request, channel: Channel, target: str, inside: bool) -> web.StreamResponse:
    wire = wires.find(request.method, target.partition("?")[0])
    headers = [(key, value) for key, value in request.headers.items()]
    if wire is None:
        return await _passed(request, channel, target, headers, _coming(request) if request.can_read_body else None)
    body = await _whole(request)
    if len(body) > bodies.LARGEST:
        return await _passed(request, channel, target, headers, _first(body, _coming(request)))
    try:
        if len(body) < SMALL:
            asked, chain = _read(wire, target, headers, body)
        else:  # the other streams are not to wait for it
            asked, chain = await asyncio.to_thread(_read, wire, target, headers, body)
    except (OSError, ValueError) as error:
        channel.unread, channel.unread_why = channel.unread + 1, f"{target.partition('?')[0]}: {error}"
        log.warning("%s: a request cannot be read, and is no turn: %s", channel.sandbox, channel.unread_why)
        return await _passed(request, channel, target, headers, body)
    caller = clients.classify(dict(request.headers), asked)
    call = Call(method=request.method, target=target, headers=headers, body=body, ask=asked, chain=chain, inside=inside)
    delivery = await channel.delivery(call, wire, caller)
    return await _told(request, delivery, wire.ping if caller.keep_alive else b"")


def _read(wire: Wire, target: str, headers: Headers, body: bytes) -> tuple[Ask, tuple[bytes, ...]]:
    asked = wire.read(target.partition("?")[0], bodies.decoded(headers, body))
    return asked, identity.chain(asked)


async def _whole(request: web.Request) -> bytes:
    """The body, or so much of it that it is too large."""
    pieces: list[bytes] = []
    size = 0
    async for data in request.content.iter_any():
        pieces.append(data)
        size += len(data)
        if size > bodies.LARGEST:
            break
    return b"".join(pieces)


async def _coming(request: web.Request) -> AsyncIterator[bytes]:
    async for data in request.content.iter_any():
        yield data


async def _first(begin: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield begin
    async for data in rest:
        yield data


async def _told(request: web.Request, delivery: Delivery, ping: bytes) -> web.StreamResponse:
    """Give the client what may go out, as it comes."""
    try:
        await delivery.head()
    except Broken:
        return _cut(request, web.StreamResponse())
    response = _response(delivery.status, delivery.headers)
    streams = bodies.header(delivery.headers, "content-type").startswith("text/event-stream")
    await response.prepare(request)
    try:
        async with contextlib.aclosing(delivery.follow(ping if streams else b"")) as pieces:
            async for data in pieces:
                await response.write(data)
    except Broken:
        return _cut(request, response)
    await response.write_eof()
    delivery.taken()
    return response


async def _passed(
    request: web.Request, channel: Channel, target: str, headers: Headers, body: bytes | AsyncIterator[bytes] | None
) -> web.StreamResponse:
    """What is no question to a model, through and back."""
    response: web.StreamResponse | None = None
    try:
        async with channel.upstream.ask(request.method, target, headers, body) as answer:
            response = _response(answer.status, answer.headers)
            length = bodies.header(answer.headers, "content-length")
            if length.isdigit():
                response.content_length = int(length)
            await response.prepare(request)
            async for data in answer.chunks():
                await response.write(data)
            await response.write_eof()
            return response
    except FAILURES as error:
        if request.transport is None or request.transport.is_closing():
            raise ConnectionResetError("the client has gone") from error
        if response is not None and response.prepared:
            return _cut(request, response)
        text = refusals.body("api_error", f"the model cannot be reached: {reason(error)}")
        return web.Response(status=502, body=text, content_type="application/json")


def _response(status: int, headers: Headers) -> web.StreamResponse:
    response = web.StreamResponse(status=status)
    for key, value in passed_on(headers):
        response.headers.add(key, value)
    return response


def _cut(request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    """Break the connection without the end of the body, so that nobody takes what came for all."""
    if request.transport is not None:
        if response.prepared and request.version < HttpVersion11:  # there the end of a connection is the end of a body
            sock = request.transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            request.transport.abort()
        request.transport.close()
    request.protocol.force_close()
    raise asyncio.CancelledError
