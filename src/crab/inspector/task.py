"""One task (a thread) of a sandbox as the kernel describes it, and what two descriptions of it say.

The layout is that of `struct task` in `bpf/tasks.h`; the two change together. Whoever did not run is what it was, but for
what others can do to a sleeping task; those fields are in the description too.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_HEAD = struct.Struct("<4I4I4i 6Q Q 3Q 3Q 2I")
_LIMITS = 256
_REGISTERS = {584 + 512: (168, 512), 416 + 272: (272, 0)}
"""Size of a record -> sizes of its registers and of the state of its floating point unit (x86-64, arm64)."""

RUNNING, STOPPED, TRACED = 0, 4, 8  # of task_struct.__state
EXITING = 0x4  # PF_EXITING
LIMIT_NAMES = (
    *("cpu time", "file size", "data size", "stack size", "core size", "resident set", "processes", "open files"),
    *("locked memory", "address space", "file locks", "pending signals", "message queues"),
    *("nice", "realtime priority", "realtime time"),
)


@dataclass(frozen=True, slots=True)
class Task:
    """See the module. Numbers of processes are the host's, those of groups and sessions the sandbox's."""

    slot: int
    process: int
    thread: int
    state: int
    exit_state: int
    tracer: int
    start: int
    """ns since boot: with the number it names a task for ever."""
    activity: tuple[int, int, int, int, int]
    """ns that it ran, switches voluntary and not, page faults minor and major: equal means that it did not run."""
    settings: tuple[int, ...]
    """What another process can set: scheduling policy and priorities, groups, affinity, …"""
    pending: tuple[int, int]
    """Signals that wait for the thread and for its process."""
    blocked: int
    limits: bytes
    registers: bytes
    fpu: bytes

    @property
    def leads(self) -> bool:
        """Whether it is the first thread of its process."""
        return self.process == self.thread

    @property
    def ended(self) -> bool:
        """A zombie or dead."""
        return self.exit_state != 0

    @property
    def runs(self) -> bool:
        """On a processor or waiting for one, at that moment."""
        return self.state == RUNNING and not self.ended


def parse(data: bytes) -> Iterator[Task]:
    """The tasks of one reading of the iterator. Raises ValueError if the programs are of another version."""
    if not data:
        return
    size = next((size for size in _REGISTERS if len(data) % size == 0), 0)
    if not size:
        raise ValueError(f"{len(data)} bytes are no list of tasks")
    registers, fpu = _REGISTERS[size]
    for at in range(0, len(data), size):
        f = _HEAD.unpack_from(data, at)
        limits = at + _HEAD.size
        yield Task(
            slot=f[0],
            process=f[1],
            thread=f[2],
            state=f[3],
            exit_state=f[4],
            tracer=f[5],
            start=f[12],
            activity=f[13:18],
            settings=(*f[6:12], *f[22:25]),
            pending=f[19:21],
            blocked=f[21],
            limits=data[limits : limits + _LIMITS],
            registers=data[limits + _LIMITS : limits + _LIMITS + registers],
            fpu=data[at + size - fpu : at + size] if f[26] else b"",
        )


SETTINGS = (
    *("scheduling policy", "realtime priority", "nice value", "process group", "session", "OOM score"),
    *("CPU affinity", "I/O priority", "timer slack"),
)


def altered(old: Task, new: Task) -> str:
    """What somebody else changed of a task that did not run; empty if nothing."""
    for name, a, b in zip(SETTINGS, old.settings, new.settings, strict=True):
        if a != b:
            return f"its {name} was set"
    if old.pending != new.pending:
        return "a signal waits for it"
    if old.ended != new.ended:
        return "it ended"
    if (old.state ^ new.state) & (STOPPED | TRACED):
        return "it was stopped or continued"
    if old.limits != new.limits:
        at = next(i for i in range(0, _LIMITS, 16) if old.limits[i : i + 16] != new.limits[i : i + 16])
        return f"its limit of {LIMIT_NAMES[at // 16]} was set"
    if old.tracer != new.tracer:
        return "it is traced"
    return ""
