"""`crab shell`: a terminal in the sandbox that stays when you leave it, and that a rewind does not throw you out of."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import click

from crab.cli.exec import end_note
from crab.cli.following import DETACH_NAME, Terminal, terminal_size
from crab.cli.session import Session
from crab.cli.values import SANDBOX, variables
from crab.errors import (
    AlreadyExists,
    Busy,
    CommandNotFound,
    CrabError,
    DaemonUnavailable,
    InvalidRequest,
    SandboxGone,
    WrongState,
)
from crab.model import ExecStatus
from crab.sdk.sync import Process, Sandbox

SHELLS = (("bash", "-l"), ("sh", "-l"))
PATIENCE = 60.0
"""Seconds to wait for a sandbox (or a daemon) that is being brought back."""


@click.command()
@click.argument("sandbox", type=SANDBOX)
@click.option("--name", default="shell", show_default=True, help="Another name is another shell.")
@click.option("--env", "-e", multiple=True, metavar="NAME=VALUE", help="A variable, if the shell is started now.")
@click.option("--cwd", "-w", default="", metavar="DIR", help="Work directory, if the shell is started now.")
@click.option("--user", "-u", default="", help="User, if the shell is started now.")
@click.pass_obj
def shell(session: Session, sandbox: str, name: str, env: tuple[str, ...], cwd: str, user: str) -> int:
    """Open a shell that stays when you leave.

    If a command of that name runs already, attaches to it. Ctrl-] leaves it running; so does closing the terminal. After a
    rewind you are in the shell as it was then.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise InvalidRequest(
            "a shell needs a terminal on standard input and output", remedy="use `crab exec -i` without one"
        )
    with session.host() as host:
        box = host.sandbox(sandbox)
        process, is_new = opened(box, name, variables(env), cwd, user)
        click.echo(f"[{DETACH_NAME} leaves the shell running, `exit` ends it]", err=True)
        with Terminal() as terminal:
            status = talk(terminal, process, lambda: box.attach(name), redraw=not is_new)
    if note := end_note(status, sandbox, None):
        click.echo(("\n" if status.running else "") + f"crab: {note}", err=True)
    return status.exit_code or 0


def opened(box: Sandbox, name: str, env: dict[str, str], cwd: str, user: str) -> tuple[Process, bool]:
    """The shell of that name, and whether it was started just now."""
    rows, columns = terminal_size()
    for argv in SHELLS:
        try:
            return box.spawn(argv, tty=True, name=name, rows=rows, columns=columns, env=env, cwd=cwd, user=user), True
        except AlreadyExists:
            return box.attach(name), False
        except CommandNotFound:
            if argv == SHELLS[-1]:
                raise
    raise AssertionError("unreachable")


def talk(terminal: Terminal, process: Process, attach: Callable[[], Process], *, redraw: bool) -> ExecStatus:
    """Follow a shell to its end, also across what cuts the line: a rewind, a recovery, a new daemon."""
    while True:
        try:
            return terminal.follow(process, redraw=redraw)
        except (SandboxGone, DaemonUnavailable) as error:
            terminal.say(f"{error.message}; waiting to attach again, {DETACH_NAME} gives up")
            process, redraw = attached_again(attach, terminal.left.wait, error), True
            terminal.say("attached again")


def attached_again(attach: Callable[[], Process], pause: Callable[[float], bool], why: CrabError) -> Process:
    """Try to attach until it works. Raises `why` if the user gives up (`pause` says so) or nothing comes in a minute."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and not pause(0.1):
        try:
            return attach()
        except (SandboxGone, DaemonUnavailable, WrongState, Busy) as error:
            why = error
    raise why
