"""Removing a checkpoint: what it holds for others goes to one of them first (hazard R07).

Checkpoints of kind `none` and `files` point at an earlier one for what they did not capture. The oldest of those that point at
a part becomes its owner, and the others point there. Until the last manifest is written all references stay valid, so a
crash in between leaves a part twice and nothing missing.

Sandboxes whose checkpoints point at it stand still meanwhile: each might take one more that does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import msgspec

from crab.checkpoint import manifest as manifests
from crab.checkpoint.manifest import Manifest
from crab.daemon.core import TURN, Core
from crab.daemon.lifecycle import needed_by_sandboxes
from crab.errors import InUse
from crab.host import btrfs
from crab.model import Checkpoint


def drop(core: Core, identity: str, held: str) -> bool:
    """Remove a checkpoint, for a caller that holds the operation of the sandbox `held`; False if it was gone already. Its
    children become those of its parent.

    Raises `InUse`, `Busy`, `NoSpace`, `Damaged` (a manifest that would have to change), OSError; then nothing is missing.
    """
    leaving = core.registry.checkpoint(identity)
    if leaving is None:
        return False
    with contextlib.ExitStack() as stack:
        for sandbox in sorted(_concerned(core, leaving) - {held}):
            stack.enter_context(core.operation(sandbox, TURN))
        if reason := needed_by_sandboxes(core, [leaving]).get(identity):
            raise _refused(leaving, reason)
        hand_over(core, leaving)
        for one in core.registry.related(identity):
            if identity in (one.files_from, one.processes_from):
                raise _refused(leaving, f"checkpoint {one.id} has something from it")
            core.change_checkpoint(one.id, parent=leaving.parent)
        core.drop_checkpoint(identity)
    return True


def _concerned(core: Core, leaving: Checkpoint) -> set[str]:
    """Sandboxes that have it, or something of it."""
    found = {leaving.sandbox, *(one.sandbox for one in core.registry.related(leaving.id))}
    return found & {record.id for record in core.registry.all()}


def _refused(leaving: Checkpoint, reason: str) -> InUse:
    return InUse(
        f"checkpoint {leaving.id} cannot be removed: {reason}",
        remedy="remove what needs it first, or take another checkpoint",
    )


def hand_over(core: Core, leaving: Checkpoint) -> None:
    """Give the parts of a checkpoint to those that need them. Raises OSError, `NoSpace`; then nothing is missing."""
    others = sorted(core.registry.related(leaving.id), key=lambda checkpoint: checkpoint.created)
    of_files = [one for one in others if one.files_from == leaving.id]
    of_processes = [one for one in others if one.processes_from == leaving.id]
    heirs: dict[str, str] = {}
    if of_files:
        heirs["files"] = of_files[0].id
        target = core.ground.own_files(of_files[0].id)
        if not target.is_dir():
            btrfs.snapshot(core.ground.own_files(leaving.id), target, read_only=True)
    if of_processes:
        heirs["processes"] = of_processes[0].id
        core.ground.store.inherit(leaving.id, of_processes[0].id)
    if heirs:
        _redirect(core, {one.id for one in (*of_files, *of_processes)}, leaving, heirs)
        core.inspector.inherited(leaving.id, heirs.get("files"), heirs.get("processes"))


def _redirect(core: Core, pointing: Iterable[str], leaving: Checkpoint, heirs: dict[str, str]) -> None:
    source = core.manifest(leaving.id) if "processes" in heirs else None

    def change(manifest: Manifest) -> Manifest:
        changed = manifest.checkpoint
        if changed.files_from == leaving.id:
            heir = heirs["files"]
            changed = msgspec.structs.replace(changed, files_from="" if heir == changed.id else heir)
        if changed.processes_from == leaving.id and source is not None:
            changed = msgspec.structs.replace(changed, processes_from=heirs["processes"])
            if heirs["processes"] == changed.id:
                manifest = manifests.with_processes_of(manifest, source)
                sizes = {"process_bytes": leaving.process_bytes, "process_count": leaving.process_count}
                changed = msgspec.structs.replace(changed, **sizes)
        return msgspec.structs.replace(manifest, checkpoint=changed)

    for identity in sorted(pointing):
        core.change(identity, change)
