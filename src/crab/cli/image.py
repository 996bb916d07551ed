"""`crab image …` and `crab commit`."""

from __future__ import annotations

import time
from collections.abc import Sequence

import click

from crab.cli.life import removed_text
from crab.cli.session import Session, each, json_option
from crab.cli.text import Table, ago, moment, pairs, size
from crab.cli.values import SANDBOX, command_line, variables
from crab.model import Image, NetworkMode
from crab.sdk.steps import told


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def image() -> None:
    """Add, list, show, remove and build images."""


@image.command()
@click.argument("name")
@click.argument("source")
@click.option("--replace", is_flag=True, help="Replace an image of that name.")
@click.option("--if-missing", is_flag=True, help="Do nothing if there is an image of that name.")
@json_option
@click.pass_obj
def add(session: Session, name: str, source: str, replace: bool, if_missing: bool) -> None:
    """Make an image of a source.

    \b
    SOURCE is one of
      debian:SUITE[+PACKAGE,…]        a fresh Debian
      oci:LAYOUT[:TAG]                a folder or archive in the OCI layout
      oci:docker://REGISTRY/NAME      fetched with skopeo
      dir:FOLDER  tar:FILE            a root file system
      host                            this machine's own
    """
    with session.host() as host:
        made = told(
            lambda: host.images.add(name, source, replace=replace, if_missing=if_missing),
            lambda: host.images.step(name),
            session.note,
        )
    session.show(made, lambda: f"{made.name}  {size(made.size)}  {made.fingerprint}")


@image.command()
@json_option
@click.pass_obj
def ls(session: Session) -> None:
    """List the images."""
    with session.host() as host:
        found = host.images.list()
    session.show(found, lambda: images_table(found, time.time()))


@image.command()
@click.argument("name")
@json_option
@click.pass_obj
def show(session: Session, name: str) -> None:
    """Show one image."""
    with session.host() as host:
        found = host.images.show(name)
    session.show(found, lambda: image_table(found))


@image.command()
@click.argument("names", nargs=-1, required=True)
@json_option
@click.pass_obj
def rm(session: Session, names: tuple[str, ...]) -> int:
    """Remove images.

    Refused while a sandbox or checkpoint is based on it.
    """
    with session.host() as host:
        results, status = each(session, names, host.images.remove)
    session.show(results, lambda: "\n".join(filter(None, map(removed_text, results))))
    return status


@image.command()
@click.option(
    "--network",
    type=click.Choice(["none", "nat", "host"]),
    default="nat",
    show_default=True,
    help="Network of the command.",
)
@click.option(
    "--env", "-e", multiple=True, metavar="NAME=VALUE", help="Variable of the command; not kept in the image."
)
@json_option
@click.option("--from", "base", default="debian", show_default=True, metavar="IMAGE", help="Image to begin with.")
@click.argument("name")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def build(
    session: Session, network: NetworkMode, env: tuple[str, ...], name: str, base: str, command: tuple[str, ...]
) -> None:
    """Run a command on an image, as root, and keep the result as another.

    crab image build python --from debian -- apt-get install -y python3
    """
    with session.host() as host:
        made = host.images.build(name, base, command_line(command), network=network, env=variables(env))
    session.show(made, lambda: f"{made.name}  {size(made.size)}  {made.fingerprint}")


@click.command()
@click.argument("sandbox", type=SANDBOX)
@click.argument("name")
@json_option
@click.pass_obj
def commit(session: Session, sandbox: str, name: str) -> None:
    """Make an image of a sandbox's files."""
    with session.host() as host:
        made = host.sandbox(sandbox).commit(name)
    session.show(made, lambda: f"{made.name}  {size(made.size)}  {made.fingerprint}")


def images_table(found: Sequence[Image], now: float) -> Table:
    """One row for each image."""
    rows = tuple(
        (i.name, i.source, i.architecture, size(i.size), ago(i.created, now), i.fingerprint[:19]) for i in found
    )
    return Table(
        ("NAME", "SOURCE", "ARCHITECTURE", "SIZE", "MADE", "FINGERPRINT"),
        rows,
        right=frozenset({"SIZE"}),
        empty="no images; `crab image add debian debian:bookworm` makes one",
    )


def image_table(found: Image) -> Table:
    """All of one image."""
    return pairs(
        {
            "name": found.name,
            "source": found.source,
            "fingerprint": found.fingerprint,
            "architecture": found.architecture,
            "size": size(found.size),
            "made": moment(found.created),
        }
    )
