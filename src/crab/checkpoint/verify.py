"""Verify: restore a checkpoint into a scratch sandbox that does not run, and compare it with what was captured.

The scratch sandbox's processes are left stopped before their first instruction, so that whatever differs was done by the
capture or the restore. Only its init is let go at the end, to see that it answers. The result is a fact that is stored
with the checkpoint: `restorable` is proven or it is not said (hazards R01, R03).
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from crab.checkpoint import difference, evidence, memory
from crab.checkpoint.ground import Ground
from crab.checkpoint.manifest import Manifest
from crab.checkpoint.restore import restore
from crab.checkpoint.view import Tree
from crab.errors import CrabError
from crab.host import processes
from crab.model import Proof, Verification
from crab.sandbox.incarnation import Incarnation

MOST = 50
"""Differences that are reported; the verdict does not need more."""


def verify(ground: Ground, manifest: Manifest, with_processes: Manifest | None, scratch: Incarnation) -> Verification:
    """Restore into `scratch` (nothing of it made yet; the caller destroys it) and compare. Never raises for a checkpoint that
    cannot be restored: that is a verdict."""
    compared: dict[str, int] = {}
    found: list[str] = []
    try:
        restore(ground, manifest, with_processes, scratch, stopped=with_processes is not None, sealed=True)
        _files(ground, manifest, scratch, compared, found)
        if with_processes is not None:
            _processes(ground, with_processes, scratch, compared, found)
            _answers(scratch)
    except (CrabError, OSError, ProcessLookupError) as error:
        found.append(error.message if isinstance(error, CrabError) else str(error))
    verdict = "failed" if found else "proven"
    proof = Proof(verdict=verdict, reason=found[0] if found else "", when=time.time())
    return Verification(
        checkpoint=manifest.checkpoint.id, proof=proof, compared=compared, differences=tuple(found[:MOST])
    )


def _files(
    ground: Ground, manifest: Manifest, scratch: Incarnation, compared: dict[str, int], found: list[str]
) -> None:
    stored = ground.files_of(manifest.checkpoint)
    parts = {"": scratch.layers.lower}
    parts |= {f"m{n}": (Path(mount.source),) for n, mount in enumerate(manifest.spec.mounts) if mount.kind == "copy"}
    for part, lower in parts.items():
        before, after = Tree(lower, stored, part), Tree(lower, scratch.files, part)
        changes = difference.compare(ground.pool, before, after)
        found += [
            f"file {change.path} was {change.kind} ({', '.join(change.what)})"
            for change in changes
            if change.what != ("times",)
        ]
        compared["files"] = compared.get("files", 0) + len(difference.names(before))


def _processes(
    ground: Ground, manifest: Manifest, scratch: Incarnation, compared: dict[str, int], found: list[str]
) -> None:
    host_pids = scratch.host_pids()
    seen = evidence.observe(host_pids, scratch.enclave.first_id)
    found += evidence.differences(manifest.evidence, seen)
    compared["processes"] = len(seen.processes)
    compared["descriptors"] = sum(len(process.descriptors) for process in seen.processes)
    with ground.store.images(manifest.checkpoint.id) as images:
        for host_pid in host_pids:
            inner = processes.inner_pid(host_pid)
            if not (images / f"pagemap-{inner}.img").exists():
                continue  # a zombie has no memory
            result = memory.compare(images, inner, host_pid)
            compared["pages"] = compared.get("pages", 0) + result.pages
            if result.different:
                few = f"{len(result.different)} of {result.pages} pages differ, first {result.different[0]:#x}"
                found.append(f"process {inner}: {few}")


def _answers(scratch: Incarnation) -> None:
    fd = os.pidfd_open(scratch.pid)
    try:
        if processes.is_foreign(scratch.pid):
            signal.pidfd_send_signal(fd, signal.SIGCONT)
    finally:
        os.close(fd)
    scratch.entries()
