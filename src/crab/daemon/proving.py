"""Proving the newest checkpoints while the host has nothing else to do, so that `restorable` is known before it is needed.

One at a time, in the background of the engine, and never for more than a tenth of the time: a proof is a restore, which
takes memory and processors from whoever works. What fails is said in the log, shown by `crab turns`, and makes the next
checkpoint of that sandbox a full one (`history.failed`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping

from crab.daemon.comparing import verified
from crab.daemon.core import Core
from crab.daemon.registry import Record
from crab.engine.jobs import Urgency
from crab.errors import CrabError
from crab.host import capacity
from crab.model import Checkpoint, State

SETTING = "CRAB_VERIFY"
"""`off`: nothing is proven in the background."""
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


class Proving:
    """The thread that does it. `close` ends it, and waits for a proof that is under way."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="crab-verify", daemon=True)
        if os.environ.get(SETTING, "") != "off":
            self._thread.start()

    def close(self) -> None:
        """End it."""
        self._end.set()
        self._core.engine.give_up_background()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        before = capacity.processor_time()
        rest = LOOK_SECONDS
        while not self._end.wait(rest):
            now = capacity.processor_time()
            idle = capacity.idle_share(before, now) >= IDLE
            begun = time.monotonic()
            if idle:
                try:
                    self.prove_one()
                except Exception:
                    log.exception("a checkpoint could not be proven")
            before = capacity.processor_time()
            rest = max(LOOK_SECONDS, REST * (time.monotonic() - begun))

    def prove_one(self) -> Checkpoint | None:
        """Prove the next one, if there is one and it has room; returns it with its proof."""
        core = self._core
        records = {record.id: record for record in core.registry.all() if core.view(record).state == State.RUNNING}
        checkpoint = next_to_prove(records.values(), {one.id: one for one in core.registry.checkpoints()})
        if checkpoint is None or self._end.is_set():
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
