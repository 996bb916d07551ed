"""What a daemon does while nobody waits for it: a thread that takes one step after the other until the daemon ends."""

from __future__ import annotations

import abc
import logging
import threading
from types import TracebackType
from typing import Self

from crab.daemon.core import Core

log = logging.getLogger("crab.background")


class Background(abc.ABC):
    """A context manager: it begins with the block. At the end of that a step that is under way is waited for, but not the turn
    of one that waits in the engine."""

    FIRST_SECONDS: float
    """Until the first step."""
    AFTER_A_FAULT = 300.0
    """Seconds until the next step after one that raised what nobody expected."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"crab-{type(self).__name__.lower()}", daemon=True)

    @abc.abstractmethod
    def step(self) -> float:
        """Do what there is to do; returns the seconds until the next step."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ends.set()
        self.core.engine.give_up_background()
        self._thread.join()

    def _run(self) -> None:
        seconds = self.FIRST_SECONDS
        while not self.ends.wait(seconds):
            try:
                seconds = self.step()
            except Exception:
                log.exception("%s failed; it is tried again later", self._thread.name)
                seconds = self.AFTER_A_FAULT
