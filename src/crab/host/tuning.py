"""What a thread can be tuned by from outside: processors, I/O priority, timer slack, and what a core dump of it holds.

CRIU keeps none of it: a restored thread has what it inherits, in the end from this process. So only what differs from this
process is worth a note, which is nothing for nearly every thread.
"""

from __future__ import annotations

import ctypes
import os
import platform

from crab.host import processes
from crab.model import Struct

_libc = ctypes.CDLL(None, use_errno=True)
# asm/unistd_64.h of x86 and asm-generic/unistd.h: ioprio_set, ioprio_get. The C library has no names for them
_SET, _GET = (251, 252) if platform.machine() == "x86_64" else (30, 31)
_ONE_THREAD = 1  # IOPRIO_WHO_PROCESS


class Tuning(Struct, kw_only=True):
    """Of one thread; None is as usual."""

    cpus: tuple[int, ...] | None = None
    """Processors that it may run on."""
    io: int | None = None
    """Class (shifted left by 13) and level of ioprio_get(2)."""
    slack: int | None = None
    """Nanoseconds that its timers may be late."""
    core: str | None = None
    """Kinds of memory that a core dump holds: core(5). Of the first thread only, it is one for all."""


def of(thread: int, first: bool = True) -> Tuning:
    """All of a thread. Raises ProcessLookupError or FileNotFoundError if it is gone."""
    io = _libc.syscall(_GET, _ONE_THREAD, thread)
    if io < 0:
        raise ProcessLookupError(thread)
    return Tuning(
        cpus=tuple(sorted(os.sched_getaffinity(thread))),
        io=io,
        slack=int(processes.read(thread, "timerslack_ns")),
        core=processes.read(thread, "coredump_filter").decode().strip() if first else None,
    )


def unlike(tuning: Tuning, usual: Tuning) -> Tuning:
    """What differs from the usual."""
    pairs = {name: (getattr(tuning, name), getattr(usual, name)) for name in Tuning.__struct_fields__}
    return Tuning(**{name: mine for name, (mine, other) in pairs.items() if mine != other})


def apply(thread: int, tuning: Tuning) -> None:
    """Give a thread what is noted. Raises OSError if the machine cannot: EINVAL if it has none of the processors."""
    if tuning.cpus is not None:
        os.sched_setaffinity(thread, tuning.cpus)
    if tuning.io is not None and _libc.syscall(_SET, _ONE_THREAD, thread, tuning.io):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    for name, value in (("timerslack_ns", tuning.slack), ("coredump_filter", tuning.core)):
        if value is not None:
            with open(f"/proc/{thread}/{name}", "w") as file:
                file.write(f"0x{value}" if name == "coredump_filter" else str(value))
