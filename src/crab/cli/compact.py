"""`crab compact`."""

from __future__ import annotations

import click

from crab.cli.session import Session, json_option
from crab.cli.text import clean, size
from crab.model import Compaction


@click.command()
@json_option
@click.pass_obj
def compact(session: Session) -> None:
    """Keep once what checkpoints have in common, to have room on the disk now.

    The daemon does it by itself while the host is idle, with all but the newest checkpoint of a sandbox. Checkpoints stay what
    they are: each can be restored and removed as before.
    """
    with session.host() as host:
        made = host.compact()
    session.show(made, lambda: compaction_text(made))


def compaction_text(made: Compaction) -> str:
    """What was done, and what was not."""
    lines = [
        f"{made.checkpoints} checkpoints with {size(made.size)} of process images; "
        f"{size(made.own)} are their own, before compression"
    ]
    return "\n".join(lines + [clean(f"{identity} was left as it is: {why}") for identity, why in made.failed.items()])
