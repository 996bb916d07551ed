"""Making, starting, stopping and removing sandboxes."""

from __future__ import annotations

import contextlib
import math
import os
import posixpath
import re
import secrets
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from crab.checkpoint import refs
from crab.daemon import requests as ask
from crab.daemon.core import Core, new_id
from crab.daemon.dispatch import answers
from crab.daemon.door import check_variables
from crab.daemon.registry import Broken, Record
from crab.errors import CrabError, InvalidRequest, NotFound, WrongState
from crab.host import processes
from crab.model import Checkpoint, ModelAccess, Mount, NetworkMode, ProcessInfo, Sandbox, SandboxSpec, State
from crab.sandbox import box, runtime, settle
from crab.sandbox.incarnation import Incarnation
from crab.turns.coordinator import check_upstream

LONGEST_HOLD = 280.0
_LEAST = {"memory": 16 << 20, "cpus": 0.01, "pids": 8, "disk": 1 << 20}
_MOST = 1 << 50
_HOSTNAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,62}[A-Za-z0-9])?")


def made_up_name() -> str:
    """A name for a sandbox that was given none."""
    return f"box-{secrets.token_hex(3)}"


def check_mounts(mounts: tuple[Mount, ...], state_dir: Path) -> tuple[Mount, ...]:
    """The mounts, if they make sense and show nothing of Crab's own state (law 6). Raises `InvalidRequest` or `NotFound`."""
    for mount in mounts:
        for path in (mount.source, mount.target):
            odd = ":" in path or not path.isprintable() or posixpath.normpath(path) != path or path == "/"
            if not path.startswith("/") or path.startswith("//") or odd:
                raise InvalidRequest(f"{path!r} cannot be mounted", remedy="use plain absolute paths without ':'")
        if mount.target.split("/")[1] in ("proc", "dev", "sys", ".crab"):
            raise InvalidRequest(f"nothing can be mounted at {mount.target}", remedy="choose another folder")
        if not Path(mount.source).is_dir():
            raise NotFound(f"the host has no folder {mount.source}", remedy="make it first, or mount another")
        source = Path(os.path.realpath(mount.source))
        if source.is_relative_to(state_dir) or state_dir.is_relative_to(source):
            raise InvalidRequest(
                f"{mount.source} cannot be mounted: Crab's own state, that of every sandbox, lies in {state_dir}",
                remedy="mount a folder that neither holds it nor lies in it",
            )
    mounts = tuple(sorted(mounts, key=lambda mount: mount.target.count("/")))  # the outer one first
    targets = [mount.target for mount in mounts]
    if len(set(targets)) != len(targets) or "" in targets:
        raise InvalidRequest(
            "two mounts have the same target, or one is the root", remedy="give each mount a folder of its own"
        )
    return mounts


def check_model(model: ModelAccess | None, network: NetworkMode) -> ModelAccess | None:
    """A way to a model that can be made. Raises `InvalidRequest`."""
    if model is None:
        return None
    if network == "host":
        raise InvalidRequest(
            "a sandbox in the host's network can have no model: it is never captured, so no turn could be safe",
            remedy="use network nat or none",
        )
    if not 0 < model.hold <= LONGEST_HOLD:
        raise InvalidRequest(
            f"an answer cannot be held for {model.hold:g} s",
            remedy=f"give 1 to {LONGEST_HOLD:g}: clients give up at about 300 s",
        )
    return msgspec.structs.replace(model, upstream=check_upstream(model.upstream))


@answers(ask.Create)
def create(core: Core, request: ask.Create) -> Sandbox:
    """Make a sandbox; nothing is left of a failure."""
    return core.view(make(core, request, new_id("s")))


def make(core: Core, request: ask.Create, identity: str) -> Record:
    """The same with an identity that is given."""
    image = core.images.get(request.image)
    config = core.images.config(request.image)
    name = refs.check_name(request.name or made_up_name())
    limits = request.limits
    for what, value in (("memory", limits.memory), ("cpus", limits.cpus), ("pids", limits.pids), ("disk", limits.disk)):
        if value is not None and not (math.isfinite(value) and _LEAST[what] <= value <= _MOST):
            raise InvalidRequest(
                f"a limit of {value} for {what} makes no sense", remedy=f"give at least {_LEAST[what]}, or leave it out"
            )
    if request.hostname and not _HOSTNAME.fullmatch(request.hostname):
        raise InvalidRequest(
            f"{request.hostname!r} is no host name", remedy="use letters, numbers, '.' and '-', at most 64"
        )
    check_variables(request.env)
    spec = SandboxSpec(
        image=image.name,
        hostname=request.hostname or name,
        env=dict(config.env) | request.env,
        workdir=request.workdir or config.workdir,
        user=request.user or config.user or "root",
        network=request.network,
        limits=limits,
        mounts=check_mounts(request.mounts, core.state_dir),
        model=check_model(request.model, request.network),
        exec_turns=request.exec_turns,
    )
    record = Record(
        id=identity,
        name=name,
        generation=1,
        spec=spec,
        created=time.time(),
        image_fingerprint=image.fingerprint,
        runtime=runtime.name_for(image.fingerprint),
        wanted=State.CREATED,
    )
    record = core.registry.add(record, box.RANGES)
    incarnation: Incarnation | None = None
    try:
        runtime.ensure(core.pool, core.images.path(image.name), image.fingerprint)
        incarnation = core.life(record)
        incarnation.make_files()
        if request.start:
            record = _bring_up(core, record, incarnation)
    except BaseException:
        if incarnation is not None:
            incarnation.destroy()
        core.switch(record, None)
        core.registry.remove(record.id)
        raise
    return record


