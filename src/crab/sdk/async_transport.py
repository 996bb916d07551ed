"""Twins of what is in `transport.py`, for asyncio. The way over the socket is `crab.daemon.async_client`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from crab.daemon.requests import Request
from crab.model import ExecSpec, ExecStatus
from crab.sdk.transport import EmbeddedCommand, EmbeddedTransport

if TYPE_CHECKING:
    from crab.sandbox.command import Output

T = TypeVar("T")
THREADS = 256
"""Embedded calls that an `AsyncHost` makes at the same time."""


class AsyncRunningCommand(Protocol):
    """Twin of `RunningCommand`."""

    @property
    def name(self) -> str: ...
    @property
    def pid(self) -> int: ...
    def events(self) -> AsyncIterator[Output]: ...
    def status(self) -> ExecStatus: ...
    async def write(self, data: bytes) -> None: ...
    async def close_input(self) -> None: ...
    async def signal(self, number: int) -> None: ...
    async def resize(self, rows: int, columns: int) -> None: ...
    async def kill(self) -> None: ...
    async def detach(self) -> None: ...


class AsyncTransport(Protocol):
    """Twin of `Transport`."""

    async def open(self) -> None: ...
    async def call(self, request: Request) -> Any: ...
    async def spawn(self, sandbox: str, spec: ExecSpec) -> AsyncRunningCommand: ...
    async def attach(self, sandbox: str, name: str) -> AsyncRunningCommand: ...
    async def close(self) -> None: ...


# ---------------------------------------------------------------- in this process


class AsyncEmbeddedTransport:
    """Twin of `EmbeddedTransport`: its calls, in threads."""

    def __init__(self, state_dir: Path | str | None = None) -> None:
        self._embedded = EmbeddedTransport(state_dir)
        self._threads = ThreadPoolExecutor(THREADS, "crab-call")

    async def run(self, function: Callable[..., T], *values: Any) -> T:
        """Call a function that blocks."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*values))

    async def open(self) -> None:
        await self.run(self._embedded.open)

    async def close(self) -> None:
        await self.run(self._embedded.close)
        self._threads.shutdown(wait=False)

    async def call(self, request: Request) -> Any:
        return await self.run(self._embedded.call, request)

    async def spawn(self, sandbox: str, spec: ExecSpec) -> AsyncEmbeddedCommand:
        return AsyncEmbeddedCommand(self, await self.run(self._embedded.spawn, sandbox, spec))

    async def attach(self, sandbox: str, name: str) -> AsyncEmbeddedCommand:
        return AsyncEmbeddedCommand(self, await self.run(self._embedded.attach, sandbox, name))


class AsyncEmbeddedCommand:
    """Twin of `EmbeddedCommand`."""

    def __init__(self, transport: AsyncEmbeddedTransport, command: EmbeddedCommand) -> None:
        self._transport = transport
        self._command = command

    @property
    def name(self) -> str:
        return self._command.name

    @property
    def pid(self) -> int:
        return self._command.pid

    async def events(self) -> AsyncIterator[Output]:
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
                loop.call_soon_threadsafe(changed.set)

        self._command.on_change = wake
        while True:
            changed.clear()
            if (piece := self._command.take()) is not None:
                yield piece
            elif self._command.has_ended():
                return
            else:
                await changed.wait()

    def status(self) -> ExecStatus:
        return self._command.status()

    async def write(self, data: bytes) -> None:
        await self._transport.run(self._command.write, data)

    async def close_input(self) -> None:
        await self._transport.run(self._command.close_input)

    async def signal(self, number: int) -> None:
        await self._transport.run(self._command.signal, number)

    async def resize(self, rows: int, columns: int) -> None:
        await self._transport.run(self._command.resize, rows, columns)

    async def kill(self) -> None:
        await self._transport.run(self._command.kill)

    async def detach(self) -> None:
        await self._transport.run(self._command.detach)
