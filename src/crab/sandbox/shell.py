"""A persistent shell on a terminal, as agents keep one: commands typed into it one after the other, and its state asked for.

Knows terminals and time: types, waits for the end, interrupts. What is typed and how answers read is the interpreter's
business (`interpreter.py`, `bash.py`); which shells there are is that of `shells.py`. Nothing is remembered here that a
restored or taken over shell would need: what passes from one command to the next is in the shell itself.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from crab.errors import Busy, CrabError
from crab.host import processes
from crab.model import ExecStatus, ShellResult, ShellState
from crab.sandbox.bash import BASH
from crab.sandbox.interpreter import Ending, Interpreter

INTERRUPT = b"\x03"
TIMEOUT_STATUS = 124  # as timeout(1), and as crab's own for commands
INTERRUPTED_STATUS = 130
PATIENCE = 5.0  # seconds for a shell to come back from an interrupt
ANSWER_PATIENCE = 2.0  # seconds for an answer: 1 MB of variables takes a tenth of that
LINE_PATIENCE = 0.05  # seconds for a question to be typed: longer it takes only while a capture is under way
SETTLING = 0.05  # seconds for a prompt
_REMEMBERED = 8  # states
_KEPT = 8 << 20  # bytes of output that a feed keeps: the newest


class Piece(Protocol):
    """A piece of output."""

    @property
    def data(self) -> bytes: ...


class Program(Protocol):
    """What a shell needs of a `crab.sandbox.command.Command`."""

    @property
    def name(self) -> str: ...
    def events(self) -> Iterable[Piece]: ...
    def status(self) -> ExecStatus: ...
    def write(self, data: bytes, patience: float | None = None) -> None: ...
    def kill(self) -> None: ...


class Feed:
    """Reads a program in a thread of its own, for as long as it runs. Its output must be taken, else it would wait."""

    def __init__(self, pieces: Iterable[Piece], name: str) -> None:
        self._pieces = pieces
        self._output = bytearray()
        self._word = b"\n"
        self._searched = 0
        """Before it there is no beginning of the word."""
        self._changed = threading.Condition()
        self._ended = False
        self._given_up = False
        self._failure: CrabError | None = None
        threading.Thread(target=self._read, name=f"feed of {name}", daemon=True).start()

    def _read(self) -> None:
        try:
            for piece in self._pieces:
                with self._changed:
                    self._output += piece.data
                    if (excess := len(self._output) - _KEPT) > 0:
                        del self._output[:excess]
                        self._searched = max(0, self._searched - excess)
                    # not for every piece: waking who waits costs more than most pieces
                    if self._has_come():
                        self._changed.notify_all()
        except CrabError as error:
            self._failure = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    @property
    def ended(self) -> bool:
        with self._changed:
            return self._ended

    @property
    def failure(self) -> CrabError | None:
        """What reading ended with, if not with the program."""
        return self._failure

    def output(self) -> bytes:
        """What came since `clear`, the newest 8 MiB of it."""
        with self._changed:
            return bytes(self._output)

    def clear(self) -> None:
        """Forget what came."""
        with self._changed:
            self._output.clear()
            self._searched = 0

    def give_up(self) -> None:
        """Make `wait` return now."""
        with self._changed:
            self._given_up = True
            self._changed.notify_all()

    def resume(self) -> bool:
        """Let `wait` wait again; says whether it had been given up."""
        with self._changed:
            given_up, self._given_up = self._given_up, False
            return given_up

    def wait(self, word: bytes, timeout: float | None) -> bytes | None:
        """All output, as soon as a line with that word in it is whole; None if the program ends or the time is over before."""
        until = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            self._word, self._searched = word, 0
            while True:
                # first look, then ask for the end: the last piece may hold it
                if self._has_come():
                    return bytes(self._output)
                left = None if until is None else until - time.monotonic()
                if self._ended or self._given_up or (left is not None and left <= 0):
                    return None
                self._changed.wait(left)

    def _has_come(self) -> bool:
        """Whether a line with the word that is waited for is whole."""
        at = self._output.find(self._word, self._searched)
        self._searched = at if at >= 0 else max(0, len(self._output) - len(self._word))
        return at >= 0 and self._output.find(b"\n", at) >= 0


class Shell:
    """One persistent shell. Its calls are safe from any thread; one command at a time."""

    def __init__(
        self, program: Program, host_pid: int, interpreter: Interpreter = BASH, *, is_new: bool = False
    ) -> None:
        """`is_new`: it was started just now, so nothing runs in it."""
        self.interpreter = interpreter
        self.name = program.name
        self._program = program
        self._host_pid = host_pid
        self._feed = Feed(program.events(), program.name)
        self._mutex = threading.Lock()
        self._terminal = threading.Lock()
        """Held by who types and waits for the answer."""
        self._runs = False
        self._is_known = is_new
        """What was typed into it so far is known to have ended."""
        self._hindrance = ""
        self._state: ShellState | None = None
        self._past: list[ShellState] = []

    def host_pid(self) -> int:
        """The host's number of its process."""
        return self._host_pid

    @property
    def alive(self) -> bool:
        return not self._feed.ended

    @property
    def idle(self) -> bool:
        """Whether it waits for a command. Of a shell that was found running: so it seems from outside."""
        return self.alive and not self._runs and (self._is_known or processes.waits_at_terminal(self._host_pid))

    # ---- commands

    def run(self, command: str, timeout: float | None = None) -> ShellResult:
        """Type a command and wait for its end; after `timeout` seconds it is interrupted (Ctrl-C).

        A shell that does not come back from that is killed. Raises `Busy` while another command runs, and `SandboxGone`.
        """
        with self._running():
            nonce = _nonce()
            self._feed.clear()
            self._type(self.interpreter.typed(command, nonce))
            end = self._end(nonce, timeout)
            return end if end is not None else self._interrupted(nonce)

    def interrupt(self) -> bool:
        """Interrupt the command that runs, and say whether one did. Its `run` returns with status 130."""
        if self._runs:
            self._feed.give_up()
        elif self.alive and not self.idle:  # of a shell that was found running
            self._type(INTERRUPT)
        else:
            return False
        return True

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        with self._mutex:
            if self.alive and not self.idle:
                raise Busy(
                    f"a command runs in {self.name}", remedy="wait for its end, interrupt it, or use another shell"
                )
            self._feed.resume()
            self._runs = True
        try:
            with self._terminal:  # a question is answered within milliseconds, or given up soon
                self._state = None
                yield
        finally:
            self._runs = False

    def _end(self, nonce: str, timeout: float | None) -> ShellResult | None:
        """The end of the command that was typed; None if it has not ended in that time."""
        output = self._feed.wait(self.interpreter.end_word(nonce), timeout)
        if output is not None:
            end = self.interpreter.ending(output, nonce) or Ending(
                status=1,
                output=self.interpreter.so_far(output, nonce),
                hindrance="its terminal changes what is written to it",
            )
            self._is_known, self._hindrance = True, end.hindrance
            return ShellResult(exit_code=end.status, output=end.output)
        if not self._feed.ended:
            return None
        if self._feed.failure is not None:
            raise self._feed.failure
        text = self.interpreter.so_far(self._feed.output(), nonce)
        return ShellResult(exit_code=self._program.status().exit_code or 0, output=text, ended=True)

    def _interrupted(self, nonce: str) -> ShellResult:
        timed_out = not self._feed.resume()
        self._type(INTERRUPT)
        self._type(self.interpreter.mark(nonce))
        result = self._end(nonce, PATIENCE)
        if result is None:
            self._program.kill()
            result = self._end(nonce, PATIENCE)
        text = result.output if result else self.interpreter.so_far(self._feed.output(), nonce)
        return ShellResult(
            exit_code=TIMEOUT_STATUS if timed_out else INTERRUPTED_STATUS,
            output=text,
            timed_out=timed_out,
            ended=result is None or result.ended,
        )

    def _type(self, text: bytes, patience: float | None = None) -> None:
        try:
            self._program.write(text, patience)
        except BrokenPipeError:
            pass  # it has ended: who waits for the answer hears of it

    # ---- state

    def state(self, stale: bool = False) -> ShellState:
        """What it holds in its memory. Never raises: what cannot be asked is `unknown`, with the reason.

        The answer is kept until a command is run. `stale`: ask anew, since something else made the process run (a signal
        with a trap, say). Takes a few milliseconds, at most two seconds, and waits for nobody.
        """
        # whoever types is a command, or somebody who asks the same and has the answer soon
        if not self._terminal.acquire(blocking=False) and (
            self._runs or not self._terminal.acquire(timeout=ANSWER_PATIENCE)
        ):
            return ShellState(unknown="a command runs in it")
        try:
            if self._state is not None and not stale and self.alive:
                return self._state
            self._state = None
            if why := self._why_not():
                return ShellState(unknown=why)
            self._state = self._ask()
            self._past = [*self._past[1 - _REMEMBERED :], self._state]
            return self._state
        finally:
            self._terminal.release()

    def digest(self, *, stale: bool = False) -> str | None:
        """The digest of its state; None if it is not known."""
        return self.state(stale).digest or None

    def changed_since(self, digest: str) -> str:
        """In words, what is other now than in the state of that digest; empty if that is not remembered any more."""
        now = self.state()
        before = next((state for state in reversed(self._past) if state.digest == digest), None)
        return "" if before is None else ", ".join(changes(before, now))

    def _why_not(self) -> str:
        """Why it is not to be asked now; empty if nothing is in the way."""
        if not self.alive:
            return "it has ended"
        if not self._is_known and not processes.waits_at_terminal(self._host_pid):
            return "a command runs in it"
        if self._hindrance:
            return f"it was not asked, since that would be seen: {self._hindrance}"
        if self._prompts_elsewhere():
            return "it was not asked: the prompt that follows would go where its errors go"
        return ""

    def _ask(self) -> ShellState:
        nonce = _nonce()
        question = self.interpreter.question(nonce)
        if question is None:
            return ShellState(unknown=f"{self.interpreter.name} cannot be asked for its state")
        self._feed.clear()
        try:
            self._type(question, LINE_PATIENCE)
        except TimeoutError:
            return ShellState(unknown="it was not asked: the sandbox stands still")
        output = self._feed.wait(self.interpreter.answer_word(nonce), ANSWER_PATIENCE)
        if output is None:
            self._is_known = False  # what was typed may still be waiting to be read
            return ShellState(unknown="it did not answer")
        try:
            state = self.interpreter.answer(output, nonce, self._outside())
        except OSError:
            return ShellState(unknown="it has ended")
        self._settle()
        return state

    def _outside(self) -> dict[str, bytes]:
        """What an interpreter need not tell, since the kernel does it in less time."""
        folder = Path(f"/proc/{self._host_pid}")
        files = {line[73:] for line in (folder / "maps").read_bytes().splitlines() if line[73:].startswith(b"/")}
        return {"limits": (folder / "limits").read_bytes(), "libraries": b"\n".join(sorted(files))}

    def _prompts_elsewhere(self) -> bool:
        """Whether standard error, where prompts go, leads to something that keeps them."""
        descriptors = f"/proc/{self._host_pid}/fd"
        try:
            where = os.readlink(f"{descriptors}/2")
            return where not in (os.readlink(f"{descriptors}/0"), "/dev/tty", "/dev/null")
        except FileNotFoundError:
            return False  # closed

    def _settle(self) -> None:
        """Wait until it has printed its prompt and sleeps: who asked may look at the process from outside next."""
        end = time.monotonic() + SETTLING
        while not processes.waits_at_terminal(self._host_pid) and time.monotonic() < end:
            time.sleep(0)


def changes(before: ShellState, after: ShellState) -> list[str]:
    """Names of the parts that differ between two states. Empty if they are equal; what is unknown differs from everything."""
    for state in (before, after):
        if state.unknown:
            return [f"unknown: {state.unknown}"]
    names = sorted(before.parts.keys() | after.parts.keys())
    differing = [name for name in names if before.parts.get(name) != after.parts.get(name)]
    return differing if differing or before.digest == after.digest else ["something"]


def _nonce() -> str:
    return secrets.token_hex(8)
