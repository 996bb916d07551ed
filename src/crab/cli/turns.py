"""`crab turns`."""

from __future__ import annotations

from collections.abc import Sequence

import click

from crab.cli.session import Session, json_option
from crab.cli.text import TONES, Table, milliseconds, size, without_empty_columns
from crab.cli.values import SANDBOX
from crab.model import Checkpoint, Proof


@click.command()
@click.argument("sandbox", type=SANDBOX)
@click.option("--all", "-a", "every", is_flag=True, help="Those that were rewound away as well.")
@json_option
@click.pass_obj
def turns(session: Session, sandbox: str, every: bool) -> None:
    """List the checkpoints of a sandbox.

    The head, which `crab recover` restores, is marked with `*`. KIND is what was captured: what was proven unchanged stands
    in from an earlier one (`crab explain SANDBOX@TURN` says why). RESTORABLE says whether `crab verify` has proven it.
    """
    with session.host() as host:
        box = host.sandbox(sandbox)
        found = box.turns(every)
        head = None if session.json else box.info().head
    session.show(found, lambda: turns_table(found, head))


def turns_table(found: Sequence[Checkpoint], head: str | None) -> Table:
    """One row for each checkpoint."""
    rows = tuple(
        (
            f"{c.turn}{'*' if c.id == head else ' '}",
            c.id,
            c.kind,
            c.label,
            milliseconds(c.decision.cost_ms) if c.decision else "-",
            milliseconds(c.timings.frozen_ms),
            milliseconds(c.timings.total_ms),
            size(c.process_bytes),
            restorable(c.proof),
            c.parent or "-",
        )
        for c in found
    )
    table = Table(
        ("TURN", "ID", "KIND", "LABEL", "DECIDED", "FROZEN", "TOTAL", "SIZE", "RESTORABLE", "PARENT"),
        rows,
        right=frozenset({"TURN", "DECIDED", "FROZEN", "TOTAL", "SIZE"}),
        empty="no checkpoints; `crab checkpoint` takes one",
        tones=TONES,
    )
    return without_empty_columns(table, {"LABEL"})


def restorable(proof: Proof) -> str:
    """`proven`, `untested`, or `failed (why)`."""
    return f"{proof.verdict} ({proof.reason})" if proof.verdict == "failed" and proof.reason else proof.verdict
