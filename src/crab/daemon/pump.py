"""The blocking stream of a command's output as an asynchronous one.

One thread for each stream, since a `Command` blocks in a read. Knows nothing of HTTP; the daemon's server and the
embedded asynchronous SDK use it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Iterator
from typing import Protocol

from crab.sandbox.command import Output


class Source(Protocol):
    """What is read: a `Command`, or what looks like one."""

    def events(self) -> Iterator[Output]: ...

    def detach(self) -> None: ...


async def pieces(source: Source) -> AsyncGenerator[Output, None]:
    """The pieces of output as they come. Raises what `events` raises.

    The thread asks for the next piece only when the consumer has asked for one, so a piece counts as read
    (acknowledged, gone from the sandbox) when the consumer is done with it, not before. A consumer that stops earlier
    closes the iterator (contextlib.aclosing); then the source is detached and its unread output stays where it is.
    """
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[Output | BaseException | None] = asyncio.Queue()
    wanted = threading.Semaphore(1)
    stopped = threading.Event()

    def hand_over(item: Output | BaseException | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
            loop.call_soon_threadsafe(arrived.put_nowait, item)

    def read() -> None:
        failure: BaseException | None = None
        stream = source.events()
        try:
            wanted.acquire()
            while not stopped.is_set():
                piece = next(stream, None)
                if piece is None:
                    break
                hand_over(piece)
                wanted.acquire()
        except BaseException as error:
            failure = error
        finally:
            with contextlib.suppress(Exception):
                close = getattr(
                    stream, "close", None
                )  # a generator stopped at its yield: the piece is not acknowledged
                if close is not None:
                    close()
            hand_over(failure)

    threading.Thread(target=read, name="crab-output", daemon=True).start()
    ended = False
    try:
        while True:
            item = await arrived.get()
            if item is None:
                ended = True
                return
            if isinstance(item, BaseException):
                ended = True
                raise item
            yield item
            wanted.release()
    finally:
        if not ended:
            stopped.set()
            wanted.release()
            # wakes the thread if it is in a read; not from here, as it may have to wait for a lock
            threading.Thread(target=source.detach, name="crab-detach", daemon=True).start()
