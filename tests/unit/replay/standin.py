"""Sandboxes without root: a folder, real programs of the host in it, and copies of the folder as checkpoints.

Files come back as they were; processes cannot, which is what the tests of `policy="files"` and of recovery without checkpoints
are about. Restoring processes is tested in tests/e2e/test_replay.py.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

from unit.sandbox.terminal import Piece, Terminal

from crab.errors import NotFound, SandboxGone, WrongState
from crab.model import Checkpoint, ExecResult, ExecStatus, ShellResult, ShellState, State, Timings
from crab.sandbox.bash import BASH
from crab.sandbox.shell import Shell as Driver


class Process:
    """A program of the host on a pipe."""

    def __init__(self, box: Sandbox, argv: list[str], cwd: Path) -> None:
        self._box = box
        self._popen = subprocess.Popen(
            argv,
            cwd=cwd,
            env=box.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        box.groups.append(self._popen.pid)

    def __iter__(self) -> Iterator[Piece]:
        assert self._popen.stdout is not None
        while data := os.read(self._popen.stdout.fileno(), 65536):
            yield Piece(data)
        self._popen.wait()
        if self._box.state == State.LOST:
            raise SandboxGone("killed")

    def status(self) -> ExecStatus:
        code = self._popen.poll()
        return ExecStatus(id="1", running=code is None, exit_code=code if code is None or code >= 0 else 128 - code)

    def kill(self) -> None:
        os.killpg(self._popen.pid, signal.SIGKILL)


class Shell:
    """A persistent shell by its name, as the SDK has it."""

    def __init__(self, box: Sandbox, name: str) -> None:
        self._box = box
        self._name = name

    def run(self, command: str, timeout: float | None = None) -> ShellResult:
        driver = self._box.shells.get(self._name)
        if driver is None or not driver.alive:
            terminal = Terminal(BASH.argv, self._box.env, self._box.root, lambda: self._box.state == State.LOST)
            self._box.groups.append(terminal.process.pid)
            driver = self._box.shells[self._name] = Driver(terminal, terminal.process.pid, is_new=True)
        return driver.run(command, timeout)

    def state(self) -> ShellState:
        driver = self._box.shells.get(self._name)
        if driver is None or not driver.alive:
            raise NotFound(f"no shell {self._name}")
        return driver.state(stale=True)


@dataclass
class Sandbox:
    root: Path
    """Stands for /root: where commands start."""
    store: Path
    env: dict[str, str]
    state: State = State.RUNNING
    head: str | None = None
    groups: list[int] = field(default_factory=list)
    removed: bool = False
    count: Iterator[int] = field(default_factory=itertools.count)
    shells: dict[str, Driver] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    """What was asked of it."""

    def run(
        self, argv: list[str], *, cwd: str = "", user: str = "", timeout: float = 60.0, input: bytes = b""
    ) -> ExecResult:
        folder = self.root if cwd in ("", "/") else Path(cwd)
        process = subprocess.Popen(
            argv,
            cwd=folder,
            env=self.env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.groups.append(process.pid)
        try:
            out, err = process.communicate(input, timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            return ExecResult(exit_code=124, stdout=out, stderr=err, timed_out=True)
        if self.state == State.LOST:
            raise SandboxGone("killed")
        return ExecResult(exit_code=process.returncode, stdout=out, stderr=err)

    def spawn(self, argv: list[str], *, name: str = "", cwd: str = "") -> Process:
        return Process(self, argv, Path(cwd) if cwd else self.root)

    def shell(self, name: str) -> Shell:
        return Shell(self, name)

    def attach(self, name: str) -> Process:
        raise NotFound(f"no command {name}: processes do not come back here")

    def checkpoint(self, policy: str = "always") -> Checkpoint:
        name = f"c{next(self.count)}"
        self.log.append(f"checkpoint {policy}")
        shutil.copytree(self.root, self.store / name, symlinks=True)
        self.head = name
        timings = Timings(frozen_ms=1.0, total_ms=2.0)
        return Checkpoint(id=name, sandbox="s", turn=1, kind="files", created=0.0, process_bytes=1000, timings=timings)

    def kill(self) -> None:
        self.log.append("kill")
        self.state = State.LOST
        self._kill_all()

    def recover(self) -> None:
        if self.state != State.LOST or self.head is None:
            raise WrongState("nothing to recover")
        self.log.append("recover")
        shutil.rmtree(self.root)
        shutil.copytree(self.store / self.head, self.root, symlinks=True)
        self.state = State.RUNNING

    def info(self) -> SimpleNamespace:
        return SimpleNamespace(head=self.head, state=self.state)

    def copy_in(self, source: str, target: str) -> None:
        copy = shutil.copytree if Path(source).is_dir() else shutil.copy
        copy(source, self.root / Path(target).name)

    def remove(self, force: bool = False) -> None:
        self.removed = True
        self._kill_all()

    def _kill_all(self) -> None:
        self.shells.clear()
        for group in self.groups:
            try:
                os.killpg(group, signal.SIGKILL)
            except ProcessLookupError:
                pass


class Host:
    """Makes sandboxes below a folder and remembers them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.boxes: list[Sandbox] = []

    def create(self, name: str, image: str, *, env: dict[str, str], hostname: str, workdir: str) -> Sandbox:
        place = self.folder / f"box{len(self.boxes)}"
        root, store = place / "root", place / "store"
        root.mkdir(parents=True)
        store.mkdir()
        box = Sandbox(root, store, os.environ | env | {"HOME": str(root)})
        self.boxes.append(box)
        return box

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        pass