def _bring_up(core: Core, record: Record, incarnation: Incarnation) -> Record:
    incarnation.start()
    settle.identity(incarnation, record.id)
    settle.network(incarnation)
    return core.registry.save(msgspec.structs.replace(record, wanted=State.RUNNING, process=incarnation.process))


@answers(ask.Start)
def start(core: Core, request: ask.Start) -> Sandbox:
    """Start a sandbox on its files as they are."""
    with core.operation(request.sandbox, "start") as record:
        state = core.view(record).state
        if state in (State.RUNNING, State.PAUSED):
            raise WrongState(f"sandbox {record.name} is {state} already", remedy="")
        if state == State.LOST:
            raise WrongState(
                f"sandbox {record.name} is lost: its processes would not come back by a start",
                remedy=f"`crab recover {record.name}` restores its newest checkpoint; `crab stop` first to give them up",
            )
        incarnation = core.incarnation(record, record.generation)
        if not incarnation.files.is_dir():
            raise NotFound(
                f"the files of sandbox {record.name} are not on this host",
                remedy=f"`crab recover {record.name}` restores its newest checkpoint",
            )
        incarnation.group.kill()
        incarnation.group.remove()
        try:
            record = _bring_up(core, record, incarnation)
        except BaseException:
            incarnation.release_processes()
            raise
        core.switch(record, incarnation)
        return core.view(record)


@answers(ask.Stop)
def stop(core: Core, request: ask.Stop) -> Sandbox:
    """SIGTERM, a moment of grace, SIGKILL."""
    with core.operation(request.sandbox, "stop") as record:
        state = core.view(record).state
        if state in (State.STOPPED, State.CREATED):
            return core.view(record)
        life = core.life(record)
        if state == State.PAUSED:
            life.group.thaw()
        if state != State.LOST and request.grace > 0:
            _ask_to_end(life, request.grace)
        record = core.registry.save(msgspec.structs.replace(record, wanted=State.STOPPED, process=None))
        life.release_processes()
        settle.forget_network(life)
        core.switch(record, core.incarnation(record, record.generation))
        return core.view(record)


def _ask_to_end(life: Incarnation, grace: float) -> None:
    with contextlib.suppress(CrabError):
        for pid in life.host_pids()[1:]:
            with contextlib.suppress(OSError):
                fd = os.pidfd_open(pid)
                try:
                    if processes.is_foreign(pid):
                        signal.pidfd_send_signal(fd, signal.SIGTERM)
                finally:
                    os.close(fd)
        end = time.monotonic() + grace
        while time.monotonic() < end and len(life.host_pids()) > 1:
            time.sleep(0.01)


@answers(ask.Kill)
def kill(core: Core, request: ask.Kill) -> Sandbox:
    """What a crash does: everything in the sandbox is gone at once, and nobody asked for it to stop.

    Takes no operation, as a crash takes none: it must also end a sandbox whose operation hangs. That one fails then as it does
    when the processes die by themselves; what a rewind builds beside the sandbox is not touched, and takes its place.
    """
    record = core.registry.find(request.sandbox)
    core.life(record).kill("the sandbox was killed")
    return core.view(record)


@answers(ask.Pause)
def pause(core: Core, request: ask.Pause) -> Sandbox:
    """Freeze every process until `resume`."""
    with core.operation(request.sandbox, "pause") as record:
        core.running(record, "pause").group.freeze()
        return core.view(core.registry.save(msgspec.structs.replace(record, wanted=State.PAUSED)))


@answers(ask.Resume)
def resume(core: Core, request: ask.Resume) -> Sandbox:
    """Let a paused sandbox run again."""
    with core.operation(request.sandbox, "resume") as record:
        state = core.view(record).state
        if state != State.PAUSED:
            raise WrongState(f"sandbox {record.name} is {state}, not paused", remedy="")
        core.life(record).group.thaw()
        return core.view(core.registry.save(msgspec.structs.replace(record, wanted=State.RUNNING)))


