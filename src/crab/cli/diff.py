"""`crab diff`."""

from __future__ import annotations

import click

from crab.cli.session import Session, json_option
from crab.cli.text import clean, size
from crab.cli.values import checkpoint_or_head
from crab.errors import InvalidRequest
from crab.model import Difference, FileChange

_LETTERS = {"added": "A", "changed": "M", "removed": "D", "renamed": "R"}


@click.command()
@click.argument("checkpoint", metavar="SANDBOX[@REF]")
@click.argument("other", default="", metavar="[REF]")
@click.option("--content", is_flag=True, help="Also a unified diff of every text file.")
@json_option
@click.pass_obj
def diff(session: Session, checkpoint: str, other: str, content: bool) -> None:
    """Show what differs between two checkpoints, or one and now.

    Without a second REF the sandbox as it is now is compared. Files: A added, M changed (and what of it), D removed,
    R renamed; then the processes that came, went, or run another program.
    """
    sandbox, ref = checkpoint_or_head(checkpoint)
    to = second_ref(sandbox, other)
    with session.host() as host:
        found = host.sandbox(sandbox).diff(ref, to, content=content)
    session.show(found, lambda: difference_text(found))


def second_ref(sandbox: str, text: str) -> str:
    """`REF`, or `SANDBOX@REF` of the same sandbox. Raises `InvalidRequest`."""
    name, at, ref = text.partition("@")
    if not at:
        return text
    if name not in ("", sandbox):
        raise InvalidRequest(
            f"{sandbox} and {name} are two sandboxes",
            remedy=f"give two checkpoints of one: crab diff {sandbox}@REF REF",
        )
    return ref


def difference_text(found: Difference) -> str:
    """One line for each change."""
    lines = [line for change in found.files for line in (file_line(change), *clean_diff(change.diff))]
    signs = {"started": "+", "ended": "-", "changed": "~"}
    lines += [f"{signs[p.kind]} process {p.pid} {p.kind}: {clean(' '.join(p.argv))}" for p in found.processes]
    return "\n".join(lines) or "no difference"


def clean_diff(text: str) -> list[str]:
    """The lines of a unified diff, indented, nothing in them that a terminal would take for a command."""
    return [f"    {clean(line)}" for line in text.splitlines()]


def file_line(change: FileChange) -> str:
    """`M path (content, mode)`."""
    path = clean(change.path)
    if change.kind == "renamed":
        path = f"{clean(change.before)} -> {path}"
    if change.kind == "added" and change.size:
        return f"A {path} ({size(change.size)})"
    what = f" ({', '.join(change.what)})" if change.what else ""
    return f"{_LETTERS[change.kind]} {path}{what}"
