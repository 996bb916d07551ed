"""`crab rewind` and `crab recover`."""

from __future__ import annotations

import click

from crab.cli.ls import not_rolled_back
from crab.cli.session import Session, json_option
from crab.cli.values import SANDBOX, checkpoint_of
from crab.model import Sandbox


@click.command()
@click.argument("checkpoint", metavar="SANDBOX@REF")
@click.option("--files-only", is_flag=True, help="Restore the files and start anew, without the processes.")
@json_option
@click.pass_obj
def rewind(session: Session, checkpoint: str, files_only: bool) -> None:
    """Bring a sandbox back to a checkpoint.

    What was done since is gone, except for checkpoints: those stay, and `crab turns --all` lists them. If the restore fails,
    the sandbox runs on as it was. One that was paused is paused again.
    """
    sandbox, ref = checkpoint_of(checkpoint)
    with session.host() as host:
        back = host.sandbox(sandbox).rewind(ref, files_only)
    session.show(back, lambda: back_text(back))


@click.command()
@click.argument("sandbox", type=SANDBOX)
@click.option("--force", is_flag=True, help="Also if it runs or was stopped: what it is now is given up.")
@json_option
@click.pass_obj
def recover(session: Session, sandbox: str, force: bool) -> None:
    """Bring a lost sandbox back from its newest checkpoint."""
    with session.host() as host:
        back = host.sandbox(sandbox).recover(force)
    session.show(back, lambda: back_text(back))


def back_text(box: Sandbox) -> str:
    """Where it is now, and what stayed as it was."""
    return "\n".join(filter(None, [f"{box.name} {box.state} at turn {box.turn} ({box.head})", not_rolled_back(box)]))
