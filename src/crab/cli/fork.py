"""`crab fork`."""

from __future__ import annotations

import click

from crab.cli.session import Session, json_option
from crab.cli.values import checkpoint_or_head


@click.command()
@click.argument("checkpoint", metavar="SANDBOX[@REF]")
@click.option("--count", "-n", type=click.IntRange(1, 1000), default=1, show_default=True, help="How many.")
@click.option("--name", "names", multiple=True, help="Name of a new sandbox; once for each. Default: SANDBOX-fork-N.")
@json_option
@click.pass_obj
def fork(session: Session, checkpoint: str, count: int, names: tuple[str, ...]) -> None:
    """Make new sandboxes from a checkpoint.

    Without @REF a checkpoint of the running sandbox is taken first. Prints the names.
    """
    sandbox, ref = checkpoint_or_head(checkpoint) if "@" in checkpoint else (checkpoint, "")
    with session.host() as host:
        made = host.sandbox(sandbox).fork(ref, count, names)
        session.show([box.info() for box in made] if session.json else None, lambda: "\n".join(b.name for b in made))
