"""What a checkpoint holds for others goes to one of them when it is removed (hazard R07).

Checkpoints of kind `none` and `files` point at an earlier one for what they did not capture. The oldest of those that point at
a part becomes its owner, and the others point there. Until the last manifest is written all references stay valid, so a
crash in between leaves a part twice and nothing missing.
"""

from __future__ import annotations

import msgspec

from crab.checkpoint import manifest as manifests
from crab.daemon.core import Core
from crab.host import btrfs
from crab.model import Checkpoint
from crab.store.local import FILES


def hand_over(core: Core, leaving: Checkpoint) -> None:
    """Give the parts of a checkpoint to those that need them. Raises OSError, `NoSpace`; then nothing is missing."""
    everything = sorted(core.registry.checkpoints(), key=lambda checkpoint: checkpoint.created)
    others = [checkpoint for checkpoint in everything if checkpoint.id != leaving.id]
    heirs: dict[str, str] = {}
    of_files = [checkpoint for checkpoint in others if checkpoint.files_from == leaving.id]
    if of_files:
        heirs["files"] = of_files[0].id
        target = core.ground.store.path(of_files[0].id) / FILES
        if not target.is_dir():
            btrfs.snapshot(core.ground.store.path(leaving.id) / FILES, target, read_only=True)
    of_processes = [checkpoint for checkpoint in others if checkpoint.processes_from == leaving.id]
    if of_processes:
        heirs["processes"] = of_processes[0].id
        core.ground.store.inherit(leaving.id, of_processes[0].id)
    if not heirs:
        return
    for checkpoint in others:
        if checkpoint in of_files or checkpoint in of_processes:
            _redirect(core, checkpoint, leaving, heirs)
    core.inspector.inherited(leaving.id, heirs.get("files"), heirs.get("processes"))


def _redirect(core: Core, checkpoint: Checkpoint, leaving: Checkpoint, heirs: dict[str, str]) -> None:
    manifest = core.manifest(checkpoint.id)
    changed = checkpoint
    if checkpoint.files_from == leaving.id:
        heir = heirs["files"]
        changed = msgspec.structs.replace(changed, files_from="" if heir == checkpoint.id else heir)
    if checkpoint.processes_from == leaving.id:
        changed = msgspec.structs.replace(changed, processes_from=heirs["processes"])
        if heirs["processes"] == checkpoint.id:
            manifest = manifests.with_processes_of(manifest, core.manifest(leaving.id))
            sizes = {"process_bytes": leaving.process_bytes, "process_count": leaving.process_count}
            changed = msgspec.structs.replace(changed, **sizes)
    manifest = msgspec.structs.replace(manifest, checkpoint=changed)
    core.ground.store.rewrite_manifest(checkpoint.id, manifests.encode(manifest))
    core.registry.index(changed)
