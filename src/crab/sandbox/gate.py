"""The gate of a sandbox: who may hold a line to its init, and when.

A capture needs every line closed (an open one leads outside and the dump would fail) and keeps new ones away until the
sandbox runs again. Lines are short-lived or re-attach by themselves, so closing the gate disturbs nobody: a command's
output waits inside.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from crab.errors import SandboxGone


class Gate:
    """Open: any number of lines. Closed: none, and `enter` waits. Broken: the sandbox is gone, `enter` raises."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._inside = 0
        self._closed = False
        self._broken = ""
        self.stirred = 0
        """How often somebody outside has set something going inside: commands started, input, signals."""

    @contextlib.contextmanager
    def enter(self) -> Iterator[None]:
        """Hold a line for the length of the block. Waits while the gate is closed; raises `SandboxGone` if broken."""
        with self._condition:
            self._condition.wait_for(lambda: not self._closed or self._broken)
            self._check()
            self._inside += 1
        try:
            yield
        finally:
            with self._condition:
                self._inside -= 1
                self._condition.notify_all()

    def stir(self) -> None:
        """Something inside is about to be set going. Who waits for quiet compares `stirred`."""
        with self._condition:
            self.stirred += 1

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """In a block of `enter`: run this block as if outside, so that nobody waits for it.

        The gate may close meanwhile; then the holder's line is closed when the block has ended.
        """
        with self._condition:
            self._inside -= 1
            self._condition.notify_all()
        try:
            yield
        finally:
            with self._condition:
                self._condition.wait_for(lambda: not self._closed or self._broken)
                self._inside += 1

    @contextlib.contextmanager
    def closed(self, detach: Callable[[], None], seconds: float = 10.0) -> Iterator[None]:
        """Run the block with no line open. `detach` makes init close all lines; their holders then leave.

        Raises TimeoutError if a holder does not leave. One block at a time: callers hold the sandbox's operation.
        """
        with self._condition:
            self._check()
            self._closed = True
            alone = not self._inside
        try:
            end = time.monotonic() + seconds
            detach()
            while not alone:
                with self._condition:
                    alone = self._condition.wait_for(lambda: not self._inside, 0.01)
                # again: somebody was inside but had not connected yet, or left a line open when he went
                detach()
                if not alone and time.monotonic() > end:
                    raise TimeoutError("a connection to the sandbox's init was not given up")
            yield
        finally:
            with self._condition:
                self._closed = False
                self._condition.notify_all()

    def destroy(self, reason: str) -> None:
        """The sandbox is gone: whoever waits or comes later is told so."""
        with self._condition:
            self._broken = reason
            self._condition.notify_all()

    def _check(self) -> None:
        if self._broken:
            raise SandboxGone(self._broken, remedy="`crab inspect` says how it is now")
