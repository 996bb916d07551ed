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
    names = [core.registry.find(request.sandbox).id] if request.sandbox else [one.id for one in core.registry.all()]
    removed: list[str] = []
    for name in names:
        with core.operation(name, "prune"):
            found = doomed(core, name, request.policy)
            removed += [one.id for one in found]
            if not request.dry:
                for one in found:
                    drop(core, one)
    return ask.Removed(removed=tuple(removed))


def doomed(core: Core, sandbox: str, policy: Policy) -> list[Checkpoint]:
    """Checkpoints of a sandbox that a policy does not keep, newest first: then what one holds for others is handed on once.
    What is the head of a sandbox stays whatever the policy says."""
    everything = core.registry.checkpoints()
    keep = kept(policy, everything) | {record.head for record in core.registry.all()}
    found = [one for one in everything if one.sandbox == sandbox and one.id not in keep]
    return sorted(found, key=lambda one: one.created, reverse=True)


class Pruning(Background):
    """Keeps of every sandbox what a policy says."""

    FIRST_SECONDS = LOOK_SECONDS

    def __init__(self, core: Core, policy: Policy) -> None:
        super().__init__(core)
        policy.check()
        self._policy = policy

    def step(self) -> float:
        """Look at every sandbox; one that is busy, or cannot give something up now, is looked at again the next time."""
        for record in self.core.registry.all():
            with contextlib.suppress(Busy, NotFound):
                self._prune(record.id)
        return LOOK_SECONDS

    def _prune(self, sandbox: str) -> None:
        for one in doomed(self.core, sandbox, self._policy):
            if self.ends.is_set():
                return
            with self.core.operation(sandbox, TURN):  # one at a time: whoever wants the sandbox waits for a moment only
                try:
                    drop(self.core, one)
                except (CrabError, OSError) as error:
                    log.warning("checkpoint %s stays: %s", one.id, error)
                    return