@answers(ask.Remove)
def remove(core: Core, request: ask.Remove) -> ask.Removed:
    """Remove a sandbox, its files, and the checkpoints that nothing else needs."""
    if request.force:
        for broken in core.registry.broken():
            if request.sandbox in (broken.name, broken.id):
                return _give_up(core, broken)
    with core.operation(request.sandbox, "rm") as record:
        state = core.view(record).state
        if state in (State.RUNNING, State.PAUSED) and not request.force:
            raise WrongState(
                f"sandbox {record.name} is {state}",
                remedy=f"`crab stop {record.name}` first, or remove it with --force",
            )
        life = core.life(record)
        life.kill("the sandbox was removed")
        settle.forget_network(life)
        life.group.remove()
        core.registry.remove(record.id)
        core.switch(record, None)
        core.forget(record.id)
        if life.files.exists():
            core.discard_later(life.files)
        return _removed(core, record.id, record.name)


def _removed(core: Core, identity: str, name: str) -> ask.Removed:
    """Drop the checkpoints of a sandbox that is gone, and those that stayed of others removed earlier because it was forked
    from them."""
    alive = {other.id for other in (*core.registry.all(), *core.registry.broken())}
    removed, kept = drop_checkpoints(core, [c.id for c in core.registry.checkpoints() if c.sandbox not in alive])
    own = {c.id for c in core.registry.checkpoints(identity)}
    return ask.Removed(removed=(name, *removed), kept=tuple(c for c in kept if c in own))


def _give_up(core: Core, broken: Broken) -> ask.Removed:
    """Remove a sandbox whose record cannot be read: all that carries its id."""
    for group in core.groups_of(broken):
        group.kill()
        group.remove()
    core.registry.remove(broken.id)
    core.forget(broken.id)
    for folder in core.pool.live.glob(f"{broken.id}.*"):
        core.discard_later(folder)
    return _removed(core, broken.id, broken.name)


def needed_by_sandboxes(core: Core, checkpoints: Iterable[Checkpoint]) -> dict[str, str]:
    """Those of the checkpoints that sandboxes need, each with the reason."""
    heads = {record.head: record.name for record in core.registry.all() if record.head}
    broken = {one.id: one.name for one in core.registry.broken()}
    needed: dict[str, str] = {}
    for one in checkpoints:
        if one.sandbox in broken:
            needed[one.id] = f"it is of sandbox {broken[one.sandbox]}, whose record cannot be read"
        elif one.id in heads:
            needed[one.id] = f"it is the head of sandbox {heads[one.id]}"
    return needed


def needed_checkpoints(core: Core) -> dict[str, str]:
    """Checkpoints that may not be removed, each with the reason."""
    checkpoints = core.registry.checkpoints()
    needed = needed_by_sandboxes(core, checkpoints)
    for checkpoint in checkpoints:
        for source, what in ((checkpoint.processes_from, "processes"), (checkpoint.files_from, "files")):
            if source and source != checkpoint.id:
                needed[source] = f"checkpoint {checkpoint.id} has its {what} from it"
    return needed


def drop_checkpoints(core: Core, identities: list[str]) -> tuple[list[str], list[str]]:
    """Remove those checkpoints that nothing needs; returns (removed, kept)."""
    removed: list[str] = []
    kept = list(identities)
    while True:  # one may be needed by another that goes as well
        needed = needed_checkpoints(core)
        droppable = [identity for identity in kept if identity not in needed]
        if not droppable:
            return removed, kept
        for identity in droppable:
            core.drop_checkpoint(identity)
        removed += droppable
        kept = [identity for identity in kept if identity in needed]


@answers(ask.Inspect)
def inspect(core: Core, request: ask.Inspect) -> Sandbox:
    """One sandbox as it is now."""
    return core.view(core.registry.find(request.sandbox))


@answers(ask.SandboxList)
def sandbox_list(core: Core, request: ask.SandboxList) -> tuple[Sandbox, ...]:
    """All sandboxes, oldest first."""
    damaged = (
        Sandbox(
            id=broken.id,
            name=broken.name,
            spec=SandboxSpec(image=""),
            state=State.DAMAGED,
            created=0.0,
            image_fingerprint="",
            generation=broken.generation,
            reason=f"its record cannot be read: {broken.why}",
        )
        for broken in core.registry.broken()
    )
    return (*(core.view(record) for record in core.registry.all()), *damaged)


@answers(ask.ProcessList)
def process_list(core: Core, request: ask.ProcessList) -> tuple[ProcessInfo, ...]:
    """Processes of a running (or paused) sandbox."""
    record = core.registry.find(request.sandbox)
    if core.view(record).state != State.PAUSED:
        core.running(record, "ps")
    return tuple(core.life(record).processes())
