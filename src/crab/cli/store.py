"""`crab store …`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from crab.cli.keeping import keeping
from crab.cli.life import removed_text
from crab.cli.session import Session, json_option
from crab.cli.text import Table, ago, clean, pairs, size
from crab.cli.values import SECONDS, SIZE, checkpoint_or_head
from crab.errors import InvalidRequest
from crab.model import StoreCheck, StoreCollection, StoredCheckpoint, StoreInfo, StoreStats
from crab.store.objects import VARIABLE
from crab.store.retention import Policy

F = TypeVar("F", bound=Callable[..., Any])


def _of_store(function: F) -> F:
    """Adds the options that say which store, and `--json`."""
    key = click.option(
        "--key-file",
        envvar="CRAB_STORE_KEY",
        default="",
        metavar="FILE",
        help="Key of an encrypted store, on the daemon's host.  [$CRAB_STORE_KEY]",
    )
    url = click.option(
        "--store",
        "url",
        envvar=VARIABLE,
        default="",
        metavar="URL",
        help=f"s3://BUCKET/PREFIX, file:///FOLDER or a path.  [${VARIABLE}]",
    )
    return url(key(json_option(function)))


def _named(url: str) -> str:
    if not url:
        raise InvalidRequest("no store was named", remedy=f"give --store URL, or set ${VARIABLE}")
    return url


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def store() -> None:
    """Keep checkpoints where they outlive this host.

    A store is a folder or a place on an S3-compatible service. What checkpoints share is in it once. Endpoint and keys of S3
    are those of the daemon's AWS_… variables (docs/store.md).
    """


@store.command()
@_of_store
@click.option(
    "--grace",
    type=SECONDS,
    default="24h",
    show_default=True,
    help="How long what nothing needs any more stays at least, twice.",
)
@click.pass_obj
def init(session: Session, url: str, key_file: str, grace: float) -> None:
    """Make a store, encrypted if a key file is given."""
    with session.host() as host:
        made = host.store(_named(url), key_file).init(grace)
    session.show(made, lambda: info_table(made))


@store.command()
@_of_store
@click.argument("checkpoint", metavar="SANDBOX[@REF]")
@click.pass_obj
def put(session: Session, url: str, key_file: str, checkpoint: str) -> None:
    """Send a checkpoint. It is durable in the store when this ends."""
    sandbox, ref = checkpoint_or_head(checkpoint)
    with session.host() as host:
        made = host.store(_named(url), key_file).put(sandbox, ref)
    session.show(
        made, lambda: f"turn {made.turn} ({made.id}) stored: {size(made.logical)}, {size(made.added)} of it new"
    )


@store.command()
@_of_store
@click.argument("checkpoint", metavar="CHECKPOINT")
@click.option("--name", default="", help="Name of the sandbox.  [the one that it had, or one like it]")
@click.option(
    "--allow-host", is_flag=True, help="Also if it uses folders or the network of the host: of this one, then."
)
@click.option("--limit", type=SIZE, metavar="SIZE", help="Most bytes that it may have.  [32G]")
@click.pass_obj
def get(
    session: Session, url: str, key_file: str, checkpoint: str, name: str, allow_host: bool, limit: int | None
) -> None:
    """Make a sandbox from a checkpoint.

    CHECKPOINT is NAME of a sandbox (the newest of it), NAME@TURN, NAME@LABEL, or an id. The sandbox is stopped; `crab
    recover` restores its processes. Prints its name.
    """
    with session.host() as host:
        made = host.store(_named(url), key_file).get(checkpoint, name, allow_host=allow_host, limit=limit)
        session.show(made.info() if session.json else None, lambda: made.name)


@store.command()
@_of_store
@click.pass_obj
def ls(session: Session, url: str, key_file: str) -> None:
    """List the checkpoints in a store."""
    with session.host() as host:
        found = host.store(_named(url), key_file).list()
    session.show(found, lambda: checkpoints_table(found, time.time()))


@store.command()
@_of_store
@click.argument("checkpoint", metavar="CHECKPOINT")
@click.pass_obj
def rm(session: Session, url: str, key_file: str, checkpoint: str) -> None:
    """Take a checkpoint out of a store.

    Others keep all that they need. Its space is free after two `crab store gc`, each a grace period later.
    """
    with session.host() as host:
        removed = host.store(_named(url), key_file).remove(checkpoint)
    session.show(removed, lambda: removed_text(removed))


@store.command()
@_of_store
@click.option("--data", is_flag=True, help="Read every byte; else sizes are compared and lists are read.")
@click.option(
    "--repair",
    is_flag=True,
    help="Index packs again, and give up damaged ones: what they had can be sent anew.",
)
@click.pass_obj
def check(session: Session, url: str, key_file: str, data: bool, repair: bool) -> int:
    """Say whether all that is in a store is what was written.

    If not, names the checkpoints that cannot be read, and ends with 65.
    """
    with session.host() as host:
        found = host.store(_named(url), key_file).check(data=data, repair=repair)
    session.show(found, lambda: check_text(found))
    return 65 if found.problems else 0


@store.command()
@_of_store
@click.pass_obj
def stats(session: Session, url: str, key_file: str) -> None:
    """Show how much is in a store."""
    with session.host() as host:
        found = host.store(_named(url), key_file).stats()
    session.show(found, lambda: stats_table(found))


@store.command()
@_of_store
@keeping
@click.pass_obj
def gc(session: Session, url: str, key_file: str, policy: Policy | None) -> None:
    """Remove what no checkpoint in a store needs.

    With --keep-… first take out the checkpoints that none of these keeps; labelled ones and the ends of branches are kept,
    too, unless told otherwise. Without, no checkpoint is taken out.
    """
    with session.host() as host:
        done = host.store(_named(url), key_file).collect(policy)
    session.show(done, lambda: collection_text(done))


# ---------------------------------------------------------------- texts


def info_table(made: StoreInfo) -> Table:
    """What a store is."""
    return pairs(
        {
            "store": made.url,
            "id": made.id,
            "encrypted": "yes; without the key nothing can be read" if made.encrypted else "no",
            "grace period": f"{made.grace / 3600:g} h",
        }
    )


def checkpoints_table(found: Sequence[StoredCheckpoint], now: float) -> Table:
    """One row for each checkpoint."""
    rows = tuple(
        (
            one.id,
            one.sandbox_name,
            str(one.turn),
            one.label,
            "yes" if one.processes else "no",
            size(one.logical),
            size(one.added),
            ago(one.created, now),
        )
        for one in found
    )
    return Table(
        ("ID", "SANDBOX", "TURN", "LABEL", "PROCESSES", "SIZE", "ADDED", "TAKEN"),
        rows,
        right=frozenset({"TURN", "SIZE", "ADDED"}),
        empty="no checkpoints; `crab store put SANDBOX@REF` sends one",
    )


def stats_table(found: StoreStats) -> Table:
    """How much there is."""
    return pairs(
        {
            "checkpoints": str(found.checkpoints),
            "as if each were alone": size(found.logical),
            "different contents": size(found.distinct),
            "stored": f"{size(found.stored)} in {found.packs} packs",
            "ratio": f"{found.ratio:.1f}",
            "to be removed": size(found.condemned),
        }
    )


def check_text(found: StoreCheck) -> str:
    """What a check found."""
    lines = [f"{found.checkpoints} checkpoints, {found.packs} packs, {size(found.read)} read and compared"]
    lines += [f"repaired: {what}" for what in found.repaired]
    lines += [f"note: {what}" for what in found.notes]
    for problem in found.problems:
        whose = f"checkpoints {', '.join(problem.checkpoints)}" if problem.checkpoints else "no checkpoint needs it"
        lines.append(f"damaged: {problem.what}: {whose}")
    lines.append(f"cannot be read: {', '.join(found.affected)}" if found.affected else "every checkpoint can be read")
    return "\n".join(map(clean, lines))  # names of objects are whatever somebody put there


def collection_text(done: StoreCollection) -> str:
    """What a collection did."""
    taken = [f"{len(done.removed_checkpoints)} checkpoints taken out"] if done.removed_checkpoints else []
    return "; ".join(
        [
            *taken,
            f"{done.removed} packs removed ({size(done.removed_bytes)})",
            f"{done.condemned} more will be, after the grace period ({size(done.condemned_bytes)})",
            f"{done.rewritten} rewritten",
        ]
    )
