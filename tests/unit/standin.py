"""A service without sandboxes, for the tests of what lies above it, and a server that serves it on a unix socket.

The real service is tested with real sandboxes elsewhere. What matters here is kept true to it: output counts as read when
the reader asks for more, a handle that was detached reads no more, input is taken only while somebody reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from crab.daemon.requests import About, Request, Version
from crab.daemon.server import Server, listen
from crab.errors import AlreadyExists, CrabError, NotFound, SandboxGone
from crab.model import ExecSpec, ExecStatus
from crab.sandbox.command import Output


class Program:
    """What a command does in its sandbox."""

    def __init__(self, number: int, name: str, spec: ExecSpec) -> None:
        self.id = number
        self.name = name
        self.spec = spec
        self.pieces: list[Output] = []
        self.acknowledged = 0
        self.exit: int | None = None
        self.gone = ""
        self.input = b""
        self.takes_input = True
        self.input_closed = False
        self.signals: list[int] = []
        self.sizes: list[tuple[int, int]] = []
        self.killed = False
        self.changed = threading.Condition()
        self.answer: Callable[[Program], None] = lambda _: None
        """Called whenever something was said to it."""

    def say(self, data: bytes, stream: int = 1) -> None:
        with self.changed:
            self.pieces.append(Output(stream, data))
            self.changed.notify_all()

    def end(self, status: int = 0) -> None:
        with self.changed:
            self.exit = status
            self.changed.notify_all()

    def vanish(self, why: str) -> None:
        """The sandbox dies."""
        with self.changed:
            self.gone = why
            self.changed.notify_all()

    def wait(self, condition: Callable[[Program], Any], seconds: float = 60.0) -> None:
        """Wait until something is so."""
        with self.changed:
            assert self.changed.wait_for(lambda: condition(self), seconds), "it did not happen"


class Handle:
    """As a `crab.sandbox.command.Command`."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.id, self.name, self.pid = program.id, program.name, 1000 + program.id
        self.timed_out = False
        self._left = False

    def events(self) -> Iterator[Output]:
        program, position = self.program, self.program.acknowledged
        while True:
            with program.changed:
                program.changed.wait_for(
                    lambda at=position: (
                        self._left or program.gone or program.exit is not None or at < len(program.pieces)
                    )
                )
                if self._left:
                    return
                if position < len(program.pieces):
                    piece = program.pieces[position]
                elif program.gone:
                    raise SandboxGone(program.gone, remedy="recover it")
                else:
                    return
            yield piece
            position += 1
            with program.changed:
                program.acknowledged = position
                program.changed.notify_all()

    def status(self) -> ExecStatus:
        status, name = self.program.exit, self.name or str(self.id)
        if status is None:
            return ExecStatus(id=name, running=True, pid=self.pid)
        return ExecStatus(
            id=name, running=False, exit_code=124 if self.timed_out else status, timed_out=self.timed_out, pid=self.pid
        )

    def write(self, data: bytes) -> None:
        if not self.program.takes_input or self._left:
            raise BrokenPipeError("it takes no more input")
        self._told(lambda p: setattr(p, "input", p.input + data))

    def close_input(self) -> None:
        self._told(lambda p: setattr(p, "input_closed", True))

    def signal(self, number: int) -> None:
        self._told(lambda p: p.signals.append(number))

    def resize(self, rows: int, columns: int) -> None:
        self._told(lambda p: p.sizes.append((rows, columns)))

    def kill(self) -> None:
        self._told(lambda p: setattr(p, "killed", True))
        self.program.end(137)

    def detach(self) -> None:
        with self.program.changed:
            self._left = True
            self.program.changed.notify_all()

    def _told(self, what: Callable[[Program], Any]) -> None:
        with self.program.changed:
            what(self.program)
            self.program.changed.notify_all()
        self.program.answer(self.program)


