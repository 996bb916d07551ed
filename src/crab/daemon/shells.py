"""Persistent shells: commands in them, interrupts, and the question what they hold."""

from __future__ import annotations

import math

from crab.daemon import requests as ask
from crab.daemon import steps
from crab.daemon.core import Core
from crab.daemon.dispatch import answers
from crab.errors import InvalidRequest, NotFound
from crab.model import ShellResult, ShellState
from crab.sandbox.shell import Shell

LONGEST = 1 << 20
"""Bytes of a command. It is typed: a megabyte takes some seconds."""


@answers(ask.ShellRun)
def shell_run(core: Core, request: ask.ShellRun) -> ShellResult:
    """Run a command in a shell, which is started if there is none of that name."""
    if "\0" in request.command:
        raise InvalidRequest("the command has a zero byte in it", remedy="no shell takes that; leave it out")
    if len(request.command) > LONGEST:
        raise InvalidRequest(
            f"the command has {len(request.command)} characters, more than {LONGEST}",
            remedy="`crab cp` it as a script, and run that",
        )
    if request.timeout is not None and not (math.isfinite(request.timeout) and request.timeout >= 0):
        raise InvalidRequest(f"{request.timeout} is no time limit", remedy="give seconds, or none")
    if request.by_agent:
        what = steps.digest("shell", request.shell, request.command, request.user, request.cwd, request.env)
        return steps.once(core, request.sandbox, what, ShellResult, lambda _: _run(core, request))
    result = _run(core, request)
    steps.end_turn(core, request.sandbox)
    return result


def _run(core: Core, request: ask.ShellRun) -> ShellResult:
    life = core.running(core.registry.find(request.sandbox), "a shell")
    shell = life.shells.open(request.shell, user=request.user, cwd=request.cwd, env=request.env)
    result = shell.run(request.command, request.timeout)
    core.later(lambda: core.inspector.prepare(life))
    return result


@answers(ask.ShellInterrupt)
def shell_interrupt(core: Core, request: ask.ShellInterrupt) -> bool:
    """What Ctrl-C does."""
    return _existing(core, request.sandbox, request.shell).interrupt()


@answers(ask.ShellLook)
def shell_look(core: Core, request: ask.ShellLook) -> ShellState:
    """The state, asked anew: whoever wants to know it cannot tell what else made the process run."""
    return _existing(core, request.sandbox, request.shell).state(stale=True)


def _existing(core: Core, sandbox: str, name: str) -> Shell:
    record = core.registry.find(sandbox)
    life = core.running(record, "a shell")
    shell = life.shells.find(name)
    if shell is None:
        known = ", ".join(found.partition(":")[2] for found in life.shells.registered()) or "none"
        raise NotFound(
            f"sandbox {record.name} has no persistent shell {name!r}",
            remedy=f"shells: {known}; the first command in one starts it",
        )
    return shell
