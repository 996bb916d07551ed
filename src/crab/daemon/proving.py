"""Proving the newest checkpoints while the host has nothing else to do, so that `restorable` is known before it is needed.

One at a time, in the background of the engine, and never for more than a tenth of the time: a proof is a restore, which
takes memory and processors from whoever works. What fails is said in the log, shown by `crab turns`, and makes the next
checkpoint of that sandbox a full one (`history.failed`).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Mapping

from crab.daemon.background import Background
from crab.daemon.comparing import verified
from crab.daemon.core import Core
from crab.daemon.registry import Record
from crab.engine.jobs import Urgency
from crab.errors import CrabError
from crab.host import capacity
from crab.model import Checkpoint, State

LOOK_SECONDS = 10.0
"""How often it is looked whether the host is idle, and how long it has to have been."""
IDLE = 0.5
"""Share of the processors' time that nobody used in that time."""
REST = 9.0
"""How many times as long as a proof took the host has rest from the next."""
ROOM = 2
"""How many times as much memory as the processes had must be free."""
log = logging.getLogger("crab.verify")


def next_to_prove(records: Iterable[Record], checkpoints: Mapping[str, Checkpoint]) -> Checkpoint | None:
    """The oldest head of which nobody knows whether it can be restored. A head that only points at what a proven one is made of
    needs no proof of its own."""
    proven = {_made_of(one) for one in checkpoints.values() if one.proof.verdict == "proven"}
    heads = [head for record in records if (head := checkpoints.get(record.head or ""))]
    untested = [one for one in heads if one.proof.verdict == "untested" and _made_of(one) not in proven]
    return min(untested, key=lambda one: one.created, default=None)


def _made_of(checkpoint: Checkpoint) -> tuple[str, str | None]:
    return checkpoint.files_from or checkpoint.id, checkpoint.processes_from


class Proving(Background):
    """See the module."""

    FIRST_SECONDS = LOOK_SECONDS

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._before = capacity.processor_time()

    def step(self) -> float:
        """Prove one, if the host was idle; then rest."""
        begun = time.monotonic()
        if capacity.idle_share(self._before, capacity.processor_time()) >= IDLE:
            self.prove_one()
        self._before = capacity.processor_time()
        return max(LOOK_SECONDS, REST * (time.monotonic() - begun))

    def prove_one(self) -> Checkpoint | None:
        """Prove the next one, if there is one and it has room; returns it with its proof."""
        core = self.core
        records = {record.id: record for record in core.registry.all() if core.view(record).state == State.RUNNING}
        checkpoint = next_to_prove(records.values(), {one.id: one for one in core.registry.checkpoints()})
        if checkpoint is None or self.ends.is_set():
            return None
        source = core.registry.checkpoint(checkpoint.processes_from) if checkpoint.processes_from else None
        if source is not None and capacity.free_memory() < ROOM * source.process_bytes:
            return None
        record = next(record for record in records.values() if record.head == checkpoint.id)
        with contextlib.suppress(CrabError):  # it was removed meanwhile
            verified(core, record, checkpoint, Urgency.BACKGROUND)
        found = core.registry.checkpoint(checkpoint.id)
        if found is not None and found.proof.verdict == "failed":
            log.error("turn %d of sandbox %s cannot be restored: %s", found.turn, record.name, found.proof.reason)
        return found