class StandIn:
    """As a `crab.daemon.service.Service`. `answers` maps a type of request to an answer, an error, or a function."""

    def __init__(self) -> None:
        self.asked: list[Request] = []
        self.answers: dict[type[Request], Any] = {About: Version(crab="0", api=1, pid=1, state_dir="/state")}
        self.programs: list[Program] = []
        self.script: Callable[[Program], None] = lambda _: None
        """What a program does when it is started."""
        self.refusal: CrabError | None = None

    def handle(self, request: Request) -> Any:
        self.asked.append(request)
        answer = self.answers.get(type(request), NotFound("the stand-in has no answer", remedy="give it one"))
        if callable(answer):
            answer = answer(request)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def spawn(self, sandbox: str, spec: ExecSpec) -> Handle:
        if self.refusal is not None:
            raise self.refusal
        if spec.name and any(p.name == spec.name and p.exit is None and not p.gone for p in self.programs):
            raise AlreadyExists(f"a command named {spec.name!r} runs already", remedy="attach to it")
        program = Program(len(self.programs) + 1, spec.name, spec)
        self.programs.append(program)
        self.script(program)
        return Handle(program)

    def command(self, sandbox: str, name: str) -> Handle:
        for program in reversed(self.programs):
            if name in (program.name, str(program.id)):
                if program.gone:
                    raise SandboxGone(program.gone, remedy="recover it")
                return Handle(program)
        raise NotFound(f"no command {name!r}", remedy="list them")

    def started(self, count: int = 1, seconds: float = 60.0) -> Program:
        """The newest program, as soon as so many were started."""
        end = threading.Event()
        for _ in range(int(seconds * 100)):
            if len(self.programs) >= count:
                return self.programs[-1]
            end.wait(0.01)
        raise AssertionError("no command was started")

    def close(self) -> None:
        """As the service's."""


class Served:
    """A server in a thread of its own."""

    def __init__(self, service: StandIn, path: Path) -> None:
        self.path = path
        self.server = Server(service)
        self._ready = threading.Event()
        self._listener = listen(path)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)
        self._thread.start()
        assert self._ready.wait(10)

    async def _serve(self) -> None:
        self._end = asyncio.Event()
        runner = web.AppRunner(
            self.server.application(), handler_cancellation=True, access_log=None, shutdown_timeout=0.5
        )
        await runner.setup()
        await web.SockSite(runner, self._listener).start()
        self._ready.set()
        await self._end.wait()
        await self.server.drain(2.0)
        self.server.close()
        await runner.cleanup()

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(10)
        assert not self._thread.is_alive()
        self._listener.close()
        self.path.unlink(missing_ok=True)


@contextlib.contextmanager
def served(service: StandIn, path: Path) -> Iterator[Served]:
    """Serve a stand-in as long as the block."""
    server = Served(service, path)
    try:
        yield server
    finally:
        server.close()


# ---------------------------------------------------------------- data of every type


ODD = "naïve \udcff\x1b[31m\n…"
"""A text that a sandbox may well say: no ASCII, no UTF-8 (PEP 383), an escape sequence."""


def sample(kind: Any, text: str = "text") -> Any:
    """A value of a type, with every field set."""
    return msgspec.convert(_built(msgspec.inspect.type_info(kind), text), kind)


def _built(info: Any, text: str) -> Any:
    inspect = msgspec.inspect
    match info:
        case inspect.StructType():
            return {field.encode_name: _built(field.type, text) for field in info.fields}
        case inspect.VarTupleType() | inspect.ListType():
            return [_built(info.item_type, text)]
        case inspect.DictType():
            return {text: _built(info.value_type, text)}
        case inspect.UnionType():
            return _built(next(t for t in info.types if not isinstance(t, inspect.NoneType)), text)
        case inspect.LiteralType():
            return info.values[0]
        case inspect.EnumType():
            return next(iter(info.cls))
        case inspect.StrType():
            return text
        case inspect.BytesType():
            return b"\x00\xffbytes"
        case inspect.BoolType():
            return True
        case inspect.IntType():
            return 7
        case inspect.FloatType():
            return 0.5
        case _:
            raise AssertionError(f"no sample for {info}")
