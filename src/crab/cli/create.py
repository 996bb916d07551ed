"""`crab create`."""

from __future__ import annotations

import click

from crab.cli.session import Session, json_option
from crab.cli.values import GATE, MOUNT, SIZE, TOOLS, variables
from crab.errors import InvalidRequest
from crab.model import GateName, Limits, ModelAccess, Mount, NetworkMode


@click.command()
@click.argument("name", default="")
@click.option("--image", "-i", default="debian", show_default=True, help="Image to start from (`crab image ls`).")
@click.option(
    "--env", "-e", multiple=True, metavar="NAME=VALUE", help="Variable of every command; NAME alone takes yours."
)
@click.option(
    "--workdir", "-w", default="", metavar="DIR", help="Work directory of commands.  [the image's, or the home]"
)
@click.option("--user", "-u", default="", help="User of commands.  [the image's, or root]")
@click.option(
    "--network",
    type=click.Choice(["none", "nat", "host"]),
    default="none",
    show_default=True,
    help="none: loopback only; nat: out through the host; host: the host's own.",
)
@click.option("--memory", type=SIZE, metavar="SIZE", help="Most memory, swap included: 512M, 2G.")
@click.option("--cpus", type=float, metavar="N", help="Most processor time: 1.5 is one and a half processors.")
@click.option(
    "--pids", type=int, default=Limits().pids, show_default=True, metavar="N", help="Most processes and threads."
)
@click.option("--disk", type=SIZE, metavar="SIZE", help="Most bytes written above the image.")
@click.option(
    "--mount",
    "-v",
    "mounts",
    type=MOUNT,
    multiple=True,
    metavar="DIR:PATH[:copy|bind][:ro]",
    help="Folder of the host in the sandbox. copy (default): what is written stays in the sandbox, is rolled back, "
    "and can be brought home with `crab apply`. bind: the folder itself, never rolled back.",
)
@click.option("--hostname", default="", help="Host name in the sandbox.  [its name]")
@click.option(
    "--model",
    default="",
    metavar="WHO",
    help="Give its agent a model: api (the real ones), an address, replay:FILE or mock (docs/turns.md).",
)
@GATE
@TOOLS
@click.option(
    "--exec-turns", is_flag=True, help="Each command that ends is a turn, and is made safe before you hear of it."
)
@click.option("--no-start", is_flag=True, help="Make it only.")
@json_option
@click.pass_obj
def create(
    session: Session,
    name: str,
    image: str,
    env: tuple[str, ...],
    workdir: str,
    user: str,
    network: NetworkMode,
    memory: int | None,
    cpus: float | None,
    pids: int,
    disk: int | None,
    mounts: tuple[Mount, ...],
    hostname: str,
    model: str,
    gate: GateName,
    tools: bool,
    exec_turns: bool,
    no_start: bool,
) -> None:
    """Make a sandbox and start it.

    Prints its name; one is made up if none is given.
    """
    if tools and not model:
        raise InvalidRequest(
            "--tools are reached by the way to a model, and there is none", remedy="add --model, or use `crab mcp`"
        )
    access = ModelAccess(upstream=model, gate=gate, tools=tools) if model else None
    with session.host() as host:
        made = host.create(
            name,
            image,
            env=variables(env),
            workdir=workdir,
            user=user,
            network=network,
            limits=Limits(memory=memory, cpus=cpus, pids=pids, disk=disk),
            mounts=mounts,
            hostname=hostname,
            model_access=access,
            exec_turns=exec_turns,
            start=not no_start,
        )
        session.show(made.info() if session.json else None, lambda: made.name)
