"""`crab export` and `crab import`."""

from __future__ import annotations

import click

from crab.cli.session import Session, json_option
from crab.cli.values import SIZE, checkpoint_or_head


@click.command()
@click.argument("checkpoint", metavar="SANDBOX[@REF]")
@click.argument("file", type=click.Path(dir_okay=False))
@click.option("--no-image", is_flag=True, help="Without the image: whoever imports it must have the same one.")
@json_option
@click.pass_obj
def export(session: Session, checkpoint: str, file: str, no_image: bool) -> None:
    """Write a checkpoint into an archive.

    FILE is on the daemon's host, must not exist yet, and is compressed if it ends in .zst. `crab import` makes a sandbox of
    it, there or elsewhere.
    """
    sandbox, ref = checkpoint_or_head(checkpoint)
    with session.host() as host:
        written = host.sandbox(sandbox).export(file, ref, with_image=not no_image)
    session.show(written, lambda: f"turn {written.turn} ({written.id}) written to {file}")


@click.command("import")
@click.argument("file", type=click.Path(dir_okay=False))
@click.option("--name", default="", help="Name of the sandbox.  [the one that it had, or one like it]")
@click.option(
    "--allow-host", is_flag=True, help="Also if it uses folders or the network of the host: of this one, then."
)
@click.option("--limit", type=SIZE, metavar="SIZE", help="Most bytes that it may unpack to.  [32G]")
@json_option
@click.pass_obj
def import_(session: Session, file: str, name: str, allow_host: bool, limit: int | None) -> None:
    """Make a sandbox from an archive.

    It is stopped; `crab recover` restores its processes. Prints its name.
    """
    with session.host() as host:
        made = host.import_archive(file, name, allow_host=allow_host, limit=limit)
        session.show(made.info() if session.json else None, lambda: made.name)
