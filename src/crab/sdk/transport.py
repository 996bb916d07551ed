"""How the SDK reaches a service: the protocols, and the embedded way, in this process.

The other way is over the daemon's socket (`crab.daemon.client`). The asynchronous twins are in `async_transport.py`, apart,
so that the command line need not wait for asyncio to be imported. What is asked for is none of a transport's business.
"""

from __future__ import annotations

import collections
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from crab.daemon.requests import Request
from crab.errors import WrongState
from crab.model import ExecSpec, ExecStatus

if TYPE_CHECKING:
    from crab.daemon.service import Service
    from crab.sandbox.command import Command, Output

BUFFER = 1 << 20
"""Bytes of output that are taken from an embedded command before somebody wants them."""


class RunningCommand(Protocol):
    """A command that is read. One thread iterates `events`; the other calls are safe from any thread."""

    @property
    def name(self) -> str: ...
    @property
    def pid(self) -> int: ...
    def events(self) -> Iterator[Output]: ...
    def status(self) -> ExecStatus: ...
    def write(self, data: bytes) -> None: ...
    def close_input(self) -> None: ...
    def signal(self, number: int) -> None: ...
    def resize(self, rows: int, columns: int) -> None: ...
    def kill(self) -> None: ...
    def detach(self) -> None: ...


class Transport(Protocol):
    """A way to a service. Safe from any thread."""

    def open(self) -> None: ...
    def call(self, request: Request) -> Any: ...
    def spawn(self, sandbox: str, spec: ExecSpec) -> RunningCommand: ...
    def attach(self, sandbox: str, name: str) -> RunningCommand: ...
    def close(self) -> None: ...


def default_state_dir() -> Path:
    """`$CRAB_STATE`, or /var/lib/crab."""
    return Path(os.environ.get("CRAB_STATE") or "/var/lib/crab")


# ---------------------------------------------------------------- in this process


class EmbeddedTransport:
    """A service in this process. It owns the state directory from `open` (or the first call) to `close`."""

    def __init__(self, state_dir: Path | str | None = None) -> None:
        self.state_dir = Path(state_dir) if state_dir is not None else default_state_dir()
        self._service: Service | None = None
        self._lock = threading.Lock()

    @property
    def service(self) -> Service:
        """The service, opened if it is not. Raises `Busy`, `HostUnsuitable`."""
        from crab.daemon.service import Service

        with self._lock:
            if self._service is None:
                self._service = Service.open(self.state_dir)
            return self._service

    def open(self) -> None:
        _ = self.service

    def close(self) -> None:
        """Give the state directory up; sandboxes run on."""
        with self._lock:
            service, self._service = self._service, None
        if service is not None:
            service.close()

    def call(self, request: Request) -> Any:
        return self.service.handle(request)

    def spawn(self, sandbox: str, spec: ExecSpec) -> EmbeddedCommand:
        return EmbeddedCommand(self.service.spawn(sandbox, spec))

    def attach(self, sandbox: str, name: str) -> EmbeddedCommand:
        return EmbeddedCommand(self.service.command(sandbox, name))


class EmbeddedCommand:
    """A `Command` with a thread that reads it, so that input can be given to it and it can be left alone for a while.

    Behaves as a pipe does: what nobody reads is held up to `BUFFER` bytes, then the command waits.
    """

    def __init__(self, command: Command) -> None:
        self._command = command
        self._pieces: collections.deque[Output] = collections.deque()
        self._size = 0
        self._ended = False
        self._failure: BaseException | None = None
        self._changed = threading.Condition()
        self.on_change: Callable[[], None] = lambda: None
        """Called from another thread when `take` may have something new to say."""
        threading.Thread(target=self._read, name="crab-output", daemon=True).start()

    @property
    def name(self) -> str:
        return self._command.name or str(self._command.id)

    @property
    def pid(self) -> int:
        return self._command.pid

    def _read(self) -> None:
        failure: BaseException | None = None
        try:
            for piece in self._command.events():
                with self._changed:
                    self._pieces.append(piece)
                    self._size += len(piece.data)
                    self._changed.notify_all()
                self.on_change()
                with self._changed:
                    self._changed.wait_for(lambda: self._size <= BUFFER)
        except BaseException as error:
            failure = error
            self._command.detach()  # who waits to give it input need not wait any more
        with self._changed:
            self._failure, self._ended = failure, True
            self._changed.notify_all()
        self.on_change()

    def take(self) -> Output | None:
        """The next piece, if it is here already."""
        with self._changed:
            if not self._pieces:
                return None
            piece = self._pieces.popleft()
            self._size -= len(piece.data)
            self._changed.notify_all()
            return piece

    def has_ended(self) -> bool:
        """Whether no piece will come any more. Raises what the reading ended with."""
        with self._changed:
            if self._pieces or not self._ended:
                return False
            if self._failure is not None:
                raise self._failure
            return True

    def events(self) -> Iterator[Output]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pieces or self._ended)
            if (piece := self.take()) is not None:
                yield piece
            elif self.has_ended():
                return

    def status(self) -> ExecStatus:
        return self._command.status()

    def write(self, data: bytes) -> None:
        try:
            self._command.write(data)
        except BrokenPipeError:
            raise WrongState(
                f"command {self.name} takes no more input", remedy="it has ended, or has closed its standard input"
            ) from None

    def close_input(self) -> None:
        self._command.close_input()

    def signal(self, number: int) -> None:
        self._command.signal(number)

    def resize(self, rows: int, columns: int) -> None:
        self._command.resize(rows, columns)

    def kill(self) -> None:
        self._command.kill()

    def detach(self) -> None:
        self._command.detach()
