"""`crab doctor`: looks at this machine itself, so that it works before anything else does."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import click

from crab.cli.session import Session, json_option
from crab.cli.text import TONES, Table
from crab.errors import DaemonUnavailable, HostUnsuitable
from crab.model import Probe


@click.command()
@click.option(
    "--fix", is_flag=True, help="Get what is lacking: packages, kernel modules, the C programs, CRIU (as root)."
)
@json_option
@click.pass_obj
def doctor(session: Session, fix: bool) -> int:
    """Say what this machine offers, and how to get what it lacks.

    Each row is ok, degraded (it says what is lost) or missing. The exit status is not 0 if something is missing.
    """
    from crab.host import doctor as machine

    if fix:
        from crab.host.criu import default_private_dir

        for done in machine.fix(_look(session), default_private_dir(), lambda line: click.echo(line, err=True)):
            click.echo(done, err=True)
    rows = _look(session)
    session.show(rows, lambda: doctor_table(rows))
    return HostUnsuitable.exit_status if machine.worst(rows) == "missing" else 0


def _look(session: Session) -> Sequence[Probe]:
    """Through the daemon, which is root, if there is one that we may use; else as who we are."""
    if not session.embedded and session.state is None:
        with contextlib.suppress(DaemonUnavailable), session.host() as host:
            return host.doctor()
    from crab.host import doctor as machine
    from crab.host.criu import default_private_dir
    from crab.sdk.transport import default_state_dir

    return machine.examine(session.state or default_state_dir(), default_private_dir())


def doctor_table(rows: Sequence[Probe]) -> Table:
    """One row for each, what is lost and the remedies below."""
    notes: list[str] = []
    for row in rows:
        if row.health != "ok":
            lost = f"{row.loses}. " if row.loses else ""
            notes.append(f"{row.name}: {lost}{row.remedy}".rstrip(" .") if lost or row.remedy else row.name)
    return Table(
        ("", "", ""), tuple((row.health, row.name, row.found) for row in rows), tones=TONES, notes=tuple(notes)
    )
