"""What the record of an agent has to hear of its sandbox: that it was captured, and that it was brought back."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext

from crab.checkpoint import refs
from crab.daemon.core import Core
from crab.daemon.registry import Record
from crab.model import Checkpoint


def note_checkpoint(core: Core, record: Record, checkpoint: Checkpoint) -> None:
    """A checkpoint was taken without a question: what was recorded until now is in its past."""
    if record.spec.model or core.coordinator.has_past(record.id):
        core.coordinator.record.mark(record.id, checkpoint.id, checkpoint.turn)


def returning(core: Core, record: Record) -> AbstractContextManager[None]:
    """For the length of the block its agent, if it asks already, waits for `note_return`."""
    if record.spec.model or core.coordinator.has_past(record.id):
        return core.coordinator.place(record.id).returning()
    return nullcontext()


def note_fork(core: Core, source: Record, target: Record, head: str) -> None:
    """A fork has the past of its source up to a checkpoint. (Said before its agent runs.)"""
    if target.spec.model or core.coordinator.has_past(source.id):
        core.coordinator.forked(source.id, target.id, past_of(core, head), head)


def note_return(core: Core, record: Record, *, ask_again: bool, goes_on: bool = False) -> None:
    """Its agent hears that a sandbox stands at its head again, and may be ahead of it. One that `goes_on` did it itself,
    from outside: what it does now is new."""
    if record.head and (record.spec.model or core.coordinator.has_past(record.id)):
        core.coordinator.brought_back(record.id, past_of(core, record.head), record.head, ask_again)
        if goes_on:
            core.coordinator.place(record.id).diverged()


def past_of(core: Core, head: str) -> Collection[str]:
    """A checkpoint and all that it came from."""
    return {checkpoint.id for checkpoint in refs.branch(core.registry.checkpoints(), head)}
