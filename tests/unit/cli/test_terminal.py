"""`crab shell` and `crab exec` on a real terminal and a real socket, and what Ctrl-C does. The service is a stand-in."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from unit.standin import Program, Served, StandIn, served
from unit.standin import sample as made

from crab.daemon.requests import Inspect
from crab.errors import CommandNotFound

CRAB = [sys.executable, "-m", "crab.cli"]


@pytest.fixture
def stand_in() -> StandIn:
    service = StandIn()
    service.answers[Inspect] = made(Inspect.returns)
    return service


@pytest.fixture
def host(stand_in: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setenv("CRAB_SOCKET", str(tmp_path / "crab.sock"))
    with served(stand_in, tmp_path / "crab.sock") as running:
        yield running


class Terminal:
    """A user's terminal with `crab` in it."""

    def __init__(self, *arguments: str, rows: int = 30, columns: int = 100) -> None:
        self.seen = b""
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
            os.execv(CRAB[0], [*CRAB, *arguments])

    def type(self, data: bytes) -> None:
        os.write(self.fd, data)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def expect(self, data: bytes, seconds: float = 10.0) -> None:
        end = time.monotonic() + seconds
        while data not in self.seen:
            ready, _, _ = select.select([self.fd], [], [], max(end - time.monotonic(), 0))
            assert ready, f"{data!r} is not in {self.seen!r}"
            self.seen += os.read(self.fd, 4096)
        self.seen = self.seen.partition(data)[2]

    def status(self) -> int:
        """Its exit status, after what it still says."""
        try:
            while data := os.read(self.fd, 4096):
                self.seen += data
        except OSError:
            pass  # nobody has the other end any more
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def close(self) -> None:
        os.close(self.fd)


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for terminal in opened:
        terminal.close()


def test_a_shell_is_a_terminal_that_can_be_left_and_taken_up_again(
    stand_in: StandIn, host: Served, terminals: list[Terminal]
) -> None:
    terminal = Terminal("shell", "x", "-e", "A=1", "-w", "/w")
    terminals.append(terminal)
    shell = stand_in.started()
    assert shell.spec.argv == ("bash", "-l")
    assert (shell.spec.tty, shell.spec.name, shell.spec.rows, shell.spec.columns) == (True, "shell", 30, 100)
    assert (shell.spec.env, shell.spec.cwd) == ({"A": "1"}, "/w")
    terminal.expect(b"Ctrl-] leaves the shell running")
    shell.say(b"$ ")
    terminal.expect(b"$ ")
    terminal.type(b"ls\x03\n")  # raw: Ctrl-C is the shell's business
    shell.wait(lambda p: p.input == b"ls\x03\n")
    terminal.resize(50, 200)
    shell.wait(lambda p: p.sizes == [(50, 200)])
    terminal.type(b"half\x1drest")
    assert terminal.status() == 0
    assert shell.input == b"ls\x03\nhalf"
    assert b"left running" in terminal.seen
    assert shell.exit is None

    shell.say(b"meanwhile")
    again = Terminal("shell", "x")
    terminals.append(again)
    again.expect(b"meanwhile")
    shell.wait(lambda p: p.sizes[1:] == [(30, 99), (30, 100)])  # it is made to draw itself again
    shell.end(7)
    assert again.status() == 7
    assert len(stand_in.programs) == 1


def test_a_shell_that_another_terminal_has_is_refused(
    stand_in: StandIn, host: Served, terminals: list[Terminal]
) -> None:
    terminals += [Terminal("shell", "x")]
    terminals[0].expect(b"Ctrl-]")
    terminals.append(Terminal("shell", "x"))
    assert terminals[1].status() == 75
    assert b"another client reads" in terminals[1].seen
    stand_in.started().end(0)
    assert terminals[0].status() == 0


def test_without_bash_there_is_sh(stand_in: StandIn, host: Served, terminals: list[Terminal]) -> None:
    spawn = stand_in.spawn

    def only_sh(sandbox: str, spec: object) -> object:
        if spec.argv[0] == "bash":  # pyright: ignore[reportAttributeAccessIssue]
            raise CommandNotFound("'bash' was not found", remedy="")
        return spawn(sandbox, spec)  # pyright: ignore[reportArgumentType]

    stand_in.spawn = only_sh  # pyright: ignore[reportAttributeAccessIssue]
    terminals.append(Terminal("shell", "x"))
    shell = stand_in.started()
    assert shell.spec.argv == ("sh", "-l")
    shell.end(0)
    assert terminals[0].status() == 0


