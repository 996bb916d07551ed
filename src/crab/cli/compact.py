"""`crab compact`."""

from __future__ import annotations

import click

from crab.cli.session import Session, json_option
from crab.cli.text import Table, pairs, size
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
    session.show(made, lambda: compaction_table(made))


def compaction_table(made: Compaction) -> Table:
    """What was done, and what was not."""
    left = f"{', '.join(made.left)}: being read, they go the next time" if made.left else ""
    damaged = f"{', '.join(made.damaged)}: not what was captured, left as they are" if made.damaged else ""
    return pairs(
        {
            "made compact": f"{made.checkpoints} checkpoints with {size(made.size)} of process images",
            "their own": f"{size(made.own)}, before compression",
            "left": left,
            "damaged": damaged,
        }
    )
