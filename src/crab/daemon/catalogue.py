"""Images, and what the host offers."""

from __future__ import annotations

import shlex

from crab.daemon import lifecycle, transfer
from crab.daemon import requests as ask
from crab.daemon.core import TEMPORARY, Core, new_id
from crab.daemon.dispatch import answers
from crab.errors import AlreadyExists, ExecFailed, InvalidRequest
from crab.host import doctor
from crab.host.criu import default_private_dir
from crab.model import ExecSpec, Image, Probe
from crab.sandbox import runtime
from crab.sandbox.incarnation import Incarnation

KEPT_OUTPUT = 1 << 16
"""Bytes at the end of a build's output that are kept for the message of its failure."""
SHOWN_LINES = 12


@answers(ask.Doctor)
def examine(core: Core, request: ask.Doctor) -> tuple[Probe, ...]:
    """What this host offers."""
    return tuple(doctor.examine(core.state_dir, default_private_dir()))


@answers(ask.ImageAdd)
def image_add(core: Core, request: ask.ImageAdd) -> Image:
    """Make an image of a source."""
    if request.if_missing and any(image.name == request.name for image in core.images.list()):
        return core.images.get(request.name)
    core.steps[request.name] = f"making image {request.name} of {request.source}"
    try:
        return core.images.add(
            request.name,
            request.source,
            progress=lambda step: core.steps.update({request.name: step}),
            replace=request.replace,
            in_use=core.users_of_image(request.name),
        )
    finally:
        core.steps.pop(request.name, None)


@answers(ask.ImageStep)
def image_step(core: Core, request: ask.ImageStep) -> str:
    """What the making of an image is at."""
    return core.steps.get(request.name, "")


@answers(ask.ImageBuild)
def image_build(core: Core, request: ask.ImageBuild) -> Image:
    """Run a command in a sandbox that lives only for this, and make an image of what is there afterwards."""
    if not request.command:
        raise InvalidRequest(
            "a build needs a command", remedy="say what is to be run, as in `-- apt-get install -y git`"
        )
    if any(image.name == request.name for image in core.images.list()):
        raise AlreadyExists(f"there is an image {request.name} already", remedy="choose another name, or remove it")
    identity = new_id(TEMPORARY)
    create = ask.Create(name=f"build-{identity[1:7]}", image=request.base, network=request.network)
    name = lifecycle.make(core, create, identity).name
    try:
        with core.operation(name, "build") as record:
            life = core.running(record, "build")
            _build(life, request)
            life.release_processes("the build is over")  # what it left in the background writes no more
            return transfer.commit_files(core, record, request.name, f"build:{request.base}")
    finally:
        lifecycle.remove(core, ask.Remove(sandbox=name, force=True))


def _build(life: Incarnation, request: ask.ImageBuild) -> None:
    """Run the command to its end. Raises `ExecFailed` with the end of its output if it fails."""
    command = life.execute(ExecSpec(argv=request.command, env=request.env, user="root"))
    output = bytearray()
    for piece in command.events():
        output += piece.data
        if len(output) > 2 * KEPT_OUTPUT:
            del output[:-KEPT_OUTPUT]
    status = command.status()
    if status.exit_code:
        lines = output[-KEPT_OUTPUT:].decode(errors="replace").splitlines()
        said = "\n".join(lines[-SHOWN_LINES:]) or "it said nothing"
        raise ExecFailed(
            f"building image {request.name}: `{shlex.join(request.command)}` ended with status {status.exit_code}:\n{said}",
            remedy="nothing was kept; repair the command, or try it in a sandbox with `crab exec`",
            exit_code=status.exit_code,
            output="\n".join(lines[-200:]),
        )


@answers(ask.ImageList)
def image_list(core: Core, request: ask.ImageList) -> tuple[Image, ...]:
    """All images."""
    return tuple(core.images.list())


@answers(ask.ImageShow)
def image_show(core: Core, request: ask.ImageShow) -> Image:
    """One image."""
    return core.images.get(request.name)


@answers(ask.ImageRemove)
def image_remove(core: Core, request: ask.ImageRemove) -> ask.Removed:
    """Remove an image that nothing is based on."""
    core.images.remove(request.name, core.users_of_image(request.name))
    runtime.forget_unused(
        core.pool, {image.fingerprint for image in core.images.list()}, {r.runtime for r in core.registry.all()}
    )
    return ask.Removed(removed=(request.name,))