def test_a_rewind_does_not_throw_the_user_out(stand_in: StandIn, host: Served, terminals: list[Terminal]) -> None:
    terminal = Terminal("shell", "x")
    terminals.append(terminal)
    shell = stand_in.started()
    shell.say(b"old")
    terminal.expect(b"old")
    shell.vanish("the sandbox was rewound")
    terminal.expect(b"the sandbox was rewound; waiting to attach again")
    time.sleep(0.3)
    restored = Program(9, "shell", shell.spec)  # as it was at the checkpoint
    stand_in.programs.append(restored)
    terminal.expect(b"attached again")
    restored.say(b"new")
    terminal.expect(b"new")
    terminal.type(b"pwd\n")
    restored.wait(lambda p: p.input == b"pwd\n")
    restored.end(3)
    assert terminal.status() == 3


def test_a_shell_outlives_the_daemon(
    stand_in: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminals: list[Terminal]
) -> None:
    path = tmp_path / "crab.sock"
    monkeypatch.setenv("CRAB_SOCKET", str(path))
    with served(stand_in, path):
        terminal = Terminal("shell", "x")
        terminals.append(terminal)
        shell = stand_in.started()
        shell.say(b"first")
        terminal.expect(b"first")
    terminal.expect(b"waiting to attach again")
    with served(stand_in, path):
        terminal.expect(b"attached again")
        shell.say(b"second")
        terminal.expect(b"second")
        shell.end(0)
        assert terminal.status() == 0


def test_waiting_can_be_given_up(stand_in: StandIn, host: Served, terminals: list[Terminal]) -> None:
    terminal = Terminal("shell", "x")
    terminals.append(terminal)
    terminal.expect(b"Ctrl-]")
    stand_in.started().vanish("it was killed")
    terminal.expect(b"waiting to attach again")
    terminal.type(b"\x1d")
    assert terminal.status() == 71
    assert b"it was killed" in terminal.seen


def test_the_terminal_is_as_before_afterwards(stand_in: StandIn, host: Served, terminals: list[Terminal]) -> None:
    terminal = Terminal("exec", "-it", "x", "top")
    terminals.append(terminal)
    program = stand_in.started()
    program.say(b"drawn")
    terminal.expect(b"drawn")
    assert not termios.tcgetattr(terminal.fd)[3] & termios.ICANON
    program.vanish("gone")
    assert terminal.status() == 71
    assert termios.tcgetattr(terminal.fd)[3] & termios.ICANON


def start(*arguments: str, **options: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*CRAB, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)  # pyright: ignore


def test_ctrl_c_is_passed_on_and_a_second_one_kills(stand_in: StandIn, host: Served) -> None:
    process = start("exec", "x", "work")
    program = stand_in.started()
    program.say(b"ready")
    assert process.stdout is not None
    assert process.stdout.read(5) == b"ready"
    process.send_signal(signal.SIGINT)
    program.wait(lambda p: p.signals == [2])
    assert not program.killed
    process.send_signal(signal.SIGINT)
    program.wait(lambda p: p.killed)
    assert process.wait(60) == 137
    process.communicate()


def test_standard_input_goes_to_the_command_only_with_i(stand_in: StandIn, host: Served) -> None:
    process = start("exec", "-i", "x", "cat", stdin=subprocess.PIPE)
    program = stand_in.started()
    assert program.spec.stdin
    assert process.stdin is not None
    process.stdin.write(b"some input")
    process.stdin.close()
    program.wait(lambda p: p.input_closed)
    assert program.input == b"some input"
    program.end(0)
    assert process.wait(60) == 0
    without = start("exec", "x", "cat", stdin=subprocess.PIPE)
    second = stand_in.started(2)
    assert not second.spec.stdin
    second.end(0)
    assert without.wait(60) == 0
    for each in (process, without):
        for stream in (each.stdin, each.stdout, each.stderr):
            assert stream is not None
            stream.close()


def test_a_command_whose_reader_has_gone_is_killed(stand_in: StandIn, host: Served) -> None:
    process = start("exec", "x", "yes")
    program = stand_in.started()
    assert process.stdout is not None
    process.stdout.close()
    program.say(b"y\n")
    program.wait(lambda p: p.killed)
    assert process.wait(60) == 128 + signal.SIGPIPE
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
