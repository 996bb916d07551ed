"""Runs one operation: its phases in children that a caller puts where it wants them."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
from collections.abc import Callable
from typing import Any

from bench.operations.looking import gone
from bench.operations.operation import (
    Operation,
    lines,
)


class Runner:
    """One operation in one folder: `prepare`, then `act`, then `close`. A context manager, so that nothing is left.

    `enter` is called in each child before it does anything: it puts the child where the caller wants it. After `act` of an
    operation that `lives`, its process and all sleepers stay until `close`.
    """

    def __init__(self, operation: Operation, folder: str, enter: Callable[[], None] = lambda: None) -> None:
        self.operation = operation
        self.folder = folder
        self.state: dict[str, Any] = {}
        """What the phases said that others can know: numbers and names."""
        self._enter = enter
        self._child: tuple[int, int, int] | None = None

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prepare(self) -> None:
        """What comes before the turn. Raises OSError as the operation does."""
        if self.operation.prepare is not None:
            self._phase("prepare")

    def act(self) -> None:
        """The turn. Raises OSError as the operation does."""
        self._phase("act")

    def look(self) -> object:
        """See `Operation.look`."""
        return self.operation.look(self.folder, self.state) if self.operation.look else None

    def close(self) -> None:
        """End every process of the operation and remove what lies outside of its folder."""
        self._end()
        for pid in self.state.get("sleepers", []):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            gone(pid)
        if self.operation.clean:
            self.operation.clean(self.folder, self.state)

    def _phase(self, name: str) -> None:
        if self._child is None:
            self._child = self._start()
        pid, out, back = self._child
        os.write(out, f"{name}\n".encode())
        answer = b""
        while not answer.endswith(b"\n"):
            piece = os.read(back, 1 << 16)
            if not piece:
                raise OSError(errno.ECHILD, f"{self.operation.name}: {name} killed its process")
            answer += piece
        said = json.loads(answer)
        self.state.update(said["state"], pid=pid)
        if not self.operation.lives:
            self._end()
        if said["code"] is not None:
            raise OSError(said["code"] or errno.EIO, f"{self.operation.name}: {name}: {said['error']}")

    def _start(self) -> tuple[int, int, int]:
        to_child, out = os.pipe()
        back, to_parent = os.pipe()
        pid = os.fork()
        if pid:
            os.close(to_child)
            os.close(to_parent)
            return pid, out, back
        try:
            os.close(out)
            os.close(back)
            self._enter()
            self._serve(to_child, to_parent)
        finally:
            os._exit(1)

    def _serve(self, commands: int, answers: int) -> None:
        lines.extend((commands, answers))
        state = dict(self.state)
        while name := os.read(commands, 100).strip().decode():
            code, error = None, ""
            try:
                phase = self.operation.prepare if name == "prepare" else self.operation.act
                assert phase
                phase(self.folder, state)
            except OSError as failure:
                code, error = failure.errno or 0, str(failure)
            except BaseException as failure:
                code, error = 0, repr(failure)
            plain = {key: value for key, value in state.items() if isinstance(value, (int, str, list))}
            os.write(answers, json.dumps({"state": plain, "code": code, "error": error}).encode() + b"\n")

    def _end(self) -> None:
        if self._child is None:
            return
        pid, out, back = self._child
        self._child = None
        os.close(out)
        os.close(back)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
