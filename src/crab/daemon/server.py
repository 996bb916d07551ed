"""The HTTP API on a unix socket: requests as calls, commands as streams.

Knows how a request gets from the socket to the service and back; what the operations do is the service's business, and
how JSON and frames look is `wire.py`'s. Whoever may use the socket may do what root may do on this host (mount any
folder into a sandbox, for instance): so only root and members of the group `crab` may.
"""

from __future__ import annotations

import asyncio
import contextlib
import grp
import logging
import os
import secrets
import socket
import stat
import struct
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import msgspec
from aiohttp import web

from crab import lenient
from crab.daemon import openapi, wire
from crab.daemon.pump import pieces
from crab.daemon.requests import About, Request, Run, ShellInterrupt, ShellRun, TakeCheckpoint, Try
from crab.daemon.underway import PASSING
from crab.errors import Busy, CrabError, DaemonUnavailable, HostUnsuitable, InvalidRequest, WrongState
from crab.model import ExecSpec, ExecStatus
from crab.sandbox.command import TIMEOUT_STATUS, Output

GROUP = "crab"
"""Members of it may use the socket, if the group exists."""
LARGEST_BODY = 256 << 20
LONG_CALLS = 1024
"""Commands that are waited for at the same time (`run`, `shell-run`, and input that a command does not take). Threads
are made when they are needed."""
SHORT_CALLS = 128
"""All other calls. They have threads of their own, so that `list` and `kill` are answered however many commands are
waited for."""
_SMALL = 1 << 16
"""Bytes of JSON that are read in no time; more would keep the other clients waiting."""
DETACH_SECONDS = 5.0
SO_PEERGROUPS = 59  # Linux 4.13; not in Python's socket module

log = logging.getLogger("crab.daemon")


class Command(Protocol):
    """What the server needs of a `crab.sandbox.command.Command`."""

    id: int
    name: str
    pid: int
    timed_out: bool

    def events(self) -> Iterator[Output]: ...
    def status(self) -> ExecStatus: ...
    def write(self, data: bytes) -> None: ...
    def close_input(self) -> None: ...
    def signal(self, number: int) -> None: ...
    def resize(self, rows: int, columns: int) -> None: ...
    def kill(self) -> None: ...
    def detach(self) -> None: ...


class Service(Protocol):
    """What the server needs of a `crab.daemon.service.Service`."""

    def handle(self, request: Request) -> Any: ...
    def spawn(self, sandbox: str, spec: ExecSpec) -> Command: ...
    def command(self, sandbox: str, name: str) -> Command: ...


# ---------------------------------------------------------------- handles on commands


