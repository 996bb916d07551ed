"""Keeping once what checkpoints have in common: process images move into the pool, put together of those before.

In the background of the engine, oldest first, so that what a checkpoint can share is there already. The newest checkpoint of
a sandbox is what a recovery restores, so it stays as CRIU wrote it (its images are in memory, and in one piece) until the
next has come, or for some minutes. Killed at any moment a checkpoint has its first images, or both, or equal ones
(`store/local.py`).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager

from crab.checkpoint.compact import Compacted, compact
from crab.daemon import requests as ask
from crab.daemon.background import Background
from crab.daemon.core import Core, new_id
from crab.daemon.dispatch import answers
from crab.engine.engine import Place
from crab.engine.jobs import Urgency
from crab.errors import Busy, CrabError, Damaged, NoSpace, NotFound
from crab.model import Checkpoint, Compaction
from crab.store.local import PROCESS

LOOK_SECONDS = 5.0
"""How often it is looked for something to do."""
NEWEST_SECONDS = 600.0
"""How long the newest images of a sandbox stay as they are."""
log = logging.getLogger("crab.compact")
_moving = threading.Lock()
"""Somebody may ask for it while a daemon does it by itself."""


def next_to_compact(loose: Iterable[Checkpoint], newest: Collection[str], now: float) -> Checkpoint | None:
    """The oldest of those whose images are not compact, but for the `newest` ones of sandboxes that are not old yet. Times in
    seconds."""
    ready = [one for one in loose if one.id not in newest or now - one.created > NEWEST_SECONDS]
    return min(ready, key=lambda one: one.created, default=None)


class Compacting(Background):
    """See the module."""

    FIRST_SECONDS = LOOK_SECONDS

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._given_up: set[str] = set()
        """Those that failed: damaged ones, most likely. They were said, and the next daemon tries again."""

    def step(self) -> float:
        """Do all that there is to do; a host without room is left alone for a while."""
        core = self.core
        self._given_up.intersection_update(core.ground.store.loose())
        passed = set(self._given_up)
        while not self.ends.is_set():
            heads = [core.registry.checkpoint(record.head) for record in core.registry.all() if record.head]
            newest = {head.processes_from for head in heads if head and head.processes_from}
            checkpoint = next_to_compact((one for one in _loose(core) if one.id not in passed), newest, time.time())
            if checkpoint is None:
                break
            passed.add(checkpoint.id)
            try:
                compacted(core, checkpoint, Urgency.BACKGROUND, self._ends)
            except Busy:
                continue
            except NoSpace as error:
                log.warning("checkpoints are not made compact: %s", error.message)
                return self.AFTER_A_FAULT
            except (CrabError, OSError) as error:
                self._given_up.add(checkpoint.id)
                log.error("checkpoint %s cannot be made compact: %s", checkpoint.id, error)
        return LOOK_SECONDS

    def _ends(self) -> bool:
        """Whether to leave off: the daemon ends, or somebody waits for a slot."""
        return self.ends.is_set() or self.core.engine.is_awaited()


@answers(ask.Compact)
def compact_all(core: Core, request: ask.Compact) -> Compaction:
    """Do it now, with all."""
    made: list[Compacted] = []
    failed: dict[str, str] = {}
    for checkpoint in sorted(_loose(core), key=lambda one: one.created):
        try:
            found = compacted(core, checkpoint, Urgency.URGENT)
            made += [found] if found else []
        except CrabError as error:
            failed[checkpoint.id] = error.message
        except OSError as error:
            failed[checkpoint.id] = str(error)
    return Compaction(
        checkpoints=len(made),
        size=sum(one.size for one in made),
        own=sum(one.own for one in made),
        failed=failed,
    )


def _loose(core: Core) -> list[Checkpoint]:
    """Checkpoints whose own images are not compact. What an interrupted removal has linked to another is not its own yet."""
    found = [core.registry.checkpoint(one) for one in core.ground.store.loose()]
    return [one for one in found if one is not None and one.processes_from == one.id]


def compacted(
    core: Core, checkpoint: Checkpoint, urgency: Urgency, ends: Callable[[], bool] = lambda: False
) -> Compacted | None:
    """Make the images of one checkpoint compact; None if it is gone, or was made so before.

    Raises `Busy` if its first images are being read (they go the next time), another is being made compact (in the background),
    or it `ends`; `Damaged` if they are not what was captured; `NoSpace`, OSError. Then its first images are what it has.
    """
    store, made = core.ground.store, None
    if not store.is_compact(checkpoint.id):
        if urgency == Urgency.URGENT:
            with _moving, _job(core, checkpoint, urgency) as place:
                made = _moved(core, checkpoint, ends)
                place.writes = made.own if made else 0
        else:
            with _job(core, checkpoint, urgency) as place:
                if not _moving.acquire(blocking=False):
                    raise Busy("another checkpoint is being made compact", remedy="wait for it")
                try:
                    made = _moved(core, checkpoint, ends)
                    place.writes = made.own if made else 0
                finally:
                    _moving.release()
    if store.is_compact(checkpoint.id) and not store.retire(checkpoint.id):
        raise Busy(f"the images of checkpoint {checkpoint.id} are being read", remedy="try again later")
    return made


def _job(core: Core, checkpoint: Checkpoint, urgency: Urgency) -> AbstractContextManager[Place]:
    known = any(record.id == checkpoint.sandbox for record in core.registry.all())
    return core.engine.job("compact", checkpoint.sandbox if known else "", urgency)


def _moved(core: Core, checkpoint: Checkpoint, ends: Callable[[], bool]) -> Compacted | None:
    store = core.ground.store
    core.pool.require(checkpoint.process_bytes, "compact checkpoints")
    staging = core.pool.staging / new_id("p")
    before = _before(core, checkpoint)

    def look() -> None:
        if ends():
            raise Busy("it was left off: somebody waits for the host", remedy="the next time")

    with contextlib.ExitStack() as stack:
        stack.callback(core.discard_later, staging)
        staging.mkdir(mode=0o700)
        try:
            manifest = core.manifest(checkpoint.id)
            if store.is_compact(checkpoint.id) or manifest.checkpoint.processes_from != checkpoint.id:
                return None
            earlier = stack.enter_context(store.images(before.id)) if before else None
            images = stack.enter_context(store.images(checkpoint.id))
            names = [one.name for one in manifest.artefacts]
            made = compact(images, names, staging / PROCESS, earlier, look)
            store.adopt(checkpoint.id, staging / PROCESS, manifest.artefacts)
            return made
        except (FileNotFoundError, NotFound) as error:
            if any(one and core.registry.checkpoint(one.id) is None for one in (checkpoint, before)):
                return None  # it was removed meanwhile, or the one before
            raise Damaged(
                f"checkpoint {checkpoint.id}: {error.filename if isinstance(error, OSError) else error} is missing",
                remedy="restore another checkpoint (`crab turns`)",
            ) from error


def _before(core: Core, checkpoint: Checkpoint) -> Checkpoint | None:
    """The nearest ancestor with images in the pool."""
    found, passed = checkpoint, {checkpoint.id}
    while found.parent and found.parent not in passed:
        passed.add(found.parent)
        earlier = core.registry.checkpoint(found.parent)
        if earlier is None or (core.ground.store.is_compact(earlier.id) and earlier.processes_from == earlier.id):
            return earlier
        found = earlier
    return None
