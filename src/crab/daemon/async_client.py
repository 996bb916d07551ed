"""The daemon's API from the outside, asynchronously. The same as `client.py`, over httpx."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx

from crab import lenient
from crab.daemon import wire
from crab.daemon.client import PIECE, check_answer, cut_off, unreachable
from crab.daemon.requests import Request
from crab.errors import CrabError, DaemonUnavailable
from crab.model import ExecSpec, ExecStatus
from crab.sandbox.command import Output


def _cause(error: BaseException) -> BaseException:
    """The system's error below those of httpx."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno is not None:
            return seen
        seen = seen.__cause__ or seen.__context__
    return error


class AsyncSocketTransport:
    """Calls over kept connections; streams have one each."""

    def __init__(self, path: Path | str | None = None) -> None:
        self.path = Path(path) if path is not None else wire.default_socket()
        self._client = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(self.path), limits=httpx.Limits(max_connections=None)),
            base_url="http://crab",
            headers={wire.API_HEADER: str(wire.API), "Content-Type": "application/json"},
            timeout=None,
            trust_env=False,
        )

    async def open(self) -> None:
        """See whether somebody answers. Raises `DaemonUnavailable`."""
        await self._send("GET", "/v1/about")

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def call(self, request: Request) -> Any:
        """The answer to a request. Raises what the operation raises, or `DaemonUnavailable`."""
        return lenient.decode(
            await self.post(f"/v1/call/{request.operation}", lenient.encode(request)), request.returns
        )

    async def spawn(self, sandbox: str, spec: ExecSpec) -> AsyncSocketCommand:
        """Start a command and read it."""
        body = await self.post("/v1/commands", lenient.encode(wire.Spawn(sandbox=sandbox, spec=spec)))
        return await self.attach(sandbox, lenient.decode(body, wire.Started).id)

    async def attach(self, sandbox: str, name: str) -> AsyncSocketCommand:
        """Read a command that runs already."""
        request = self._client.build_request("GET", wire.command_path(sandbox, name, "events"))
        try:
            response = await self._client.send(request, stream=True)
            started = response.headers.get(wire.COMMAND_HEADER)
            if response.status_code != 200 or started is None:
                body = await response.aread()
                check_answer(self.path, response.headers.get(wire.API_HEADER), response.status_code, body)
                raise DaemonUnavailable(
                    f"who listens on {self.path} is not Crab", remedy="check --socket and $CRAB_SOCKET"
                )
        except httpx.HTTPError as error:
            raise self._explain(error) from error
        return AsyncSocketCommand(self, sandbox, wire.read_started_header(started), response)

    async def post(self, path: str, body: bytes = b"") -> bytes:
        """The body of the answer to a POST. Raises the error that it states."""
        return await self._send("POST", path, body)

    async def _send(self, method: str, path: str, body: bytes | None = None) -> bytes:
        try:
            response = await self._client.request(method, path, content=body)
        except httpx.HTTPError as error:
            raise self._explain(error) from error
        return check_answer(self.path, response.headers.get(wire.API_HEADER), response.status_code, response.content)

    def _explain(self, error: httpx.HTTPError) -> CrabError:
        if isinstance(error, httpx.ConnectError):
            return unreachable(self.path, _cause(error))
        return cut_off(self.path, error)


class AsyncSocketCommand:
    """A command that is read over the socket. One task reads `events`."""

    def __init__(
        self, transport: AsyncSocketTransport, sandbox: str, started: wire.Started, response: httpx.Response
    ) -> None:
        self.id = started.id
        self.name = started.name
        self.pid = started.pid
        self._transport = transport
        self._sandbox = sandbox
        self._response = response
        self._raw = response.aiter_raw()
        self._frames = wire.FrameReader()
        self._status: ExecStatus | None = None

    async def events(self) -> AsyncIterator[Output]:
        """The pieces of output until the end. Raises `SandboxGone`, or `DaemonUnavailable` if the daemon ended."""
        data = b""  # first what is left of an iteration that was stopped in the middle
        while self._status is None:
            for stream, content in self._frames.feed(data):
                self._status = wire.read_status(stream, content)
                if self._status is None:
                    yield Output(stream, content)
            if self._status is None:
                data = await self._read()
        await self._response.aclose()

    async def _read(self) -> bytes:
        try:
            return await anext(self._raw)
        except StopAsyncIteration:
            raise self._lost(None) from None
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise self._lost(error) from error

    def _lost(self, error: BaseException | None) -> DaemonUnavailable:
        why = f": {error}" if error is not None and str(error) else ""
        return DaemonUnavailable(
            f"the stream of command {self.name or self.id} was cut{why}",
            remedy="the command goes on: attach to it when the daemon is back",
        )

    def status(self) -> ExecStatus:
        """How it ended, or that it runs (as far as `events` was read)."""
        return self._status or ExecStatus(id=self.name or self.id, running=True, pid=self.pid)

    async def write(self, data: bytes) -> None:
        """Give input; returns when the command has taken all. Raises `WrongState` if it takes no more."""
        view = memoryview(data)
        for at in range(0, len(data), PIECE):
            await self._post("input", bytes(view[at : at + PIECE]))

    async def close_input(self) -> None:
        """End of input."""
        await self._post("input?eof=1")

    async def signal(self, number: int) -> None:
        """Send a signal to its process group, or to the foreground group of its terminal."""
        await self._post("signal", lenient.encode(wire.Signal(number=number)))

    async def resize(self, rows: int, columns: int) -> None:
        """New size of its terminal, in characters."""
        await self._post("resize", lenient.encode(wire.Resize(rows=rows, columns=columns)))

    async def kill(self) -> None:
        """SIGKILL it and everything that it has started."""
        await self._post("kill")

    async def detach(self) -> None:
        """End the stream: `events` yields what is under way and ends, further output waits in the sandbox."""
        await self._post("detach")

    async def _post(self, what: str, body: bytes = b"") -> None:
        await self._transport.post(wire.command_path(self._sandbox, self.id, what), body)