class Reading:
    """One client that reads the output of a command."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self.ended = asyncio.Event()
        self.task = asyncio.current_task()


class Desk:
    """The handles on commands that were started or are being read here. A command has at most one reader.

    A handle of a start is kept until its command was read to the end, since it knows more than one that is made later:
    whether the time limit struck. Methods are safe from any thread; those that ask the service block.
    """

    KEPT = 4096
    """Handles of starts. Beyond it the oldest is forgotten; its command can still be read."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._lock = threading.Lock()
        self._started: dict[tuple[str, str], Command] = {}
        self._unread: set[int] = set()
        """Identities of handles in `_started` that nobody has read yet."""
        self._readings: dict[tuple[str, str], Reading] = {}

    @staticmethod
    def _keys(sandbox: str, command: Command) -> set[tuple[str, str]]:
        return {(sandbox, name) for name in (str(command.id), command.name) if name}

    def spawn(self, sandbox: str, spec: ExecSpec) -> Command:
        """Start a command."""
        command = self._service.spawn(sandbox, spec)
        with self._lock:
            while len(self._started) >= self.KEPT:
                self._unread.discard(id(self._started.pop(next(iter(self._started)))))
            self._started |= dict.fromkeys(self._keys(sandbox, command), command)
            self._unread.add(id(command))
        return command

    def take(self, sandbox: str, name: str) -> Command:
        """A handle to read."""
        with self._lock:
            command = self._started.get((sandbox, name))
            if command is not None and id(command) in self._unread:
                self._unread.discard(id(command))
                return command
        return self._service.command(sandbox, name)

    def handle(self, sandbox: str, name: str) -> Command:
        """A handle for signals and the like: the reader's, if there is one."""
        with self._lock:
            if reading := self._readings.get((sandbox, name)):
                return reading.command
        return self._service.command(sandbox, name)

    def reading(self, sandbox: str, name: str) -> Reading | None:
        """Who reads a command."""
        with self._lock:
            return self._readings.get((sandbox, name))

    def readings(self) -> list[Reading]:
        """Everybody who reads a command."""
        with self._lock:
            return list({id(reading): reading for reading in self._readings.values()}.values())

    def begin(self, sandbox: str, command: Command) -> Reading:
        """Become the reader of a command. Raises `Busy`."""
        keys = self._keys(sandbox, command)
        with self._lock:
            if keys & self._readings.keys():
                raise Busy(
                    f"another client reads the output of command {command.name or command.id}",
                    remedy="detach there first (Ctrl-] in a shell), or start a shell with another --name",
                )
            reading = Reading(command)
            self._readings |= dict.fromkeys(keys, reading)
        return reading

    def end(self, sandbox: str, reading: Reading) -> None:
        """The reader has gone, or the command has ended."""
        with self._lock:
            for key in self._keys(sandbox, reading.command):
                self._readings.pop(key, None)
        reading.ended.set()

    def status(self, sandbox: str, command: Command) -> ExecStatus:
        """How a command ended, with what the handle of its start knows."""
        status = command.status()
        if status.running:
            return status
        with self._lock:
            started = [self._started.pop(key, None) for key in self._keys(sandbox, command)]
        if not status.timed_out and any(handle is not None and handle.timed_out for handle in started):
            return msgspec.structs.replace(status, timed_out=True, exit_code=TIMEOUT_STATUS)
        return status


# ---------------------------------------------------------------- the server


