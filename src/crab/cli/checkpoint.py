"""`crab checkpoint`, `crab label`, `crab rm-checkpoint`."""

from __future__ import annotations

import click

from crab.cli.life import removed_text
from crab.cli.session import Session, json_option
from crab.cli.text import milliseconds, size
from crab.cli.values import SANDBOX, checkpoint_of
from crab.model import Checkpoint, PolicyName


@click.command()
@click.argument("sandbox", type=SANDBOX)
@click.option("--label", "-l", default="", help="A name to find it by.")
@click.option(
    "--policy",
    type=click.Choice(["adaptive", "always", "files", "oracle"]),
    default="adaptive",
    show_default=True,
    help="always: files and processes, whatever changed; files: without the processes; oracle: always, and judge "
    "what adaptive would have done.",
)
@click.option("--no-durable", is_flag=True, help="Do not wait until it would survive a crash of the host.")
@json_option
@click.pass_obj
def checkpoint(session: Session, sandbox: str, label: str, policy: PolicyName, no_durable: bool) -> None:
    """Capture what a sandbox has changed since its last checkpoint.

    What is proven unchanged stands in from an earlier one; any doubt means everything (`crab explain` says why). The sandbox
    runs on; if it has to stand still, then for the time that is printed as `frozen`.
    """
    with session.host() as host:
        made = host.sandbox(sandbox).checkpoint(label, policy, durable=not no_durable)
    session.show(made, lambda: checkpoint_text(made))


@click.command()
@click.argument("checkpoint", metavar="SANDBOX@REF")
@click.argument("text", default="", metavar="[LABEL]")
@json_option
@click.pass_obj
def label(session: Session, checkpoint: str, text: str) -> None:
    """Give a checkpoint a label.

    Without LABEL the label that it has is taken away.
    """
    sandbox, ref = checkpoint_of(checkpoint)
    with session.host() as host:
        labelled = host.sandbox(sandbox).label(ref, text)
    session.show(labelled, lambda: checkpoint_text(labelled))


@click.command("rm-checkpoint")
@click.argument("checkpoint", metavar="SANDBOX@REF")
@json_option
@click.pass_obj
def rm_checkpoint(session: Session, checkpoint: str) -> None:
    """Remove a checkpoint.

    Those that were taken after it stay. Refused if something else needs it.
    """
    sandbox, ref = checkpoint_of(checkpoint)
    with session.host() as host:
        removed = host.sandbox(sandbox).remove_checkpoint(ref)
    session.show(removed, lambda: removed_text(removed))


def checkpoint_text(made: Checkpoint) -> str:
    """One line: what it is and what it cost."""
    parts = [
        f"turn {made.turn}",
        made.id,
        made.kind,
        made.label,
        f"frozen {milliseconds(made.timings.frozen_ms)}" if made.timings.frozen_ms else "",
        f"total {milliseconds(made.timings.total_ms)}",
        size(made.process_bytes) if made.process_bytes else "",
    ]
    return "  ".join(filter(None, parts))
