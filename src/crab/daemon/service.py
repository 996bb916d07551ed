"""The service: everything that can be asked of a state directory, in this process.

`handle` answers the typed requests, `spawn` and `command` give handles on running commands, which are streams and
therefore no requests. Safe from any thread.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path
from typing import Any, cast

import msgspec

from crab import __version__
from crab.daemon import (
    archiving,
    catalogue,
    compacting,
    comparing,
    conversing,
    draining,
    history,
    lifecycle,
    pruning,
    shells,
    steps,
    storing,
    transfer,
    trying,
    underway,
)
from crab.daemon import requests as ask
from crab.daemon.background import Background
from crab.daemon.compacting import Compacting
from crab.daemon.core import Core
from crab.daemon.dispatch import Answer, answers, collect
from crab.daemon.door import checked, checked_command
from crab.daemon.keeper import Keeper
from crab.daemon.past import note_returns
from crab.daemon.proving import Proving
from crab.daemon.pruning import Pruning
from crab.daemon.sending import Sending
from crab.daemon.underway import Resumed
from crab.errors import CrabError, InvalidRequest, NotFound, SandboxGone
from crab.model import ExecResult, ExecSpec, ExecStatus, Trial
from crab.sandbox.command import Command
from crab.sandbox.shells import PREFIX, is_shell
from crab.store.retention import Policy
from crab.turns.place import STEP, Ticket

API = 1
VERIFY = "CRAB_VERIFY"
"""`off`: nothing is proven in the background (docs/engine.md)."""
COMPACT = "CRAB_COMPACT"
"""`off`: no checkpoint is made compact but by `crab compact`."""


class Service:
    """See the module. A context manager: at the end the state directory is given up, the sandboxes run on."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.state_dir = core.state_dir

    @classmethod
    def open(cls, state_dir: Path) -> Service:
        """Own a state directory. Raises `Busy` if another process does, `HostUnsuitable` if this host cannot."""
        core = Core.open(state_dir)
        service = cls(core)
        try:
            core.coordinator.begin(Keeper(core, service.handle))
            note_returns(core)
            core.coordinator.tidy()
            core.open_doors()
        except BaseException:
            core.close()
            raise
        return service

    def background(self, store: ask.StoreRequest | None, keep: Policy | None = None) -> list[Background]:
        """What a daemon does while nobody waits: prove the newest checkpoints (unless `$CRAB_VERIFY` is `off`), keep once what
        they have in common (unless `$CRAB_COMPACT` is), send them to a store and keep only some, if that is said. Each begins
        when it is entered."""
        found: list[Background] = [] if os.environ.get(VERIFY) == "off" else [Proving(self._core)]
        found += [] if os.environ.get(COMPACT) == "off" else [Compacting(self._core)]
        found += [Sending(self._core, store)] if store else []
        found += [Pruning(self._core, keep)] if keep else []
        return found

    def handle(self, request: ask.Request) -> Any:
        """The answer to a request, of its type `returns`. Raises the errors of the operation."""
        request = checked(request, request.operation)
        answer = _ANSWERS.get(type(request))
        if answer is None:
            raise InvalidRequest(f"nothing answers {request.operation!r}", remedy="upgrade the daemon")
        return answer(self._core, request)

    def spawn(self, sandbox: str, spec: ExecSpec) -> Command:
        """Start a command in a running sandbox. Its time limit counts from here.

        One of an agent that was run before is not started: what comes back gives what it came to.
        """
        core = self._core
        _check_name(spec)
        if spec.by_agent and not spec.tty:
            spec = checked_command(spec)
            return cast(Command, steps.stream_once(core, sandbox, spec, lambda named: spawn(core, sandbox, named)))
        command = spawn(core, sandbox, spec)
        if core.registry.find(sandbox).spec.exec_turns:
            return cast(Command, steps.Recording(command, lambda _: steps.end_turn(core, sandbox)))
        return command

    def command(self, sandbox: str, name: str) -> Command:
        """A handle on a command that runs already, by its name or number. Raises `NotFound`.

        Not on a persistent shell: its output has a reader, and a second one would take pieces of it away.
        """
        record = self._core.registry.find(sandbox)
        name = self._core.names.get((record.id, name), name)
        life = self._core.running(record, "attach")
        entries = life.entries()
        for entry in entries:
            if name in (entry.name, str(entry.exec)):
                if is_shell(entry.name):
                    raise InvalidRequest(
                        f"{entry.name} is a persistent shell, which cannot be attached to",
                        remedy=f"`crab exec --shell {entry.name.removeprefix(PREFIX)}` runs commands in it",
                    )
                return life.attach(entry)
        known = ", ".join(entry.name or str(entry.exec) for entry in entries) or "none"
        raise NotFound(f"sandbox {record.name} has no command {name!r}", remedy=f"commands: {known}")

    def close(self) -> None:
        """Give the state directory up; sandboxes run on."""
        self._core.close()

    def close_down(self) -> None:
        """Give it up and take the pool off the machine. Raises `Busy` while sandboxes run."""
        self._core.close_down()

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def spawn(core: Core, sandbox: str, spec: ExecSpec) -> Command:
    """See `Service.spawn`."""
    spec = checked_command(spec)
    record = core.registry.find(sandbox)
    command = core.running(record, "exec").execute(spec)
    if spec.timeout is not None:
        command.limit(spec.timeout)
    return command


