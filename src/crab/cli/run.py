"""`crab run`: an agent, a sandbox and a model, tied together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from crab.cli.session import Session
from crab.cli.text import clean
from crab.cli.values import GATE, MOUNT, SECONDS, TOOLS, command_line, variables
from crab.errors import InvalidRequest
from crab.model import GateName, ModelAccess, Mount, NetworkMode, State

if TYPE_CHECKING:
    from crab.sdk.sync import Sandbox


@click.command(context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False})
@click.option("--name", default="", help="Name of the sandbox.  [one is made up]")
@click.option("--image", "-i", default="debian", show_default=True, help="Image to start from (`crab image ls`).")
@click.option(
    "--upstream",
    default="api",
    show_default=True,
    metavar="WHO",
    help="Who answers: api (the real one that is asked for), an address, replay:FILE, mock (docs/turns.md).",
)
@GATE
@TOOLS
@click.option("--hold", type=SECONDS, default=60.0, metavar="TIME", help="Longest time to keep an answer back.  [60s]")
@click.option("--env", "-e", multiple=True, metavar="NAME=VALUE", help="Variable of the agent; NAME alone takes yours.")
@click.option("--workdir", "-w", default="", metavar="DIR", help="Work directory in the sandbox.")
@click.option("--user", "-u", default="", help="User in the sandbox.")
@click.option(
    "--network", type=click.Choice(["none", "nat"]), default="none", show_default=True, help="Besides the model."
)
@click.option(
    "--mount",
    "-v",
    "mounts",
    type=MOUNT,
    multiple=True,
    metavar="DIR:PATH[:copy|bind][:ro]",
    help="As in `crab create`.",
)
@click.option(
    "--outside", is_flag=True, help="The agent runs on the host, and acts in the sandbox by `crab exec` or the SDK."
)
@click.option(
    "--on-crash",
    type=click.Choice(["recover", "stop"]),
    default="recover",
    show_default=True,
    help="What to do when the sandbox dies, or the agent does by a signal that nobody here has sent.",
)
@click.option("--resume", metavar="SANDBOX", help="Go on with the sandbox of an earlier run.")
@click.option("--rm", "remove", is_flag=True, help="Remove the sandbox at the end.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def run(
    session: Session,
    name: str,
    image: str,
    upstream: str,
    gate: GateName,
    tools: bool,
    hold: float,
    env: tuple[str, ...],
    workdir: str,
    user: str,
    network: NetworkMode,
    mounts: tuple[Mount, ...],
    outside: bool,
    on_crash: str,
    resume: str | None,
    remove: bool,
    command: tuple[str, ...],
) -> int:
    """Run an agent so that it survives: its sandbox, its process, its machine.

    The agent's requests to its model go through Crab: each ends a turn, which is made safe while the model thinks. When the
    sandbox dies, it is brought back to its newest turn with the agent in it, which gets its answer from the record: no model is
    asked twice for what it answered, no command that had ended is run twice (limits: docs/turns.md).

    The exit status is the agent's. The sandbox stays (unless --rm), and `crab run --resume` goes on with it. Keys for models
    are taken from your environment and never enter the sandbox.
    """
    from crab.cli.agents import Inside, Outside, say, survive

    argv = command_line(command) if command or not resume else ()
    if outside and session.embedded:
        raise InvalidRequest(
            "--outside needs a daemon: the agent's own `crab exec` could not reach this process",
            remedy="start one (`crab daemon run`) and leave --embedded out",
        )
    with session.host() as host:
        if resume:
            box = host.sandbox(resume)
            if box.info().state == State.LOST:
                box.recover()
                say(f"{box.name} was brought back")
        else:
            access = ModelAccess(upstream=upstream, gate=gate, hold=hold, tools=tools)
            box = host.create(
                name, image, workdir=workdir, user=user, network=network, mounts=mounts, model_access=access
            )
            say(f"sandbox {box.name}")
        known = variables(env)
        agent = Outside(box, argv, known, session.socket) if outside else Inside(box, argv, known)
        status = survive(agent, box, recovers=on_crash == "recover")
        _end(box, remove, status)
    return status


def _end(box: Sandbox, remove: bool, status: int) -> None:
    """One line of what it came to, and how to go on."""
    from crab.cli.agents import say

    found = [one for one in box.exchanges() if one.kind == "main" and not one.abandoned]
    weak = sum(one.protection == "unprotected" for one in found)
    waits = sum(one.wait_ms for one in found) / 1e3
    held = sum(one.held_ms for one in found) / 1e3
    note = f"; {weak} turns were not safe (`crab record {clean(box.name)}`)" if weak else ""
    say(f"status {status}, {len(found)} turns, {waits:.1f} s of waiting for the model, {held:.2f} s for Crab{note}")
    if remove:
        box.remove(force=True)
    else:
        say(f"`crab run --resume {clean(box.name)}` goes on, `crab rm --force {clean(box.name)}` removes it")
