"""`crab explain`."""

from __future__ import annotations

import click

from crab.cli.session import Session, json_option
from crab.cli.text import clean, milliseconds
from crab.cli.values import checkpoint_or_head
from crab.model import Decision


@click.command()
@click.argument("checkpoint", metavar="SANDBOX[@REF]")
@json_option
@click.pass_obj
def explain(session: Session, checkpoint: str) -> None:
    """Say what a turn changed, and how that is known.

    Of a checkpoint: why it captured what it did. Of a sandbox: what a checkpoint taken now would capture; nothing is
    captured. Lines with `+` are reasons, those with `-` were seen and do not count.
    """
    sandbox, ref = checkpoint_or_head(checkpoint) if "@" in checkpoint else (checkpoint, "")
    with session.host() as host:
        found = host.sandbox(sandbox).explain(ref)
    session.show(found, lambda: decision_text(found))


def decision_text(found: Decision) -> str:
    """The kind, how it was found, and one line for each reason."""
    how = f"tier {found.tier}, {milliseconds(found.cost_ms)}" if found.tier else "not watched"
    lines = [f"{found.kind}  ({how})"]
    lines += [f"  + {clean(reason)}" for reason in found.reasons]
    lines += [f"  - {clean(note)}" for note in found.notes]
    return "\n".join(lines)
