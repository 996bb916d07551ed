"""Sending the newest checkpoints to a store as they come, so that a machine that goes takes next to nothing with it.

One at a time, in the background of the engine; each goes on from what the store has of its ancestors, so what a turn changed
is what is sent. Turns that come faster than they can be sent are passed over: the newest counts. While the store is away
it is tried again and again, and said once.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterable, Mapping

from crab.daemon import requests as ask
from crab.daemon.core import TURN, Core
from crab.daemon.registry import Record
from crab.daemon.storing import sent
from crab.engine.jobs import Urgency
from crab.errors import CrabError

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


class Sending:
    """The thread that does it. `close` ends it, and waits for one that is under way."""

    def __init__(self, core: Core, store: ask.StoreRequest) -> None:
        self._core, self._store = core, store
        self._known: dict[str, tuple[str, float]] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="crab-send", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End it."""
        self._end.set()
        self._core.engine.give_up_background()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        pause = LOOK_SECONDS
        while not self._end.wait(pause):
            try:
                while not self._end.is_set() and self.send_one():
                    pass
                if pause != LOOK_SECONDS:
                    log.info("the store at %s answers again", self._store.url)
                pause = LOOK_SECONDS
            except CrabError as error:
                if pause == LOOK_SECONDS and not self._end.is_set():
                    log.error("checkpoints are not sent to %s: %s", self._store.url, error.message)
                pause = min(pause * 2, LONGEST_PAUSE)
            except Exception:
                log.exception("a checkpoint could not be sent")
                pause = LONGEST_PAUSE

    def send_one(self) -> str | None:
        """Send the next one, if there is one; returns its id. Raises `CrabError`."""
        records = {record.id: record for record in self._core.registry.all()}
        self._known = {name: known for name, known in self._known.items() if name in records}
        record = next_to_send(records.values(), self._known, time.monotonic())
        if record is None or record.head is None:
            return None
        # also of one that fails: the others are not to wait for it
        self._known[record.id] = (self._known.get(record.id, ("", 0.0))[0], time.monotonic())
        made = sent(self._core, self._store, record.id, record.head, Urgency.BACKGROUND, TURN)
        self._known[record.id] = (record.head, time.monotonic())
        return made.id
