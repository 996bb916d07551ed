"""Comparing states of sandboxes: `diff` and `verify`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from crab.checkpoint import difference
from crab.checkpoint.evidence import Evidence, observe
from crab.checkpoint.verify import verify
from crab.checkpoint.view import Tree
from crab.daemon import requests as ask
from crab.daemon.core import Core, new_id
from crab.daemon.dispatch import answers
from crab.daemon.history import checked, find
from crab.daemon.registry import Record
from crab.engine.jobs import Urgency
from crab.errors import Damaged, Incompatible, NotFound
from crab.host import btrfs
from crab.model import Checkpoint, Difference, Proof, SandboxSpec, State, Verification
from crab.sandbox import box


@answers(ask.Diff)
def diff(core: Core, request: ask.Diff) -> Difference:
    """From one checkpoint to another, or to the sandbox as it is now."""
    record = core.registry.find(request.sandbox)
    with contextlib.ExitStack() as stack:
        before, running_before = stack.enter_context(_stored(core, record, find(core, record, request.ref)))
        if request.to:
            after, running_after = stack.enter_context(_stored(core, record, find(core, record, request.to)))
        else:
            after, running_after = stack.enter_context(_live(core, record))
        files = [
            msgspec.structs.replace(
                change, path=f"{place}{change.path}", before=change.before and f"{place}{change.before}"
            )
            for place, tree in before.items()
            if place in after
            for change in difference.compare(
                core.pool, tree, after[place], () if place else difference.HIDDEN, request.content
            )
        ]
        return Difference(files=tuple(files), processes=difference.compare_processes(running_before, running_after))


def _trees(spec: SandboxSpec, lower: tuple[Path, ...], files: Path) -> dict[str, Tree]:
    """The root file system and the copy-on-write mounts in it, each under the place that its paths begin with."""
    mounts = {
        f"{mount.target.strip('/')}/": Tree((Path(mount.source),), files, f"m{number}")
        for number, mount in enumerate(spec.mounts)
        if mount.kind == "copy"
    }
    return {"": Tree(lower, files), **mounts}


@contextlib.contextmanager
def _stored(core: Core, record: Record, checkpoint: Checkpoint) -> Iterator[tuple[dict[str, Tree], Evidence]]:
    manifest = core.manifest(checkpoint.id)
    source = checkpoint.processes_from
    running = (
        Evidence() if source is None else (manifest if source == checkpoint.id else core.manifest(source)).evidence
    )
    lower = core.incarnation(
        msgspec.structs.replace(record, spec=manifest.spec, runtime=manifest.runtime), record.generation
    ).layers.lower
    yield _trees(manifest.spec, lower, core.ground.files_of(checkpoint)), running


@contextlib.contextmanager
def _live(core: Core, record: Record) -> Iterator[tuple[dict[str, Tree], Evidence]]:
    """The sandbox as it is now: a snapshot of its files that lasts as long as the block, and what runs."""
    life = core.life(record)
    if not life.files.is_dir():
        raise NotFound(
            f"the files of sandbox {record.name} are not on this host",
            remedy=f"`crab recover {record.name}` brings it back",
        )
    running = Evidence()
    if core.view(record).state in (State.RUNNING, State.PAUSED):
        running = observe(life.host_pids(), life.enclave.first_id, moving=True)
    snapshot = core.pool.staging / new_id("d")
    btrfs.snapshot(life.files, snapshot, read_only=True)
    try:
        yield _trees(record.spec, life.layers.lower, snapshot), running
    finally:
        core.discard_later(snapshot)


@answers(ask.Verify)
def verify_checkpoint(core: Core, request: ask.Verify) -> Verification:
    """Prove that a checkpoint can be restored to what was captured, or say why not; the result is kept with it."""
    record = core.registry.find(request.sandbox)
    return verified(core, record, find(core, record, request.ref))


def verified(core: Core, record: Record, checkpoint: Checkpoint, urgency: Urgency = Urgency.URGENT) -> Verification:
    """The same of a checkpoint of a sandbox. Raises `NotFound` if it is removed meanwhile."""
    try:
        manifest, with_processes = checked(core, checkpoint)
    except (Damaged, Incompatible, NotFound) as error:
        if moved := _moved(core, checkpoint):
            return verified(core, record, moved, urgency)
        if isinstance(error, NotFound):
            raise
        proof = Proof(verdict="failed", reason=error.message)
        if isinstance(error, Damaged):
            with contextlib.suppress(Damaged):
                core.change_checkpoint(checkpoint.id, proof=proof)
        return Verification(checkpoint=checkpoint.id, proof=proof, differences=(error.message,))
    # a range of ids that no sandbox has; it is not reserved, as ids of a scratch sandbox touch nothing of another
    scratch = core.incarnation(
        msgspec.structs.replace(record, id=new_id("v"), spec=manifest.spec, runtime=manifest.runtime, slot=box.RANGES),
        1,
    )
    try:
        with core.engine.job("verify", record.id, urgency):
            result = verify(core.ground, manifest, with_processes, scratch)
    finally:
        scratch.destroy("the trial is over")
    if result.proof.verdict == "failed" and (moved := _moved(core, checkpoint)):
        return verified(core, record, moved, urgency)
    core.change_checkpoint(checkpoint.id, proof=result.proof)
    return result


def _moved(core: Core, checkpoint: Checkpoint) -> Checkpoint | None:
    """The checkpoint as it is now, if what it has from others lies elsewhere since it was read: that it could not be restored
    then says nothing. Raises `NotFound` if it was removed."""
    now = core.registry.checkpoint(checkpoint.id)
    if now is None:
        raise NotFound(f"checkpoint {checkpoint.id} was removed a moment ago", remedy="`crab turns` lists the others")
    return now if (now.files_from, now.processes_from) != (checkpoint.files_from, checkpoint.processes_from) else None
