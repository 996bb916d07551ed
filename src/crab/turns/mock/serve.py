"""The scripted model as a server of its own, for agents that run without Crab.

Knows HTTP and the log; what is answered is the business of `Mock`.
"""

from __future__ import annotations

import argparse
import socket
import struct
from collections.abc import Sequence
from typing import BinaryIO

import aiohttp
import msgspec
from aiohttp import web

from crab.turns.mock import Asked, Fault, Mock

MOST_BYTES = 1 << 28
"""Of a request: some carry images."""
GRACE_SECONDS = 1.0
"""How long answers may go on when the server is told to end."""


def application(mock: Mock) -> web.Application:
    """A server that answers every path with the model."""

    async def answered(request: web.Request) -> web.StreamResponse:
        # aiohttp has taken the encoding of the body away, if there was one.
        headers = [(key, value) for key, value in request.headers.items() if key.lower() != "content-encoding"]
        async with mock.ask(request.method, request.path_qs, headers, await request.read()) as answer:
            response = web.StreamResponse(status=answer.status, headers=dict(answer.headers))
            try:
                await response.prepare(request)
                async for data in answer.chunks():
                    await response.write(data)
                await response.write_eof()
            except (aiohttp.ClientPayloadError, ConnectionResetError) as error:
                _end(request, reset=isinstance(error, ConnectionResetError))
            return response

    app = web.Application(client_max_size=MOST_BYTES)
    app.router.add_route("*", "/{path:.*}", answered)
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m crab.turns.mock",
        description="A scripted model that needs no network. It listens on 127.0.0.1 only and prints its address.",
    )
    parser.add_argument("port", type=int, help="0: any that is free")
    parser.add_argument("--log", metavar="FILE", help="one JSON line for each request, without its headers")
    parser.add_argument("--faults", metavar="JSON", default="[]", help='[{"nth": 2, "kind": "cut", "after": 4}]')
    given = parser.parse_args(arguments)
    try:
        faults = msgspec.json.decode(given.faults, type=list[Fault])
    except msgspec.DecodeError as error:
        parser.error(f"--faults: {error}")
    log: BinaryIO | None = open(given.log, "ab", buffering=0) if given.log else None  # noqa: SIM115 - until the end

    def told(asked: Asked) -> None:
        if log is not None:
            log.write(msgspec.json.encode(asked) + b"\n")

    listener = socket.create_server(("127.0.0.1", given.port))
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    app = application(Mock(faults, told))
    web.run_app(app, sock=listener, print=None, access_log=None, shutdown_timeout=GRACE_SECONDS)


def _end(request: web.Request, reset: bool) -> None:
    """Break the connection in the middle of an answer."""
    transport = request.transport
    if transport is None or transport.is_closing():
        return
    if reset:
        # Closed at once, with what was not sent forgotten: the other side gets a reset, not an end.
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()
    else:
        transport.close()
