"""`crab record`: what an agent asked its model."""

from __future__ import annotations

from collections.abc import Sequence

import click

from crab.cli.session import Session, json_option
from crab.cli.text import TONES, Table, clean, milliseconds, without_empty_columns
from crab.cli.values import SANDBOX
from crab.model import Conversation, Exchange, Sandbox


@click.command()
@click.option("--all", "-a", "every", is_flag=True, help="Helpers, and those that were rewound away, as well.")
@click.argument("sandbox", type=SANDBOX)
@click.argument("number", type=int, required=False)
@json_option
@click.pass_obj
def record(session: Session, every: bool, sandbox: str, number: int | None) -> None:
    """Show what the agent of a sandbox asked its model.

    Each exchange of the main loop ended a turn. SAFE says how safe that was before the agent got the answer; HELD is how
    long Crab kept the whole answer back. With NUMBER all that was said in that exchange.
    """
    with session.host() as host:
        box = host.sandbox(sandbox)
        if number is not None:
            said = box.exchange(number)
            session.show(said, lambda: conversation_text(said))
            return
        found, about = box.exchanges(), box.info()
    shown = found if every or session.json else [one for one in found if one.kind == "main" and not one.abandoned]
    session.show(found, lambda: exchanges_table(shown, about))


def exchanges_table(found: Sequence[Exchange], about: Sandbox) -> Table:
    """One row for each exchange, and what is no exchange because it could not be read."""
    rows = tuple(
        (
            str(one.number),
            "-" if one.turn is None else str(one.turn),
            one.client or "-",
            one.kind + (", rewound" if one.abandoned else ""),
            one.state,
            one.protection or "-",
            str(one.calls),
            milliseconds(one.wait_ms),
            milliseconds(one.held_ms),
            one.why,
        )
        for one in found
    )
    table = Table(
        ("NUMBER", "TURN", "CLIENT", "KIND", "STATE", "SAFE", "CALLS", "MODEL", "HELD", "WHY"),
        rows,
        right=frozenset({"NUMBER", "TURN", "CALLS", "MODEL", "HELD"}),
        empty="nothing was asked yet",
        tones=TONES,
        notes=(f"{about.unread} requests could not be read, and ended no turn; the newest: {clean(about.unread_why)}",)
        if about.unread
        else (),
    )
    return without_empty_columns(table, {"WHY"})


def conversation_text(said: Conversation) -> str:
    """All of an exchange."""
    return "\n".join([*said.items, "", said.answer])
