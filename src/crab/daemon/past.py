"""What the record of an agent has to hear of its sandbox: that it was captured, and that it was brought back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext

import msgspec

from crab.checkpoint import refs
from crab.daemon.core import Core
from crab.daemon.registry import Owed, Record
from crab.errors import CrabError
from crab.model import Checkpoint

log = logging.getLogger("crab.turns")


def noting(core: Core, record: Record) -> Callable[[Checkpoint], None]:
    """To be asked for before a checkpoint is taken without a question, and called with it afterwards: what was recorded until
    then is in its past, but for the ends of commands that it may have been too early for."""
    known = core.coordinator.record
    ended = known.outcomes.ended(record.id)

    def note(made: Checkpoint) -> None:
        if record.spec.model or core.coordinator.has_past(record.id):
            known.mark(record.id, made.id, made.turn, ended)

    return note


def returning(core: Core, record: Record) -> AbstractContextManager[None]:
    """For the length of the block its agent, if it asks already, waits for `note_return`."""
    if record.spec.model or core.coordinator.has_past(record.id):
        return core.coordinator.place(record.id).returning()
    return nullcontext()


def note_fork(core: Core, source: Record, target: Record, head: str) -> None:
    """A fork has the past of its source up to a checkpoint. (Said before its agent runs.)"""
    if target.spec.model or core.coordinator.has_past(source.id):
        core.coordinator.forked(source.id, target.id, past_of(core, head), head)


def owes(core: Core, record: Record, owed: Owed) -> Owed | None:
    """What its agent has to hear of a return, if it has one that asks or was recorded."""
    return owed if record.head and (record.spec.model or core.coordinator.has_past(record.id)) else None


def note_return(core: Core, record: Record) -> Record:
    """Its agent hears what is owed to it: that a sandbox stands at its head again, and may be ahead of it. Returns the record
    as it is then. To say it twice (a crash came in between) is the same, as long as nothing was asked or run since."""
    if record.owed is None or record.head is None:
        return record
    core.coordinator.brought_back(record.id, past_of(core, record.head), record.head, record.owed.ask_again)
    if record.owed.goes_on:
        core.coordinator.place(record.id).diverged()
    return core.registry.save(msgspec.structs.replace(record, owed=None))


def note_returns(core: Core) -> None:
    """The same for all whose owner died before it had said so. Before any agent is listened to."""
    for record in core.registry.all():
        try:
            note_return(core, record)
        except CrabError as error:
            log.error("%s was brought back, and its agent cannot be told: %s", record.name, error)


def past_of(core: Core, head: str) -> Collection[str]:
    """A checkpoint and all that it came from."""
    return {checkpoint.id for checkpoint in refs.branch(core.registry.checkpoints(), head)}
