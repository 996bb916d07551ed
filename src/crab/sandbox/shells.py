"""The persistent shells of one incarnation: which there are, each found again by its name in init's entries.

Their drivers live as long as the incarnation. After a restore, a fork or a restart of the daemon they are made anew, for the
shells that init knows: the name of a shell's exec begins with `shell:`, which nothing else may be called.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Mapping
from typing import Protocol

from crab.errors import CommandNotFound, InvalidRequest, NotFound
from crab.model import ExecSpec
from crab.sandbox.bash import BASH
from crab.sandbox.command import Command
from crab.sandbox.shell import Shell
from crab.sandbox.wire import Entry

PREFIX = "shell:"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,55}")


class Life(Protocol):
    """What shells need of an `Incarnation`."""

    def execute(self, spec: ExecSpec) -> Command: ...
    def entries(self) -> list[Entry]: ...
    def attach(self, entry: Entry) -> Command: ...
    def host_pid(self, command: Command) -> int: ...


class Shells:
    """See the module. Safe from any thread."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._lock = threading.Lock()
        self._known: dict[str, Shell] = {}
        self._is_complete = False

    def open(self, name: str, *, user: str = "", cwd: str = "", env: Mapping[str, str] | None = None) -> Shell:
        """The shell of that name, started (as that user, there, with that environment) if there is none.

        Raises `CommandNotFound` if the image has no bash, `InvalidRequest`, `ExecFailed`, `SandboxGone`.
        """
        exec_name = name_of(name)
        with self._lock:
            known = self._registered().get(exec_name)
            if known is not None:
                return known
            spec = ExecSpec(
                argv=BASH.argv, env={**BASH.env, **(env or {})}, cwd=cwd, user=user, tty=True, name=exec_name
            )
            try:
                command = self._life.execute(spec)
            except CommandNotFound as error:
                raise CommandNotFound(
                    f"the sandbox has no {BASH.name}, which its persistent shells need",
                    remedy="install it in the image; `crab exec` without --shell runs single commands",
                ) from error
            shell = Shell(command, self._life.host_pid(command), BASH, is_new=True)
            self._known[exec_name] = shell
            return shell

    def find(self, name: str) -> Shell | None:
        """The shell of that name, if there is one."""
        return self.registered().get(name_of(name))

    def registered(self) -> dict[str, Shell]:
        """The living shells by the names of their execs. The first call asks init: not while the gate is closed."""
        with self._lock:
            return dict(self._registered())

    def _registered(self) -> dict[str, Shell]:
        if not self._is_complete:
            for entry in self._life.entries():
                if entry.name.startswith(PREFIX) and not entry.exited and entry.name not in self._known:
                    command = self._life.attach(entry)
                    with contextlib.suppress(NotFound):  # it has just ended
                        self._known[entry.name] = Shell(command, self._life.host_pid(command), BASH)
            self._is_complete = True  # from now on they are all started here
        self._known = {name: shell for name, shell in self._known.items() if shell.alive}
        return self._known


def name_of(shell: str) -> str:
    """Name of the exec of a shell. Raises `InvalidRequest`."""
    if not _NAME.fullmatch(shell):
        raise InvalidRequest(
            f"{shell!r} is no name for a shell", remedy="use letters, numbers, '_', '.' and '-', at most 56"
        )
    return PREFIX + shell


def is_shell(exec_name: str) -> bool:
    """Whether an exec of that name is a persistent shell."""
    return exec_name.startswith(PREFIX)
