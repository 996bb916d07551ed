"""The root of the command line: global options, the table of verbs, and how errors become exit statuses.

A verb's module is loaded when the verb is used, so that `crab ls` does not wait for the others: the table knows their
first lines (a test compares them).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from crab import __version__
from crab.cli.session import Session, json_option, json_text
from crab.errors import CrabError, InvalidRequest

SECTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "Agents": {
        "run": ("run:run", "Run an agent so that it survives: its sandbox, its process, its machine."),
        "record": ("record:record", "Show what the agent of a sandbox asked its model."),
        "mcp": ("mcp:mcp", "Give an agent on the host tools to save, rewind and try, over MCP."),
    },
    "Sandboxes": {
        "create": ("create:create", "Make a sandbox and start it."),
        "ls": ("ls:ls", "List the sandboxes."),
        "inspect": ("ls:inspect", "Show all that is known of a sandbox."),
        "start": ("life:start", "Start stopped sandboxes on their files."),
        "pause": ("life:pause", "Freeze every process of sandboxes."),
        "resume": ("life:resume", "Let paused sandboxes run again."),
        "stop": ("life:stop", "Stop sandboxes; files and checkpoints stay."),
        "kill": ("life:kill", "Kill everything in sandboxes at once, as a crash would."),
        "rm": ("life:rm", "Remove sandboxes and their checkpoints."),
    },
    "In a sandbox": {
        "exec": ("exec:exec_", "Run a command in a sandbox."),
        "shell": ("shell:shell", "Open a shell that stays when you leave."),
        "ps": ("ps:ps", "List the processes or commands of a sandbox."),
        "cp": ("cp:cp", "Copy files into or out of a sandbox."),
        "apply": ("apply:apply", "Copy what was changed in a mounted folder back to the host."),
    },
    "Checkpoints": {
        "checkpoint": ("checkpoint:checkpoint", "Capture what a sandbox has changed since its last checkpoint."),
        "explain": ("explain:explain", "Say what a turn changed, and how that is known."),
        "turns": ("turns:turns", "List the checkpoints of a sandbox."),
        "rewind": ("rewind:rewind", "Bring a sandbox back to a checkpoint."),
        "recover": ("rewind:recover", "Bring a lost sandbox back from its newest checkpoint."),
        "fork": ("fork:fork", "Make new sandboxes from a checkpoint."),
        "diff": ("diff:diff", "Show what differs between two checkpoints, or one and now."),
        "verify": ("verify:verify", "Prove that a checkpoint can be restored."),
        "label": ("checkpoint:label", "Give a checkpoint a label."),
        "rm-checkpoint": ("checkpoint:rm_checkpoint", "Remove a checkpoint."),
        "export": ("archive:export", "Write a checkpoint into an archive."),
        "import": ("archive:import_", "Make a sandbox from an archive."),
        "prune": ("prune:prune", "Remove the checkpoints of a sandbox that no rule keeps."),
        "compact": ("compact:compact", "Keep once what checkpoints have in common, to have room on the disk now."),
        "store": ("store:store", "Keep checkpoints where they outlive this host."),
    },
    "Images and host": {
        "image": ("image:image", "Add, list, show, remove and build images."),
        "commit": ("image:commit", "Make an image of a sandbox's files."),
        "jobs": ("jobs:jobs", "Show what the host works on for checkpoints, and what waits."),
        "drain": ("jobs:drain", "Make every running sandbox safe before the machine goes."),
        "doctor": ("doctor:doctor", "Say what this machine offers, and how to get what it lacks."),
        "daemon": ("daemon:daemon", "Run, stop or look at the daemon."),
        "replay": ("crab.replay.cli:replay", "Run a recorded trajectory, with faults if wanted."),
    },
}
VERBS = {name: where for section in SECTIONS.values() for name, (where, _) in section.items()}

_EPILOG = "SANDBOX is a name or id; SANDBOX@REF a checkpoint: head, head~N, a turn, a label or an id (`crab turns`)."


def _home(where: str) -> tuple[str, str]:
    module, _, name = where.partition(":")
    return (module if "." in module else f"crab.cli.{module}"), name


def _is_there(where: str) -> bool:
    """Whether the module of a verb is installed. (Those of this package always are.)"""
    if "." not in where:
        return True
    with contextlib.suppress(ModuleNotFoundError):
        return importlib.util.find_spec(_home(where)[0]) is not None
    return False


class _ReaderGone(Exception):
    """Who read our output has gone. (Of a BrokenPipeError click would make the exit status 1.)"""


class Verbs(click.Group):
    """A group whose commands are loaded when they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name, where in VERBS.items() if _is_there(where)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        where = VERBS.get(cmd_name)
        if where is None or not _is_there(where):
            return None
        module, name = _home(where)
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise _ReaderGone from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        there = set(self.list_commands(ctx))
        for title, verbs in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name, line) for name, (_, line) in verbs.items() if name in there])


@click.command(
    cls=Verbs, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.option("--embedded", is_flag=True, help="Work in this process, without a daemon (needs root).")
@click.option(
    "--state",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="State directory, with --embedded and `daemon run`.  [$CRAB_STATE, /var/lib/crab]",
)
@click.option(
    "--socket",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Socket of the daemon.  [$CRAB_SOCKET, /run/crab/crab.sock]",
)
@json_option
@click.version_option(__version__, prog_name="crab", message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context, embedded: bool, state: Path | None, socket: Path | None) -> None:
    """Checkpoint, rewind, fork and recover the sandboxes of AI agents."""
    if embedded and socket is not None:
        raise InvalidRequest("--embedded works without a daemon, --socket names one", remedy="give one of them")
    if state is not None and not embedded and ctx.invoked_subcommand not in ("daemon", "doctor"):
        raise InvalidRequest(
            "--state needs --embedded: a daemon has its own state directory", remedy="add --embedded, or use --socket"
        )
    session = ctx.ensure_object(Session)
    session.embedded, session.state, session.socket = embedded, state, socket


def run(arguments: Sequence[str], session: Session | None = None) -> int:
    """Run the command line; returns the exit status.

    Says on standard error what went wrong and what to do; with `--json` the one document is the error instead.
    """
    session = session or Session()
    try:
        result: Any = cli.main(list(arguments), prog_name="crab", standalone_mode=False, obj=session)
        sys.stdout.flush()
    except CrabError as error:
        if session.json:
            click.echo(json_text(error.to_wire()))
        else:
            say(error)
        return error.exit_status
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return InvalidRequest.exit_status
    except click.ClickException as error:
        if session.json:
            click.echo(json_text(InvalidRequest(error.format_message(), remedy="see --help").to_wire()))
        else:
            error.show()
        return InvalidRequest.exit_status if isinstance(error, click.UsageError) else error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return 128 + signal.SIGINT
    except (BrokenPipeError, _ReaderGone):
        # nothing more can be said, not even at the exit of Python
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE
    return result if isinstance(result, int) else 0


def say(error: CrabError) -> None:
    """One message on standard error."""
    from crab.cli.text import clean

    lines = [clean(line) for line in error.message.splitlines()] or [type(error).__name__]
    if error.remedy:
        lines.append(f"  remedy: {clean(error.remedy)}")
    click.echo("crab: " + "\n".join(lines), err=True)
