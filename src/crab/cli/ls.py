"""`crab ls` and `crab inspect`."""

from __future__ import annotations

import time
from collections.abc import Sequence

import click

from crab.cli.session import Session, json_option
from crab.cli.text import TONES, Table, ago, clean, moment, pairs, size, without_empty_columns
from crab.cli.values import SANDBOX
from crab.daemon.requests import SandboxList
from crab.model import Limits, Sandbox


@click.command()
@json_option
@click.pass_obj
def ls(session: Session) -> None:
    """List the sandboxes.

    NOT ROLLED BACK are the host's own folders in it: what rewind and recover leave as it is.
    """
    with session.host() as host:
        found = host.call(SandboxList())
    session.show(found, lambda: sandboxes_table(found, time.time()))


@click.command()
@click.argument("sandbox", type=SANDBOX)
@json_option
@click.pass_obj
def inspect(session: Session, sandbox: str) -> None:
    """Show all that is known of a sandbox."""
    with session.host() as host:
        found = host.sandbox(sandbox).info()
    session.show(found, lambda: sandbox_table(found))


def sandboxes_table(found: Sequence[Sandbox], now: float) -> Table:
    """One row for each."""
    rows = tuple(
        (
            box.name,
            str(box.state),
            box.spec.image,
            str(box.turn) if box.turn else "-",
            ago(box.created, now) if box.created else "-",
            box.reason,
            ", ".join(box.not_rolled_back),
        )
        for box in found
    )
    table = Table(
        ("NAME", "STATE", "IMAGE", "TURN", "CREATED", "WHY", "NOT ROLLED BACK"),
        rows,
        right=frozenset({"TURN"}),
        empty="no sandboxes; `crab create` makes one",
        tones=TONES,
    )
    return without_empty_columns(table, {"WHY", "NOT ROLLED BACK"})


def sandbox_table(box: Sandbox) -> Table:
    """All of one."""
    spec = box.spec
    mounts = [f"{m.source} at {m.target} ({m.kind}{', read only' if m.read_only else ''})" for m in spec.mounts]
    return pairs(
        {
            "name": box.name,
            "id": box.id,
            "state": f"{box.state}" + (f" ({box.reason})" if box.reason else ""),
            "image": f"{spec.image} ({box.image_fingerprint})",
            "created": moment(box.created),
            "generation": str(box.generation),
            "pid": str(box.pid or ""),
            "head": f"{box.head} (turn {box.turn})" if box.head else "none: nothing to recover from",
            "forked from": box.forked_from or "",
            "host name": spec.hostname or box.name,
            "user": spec.user,
            "work directory": spec.workdir,
            "network": spec.network,
            "limits": limits_text(spec.limits),
            "environment": " ".join(f"{name}={value}" for name, value in spec.env.items()),
            "mounts": "; ".join(mounts),
            "not rolled back": ", ".join(box.not_rolled_back),
            "unread requests": f"{box.unread}; the newest: {clean(box.unread_why)}" if box.unread else "",
        }
    )


def limits_text(limits: Limits) -> str:
    """The limits that there are."""
    found = {
        "memory": limits.memory and size(limits.memory),
        "cpus": limits.cpus,
        "pids": limits.pids,
        "disk": limits.disk and size(limits.disk),
    }
    return ", ".join(f"{name} {value}" for name, value in found.items() if value) or "none"


def not_rolled_back(box: Sandbox) -> str:
    """A warning for verbs that bring a sandbox back; empty if nothing stays behind."""
    if not box.not_rolled_back:
        return ""
    return f"not rolled back (the host's own folders): {', '.join(box.not_rolled_back)}"
