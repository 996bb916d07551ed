"""Which checkpoints stay on this host: `prune`, and what a daemon does of it by itself."""

from __future__ import annotations

import logging
from collections.abc import Callable

from crab.daemon import requests as ask
from crab.daemon.background import Background
from crab.daemon.core import TURN, Core
from crab.daemon.dispatch import answers
from crab.daemon.heirs import drop
from crab.errors import Busy, CrabError, NotFound
from crab.model import Checkpoint
from crab.store.retention import Policy, kept

LOOK_SECONDS = 60.0
log = logging.getLogger("crab.prune")


@answers(ask.Prune)
def prune(core: Core, request: ask.Prune) -> ask.Pruned:
    """Remove what the policy does not keep, of one sandbox or of all. What cannot be removed now is said."""
    only = core.registry.find(request.sandbox).id if request.sandbox else ""
    removed: list[str] = []
    stays: dict[str, str] = {}
    for sandbox, found in doomed(core, request.policy).items():
        if only and sandbox != only:
            continue
        if request.dry:
            removed += [one.id for one in found]
            continue
        try:
            with core.operation(sandbox, "prune"):
                removed += pruned(core, sandbox, found, request.policy, stays)
        except (Busy, NotFound) as error:
            stays |= {one.id: error.message for one in found}
    return ask.Pruned(removed=tuple(removed), stays=stays)


def doomed(core: Core, policy: Policy) -> dict[str, list[Checkpoint]]:
    """Checkpoints of each sandbox that a policy does not keep, children before their parents: then what one holds for others is
    handed on once. What is the head of a sandbox stays whatever the policy says, and what is of none, which others need."""
    everything = core.registry.checkpoints()
    records = core.registry.all()
    keep = kept(policy, everything) | {record.head for record in records}
    found: dict[str, list[Checkpoint]] = {record.id: [] for record in records}
    for one in sorted(everything, key=lambda one: one.turn, reverse=True):
        if one.id not in keep and one.sandbox in found:
            found[one.sandbox].append(one)
    return {sandbox: those for sandbox, those in found.items() if those}


def pruned(
    core: Core,
    sandbox: str,
    found: list[Checkpoint],
    policy: Policy,
    stays: dict[str, str],
    ends: Callable[[], bool] = lambda: False,
) -> list[str]:
    """Remove those of a sandbox whose operation is held; returns what went, and tells `stays` why the others did not."""
    removed: list[str] = []
    for one in found:
        if ends():
            break
        now = core.registry.checkpoint(one.id)
        if now is None or (policy.labelled and now.label):  # since it was chosen
            continue
        try:
            removed += [one.id] if drop(core, one.id, sandbox) else []
        except CrabError as error:
            stays[one.id] = error.message
        except OSError as error:
            stays[one.id] = str(error)
    return removed


class Pruning(Background):
    """Keeps of every sandbox what a policy says."""

    FIRST_SECONDS = LOOK_SECONDS

    def __init__(self, core: Core, policy: Policy) -> None:
        super().__init__(core)
        policy.check()
        self._policy = policy
        self._said: dict[str, str] = {}
        """Why some cannot be removed, as it was said in the log."""

    def step(self) -> float:
        """Look at every sandbox; what is busy, or cannot be removed now, is looked at again the next time."""
        stays: dict[str, str] = {}
        for sandbox, found in doomed(self.core, self._policy).items():
            for one in found:  # one at a time: who wants the sandbox waits for a moment only
                try:
                    with self.core.operation(sandbox, TURN):
                        pruned(self.core, sandbox, [one], self._policy, stays, self.ends.is_set)
                except (Busy, NotFound):
                    break
        for identity, why in stays.items():
            if self._said.get(identity) != why:
                log.warning("checkpoint %s stays: %s", identity, why)
        self._said = stays
        return LOOK_SECONDS
