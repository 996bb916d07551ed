"""A running command and the user's terminal, or what stands in for one: output out, input in, signals through.

Knows how bytes and signals flow; which command and what its end means is decided by `exec` and `shell`. Signal handlers
here only note what came: what has to be said to the daemon is said by a thread, since a handler may interrupt a call.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from crab.cli.text import clean
from crab.errors import CrabError
from crab.model import ExecStatus
from crab.sdk.sync import Process, Shell

DETACH_KEY = b"\x1d"
DETACH_NAME = "Ctrl-]"
_PIECE = 1 << 16


def terminal_size() -> tuple[int, int]:
    """(rows, columns) of the user's terminal."""
    for descriptor in (1, 0, 2):
        with contextlib.suppress(OSError):
            size = os.get_terminal_size(descriptor)  # not shutil's: that believes $COLUMNS, which does not follow
            if size.lines and size.columns:
                return size.lines, size.columns
    return 24, 80


def write_out(stream: int, data: bytes) -> None:
    """All of it, to standard output or standard error. Raises BrokenPipeError if the reader has gone."""
    out = sys.stderr if stream == 2 else sys.stdout
    out.buffer.write(data)
    out.flush()


class _Messages:
    """A thread that does what signal handlers note, one after the other."""

    def __init__(self) -> None:
        self._noted: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # may be put to in a handler
        threading.Thread(target=self._work, name="crab-signals", daemon=True).start()

    def note(self, what: Callable[[], None] | None) -> None:
        self._noted.put(what)

    def _work(self) -> None:
        while (what := self._noted.get()) is not None:
            with contextlib.suppress(CrabError):  # it ended meanwhile; who reads it hears of it
                what()


@contextlib.contextmanager
def _handlers(numbers: tuple[int, ...], handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextlib.contextmanager
def forwarded_signals(process: Process, asked: threading.Event | None = None) -> Iterator[None]:
    """SIGINT and SIGTERM go to the command; the second kills it; the third ends us, whatever becomes of it. `asked` is set
    by the first."""
    messages = _Messages()
    count = 0

    def handler(number: int, _: FrameType | None) -> None:
        nonlocal count
        count += 1
        if asked is not None:
            asked.set()
        if count > 2:
            raise KeyboardInterrupt
        messages.note((lambda: process.signal(number)) if count == 1 else process.kill)

    with _handlers((signal.SIGINT, signal.SIGTERM), handler):
        try:
            yield
        finally:
            messages.note(None)


@contextlib.contextmanager
def interrupting(shell: Shell) -> Iterator[None]:
    """SIGINT and SIGTERM interrupt the command in a persistent shell; the second ends us, whatever becomes of it."""
    messages = _Messages()
    count = 0

    def handler(*_: object) -> None:
        nonlocal count
        count += 1
        if count > 1:
            raise KeyboardInterrupt
        messages.note(lambda: _interrupt(shell))

    with _handlers((signal.SIGINT, signal.SIGTERM), handler):
        try:
            yield
        finally:
            messages.note(None)


def _interrupt(shell: Shell) -> None:
    shell.interrupt()


def follow(process: Process, *, give_input: bool, asked: threading.Event | None = None) -> ExecStatus:
    """Print the output of a command until it ends. `give_input`: it gets our standard input. `asked` is set when the user
    wants it to end."""
    if give_input:
        threading.Thread(target=_give_input, args=(process,), name="crab-input", daemon=True).start()
    with forwarded_signals(process, asked):
        try:
            for piece in process:
                write_out(piece.stream, piece.data)
        except BrokenPipeError:
            process.kill()  # as a pipe would have done it
            process.wait()
            raise
    return process.status()


def _give_input(process: Process) -> None:
    with contextlib.suppress(CrabError, OSError):  # it takes no more, or has ended
        while data := os.read(0, _PIECE):
            process.write(data)
        process.close_input()


# ---------------------------------------------------------------- terminals


def _restore(settings: list[Any]) -> None:
    with contextlib.suppress(termios.error):  # the terminal was closed
        termios.tcsetattr(0, termios.TCSADRAIN, settings)


def _end(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


class Terminal:
    """The user's terminal, in raw mode for as long as the `with` block, tied to one command after the other."""

    def __init__(self) -> None:
        self.left = threading.Event()
        """The user has pressed the detach key."""
        self._process: Process | None = None
        self._messages = _Messages()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Terminal:
        before = termios.tcgetattr(0)
        self._stack.callback(_restore, before)
        try:
            tty.setraw(0, termios.TCSADRAIN)
            self._stack.enter_context(_handlers((signal.SIGWINCH,), lambda *_: self._messages.note(self._resize)))
            self._stack.enter_context(_handlers((signal.SIGTERM, signal.SIGHUP), _end))  # not without `_restore`
        except BaseException:
            self._stack.close()
            raise
        threading.Thread(target=self._give_input, name="crab-input", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._messages.note(None)
        self._stack.close()

    def follow(self, process: Process, *, redraw: bool = False) -> ExecStatus:
        """Tie the terminal to a command until it ends or the user leaves it; then its status says `running`.

        `redraw`: make it draw itself again first, by telling it that the size of its terminal has changed.
        """
        self._process = process
        if redraw:
            rows, columns = terminal_size()
            self._messages.note(lambda: process.resize(rows, max(columns - 1, 1)))
            self._messages.note(lambda: process.resize(rows, columns))
        try:
            for piece in process:
                write_out(piece.stream, piece.data)
        finally:
            self._process = None
        return process.status()

    def say(self, text: str) -> None:
        """A line of our own on the raw terminal."""
        os.write(2, f"\r\n[{clean(text)}]\r\n".encode())

    def _resize(self) -> None:
        if (process := self._process) is not None:
            process.resize(*terminal_size())

    def _give_input(self) -> None:
        with contextlib.suppress(OSError):
            while data := os.read(0, _PIECE):
                before, key, _ = data.partition(DETACH_KEY)
                with contextlib.suppress(CrabError):  # it ended, or is being attached to again
                    if before and (process := self._process) is not None:
                        process.write(before)
                    if key:
                        self.left.set()
                        if (process := self._process) is not None:
                            process.detach()
                if key:
                    return
