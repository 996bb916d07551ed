"""`crab prune`."""

from __future__ import annotations

import click

from crab.cli.keeping import keeping
from crab.cli.session import Session, json_option
from crab.cli.text import clean
from crab.daemon.requests import Pruned
from crab.errors import InvalidRequest
from crab.store.retention import Policy


@click.command()
@click.argument("sandbox", required=False, default="")
@click.option("--all", "everything", is_flag=True, help="Of all sandboxes.")
@keeping
@click.option("--dry-run", is_flag=True, help="Say what would be removed, and remove nothing.")
@json_option
@click.pass_obj
def prune(session: Session, sandbox: str, everything: bool, policy: Policy | None, dry_run: bool) -> None:
    """Remove the checkpoints of a sandbox that no rule keeps.

    Kept are those that --keep-… say, labelled ones, the ends of branches (unless told otherwise), and always the head. What
    stays can be restored as before: it gets what it needs of those that go.
    """
    if bool(sandbox) == everything:
        raise InvalidRequest("it is not said of which sandbox", remedy="give its name, or --all")
    if policy is None:
        raise InvalidRequest("nothing says what is to be kept", remedy="give --keep-last or --keep-every")
    with session.host() as host:
        removed = host.prune(policy, sandbox, dry=dry_run)
    session.show(removed, lambda: pruned_text(removed, dry_run))


def pruned_text(done: Pruned, dry: bool) -> str:
    """How many, which, and what stays all the same."""
    count = len(done.removed)
    what = f"{count} checkpoint{'' if count == 1 else 's'} {'would be ' if dry else ''}removed"
    lines = [f"{what}: {', '.join(done.removed)}" if done.removed else what]
    return "\n".join(lines + [clean(f"{identity} stays: {why}") for identity, why in done.stays.items()])
