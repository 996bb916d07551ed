"""Sending the newest checkpoints to a store as they come, so that a machine that goes takes next to nothing with it.

One at a time, in the background of the engine; each goes on from what the store has of its ancestors, so what a turn changed
is what is sent. Turns that come faster than they can be sent are passed over: the newest counts. While the store is away
it is tried again and again, and said once.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Mapping

from crab.daemon import requests as ask
from crab.daemon.background import Background
from crab.daemon.core import TURN, Core
from crab.daemon.registry import Record
from crab.daemon.storing import sent
from crab.engine.jobs import Urgency
from crab.errors import Busy, CrabError

LOOK_SECONDS = 2.0
"""How often it is looked for something to send."""
APART_SECONDS = 20.0
"""How often one sandbox is sent at most: others want to be, too."""
LONGEST_PAUSE = 300.0
"""Between two attempts to reach a store that is away."""
log = logging.getLogger("crab.send")


def next_to_send(records: Iterable[Record], known: Mapping[str, tuple[str, float]], now: float) -> Record | None:
    """The sandbox whose newest checkpoint is to be sent next: one that never was, else the one that waits longest. `known` has
    what was sent of each, and when."""

    def last(record: Record) -> tuple[str, float]:
        return known.get(record.id, ("", -math.inf))

    wait = [
        record
        for record in records
        if record.head and record.head != last(record)[0] and now - last(record)[1] >= APART_SECONDS
    ]
    return min(wait, key=lambda record: last(record)[1], default=None)


class Sending(Background):
    """See the module."""

    FIRST_SECONDS = LOOK_SECONDS

    def __init__(self, core: Core, store: ask.StoreRequest) -> None:
        super().__init__(core)
        self._store = store
        self._known: dict[str, tuple[str, float]] = {}
        self._pause = LOOK_SECONDS

    def step(self) -> float:
        """Send all that there is; longer and longer pauses while the store is away."""
        try:
            while not self.ends.is_set() and self.send_one():
                pass
        except Busy:  # somebody works with that sandbox, or with the store: the next time
            return LOOK_SECONDS
        except CrabError as error:
            if self._pause == LOOK_SECONDS:
                log.error("checkpoints are not sent to %s: %s", self._store.url, error.message)
            self._pause = min(self._pause * 2, LONGEST_PAUSE)
            return self._pause
        if self._pause != LOOK_SECONDS:
            log.info("the store at %s answers again", self._store.url)
        self._pause = LOOK_SECONDS
        return self._pause

    def send_one(self) -> str | None:
        """Send the next one, if there is one; returns its id. Raises `CrabError`."""
        records = {record.id: record for record in self.core.registry.all()}
        self._known = {name: known for name, known in self._known.items() if name in records}
        record = next_to_send(records.values(), self._known, time.monotonic())
        if record is None or record.head is None:
            return None
        # also of one that fails: the others are not to wait for it
        self._known[record.id] = (self._known.get(record.id, ("", 0.0))[0], time.monotonic())
        made = sent(self.core, self._store, record.id, record.head, Urgency.BACKGROUND, TURN)
        self._known[record.id] = (record.head, time.monotonic())
        return made.id
