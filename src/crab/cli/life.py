"""The verbs that change the life of sandboxes: start, pause, resume, stop, kill, rm."""

from __future__ import annotations

from collections.abc import Callable

import click

from crab.cli.session import Session, each, json_option
from crab.cli.values import SANDBOX, SECONDS
from crab.daemon.requests import Removed
from crab.model import Sandbox
from crab.sdk.sync import Sandbox as Handle

_names = click.argument("sandboxes", nargs=-1, required=True, type=SANDBOX)


def _change(session: Session, names: tuple[str, ...], action: Callable[[Handle], Sandbox]) -> int:
    with session.host() as host:
        results, status = each(session, names, lambda name: action(host.sandbox(name)))
    session.show(results, lambda: "\n".join(f"{box.name} {box.state}" for box in results))
    return status


@click.command()
@_names
@json_option
@click.pass_obj
def start(session: Session, sandboxes: tuple[str, ...]) -> int:
    """Start stopped sandboxes on their files.

    Processes of before are not brought back; that is what `crab recover` does.
    """
    return _change(session, sandboxes, lambda box: box.start())


@click.command()
@_names
@json_option
@click.pass_obj
def pause(session: Session, sandboxes: tuple[str, ...]) -> int:
    """Freeze every process of sandboxes."""
    return _change(session, sandboxes, lambda box: box.pause())


@click.command()
@_names
@json_option
@click.pass_obj
def resume(session: Session, sandboxes: tuple[str, ...]) -> int:
    """Let paused sandboxes run again."""
    return _change(session, sandboxes, lambda box: box.resume())


@click.command()
@_names
@click.option("--grace", type=SECONDS, default="2s", show_default=True, metavar="TIME", help="From SIGTERM to SIGKILL.")
@json_option
@click.pass_obj
def stop(session: Session, sandboxes: tuple[str, ...], grace: float) -> int:
    """Stop sandboxes; files and checkpoints stay."""
    return _change(session, sandboxes, lambda box: box.stop(grace))


@click.command()
@_names
@json_option
@click.pass_obj
def kill(session: Session, sandboxes: tuple[str, ...]) -> int:
    """Kill everything in sandboxes at once, as a crash would.

    They are `lost` afterwards; `crab recover` brings them back from their newest checkpoint.
    """
    return _change(session, sandboxes, lambda box: box.kill())


@click.command()
@_names
@click.option("--force", "-f", is_flag=True, help="Also those that run.")
@json_option
@click.pass_obj
def rm(session: Session, sandboxes: tuple[str, ...], force: bool) -> int:
    """Remove sandboxes and their checkpoints.

    A checkpoint that another sandbox was forked from stays until that is removed.
    """
    with session.host() as host:
        results, status = each(session, sandboxes, lambda name: host.sandbox(name).remove(force))
    session.show(results, lambda: "\n".join(filter(None, map(removed_text, results))))
    return status


def removed_text(result: Removed) -> str:
    """What went, and what stays because something else needs it."""
    lines = [f"removed {', '.join(result.removed)}"] if result.removed else []
    if result.kept:
        lines.append(f"kept, as something else builds on it: {', '.join(result.kept)}")
    return "\n".join(lines)
