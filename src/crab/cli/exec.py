"""`crab exec`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from crab.cli.session import Session
from crab.cli.text import clean
from crab.cli.values import SANDBOX, SECONDS, command_line, variables
from crab.errors import InvalidRequest
from crab.model import ExecStatus

if TYPE_CHECKING:
    from crab.sdk.sync import Shell


@click.command("exec", context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False})
@click.option("--interactive", "-i", is_flag=True, help="Give it our standard input; else it has none.")
@click.option("--tty", "-t", is_flag=True, help="Give it a terminal. Ctrl-] leaves it running.")
@click.option("--env", "-e", multiple=True, metavar="NAME=VALUE", help="A variable; NAME alone takes yours.")
@click.option("--cwd", "-w", default="", metavar="DIR", help="Work directory.  [the sandbox's]")
@click.option("--user", "-u", default="", help="Name or number.  [the sandbox's]")
@click.option(
    "--timeout", type=SECONDS, metavar="TIME", help="Kill it with all that it has started after this long: 30s, 2min."
)
@click.option("--name", default="", help="A name to attach to it by.")
@click.option("--detach", "-d", is_flag=True, help="Leave it running and print its name.")
@click.option(
    "--shell",
    metavar="NAME",
    help="Run it in the persistent shell of that name (bash; started if there is none), which keeps folder and variables.",
)
@click.option(
    "--agent/--no-agent",
    "by_agent",
    envvar="CRAB_AGENT",
    default=False,
    help="A step of the sandbox's agent: recorded, and not run again by an agent that comes back.  [$CRAB_AGENT]",
)
@click.argument("sandbox", type=SANDBOX)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def exec_(
    session: Session,
    interactive: bool,
    tty: bool,
    env: tuple[str, ...],
    cwd: str,
    user: str,
    timeout: float | None,
    name: str,
    detach: bool,
    shell: str | None,
    by_agent: bool,
    sandbox: str,
    command: tuple[str, ...],
) -> int:
    """Run a command in a sandbox.

    With --shell NAME it is shell text, typed into a persistent shell: `crab exec --shell main BOX -- 'cd /x && A=1'`. Its
    output comes when it has ended, --timeout interrupts it, and -e, -w, -u matter only when the shell is started.

    Options come before SANDBOX. The exit status is the command's: 128 + N if signal N ended it, 124 after --timeout, 126 or
    127 if it could not be started. Ctrl-C interrupts the command, a second one kills it.
    """
    from crab.cli.following import Terminal, follow, terminal_size

    argv = command_line(command)
    if shell is not None:
        if interactive or tty or name or detach:
            raise InvalidRequest("--shell takes none of -i, -t, -d and --name", remedy="leave them out")
        with session.host() as host:
            kept = host.sandbox(sandbox).shell(shell, env=variables(env), cwd=cwd, user=user, by_agent=by_agent)
            return run_in_shell(kept, shell_text(argv), timeout)
    own_terminal = tty and not detach
    if own_terminal and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise InvalidRequest("-t needs a terminal on standard input and output", remedy="leave -t out")
    rows, columns = terminal_size() if tty else (24, 80)
    with session.host() as host:
        process = host.sandbox(sandbox).spawn(
            argv,
            tty=tty,
            stdin=interactive,
            name=name,
            rows=rows,
            columns=columns,
            env=variables(env),
            cwd=cwd,
            user=user,
            timeout=timeout,
            by_agent=by_agent and not detach,
        )
        if detach:
            process.detach()
            click.echo(process.name)
            return 0
        if own_terminal:
            with Terminal() as terminal:
                status = terminal.follow(process)
        else:
            status = follow(process, give_input=interactive)
    if note := end_note(status, sandbox, timeout):
        click.echo(("\n" if status.running else "") + f"crab: {note}", err=True)
    return status.exit_code or 0


def shell_text(argv: Sequence[str]) -> str:
    """What is typed into a shell: one word is shell text, several are a program and its arguments."""
    return argv[0] if len(argv) == 1 else shlex.join(argv)


def run_in_shell(shell: Shell, text: str, timeout: float | None) -> int:
    """Run it and print what the terminal showed. Ctrl-C interrupts it."""
    from crab.cli.following import interrupting, write_out

    with interrupting(shell):
        result = shell.run(text, timeout)
    write_out(1, result.output.encode(errors="surrogateescape"))
    if result.timed_out:
        click.echo(f"crab: the command was interrupted after its time limit of {timeout:g} s", err=True)
    if result.ended:
        click.echo(f"crab: the shell {clean(shell.name)} has ended", err=True)
    return result.exit_code


def end_note(status: ExecStatus, sandbox: str, timeout: float | None) -> str:
    """What is said besides the exit status; empty if that says all."""
    if status.running:
        return f"left running; `crab shell {clean(sandbox)} --name {clean(status.id)}` attaches to it"
    if status.timed_out:
        limit = f" of {timeout:g} s" if timeout is not None else ""
        return f"the command was killed, with all that it had started, after its time limit{limit}"
    return ""
