"""One command in a sandbox: its output, its input, its end, across captures.

The handle re-attaches by itself whenever its line is cut (a capture closes all of them) and goes on from the byte that
the caller had last: nothing is lost, nothing comes twice.
"""

from __future__ import annotations

import contextlib
import os
import signal as signals
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from crab.errors import AlreadyExists, CommandNotFound, CrabError, ExecFailed, InvalidRequest, SandboxGone
from crab.host.cgroups import Cgroup
from crab.model import ExecResult, ExecStatus
from crab.sandbox.gate import Gate
from crab.sandbox.wire import WINDOW, Entry, Frame, InitLine, Kind, StartRequest

TIMEOUT_STATUS = 124  # as timeout(1)
_START_TRIES = 100
_WHAT = {
    "c": "the work directory cannot be entered",
    "u": "the user cannot be taken on",
    "t": "no terminal could be opened",
    "f": "no process could be made",
    "p": "no pipe could be opened",
    "n": "there are 16384 already (those that have ended count while a process holds their output)",
    "m": "the command line could not be taken",
    "s": "the system call filter could not be installed",
    "i": "its input and output could not be set up",
}


@dataclass(frozen=True, slots=True)
class Output:
    """A piece of output. `stream` is 1 for standard output and terminals, 2 for standard error."""

    stream: int
    data: bytes