def _check_name(spec: ExecSpec) -> None:
    if is_shell(spec.name):
        raise InvalidRequest(
            f"names that begin with {PREFIX!r} are those of persistent shells", remedy="choose another name"
        )
    if underway.is_step(spec.name):
        raise InvalidRequest(
            f"names that begin with {STEP!r} are those of agents' commands", remedy="choose another name"
        )


@answers(ask.About)
def about(core: Core, request: ask.About) -> ask.Version:
    """Who answers."""
    return ask.Version(crab=__version__, api=API, pid=os.getpid(), state_dir=str(core.state_dir))


@answers(ask.Run)
def run(core: Core, request: ask.Run) -> ExecResult:
    """Run a command to its end; one of an agent once."""
    _check_name(request.spec)
    if request.spec.by_agent:
        return _run_once(core, request)
    result = _run(core, request)
    steps.end_turn(core, request.sandbox)
    return result


def _run_once(core: Core, request: ask.Run) -> ExecResult:
    record = core.registry.find(request.sandbox)

    def begin(ticket: Ticket) -> ExecResult:
        spec = underway.named(request.spec, ticket)
        with core.called(record, request.spec.name, spec.name):
            return _run(core, msgspec.structs.replace(request, spec=spec))

    def resume(ticket: Ticket) -> ExecResult | None:
        spec = underway.named(checked_command(request.spec), ticket)
        with core.called(record, request.spec.name, spec.name):
            found = underway.take_up(core, record, spec)
            return _ended(found, request) if found else None

    what = steps.digest_of(request.spec, request.input)
    return steps.once(core, request.sandbox, what, ExecResult, begin, resume)


@answers(ask.Try)
def try_in_forks(core: Core, request: ask.Try) -> tuple[Trial, ...]:
    """Run a command in forks that are gone when it has ended."""

    def run(sandbox: str, spec: ExecSpec) -> ExecResult:
        return _run(core, ask.Run(sandbox=sandbox, spec=spec, limit=request.limit))

    return trying.tried(core, request, run)


def _run(core: Core, request: ask.Run) -> ExecResult:
    spec = request.spec
    if request.input and not spec.stdin:
        spec = msgspec.structs.replace(spec, stdin=True)
    return _ended(spawn(core, request.sandbox, spec), request)


def _ended(command: Command | Resumed, request: ask.Run) -> ExecResult:
    """Give a command its input, and wait for its end."""

    def feed() -> None:
        with contextlib.suppress(BrokenPipeError, SandboxGone):
            command.write(request.input)
            command.close_input()

    try:
        if request.spec.stdin or request.input:
            threading.Thread(target=feed, daemon=True).start()
        return command.collect(request.limit)
    except BaseException:  # the caller was interrupted: nobody will ever ask for the rest
        with contextlib.suppress(CrabError, OSError):
            command.kill()
            command.release()
        raise


@answers(ask.CommandList)
def command_list(core: Core, request: ask.CommandList) -> tuple[ExecStatus, ...]:
    """The commands that a sandbox's init knows."""
    life = core.running(core.registry.find(request.sandbox), "commands")
    return tuple(life.attach(entry).status() for entry in life.entries())


_ANSWERS: dict[type[ask.Request], Answer] = collect(
    archiving,
    catalogue,
    compacting,
    comparing,
    conversing,
    draining,
    history,
    lifecycle,
    pruning,
    shells,
    storing,
    transfer,
    sys.modules[__name__],
)
