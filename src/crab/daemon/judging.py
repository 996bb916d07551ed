"""Policy `oracle`: everything is captured, twice, and the inspector's decision is judged by a comparison of all of it.

Two captures with nothing in between say what a capture by itself does to processes (`crab.checkpoint.oracle`); the first of
them is compared with the checkpoint before, the second is published. It takes seconds for each turn, and is how misses are
found.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from crab.checkpoint import oracle
from crab.checkpoint.capture import Captured, capture
from crab.checkpoint.oracle import Capture, Truth
from crab.daemon.core import Core, new_id
from crab.inspector import roles
from crab.model import Checkpoint, Decision
from crab.sandbox.incarnation import Incarnation
from crab.store.local import Staging

MOST = 20
"""Differences that are told."""


def judged(
    core: Core,
    incarnation: Incarnation,
    staging: Staging,
    head: Checkpoint | None,
    decision: Decision,
    frozen: Callable[[], None],
) -> tuple[Captured, Decision]:
    """Capture into `staging`, and judge a decision about what changed since `head`."""
    if head is None or head.files_from or head.processes_from != head.id:
        captured = capture(core.ground, incarnation, staging, "full", frozen)
        note = "not judged: the checkpoint before holds not everything itself (take one with policy oracle or always)"
        return captured, msgspec.structs.replace(decision, notes=(*decision.notes, note))
    with core.ground.store.staging(new_id("c")) as first:
        end = capture(core.ground, incarnation, first, "full")
        captured = capture(core.ground, incarnation, staging, "full", frozen)
        manifest = core.manifest(head.id)

        def seen(taken: Captured, images: Path, files: Path) -> Capture:
            here = msgspec.structs.replace(
                manifest, evidence=taken.evidence, groups=taken.groups, spec=incarnation.spec
            )
            return Capture(here, images, files, incarnation.layers.lower)

        after = seen(end, first.process, first.files)
        noise = oracle.learn(core.pool, after, seen(captured, staging.process, staging.files))
        with core.ground.store.images(head.id) as images:
            before = Capture(manifest, images, core.ground.files_of(head), incarnation.layers.lower)
            truth = without_known(incarnation, oracle.compare(core.pool, before, after, noise))
    files = [f"file {change.path} {change.kind} {', '.join(change.what)}".strip() for change in truth.files]
    lines = (*files, *truth.processes)[:MOST]
    judgement = oracle.judge(truth, decision.kind)
    return captured, msgspec.structs.replace(decision, judged=judgement, truth=lines)


def without_known(incarnation: Incarnation, truth: Truth) -> Truth:
    """Leave out what the memory of registered shells and agents alone says: a shell rewrites its own after every command, and
    of an agent it counts only with another change."""
    known = {*roles.shells(incarnation), *roles.agents(incarnation)}
    numbers = {info.pid for info in incarnation.processes() if info.host_pid in known} & truth.ran
    kept = tuple(line for line in truth.processes if not any(line.startswith(f"process {n}:") for n in numbers))
    return Truth(truth.files, kept, truth.times_only, truth.left_out, truth.ran)
