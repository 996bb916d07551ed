"""Making a sandbox safe for the requests of its agent: one capture at a time, and none too many.

A capture covers every request that came before it began. Who asks while one is under way gets the next one, shared with all
who ask until that begins: parallel sub-agents do not queue up captures, and none is released by one that began too early.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

from crab.model import Struct

ProtectionKind = Literal["durable", "captured", "none", "unprotected"]
"""How safe a turn is: it would survive a crash of the host, or of the sandbox; nobody waited for it; it is not safe."""
_CAPTURES = ThreadPoolExecutor(4096, "crab-protect")
"""One for each sandbox that waits for its turn, else those that are beyond would not even be in the queue. Apart from the
threads that write the record: a capture may wait for a minute, and an answer of another sandbox need not."""


class Safety(Struct, kw_only=True):
    """What came of making a turn safe."""

    protection: ProtectionKind
    checkpoint: str | None = None
    turn: int | None = None
    why: str = ""
    """Of a turn that is not as safe as its policy wants."""


class Haste:
    """Where to say how urgent it is that a sandbox becomes safe. Its methods do not block. (This one tells nobody.)"""

    def answered(self, seconds: float) -> None:
        """The model took so long: how much time there may be the next time."""

    def awaited(self) -> AbstractContextManager[None]:
        """For the length of the block somebody waits for it."""
        return nullcontext()

    def why_not_yet(self) -> str:
        """What it waits for; empty if it is under way."""
        return ""


class Protection:
    """See the module. Used within one event loop; `work` blocks, so it runs in a thread."""

    def __init__(self, work: Callable[[], Safety], haste: Haste | None = None) -> None:
        """`work` makes the sandbox safe as it is when it is called. What it raises becomes `unprotected`."""
        self.haste = haste or Haste()
        self._work = work
        self._next: asyncio.Future[Safety] | None = None
        self._worker: asyncio.Task[None] | None = None

    def ask(self) -> asyncio.Future[Safety]:
        """Begin to make the sandbox safe as it is now. The future never fails; do not cancel it (others may share it)."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
            if self._worker is None or self._worker.done():
                self._worker = asyncio.create_task(self._run())
        return self._next

    async def _run(self) -> None:
        await asyncio.sleep(0)  # the question goes out first: a capture takes the interpreter from it
        while self._next is not None:
            asked, self._next = self._next, None
            try:
                safety = await asyncio.get_running_loop().run_in_executor(_CAPTURES, self._work)
            except Exception as error:
                safety = Safety(protection="unprotected", why=str(error))
            if not asked.done():
                asked.set_result(safety)
