"""The clocks that count from the boot, and how far a time namespace is ahead of the host's.

A process may hold times of these clocks in its memory, so for it they must never go back (hazard R10): neither when a
checkpoint is restored after a reboot nor on another host.
"""

from __future__ import annotations

import time
from pathlib import Path

from crab.model import Struct


class Clocks(Struct, kw_only=True):
    """CLOCK_MONOTONIC and CLOCK_BOOTTIME in nanoseconds, as some processes see them."""

    monotonic: int = 0
    boottime: int = 0

    def minus(self, other: Clocks) -> Clocks:
        return Clocks(monotonic=self.monotonic - other.monotonic, boottime=self.boottime - other.boottime)

    def plus(self, other: Clocks) -> Clocks:
        return Clocks(monotonic=self.monotonic + other.monotonic, boottime=self.boottime + other.boottime)


def host_clocks() -> Clocks:
    """Those of this process's time namespace: the host's."""
    return Clocks(
        monotonic=time.clock_gettime_ns(time.CLOCK_MONOTONIC), boottime=time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    )


def shift_of(pid: int) -> Clocks:
    """How far the clocks of a process are ahead of the host's; nothing on a kernel without time namespaces."""
    try:
        text = Path(f"/proc/{pid}/timens_offsets").read_text()
    except OSError:
        return Clocks()
    values = {words[0]: int(words[1]) * 10**9 + int(words[2]) for words in map(str.split, text.splitlines())}
    return Clocks(monotonic=values.get("monotonic", 0), boottime=values.get("boottime", 0))


def shift_for(seen: Clocks, shift: Clocks, same_boot: bool, now: Clocks) -> Clocks:
    """How far ahead the clocks of a restored sandbox must be.

    `seen` is what its processes saw when they were captured, `shift` how far that was ahead of the host's. In the same boot
    the host's clocks have only gone forward, so the same shift is right; after another they go on where they stopped.
    """
    return shift if same_boot else seen.minus(now)
