"""Threads in a process image: where each stands, in terms that do not depend on how it was stopped.

A thread that sleeps in a system call is woken by every freeze. CRIU writes down one that will make its call again as if it
had not made it yet (`ip` before the instruction, `ax` the number of the call), and one that the kernel would go on with by
restart_syscall(2) as one whose call was interrupted (`ax` is EINTR). The running thread goes on accordingly, so the next
image may show the other form. Here both become "in this call". Of the registers a call destroys `cx` and `r11`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from crab.checkpoint.imagenames import Record

RESTART = 219  # restart_syscall(2)
EINTR = -4
_CLOCK_NANOSLEEP = 230
_SLEEPS = {
    35: ("di", "si"),  # nanosleep
    _CLOCK_NANOSLEEP: ("dx", "r10"),
    23: ("r8",),  # select
    270: ("r8",),  # pselect6
    271: ("dx",),  # ppoll
}
"""Registers that hold the addresses of a relative time."""
_INSTRUCTION = 2  # length of `syscall`
RED_ZONE = 128
"""Bytes below the stack pointer that belong to the running function (System V ABI for AMD64, 3.2.2)."""


@dataclass(frozen=True)
class Thread:
    """One thread."""

    tid: int
    registers: dict[str, int]
    """General registers, normalised; of other machines than x86 none."""
    floating: Record
    other: Record
    """All else that the image says of the thread alone."""
    call: int | None
    """Number of the system call that it is in, `RESTART` if only the kernel knows; None in the middle of its program."""

    @property
    def stack_pointer(self) -> int | None:
        return self.registers.get("sp")

    @property
    def sleep(self) -> tuple[int, ...]:
        """Addresses of the times that it waits for, of 16 bytes each, if its call takes a relative time and the kernel writes
        back what is left of it."""
        registers = self.registers
        if self.call == _CLOCK_NANOSLEEP and registers["si"] & 1:  # TIMER_ABSTIME
            return ()
        return tuple(registers[name] for name in _SLEEPS.get(self.call or 0, ()) if registers[name])

    @property
    def storage(self) -> int | None:
        """Address of its thread-local storage."""
        return self.registers.get("fs_base")

    @property
    def rseq(self) -> tuple[int, int] | None:
        """Begin and end of its `struct rseq`. The kernel writes the processor's number into it whenever it schedules the thread
        and clears a finished section lazily: nothing in it is left over a preemption."""
        known = self.other.get("rseq")
        return (known["pointer"], known["pointer"] + known["size"]) if known and known.get("pointer") else None


def thread(tid: int, core: Record) -> Thread:
    """From a message of `core-TID.img`."""
    registers, call = _standing(dict(core.get("x86", {}).get("registers", {})))
    machine: dict[str, Any] = {
        name: value for name, value in core.items() if name not in ("x86", "task", "ids", "thread")
    }
    special = {name: value for name, value in core.get("x86", {}).items() if name not in ("registers", "floating")}
    return Thread(
        tid=tid,
        registers=registers,
        floating=core.get("x86", {}).get("floating", {}),
        other={**core.get("thread", {}), **special, **machine},
        call=call,
    )


def _standing(registers: dict[str, int]) -> tuple[dict[str, int], int | None]:
    call, ax = registers.get("orig_ax", -1), registers.get("ax", 0)
    if call < 0:
        return registers, None
    if ax == EINTR:
        end = registers["ip"]
    elif ax == call:
        end = registers["ip"] + _INSTRUCTION
    else:  # it has just come back
        return registers, None
    dropped = ("ax", "orig_ax", "cx", "r11")
    return {name: value for name, value in registers.items() if name not in dropped} | {"ip": end}, call
