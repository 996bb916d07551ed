"""`crab cp`."""

from __future__ import annotations

import click

from crab.cli.session import Session, json_option
from crab.cli.text import size
from crab.cli.values import copy_ends
from crab.daemon.requests import Copied


@click.command()
@click.argument("source")
@click.argument("target")
@json_option
@click.pass_obj
def cp(session: Session, source: str, target: str) -> None:
    """Copy files into or out of a sandbox.

    One of SOURCE and TARGET is SANDBOX:/PATH, the other is a path of the host (of the daemon's, if that is another). Folders
    are copied whole; into a folder that exists.
    """
    sandbox, outside, inside, goes_in = copy_ends(source, target)
    with session.host() as host:
        box = host.sandbox(sandbox)
        copied = box.copy_in(outside, inside) if goes_in else box.copy_out(inside, outside)
    session.show(copied, lambda: copied_text(copied))


def copied_text(copied: Copied) -> str:
    """What was copied, and what was not."""
    lines = [f"{copied.files} {'file' if copied.files == 1 else 'files'}, {size(copied.size)}"]
    if copied.skipped:
        lines.append(f"skipped: {', '.join(copied.skipped)}")
    return "\n".join(lines)
