"""`crab apply`."""

from __future__ import annotations

import click

from crab.cli.diff import difference_text
from crab.cli.session import Session, json_option
from crab.cli.values import SANDBOX


@click.command()
@click.argument("sandbox", type=SANDBOX)
@click.argument("target")
@click.option("--dry-run", "-n", is_flag=True, help="Say what would be changed, and change nothing.")
@json_option
@click.pass_obj
def apply(session: Session, sandbox: str, target: str, dry_run: bool) -> None:
    """Copy what was changed in a mounted folder back to the host.

    TARGET is the path in the sandbox of a folder that was mounted with `copy`. Prints what changes on the host: A added,
    M changed, D removed, R renamed.
    """
    with session.host() as host:
        changed = host.sandbox(sandbox).apply(target, dry_run)
    session.show(changed, lambda: difference_text(changed))
