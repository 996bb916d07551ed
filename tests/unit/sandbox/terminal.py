"""A program of the host on a terminal of its own, as a `crab.sandbox.command.Command` looks to a shell."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import subprocess
import termios
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from crab.errors import SandboxGone
from crab.model import ExecStatus
from crab.sandbox.bash import BASH
from crab.sandbox.shell import Shell


@dataclass
class Piece:
    data: bytes
    stream: int = 1


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Terminal:
    """See the module."""

    name = "shell:main"

    def __init__(
        self, argv: tuple[str, ...], env: Mapping[str, str], cwd: Path, gone: Callable[[], bool] = lambda: False
    ) -> None:
        """`gone`: says whether the sandbox that it stands for was killed."""
        self.master, theirs = pty.openpty()
        self.process = subprocess.Popen(
            argv,
            cwd=cwd,
            env=dict(env),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(theirs)
        self._gone = gone
        self.shown = bytearray()
        """All that came."""

    def events(self) -> Iterator[Piece]:
        ended = False
        while True:
            try:
                came = select.select([self.master], [], [], 0 if ended else 0.05)[0]
                data = os.read(self.master, 65536) if came else b""
            except OSError:  # EIO: the last holder of the terminal is gone
                break
            if not data and ended:  # what it left in the background may hold the terminal
                break
            ended = self.process.poll() is not None
            if not data:
                continue
            self.shown += data
            yield Piece(data)
        self.process.wait()
        if self._gone():
            raise SandboxGone("killed")

    def write(self, data: bytes, patience: float | None = None) -> None:
        if self.process.poll() is not None:
            raise BrokenPipeError
        while data:
            data = data[os.write(self.master, data) :]

    def status(self) -> ExecStatus:
        code = self.process.poll()
        return ExecStatus(id="1", running=code is None, exit_code=code if code is None or code >= 0 else 128 - code)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def bash_on_a_terminal(folder: Path, **env: str) -> tuple[Shell, Terminal]:
    """A shell whose home and work directory is the folder."""
    values = {"PATH": os.environ["PATH"], "HOME": str(folder), "TERM": "dumb", "LANG": "C.UTF-8"}
    terminal = Terminal(BASH.argv, values | dict(BASH.env) | env, folder)
    return Shell(terminal, terminal.process.pid, is_new=True), terminal
