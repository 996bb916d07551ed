"""Following what takes long: its steps are asked for while it is done."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")
SECONDS = 1.0
"""How often it is asked what is being done."""


def told(work: Callable[[], T], step: Callable[[], str], tell: Callable[[str], None]) -> T:
    """What `work` returns or raises; meanwhile `tell` gets each `step` that is not empty, once."""
    last = ""
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(work)
        while not wait([done], SECONDS).done:
            if (now := step()) not in ("", last):
                last = now
                tell(now)
        return done.result()
