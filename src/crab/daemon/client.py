"""The daemon's API from the outside, synchronously: typed calls and streams over its unix socket.

Knows how requests, answers and errors travel; `http.py` knows the bytes. The asynchronous twin is `async_client.py`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from crab import lenient
from crab.daemon import wire
from crab.daemon.http import Answer, Line
from crab.daemon.requests import Request, Version
from crab.errors import DaemonUnavailable
from crab.model import ExecSpec, ExecStatus

if TYPE_CHECKING:
    from crab.sandbox.command import Output

IDLE_SECONDS = 30.0
"""A connection that was idle for longer is not used again: the daemon closes it after 75, perhaps just then."""
PIECE = 1 << 20
"""Bytes of input that are sent at once."""
_HEADERS = {wire.API_HEADER: str(wire.API), "Content-Type": "application/json"}
_API_HEADER, _COMMAND_HEADER = wire.API_HEADER.lower(), wire.COMMAND_HEADER.lower()
_BROKEN = (OSError, EOFError, ValueError)
_START = "start it with `crab daemon run`, or work without one: `crab --embedded …` as root"


def unreachable(path: Path, error: BaseException) -> DaemonUnavailable:
    """In words, why nobody answers."""
    match error:
        case FileNotFoundError():
            return DaemonUnavailable(f"no daemon runs: there is no socket {path}", remedy=_START, absent=True)
        case ConnectionRefusedError():
            return DaemonUnavailable(f"no daemon runs: nobody listens on {path}", remedy=_START, absent=True)
        case PermissionError():
            return DaemonUnavailable(
                f"you may not use the daemon's socket {path}",
                remedy="become root, or join the group crab: `usermod -aG crab USER`",
            )
        case _:
            return DaemonUnavailable(f"the daemon cannot be reached at {path}: {error}", remedy=_START)


def cut_off(path: Path, error: BaseException | None = None) -> DaemonUnavailable:
    """The connection ended in the middle of something. Not tried again: it may have been done (law 6)."""
    why = f": {error}" if error is not None and str(error) else ""
    return DaemonUnavailable(
        f"the daemon at {path} ended, or cut the connection, before it answered{why}",
        remedy="whether it was done is not known: look (`crab ls`, `crab turns`) before you try again",
    )


def check_answer(path: Path, version: str | None, status: int, body: bytes) -> bytes:
    """The body of an answer. Raises the error that it states, or `DaemonUnavailable` if it is not from a daemon like us."""
    if version is None:
        raise _stranger(path)
    wire.check_version(version, "client")
    if status != 200:
        raise wire.read_error(body)
    return body


def _stranger(path: Path) -> DaemonUnavailable:
    return DaemonUnavailable(f"who listens on {path} is not Crab", remedy="check --socket and $CRAB_SOCKET")


class SocketTransport:
    """Calls over one kept connection (more, if threads call at the same time); streams have one each."""

    def __init__(self, path: Path | str | None = None) -> None:
        self.path = Path(path) if path is not None else wire.default_socket()
        self._idle: list[tuple[Line, float]] = []
        """Connections, and when they were used last."""
        self._process = os.getpid()
        self._lock = threading.Lock()

    def open(self) -> None:
        """See whether somebody listens. Raises `DaemonUnavailable`."""
        self._give_back(self._take())

    def close(self) -> None:
        """Close the connections that are not in use."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection, _ in idle:
            connection.close()

    def call(self, request: Request) -> Any:
        """The answer to a request. Raises what the operation raises, or `DaemonUnavailable`."""
        return lenient.decode(self.post(f"/v1/call/{request.operation}", lenient.encode(request)), request.returns)

    def spawn(self, sandbox: str, spec: ExecSpec) -> SocketCommand:
        """Start a command and read it."""
        body = self.post("/v1/commands", lenient.encode(wire.Spawn(sandbox=sandbox, spec=spec)))
        return self.attach(sandbox, lenient.decode(body, wire.Started).id)

    def attach(self, sandbox: str, name: str) -> SocketCommand:
        """Read a command that runs already."""
        connection = self._take()
        try:
            answer = connection.ask("GET", wire.command_path(sandbox, name, "events"), _HEADERS)
            started = answer.headers.get(_COMMAND_HEADER)
            if answer.status != 200 or started is None:
                check_answer(self.path, answer.headers.get(_API_HEADER), answer.status, answer.read())
                raise _stranger(self.path)
            return SocketCommand(self, sandbox, wire.read_started_header(started), connection, answer)
        except BaseException as error:
            connection.close()
            if isinstance(error, _BROKEN):
                raise cut_off(self.path, error) from error
            raise

    def about(self) -> Version:
        """Who answers, whatever version of the API it speaks. Raises `DaemonUnavailable`."""
        status, _, body = self._exchange("GET", "/v1/about", b"")
        if status != 200:
            raise wire.read_error(body)
        try:
            return lenient.decode(body, Version)
        except msgspec.DecodeError:
            raise _stranger(self.path) from None

    # ---- HTTP

    def post(self, path: str, body: bytes) -> bytes:
        """The body of the answer to a POST. Raises the error that it states."""
        status, version, answer = self._exchange("POST", path, body)
        return check_answer(self.path, version, status, answer)

    def _exchange(self, method: str, path: str, body: bytes) -> tuple[int, str | None, bytes]:
        """(HTTP status, version of the API that the daemon states, body)."""
        connection = self._take()
        try:
            answer = connection.ask(method, path, _HEADERS, body)
            content = answer.read()
        except BaseException as error:  # also Ctrl-C: what comes later is not the answer to the next question
            connection.close()
            if isinstance(error, _BROKEN):
                raise cut_off(self.path, error) from error
            raise
        if answer.is_last:
            connection.close()
        else:
            self._give_back(connection)
        return answer.status, answer.headers.get(_API_HEADER), content

    def _take(self) -> Line:
        if self._process != os.getpid():  # after a fork the connections are our parent's
            self._process, self._idle = os.getpid(), []
        while True:
            with self._lock:
                if not self._idle:
                    break
                connection, used = self._idle.pop()
            if time.monotonic() - used < IDLE_SECONDS and not connection.is_stale():
                return connection
            connection.close()
        try:
            return Line(self.path)
        except OSError as error:
            raise unreachable(self.path, error) from error

    def _give_back(self, connection: Line) -> None:
        with self._lock:
            self._idle.append((connection, time.monotonic()))


