"""Which checkpoints stay on this host: `prune`, and what a daemon does of it by itself."""

from __future__ import annotations

import contextlib
import logging

from crab.daemon import requests as ask
from crab.daemon.background import Background
from crab.daemon.core import TURN, Core
from crab.daemon.dispatch import answers
from crab.daemon.history import drop
from crab.errors import Busy, CrabError, NotFound
from crab.model import Checkpoint
from crab.store.retention import Policy, kept

LOOK_SECONDS = 60.0
log = logging.getLogger("crab.prune")


@answers(ask.Prune)
def prune(core: Core, request: ask.Prune) -> ask.Removed:
    """Remove what the policy does not keep, of one sandbox or of all."""
    request.policy.check()
    only = core.registry.find(request.sandbox).id if request.sandbox else ""
    removed: list[str] = []
    for sandbox, found in doomed(core, request.policy).items():
        if not only or sandbox == only:
            with core.operation(sandbox, "prune"):
                for one in found:
                    if not _is_head(core, one):
                        removed.append(one.id)
                        if not request.dry:
                            drop(core, one)
    return ask.Removed(removed=tuple(removed))


def doomed(core: Core, policy: Policy) -> dict[str, list[Checkpoint]]:
    """Checkpoints of each sandbox that a policy does not keep, newest first: then what one holds for others is handed on once.
    What is the head of a sandbox stays whatever the policy says, and what is of none, which others need."""
    everything = core.registry.checkpoints()
    records = core.registry.all()
    keep = kept(policy, everything) | {record.head for record in records}
    found: dict[str, list[Checkpoint]] = {record.id: [] for record in records}
    for one in sorted(everything, key=lambda one: one.created, reverse=True):
        if one.id not in keep and one.sandbox in found:
            found[one.sandbox].append(one)
    return {sandbox: those for sandbox, those in found.items() if those}


def _is_head(core: Core, checkpoint: Checkpoint) -> bool:
    """It may have been brought back, or forked from, since it was chosen."""
    return any(record.head == checkpoint.id for record in core.registry.all())


class Pruning(Background):
    """Keeps of every sandbox what a policy says."""

    FIRST_SECONDS = LOOK_SECONDS

    def __init__(self, core: Core, policy: Policy) -> None:
        super().__init__(core)
        policy.check()
        self._policy = policy

    def step(self) -> float:
        """Look at every sandbox; one that is busy, or cannot give something up now, is looked at again the next time."""
        for sandbox, found in doomed(self.core, self._policy).items():
            with contextlib.suppress(Busy, NotFound):
                self._prune(sandbox, found)
        return LOOK_SECONDS

    def _prune(self, sandbox: str, found: list[Checkpoint]) -> None:
        for one in found:
            if self.ends.is_set():
                return
            with self.core.operation(sandbox, TURN):  # one at a time: whoever wants the sandbox waits for a moment only
                try:
                    if not _is_head(self.core, one):
                        drop(self.core, one)
                except (CrabError, OSError) as error:
                    log.warning("checkpoint %s stays: %s", one.id, error)
                    return
