"""`crab daemon …`."""

from __future__ import annotations

from pathlib import Path

import click

from crab.cli.keeping import keeping
from crab.cli.session import Session, json_option
from crab.cli.text import Table, pairs
from crab.daemon import wire
from crab.daemon.requests import StoreRequest, Version
from crab.errors import DaemonUnavailable
from crab.sdk.transport import default_state_dir
from crab.store.retention import Policy


def _socket(session: Session) -> Path:
    return session.socket or wire.default_socket()


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def daemon() -> None:
    """Run, stop or look at the daemon."""


@daemon.command()
@click.option(
    "--drain",
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="SECONDS",
    help="At SIGTERM make every running sandbox safe first, for so long at most (`crab drain`).",
)
@click.option("--store", metavar="URL", help="Send the newest checkpoint of every sandbox to that store as they come.")
@click.option("--key-file", default="", type=click.Path(), help="Of an encrypted store: absolute path.")
@keeping
@click.pass_obj
def run(session: Session, drain: float, store: str | None, key_file: str, policy: Policy | None) -> None:
    """Run the daemon in the foreground, until SIGTERM.

    Sandboxes run on when it ends, and the next one takes them over. `crab --state DIR --socket PATH daemon run` chooses
    where. Root and the members of the group crab may use the socket. With --keep-… it removes the checkpoints that no rule
    keeps, as `crab prune --all` does, every minute.
    """
    from crab.daemon.run import leave, serve

    serve(
        session.state or default_state_dir(),
        _socket(session),
        drain,
        StoreRequest(url=store, key_file=key_file) if store else None,
        policy,
    )
    leave()


@daemon.command()
@json_option
@click.pass_obj
def status(session: Session) -> None:
    """Say who answers on the socket."""
    from crab.daemon.client import SocketTransport

    found = SocketTransport(_socket(session)).about()
    session.show(found, lambda: version_table(found, _socket(session)))


@daemon.command()
@json_option
@click.pass_obj
def stop(session: Session) -> None:
    """End the daemon; sandboxes run on.

    It is no error if none runs.
    """
    from crab.daemon.run import stop as end

    try:
        ended = end(_socket(session))
    except DaemonUnavailable as error:
        if error.details.get("absent"):
            session.show(None, lambda: "no daemon runs")
            return
        raise
    session.show(ended, lambda: f"daemon {ended.pid} has ended; sandboxes run on")


def version_table(found: Version, socket: Path) -> Table:
    """Who answers."""
    return pairs(
        {
            "crab": found.crab,
            "api": str(found.api),
            "pid": str(found.pid),
            "state directory": found.state_dir,
            "socket": str(socket),
        }
    )