class Command:
    """A started command. One thread reads it (`events` or `collect`); the other calls are safe from any thread."""

    def __init__(
        self, pid: Callable[[], int], gate: Gate, entry: Entry, group: Cgroup | None, line: InitLine | None = None
    ) -> None:
        self.id = entry.exec
        self.name = entry.name
        self.pid = entry.pid
        self.tty = entry.tty
        self.group = group
        """Holds the command and all that it starts; None for a command of an earlier incarnation."""
        self.timed_out = False
        self.keeps_output = False
        """Init is to keep the newest 32 KiB of its output (half of its window), for somebody who attaches to it in a sandbox
        that is brought back to before its end. (Else a byte is let go as soon as it was read.)"""
        self.on_end: Callable[[], None] = lambda: None
        """Called when it has been read to its end."""
        self._init = pid
        self._gate = gate
        self._line = line
        self._offsets = list(entry.acknowledged)
        self._acknowledged = list(entry.acknowledged)
        self._changed = threading.Condition()
        self._taken = entry.input
        """Bytes of input that the command's pipe has; -1: it takes no more."""
        self._exit: int | None = entry.status if entry.exited else None
        self._ended = False

    @classmethod
    def start(cls, pid: Callable[[], int], gate: Gate, request: StartRequest, group: Cgroup | None) -> Command:
        """Start a command. Raises `CommandNotFound`, `ExecFailed` or `AlreadyExists` (its name)."""
        for _ in range(_START_TRIES):
            gate.stir()
            with gate.enter():
                line = InitLine.connect(pid())
                try:
                    answer = cls._ask(line, request, group)
                    if answer is not None and answer.kind != Kind.STARTED:
                        raise _refusal(request, answer)
                except BaseException:
                    line.close()
                    raise
                if answer is not None:
                    break
                line.close()  # cut by a capture before init had read it: nothing was started
        else:
            raise SandboxGone("the sandbox's init does not answer", remedy="`crab inspect` says how it is now")
        entry = Entry(
            answer.exec, answer.value, False, 0, (0, 0), 0, request.tty, request.stdin or request.tty, request.name
        )
        return cls(pid, gate, entry, group, line)

    @staticmethod
    def _ask(line: InitLine, request: StartRequest, group: Cgroup | None) -> Frame | None:
        """Init's answer to a start; None if the line was cut. Raises `ExecFailed` for a command line that is too long."""
        folder = -1 if group is None else os.open(group.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            line.send(request.frame(), folder)
        except ConnectionError:
            return None
        except OSError as error:
            raise ExecFailed(
                f"{request.argv[0]!r} cannot be started: {error.strerror}",
                remedy="make the command line and environment shorter",
            ) from error
        finally:
            if folder >= 0:
                os.close(folder)
        return line.receive(60.0)

    # ---- reading

    def events(self) -> Iterator[Output]:
        """Pieces of output until the command has ended and all that it wrote is here. Then `status` tells how it ended.

        Output of processes that it left in the background is not waited for. Ends early after a `detach`. Raises
        `SandboxGone`.
        """
        try:
            while not self._ended:
                with self._gate.enter(), self._attached() as line:
                    yield from self._read(line)
        finally:
            with self._changed:  # nobody reads any more, so input would never be acknowledged
                self._ended = True
                self._changed.notify_all()
        if self._exit is not None:
            self.on_end()
            self.release()

    @contextlib.contextmanager
    def _attached(self) -> Iterator[InitLine]:
        line, fresh = self._line, False
        if line is None:
            line, fresh = InitLine.connect(self._init()), True
        try:
            with self._changed:
                self._line = line
            if fresh:
                # from there init sends it again; what is known of it is left out
                begin = self._acknowledged if self.keeps_output else self._offsets
                offsets = b"".join(offset.to_bytes(8, "little") for offset in begin)
                line.send(Frame(Kind.ATTACH, exec=self.id, payload=offsets))
            yield line
        finally:
            with self._changed:
                self._line = None
                self._changed.notify_all()
            line.close()

    def _read(self, line: InitLine) -> Iterator[Output]:
        drained = {2} if self.tty else set[int]()
        for frame in _frames(line):
            match frame.kind:
                case Kind.OUTPUT:
                    known = self._offsets[frame.stream - 1] - frame.value
                    data = frame.payload[known:] if known > 0 else frame.payload
                    self._offsets[frame.stream - 1] += len(data)
                    if data:
                        with self._gate.outside():  # a slow reader must not keep a capture waiting
                            yield Output(frame.stream, data)
                    self._acknowledge(line, frame.stream)
                case Kind.DRAINED:
                    drained.add(frame.stream)
                case Kind.EXITED:
                    self._exit = frame.value
                case Kind.INPUT_ACK:
                    with self._changed:
                        self._taken = frame.value
                        self._changed.notify_all()
                case Kind.FAILED:
                    raise SandboxGone(
                        f"the sandbox no longer knows the command {self.id}",
                        remedy="it was rewound or recovered to before the command",
                    )
                case _:
                    pass  # of a newer init
            if self._exit is not None and len(drained) == 2:
                self._ended = True
                return

    def _acknowledge(self, line: InitLine, stream: int) -> None:
        offset = self._offsets[stream - 1] - (WINDOW // 2 if self.keeps_output else 0)
        if offset <= self._acknowledged[stream - 1]:
            return
        self._acknowledged[stream - 1] = offset
        with contextlib.suppress(OSError):
            line.send(Frame(Kind.ACK, stream, self.id, offset))

    def collect(self, limit: int = 64 << 20) -> ExecResult:
        """Read to the end; of each stream the first `limit` bytes are kept."""
        return collected(self.events(), self.status, limit)

    def status(self) -> ExecStatus:
        """How it ended, or that it runs (as far as `events` has been read)."""
        if self._exit is None:
            return ExecStatus(id=self.name or str(self.id), running=True, pid=self.pid)
        code = os.waitstatus_to_exitcode(self._exit)
        number = -code if code < 0 else None
        code = TIMEOUT_STATUS if self.timed_out else 128 - code if code < 0 else code
        return ExecStatus(
            id=self.name or str(self.id),
            running=False,
            exit_code=code,
            signal=number,
            timed_out=self.timed_out,
            pid=self.pid,
        )

    # ---- the other calls

    def write(self, data: bytes, patience: float | None = None) -> None:
        """Give input to the command; returns when its pipe has taken all. Raises BrokenPipeError if it takes no more.

        Needs `events` to be read in another thread. `patience`: seconds to wait for a line to the sandbox, which there is
        none of while a capture has it stand still; then raises TimeoutError, and nothing of the piece (64 KiB) was given.
        """
        for at in range(0, len(data), WINDOW):
            self._put(data[at : at + WINDOW], patience)

    def _put(self, piece: bytes, patience: float | None) -> None:
        self._gate.stir()
        until = None if patience is None else time.monotonic() + patience
        with self._changed:
            begin = self._taken
            end = begin + len(piece)
            sent_on: InitLine | None = None
            sent = False
            while True:
                if self._taken >= end:
                    return  # also if it has ended meanwhile
                if self._taken < 0 or self._ended:
                    raise BrokenPipeError("the command takes no more input")
                # again on every new line: init knows what it had before
                if self._line is not None and self._line is not sent_on:
                    sent_on = self._line
                    with contextlib.suppress(OSError):
                        sent_on.send(Frame(Kind.INPUT, exec=self.id, value=begin, payload=piece))
                        self._gate.stir()  # again: a capture may have been in between
                        sent = True  # init takes it, even if the line is cut before it says so
                left = 1.0 if until is None or sent else until - time.monotonic()
                if left <= 0:
                    raise TimeoutError("no line leads into the sandbox")
                self._changed.wait(min(left, 1.0))

    def close_input(self) -> None:
        """End of input."""
        with self._changed:
            if self._taken >= 0:
                self._tell(Frame(Kind.INPUT, exec=self.id, value=self._taken))

    def signal(self, number: int) -> None:
        """Send a signal to the process group of the command, or to the foreground group of its terminal."""
        self._tell(Frame(Kind.SIGNAL, exec=self.id, value=number))

    def resize(self, rows: int, columns: int) -> None:
        """New size of the terminal, in characters. Raises `InvalidRequest`."""
        if not (0 <= rows <= 65535 and 0 <= columns <= 65535):
            raise InvalidRequest(f"a terminal cannot have {rows} rows and {columns} columns", remedy="give 0 to 65535")
        self._tell(Frame(Kind.RESIZE, exec=self.id, value=rows << 16 | columns))

    def kill(self) -> None:
        """SIGKILL the command and everything that it has started."""
        if self.group is None or not self.group.kill():
            self.signal(signals.SIGKILL)

    def detach(self) -> None:
        """Stop reading; the command goes on, its output waits inside."""
        self._ended = True
        with self._changed:
            if self._line is not None:
                self._line.shutdown()

    def limit(self, seconds: float) -> None:
        """Kill it, and all that it has started, if it has not ended in so many seconds from now."""

        def expire() -> None:
            self.timed_out = True
            with contextlib.suppress(CrabError, OSError):  # it is gone with its sandbox
                self.kill()

        timer = threading.Timer(seconds, expire)
        timer.daemon = True
        self.on_end = timer.cancel
        timer.start()

    def release(self) -> None:
        """Let init forget the (ended) command and remove its group if nothing is left in it."""
        with contextlib.suppress(SandboxGone, OSError):
            self._tell(Frame(Kind.RELEASE, exec=self.id))
        if self.group is not None:
            self.group.remove(0)

    def _tell(self, frame: Frame) -> None:
        """Send on the open line, or on one of its own."""
        if frame.kind != Kind.RELEASE:
            self._gate.stir()
        line = self._line
        if line is not None:
            try:
                line.send(frame)
                return
            except OSError:
                pass  # cut by a capture
        with self._gate.enter(), InitLine.connect(self._init()) as own:
            own.send(frame)


def collected(events: Iterable[Output], status: Callable[[], ExecStatus], limit: int) -> ExecResult:
    """All events of a command, and how it ended; of each stream the first `limit` bytes are kept."""
    begin = time.monotonic()
    kept = {1: bytearray(), 2: bytearray()}
    truncated = False
    for piece in events:
        room = limit - len(kept[piece.stream])
        kept[piece.stream] += piece.data[: max(room, 0)]
        truncated |= len(piece.data) > room
    end = status()
    return ExecResult(
        exit_code=end.exit_code or 0,
        signal=end.signal,
        timed_out=end.timed_out,
        stdout=bytes(kept[1]),
        stderr=bytes(kept[2]),
        truncated=truncated,
        duration_ms=(time.monotonic() - begin) * 1e3,
    )


def _frames(line: InitLine) -> Iterator[Frame]:
    """The frames of a line to its end. Output that has come meanwhile is put together: a piece costs its reader 30 µs, and
    what writes line by line to a terminal makes one of each line."""
    waiting: Frame | None = None
    while (frame := waiting or line.receive()) is not None:
        waiting = None
        if frame.kind == Kind.OUTPUT:
            data = bytearray(frame.payload)
            while len(data) < WINDOW and (waiting := line.receive_now()) is not None:
                if (waiting.kind, waiting.stream, waiting.value) != (frame.kind, frame.stream, frame.value + len(data)):
                    break
                data += waiting.payload
                waiting = None
            frame = Frame(frame.kind, frame.stream, frame.exec, frame.value, bytes(data))
        yield frame


def _refusal(request: StartRequest, answer: Frame) -> Exception:
    program, reason = request.argv[0], os.strerror(answer.value)
    what = chr(answer.stream)
    if what == "n" and answer.value == 17:
        return AlreadyExists(
            f"a command named {request.name!r} runs already", remedy="attach to it, or choose another name"
        )
    if what == "x" and answer.value == 2:
        return CommandNotFound(
            f"{program!r} was not found in the sandbox", remedy="check the name and PATH, or install it in the image"
        )
    if what == "x":
        return ExecFailed(
            f"{program!r} cannot be run: {reason}", remedy="check that it is an executable file for this architecture"
        )
    if what == "c":
        return ExecFailed(f"work directory {request.cwd!r}: {reason}", remedy="create it, or choose another with --cwd")
    return ExecFailed(
        f"{program!r} cannot be started, {_WHAT.get(what, what)}: {reason}",
        remedy="see the sandbox's limits: `crab inspect`",
    )