class Server:
    """The API of one service: `application` is what listens, `drain` and `close` end it."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._desk = Desk(service)
        self._long = ThreadPoolExecutor(LONG_CALLS, "crab-run")
        self._short = ThreadPoolExecutor(SHORT_CALLS, "crab-call")
        self._under_way: set[asyncio.Future[Any]] = set()
        self._ending = False

    def application(self) -> web.Application:
        """All routes. Run it with `handler_cancellation`, else nobody notices that a reader has gone."""
        app = web.Application(middlewares=[self._around], client_max_size=LARGEST_BODY)
        command = "/v1/commands/{sandbox}/{command}"
        app.add_routes(
            [
                web.get("/v1/about", self._about),
                web.get("/v1/openapi.json", self._openapi),
                web.post("/v1/call/{operation}", self._call),
                web.post("/v1/turns", self._turn),
                web.post("/v1/commands", self._spawn),
                web.get(f"{command}/events", self._events),
                web.post(f"{command}/input", self._input),
                web.post(f"{command}/signal", self._signal),
                web.post(f"{command}/resize", self._resize),
                web.post(f"{command}/kill", self._kill),
                web.post(f"{command}/detach", self._detach),
            ]
        )
        return app

    async def drain(self, seconds: float) -> None:
        """Send the readers away and let calls end that change something; commands and sandboxes go on.

        A call that takes longer is cut off; the next start of the daemon sweeps what it leaves.
        """
        self._ending = True
        readings = self._desk.readings()
        for reading in readings:
            await self._in(self._short, reading.command.detach)
        waits = [asyncio.ensure_future(reading.ended.wait()) for reading in readings]
        if pending := [*waits, *self._under_way]:
            await asyncio.wait(pending, timeout=seconds)
        for wait in waits:
            wait.cancel()

    def close(self) -> None:
        """Take no more calls. Threads that wait for a command are left."""
        for pool in (self._long, self._short):
            pool.shutdown(wait=False, cancel_futures=True)

    # ---- around every request

    @web.middleware
    async def _around(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            check_peer(request.get_extra_info("socket"))
            if request.path != "/v1/about":  # answered to everybody: how else could they learn the version
                wire.check_version(request.headers.get(wire.API_HEADER), "daemon")
            answer = await handler(request)
        except CrabError as error:
            answer = _refusal(error, error.http_status)
        except web.HTTPException as error:
            answer = _refusal(_explain(request, error), error.status)
        except ConnectionError:
            raise  # the client has gone
        except Exception as error:
            log.exception("%s %s", request.method, request.path)
            answer = _refusal(internal(error), CrabError.http_status)
        if not answer.prepared:
            answer.headers[wire.API_HEADER] = str(wire.API)
        return answer

    async def _in(self, pool: ThreadPoolExecutor, function: Callable[..., Any], *values: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(pool, function, *values)

    # ---- calls

    async def _about(self, _: web.Request) -> web.Response:
        return _answer(await self._in(self._short, self._answer, About()))

    async def _openapi(self, _: web.Request) -> web.Response:
        return _answer(lenient.encode(await self._in(self._short, openapi.description)))

    async def _turn(self, request: web.Request) -> web.Response:
        """The end of a turn, for agents whose model is not reached through Crab: a checkpoint, under a name of its own."""
        return await self._called(TakeCheckpoint.operation, await request.read())

    async def _call(self, request: web.Request) -> web.Response:
        return await self._called(request.match_info["operation"], await request.read())

    async def _called(self, operation: str, body: bytes) -> web.Response:
        if len(body) < _SMALL:
            asked = wire.read_request(operation, body)
        else:
            asked = await self._in(self._short, wire.read_request, operation, body)
        if isinstance(asked, Run):
            return _answer(await self._run(asked))
        if isinstance(asked, ShellRun):
            return _answer(await self._shell_run(asked))
        pool = self._long if isinstance(asked, Try) else self._short
        call = asyncio.ensure_future(self._in(pool, self._answer, asked))
        self._under_way.add(call)
        call.add_done_callback(self._under_way.discard)
        call.add_done_callback(lambda done: done.cancelled() or done.exception())  # the client may have gone
        return _answer(await asyncio.shield(call))

    def _answer(self, request: Request) -> bytes:
        return lenient.encode(self._service.handle(request))

    async def _run(self, request: Run) -> bytes:
        """Run a command to its end. Nobody can have its output once the client has gone, so it is killed then."""
        name = request.spec.name or f"{PASSING}{secrets.token_hex(6)}"
        request = msgspec.structs.replace(request, spec=msgspec.structs.replace(request.spec, name=name))
        try:
            return await self._in(self._long, self._answer, request)
        except asyncio.CancelledError:
            with contextlib.suppress(RuntimeError):  # at the end of the daemon: the command goes on
                self._short.submit(self._kill_abandoned, request.sandbox, name)
            raise

    def _kill_abandoned(self, sandbox: str, name: str) -> None:
        with contextlib.suppress(CrabError):
            self._service.command(sandbox, name).kill()

    async def _shell_run(self, request: ShellRun) -> bytes:
        """Run a command in a persistent shell; it is interrupted if the client goes."""
        try:
            return await self._in(self._long, self._answer, request)
        except asyncio.CancelledError:
            with contextlib.suppress(RuntimeError):  # at the end of the daemon: the command goes on
                self._short.submit(self._interrupt_abandoned, request.sandbox, request.shell)
            raise

    def _interrupt_abandoned(self, sandbox: str, shell: str) -> None:
        with contextlib.suppress(CrabError):
            self._service.handle(ShellInterrupt(sandbox=sandbox, shell=shell))

    # ---- commands

    async def _spawn(self, request: web.Request) -> web.Response:
        asked = wire.read_struct(wire.Spawn, await request.read(), "commands")
        command = await self._in(self._short, self._desk.spawn, asked.sandbox, asked.spec)
        return _answer(lenient.encode(_started(command)))

    async def _events(self, request: web.Request) -> web.StreamResponse:
        sandbox, name = _names(request)
        command = await self._in(self._short, self._desk.take, sandbox, name)
        reading = self._desk.begin(sandbox, command)
        try:
            headers = {
                wire.API_HEADER: str(wire.API),
                wire.COMMAND_HEADER: wire.started_header(_started(command)),
                "Content-Type": wire.FRAMES,
            }
            response = web.StreamResponse(headers=headers)
            await response.prepare(request)
            await response.write(await self._stream(sandbox, command, response))
            await response.write_eof()
        finally:
            self._desk.end(sandbox, reading)
        return response

    async def _stream(self, sandbox: str, command: Command, response: web.StreamResponse) -> bytes:
        """Send the output; returns the last frame. If the client goes away, the output waits in the sandbox."""
        try:
            async with contextlib.aclosing(pieces(command)) as output:
                async for piece in output:
                    await response.write(wire.frame(piece.stream, piece.data))
            status = self._desk.status(sandbox, command)
            if status.running and self._ending:
                raise DaemonUnavailable("the daemon is ending", remedy="attach again when the next one runs")
            return wire.frame(wire.STATUS, lenient.encode(status))
        except CrabError as error:
            await self._in(self._short, command.detach)  # who waits to give it input need not wait any more
            return wire.frame(wire.ERROR, lenient.encode(error.to_wire()))
        except ConnectionError:
            raise
        except Exception as error:
            log.exception("output of command %s in %s", command.id, sandbox)
            return wire.frame(wire.ERROR, lenient.encode(internal(error).to_wire()))

    async def _input(self, request: web.Request) -> web.Response:
        sandbox, name = _names(request)
        data = await request.read()
        reading = self._desk.reading(sandbox, name)
        if reading is None:
            # the sandbox says only to a reader how much input its command has taken
            raise WrongState(
                f"nobody reads the output of command {name}", remedy="read its events while you write to it"
            )

        def give() -> None:
            try:
                if data:
                    reading.command.write(data)
                if request.query.get("eof") == "1":
                    reading.command.close_input()
            except BrokenPipeError:
                raise WrongState(
                    f"command {name} takes no more input", remedy="it has ended, or has closed its standard input"
                ) from None

        await self._in(self._long, give)
        return _answer(b"{}")

    async def _signal(self, request: web.Request) -> web.Response:
        asked = wire.read_struct(wire.Signal, await request.read(), "signal")
        if not 0 < asked.number < 65:
            raise InvalidRequest(
                f"there is no signal {asked.number}", remedy="use a number of 1 to 64; `kill -l` lists them"
            )
        return await self._tell(request, lambda command: command.signal(asked.number))

    async def _resize(self, request: web.Request) -> web.Response:
        asked = wire.read_struct(wire.Resize, await request.read(), "resize")
        if not (0 < asked.rows < 1 << 16 and 0 < asked.columns < 1 << 16):
            raise InvalidRequest(
                f"no terminal has {asked.rows} rows and {asked.columns} columns", remedy="use 1 to 65535"
            )
        return await self._tell(request, lambda command: command.resize(asked.rows, asked.columns))

    async def _kill(self, request: web.Request) -> web.Response:
        return await self._tell(request, lambda command: command.kill())

    async def _tell(self, request: web.Request, what: Callable[[Command], None]) -> web.Response:
        sandbox, name = _names(request)
        await self._in(self._short, lambda: what(self._desk.handle(sandbox, name)))
        return _answer(b"{}")

    async def _detach(self, request: web.Request) -> web.Response:
        """End the stream of a reader without losing anything: it gets what is under way, the rest waits."""
        reading = self._desk.reading(*_names(request))
        if reading is not None:
            await self._in(self._short, reading.command.detach)
            try:
                await asyncio.wait_for(reading.ended.wait(), DETACH_SECONDS)
            except TimeoutError:  # it does not take what was sent
                if reading.task is not None:
                    reading.task.cancel()
        return _answer(b"{}")


def _names(request: web.Request) -> tuple[str, str]:
    return request.match_info["sandbox"], request.match_info["command"]


def _started(command: Command) -> wire.Started:
    return wire.Started(id=str(command.id), name=command.name, pid=command.pid)


def _answer(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


def _refusal(error: CrabError, status: int) -> web.Response:
    return web.Response(body=lenient.encode(error.to_wire()), status=status, content_type="application/json")


def _explain(request: web.Request, error: web.HTTPException) -> InvalidRequest:
    what = f"{request.method} {request.path}"
    if error.status == 413:
        return InvalidRequest(f"{what}: more than {LARGEST_BODY} bytes", remedy="write it in pieces, or copy a file in")
    return InvalidRequest(f"{what}: {error.reason}", remedy="see /v1/openapi.json")


def internal(error: Exception) -> CrabError:
    """What the client is told of a defect; the log has the rest."""
    return CrabError(
        f"a defect in the daemon: {type(error).__name__}: {error}", remedy="please report it, with the daemon's log"
    )


# ---------------------------------------------------------------- who may


def peer(connection: socket.socket) -> tuple[int, int, tuple[int, ...]]:
    """(uid, gid, further groups) of the process that connected, as the kernel noted them then."""
    _, uid, gid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    try:
        packed = connection.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, 1024 * 4)
    except OSError:
        packed = b""
    return uid, gid, struct.unpack(f"{len(packed) // 4}I", packed)


def group() -> int | None:
    """Number of the group `crab`, if there is one."""
    try:
        return grp.getgrnam(GROUP).gr_gid
    except KeyError:
        return None


def may_use(uid: int, gid: int, groups: tuple[int, ...], members: int | None, owner: int) -> bool:
    """Whether a peer may use the daemon of `owner`; `members` is the group `crab`, if there is one."""
    return uid in (0, owner) or (members is not None and members in (gid, *groups))


def check_peer(connection: socket.socket | None) -> None:
    """Raises `DaemonUnavailable` if who is at the other end may not use the daemon."""
    if connection is None:
        raise ConnectionResetError("the client has gone")
    uid, gid, groups = peer(connection)
    if not may_use(uid, gid, groups, group(), os.geteuid()):
        raise DaemonUnavailable(
            f"user {uid} may not use this daemon",
            remedy=f"become root, or join the group {GROUP}: `usermod -aG {GROUP} USER`",
        )


def listen(path: Path) -> socket.socket:
    """A listening unix socket with mode 0660, in a folder with mode 0711 (made if missing).

    Raises `Busy` if somebody listens there already, `InvalidRequest` or `HostUnsuitable` if none can be made there.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if not path.parent.exists():
            path.parent.mkdir(parents=True)
            path.parent.chmod(0o711)
        _clear(path)
        before = os.umask(0o117)  # from the first moment nobody else may connect
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        if (members := group()) is not None:
            os.chown(path, -1, members)
        listener.listen(128)
    except OSError as error:
        listener.close()
        if "too long" in str(error):
            raise InvalidRequest(
                f"the path of the socket is too long: {path}", remedy="use at most 107 bytes"
            ) from None
        raise HostUnsuitable(
            f"no socket can be made at {path}: {error}", remedy="choose another with --socket"
        ) from error
    except BaseException:
        listener.close()
        raise
    return listener


def _clear(path: Path) -> None:
    """Remove the socket that a dead daemon left."""
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise InvalidRequest(f"{path} exists and is no socket", remedy="choose another path with --socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        try:
            trial.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise Busy(f"another daemon listens on {path}", remedy="`crab daemon stop` ends it; --socket chooses another path")
