"""Commits that are shared: one at a time, and each covers all who asked before it began.

A commit of a file system costs about the same for one checkpoint as for twenty, and two at once wait for each other. Who
asks while one is under way waits for the next, together with all who ask until that begins.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence


class _Round:
    """Those whom one commit covers."""

    def __init__(self) -> None:
        self.members: list[str] = []
        self.over = False
        self.error: Exception | None = None


class Commits:
    """See the module. Safe from any thread."""

    def __init__(self, commit: Callable[[Sequence[str]], None]) -> None:
        """`commit` makes all of these durable, or raises: then none of them counts as durable."""
        self._commit = commit
        self._next = _Round()
        self._busy = False
        self._changed = threading.Condition()

    def join(self, member: str) -> None:
        """Return when it is durable. Raises what the commit raised; each of those whom it was to cover gets the error."""
        with self._changed:
            mine = self._next
            mine.members.append(member)
            self._changed.wait_for(lambda: mine.over or not self._busy)
            leads = not mine.over
            if leads:
                self._next, self._busy = _Round(), True
        if leads:
            self._lead(mine)
        if mine.error is not None:
            raise mine.error

    def _lead(self, mine: _Round) -> None:
        mine.error = InterruptedError("the commit was interrupted")
        try:
            self._commit(mine.members)
            mine.error = None
        except Exception as error:
            mine.error = error
        finally:
            with self._changed:
                mine.over, self._busy = True, False
                self._changed.notify_all()