class SocketCommand:
    """A command that is read over the socket. One thread reads `events`; the other calls are safe from any thread."""

    def __init__(
        self,
        transport: SocketTransport,
        sandbox: str,
        started: wire.Started,
        connection: Line,
        answer: Answer,
    ) -> None:
        self.id = started.id
        self.name = started.name
        self.pid = started.pid
        self._transport = transport
        self._sandbox = sandbox
        self._connection = connection
        self._answer = answer
        self._frames = wire.FrameReader()
        self._status: ExecStatus | None = None

    def events(self) -> Iterator[Output]:
        """The pieces of output until the end. Raises `SandboxGone`, or `DaemonUnavailable` if the daemon ended."""
        from crab.sandbox.command import Output

        data = b""  # first what is left of an iteration that was stopped in the middle
        while self._status is None:
            for stream, content in self._frames.feed(data):
                self._status = wire.read_status(stream, content)
                if self._status is None:
                    yield Output(stream, content)
            if self._status is None:
                data = self._read()
        self._connection.close()

    def _read(self) -> bytes:
        try:
            data = self._answer.piece()
        except _BROKEN as error:
            raise self._lost(error) from error
        if not data:
            raise self._lost(None)
        return data

    def _lost(self, error: BaseException | None) -> DaemonUnavailable:
        self._connection.close()
        why = f": {error}" if error is not None and str(error) else ""
        return DaemonUnavailable(
            f"the stream of command {self.name or self.id} was cut{why}",
            remedy="the command goes on: attach to it when the daemon is back",
        )

    def status(self) -> ExecStatus:
        """How it ended, or that it runs (as far as `events` was read)."""
        return self._status or ExecStatus(id=self.name or self.id, running=True, pid=self.pid)

    def write(self, data: bytes) -> None:
        """Give input; returns when the command has taken all. Raises `WrongState` if it takes no more."""
        view = memoryview(data)
        for at in range(0, len(data), PIECE):
            self._post("input", bytes(view[at : at + PIECE]))

    def close_input(self) -> None:
        """End of input."""
        self._post("input?eof=1")

    def signal(self, number: int) -> None:
        """Send a signal to its process group, or to the foreground group of its terminal."""
        self._post("signal", lenient.encode(wire.Signal(number=number)))

    def resize(self, rows: int, columns: int) -> None:
        """New size of its terminal, in characters."""
        self._post("resize", lenient.encode(wire.Resize(rows=rows, columns=columns)))

    def kill(self) -> None:
        """SIGKILL it and everything that it has started."""
        self._post("kill")

    def detach(self) -> None:
        """End the stream: `events` yields what is under way and ends, further output waits in the sandbox."""
        self._post("detach")

    def _post(self, what: str, body: bytes = b"") -> None:
        self._transport.post(wire.command_path(self._sandbox, self.id, what), body)
