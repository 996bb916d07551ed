"""`crab ps`."""

from __future__ import annotations

from collections.abc import Sequence

import click

from crab.cli.session import Session, json_option
from crab.cli.text import TONES, Table, size
from crab.cli.values import SANDBOX
from crab.model import ExecStatus, ProcessInfo


@click.command()
@click.argument("sandbox", type=SANDBOX)
@click.option("--commands", "-c", is_flag=True, help="The commands that were started by `exec`, `shell` or the SDK.")
@json_option
@click.pass_obj
def ps(session: Session, sandbox: str, commands: bool) -> None:
    """List the processes or commands of a sandbox.

    A command that runs can be attached to with `crab shell SANDBOX --name COMMAND`.
    """
    with session.host() as host:
        box = host.sandbox(sandbox)
        if commands:
            statuses = box.commands()
            session.show(statuses, lambda: commands_table(statuses))
        else:
            processes = box.processes()
            session.show(processes, lambda: processes_table(processes))


def processes_table(found: Sequence[ProcessInfo]) -> Table:
    """One row for each process, by its number in the sandbox."""
    rows = tuple(
        (str(p.pid), str(p.parent), str(p.host_pid), str(p.uid), p.state, size(p.memory), p.exec_id, " ".join(p.argv))
        for p in found
    )
    return Table(
        ("PID", "PARENT", "HOST PID", "UID", "S", "MEMORY", "GROUP", "COMMAND"),
        rows,
        right=frozenset({"PID", "PARENT", "HOST PID", "UID", "MEMORY"}),
        empty="no processes",
    )


def commands_table(found: Sequence[ExecStatus]) -> Table:
    """One row for each command."""
    rows = tuple((status.id, str(status.pid or ""), status_text(status)) for status in found)
    return Table(("COMMAND", "PID", "STATE"), rows, right=frozenset({"PID"}), empty="no commands", tones=TONES)


def status_text(status: ExecStatus) -> str:
    """How a command stands, in words."""
    if status.running:
        return "running"
    if status.timed_out:
        return "ended: out of time"
    return f"ended: signal {status.signal}" if status.signal else f"ended: status {status.exit_code}"
