"""Processes of other pid namespaces: find them, identify them, never touch one of our own.

Every signal and every cgroup write in Crab goes to a process that `is_foreign` has approved: a sandbox lies in a pid
namespace of its own, so a process in ours is never part of one, whatever a stale number says (hazard C19).
"""

from __future__ import annotations

import ctypes
import functools
import os
import select
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

_PIECE = 1 << 16
_READ = {"x86_64": "0", "aarch64": "63"}.get(os.uname().machine, "")
"""Number of the system call read(2)."""

_PR_SET_CHILD_SUBREAPER = 36


class ProcessId(msgspec.Struct, frozen=True):
    """A process that a reused number cannot be mistaken for."""

    pid: int
    start: int
    """Ticks between boot and the start of the process (`/proc/PID/stat`, field 22)."""
    boot: str
    """Boot that the ticks belong to."""


def read(pid: int, name: str) -> bytes:
    """A file of `/proc/PID`. Raises ProcessLookupError or FileNotFoundError if the process is gone.

    By plain system calls: three in the place of seven, which counts where a sandbox stands still meanwhile.
    """
    descriptor = os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.read(descriptor, _PIECE)
        while piece := os.read(descriptor, _PIECE):
            data += piece
        return data
    finally:
        os.close(descriptor)


@functools.cache
def boot_id() -> str:
    """Identity of the running kernel's boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def stat_fields(pid: int) -> list[str]:
    """Fields of `/proc/PID/stat` from the state (field 3) on; the name before it may hold anything.

    Raises ProcessLookupError if the process is gone.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            return f.read().decode(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        raise ProcessLookupError(pid) from None


def identify(pid: int) -> ProcessId:
    """The identity of a living process. Raises ProcessLookupError if it is gone."""
    return ProcessId(pid, int(stat_fields(pid)[19]), boot_id())


def is_alive(process: ProcessId) -> bool:
    """Whether that very process exists and is more than a zombie."""
    try:
        fields = stat_fields(process.pid)
    except ProcessLookupError:
        return False
    return fields[0] not in "ZX" and int(fields[19]) == process.start and process.boot == boot_id()


def is_foreign(pid: int) -> bool:
    """Whether the process lives in another pid namespace than we do. False if it is gone."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid") != os.readlink("/proc/self/ns/pid")
    except OSError:
        return False


def children(pid: int) -> list[int]:
    """Children of all threads of a process; empty if it is gone.

    From `/proc/PID/task/TID/children`, not `pgrep --ns`: procps 4.0.2 answers 1 for a pid that is gone.
    """
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as f:
                found += map(int, f.read().split())
    except OSError:
        pass
    return found


def descendants(pid: int) -> Iterator[int]:
    """The process and everything below it, parents first."""
    waiting = [pid]
    while waiting:
        found = waiting.pop()
        yield found
        waiting += children(found)


def adopt_orphans() -> None:
    """From now on what descendants of this process leave behind becomes its own children (prctl(2), PR_SET_CHILD_SUBREAPER), so
    that `descendants` finds it. Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def inner_pid(pid: int) -> int:
    """The number that a process has in its own (innermost) pid namespace. Raises ProcessLookupError if it is gone."""
    try:
        with open(f"/proc/{pid}/status") as f:
            for line in f:
                if line.startswith("NSpid:"):
                    return int(line.split()[-1])
    except (FileNotFoundError, ProcessLookupError):
        pass
    raise ProcessLookupError(pid)


def absent_foreground(pids: Iterable[int]) -> set[int]:
    """Process groups that are in the foreground of a terminal of these processes, but of which none of them is a member.

    So it is between the end of a shell's job and the moment when the shell takes its terminal back.
    """
    groups: set[str] = set()
    foreground: set[str] = set()
    for pid in pids:
        try:
            fields = stat_fields(pid)
        except ProcessLookupError:
            continue
        groups.add(fields[2])
        if fields[4] != "0":
            foreground.add(fields[5])
    return {int(group) for group in foreground - groups - {"-1", "0"}}


def waits_at_terminal(pid: int) -> bool:
    """Whether a process sleeps in a read of its standard input, in the foreground of its terminal. False if it is gone."""
    try:
        fields = stat_fields(pid)
        call = Path(f"/proc/{pid}/syscall").read_text().split()  # number, arguments, …; or `running`
    except OSError:
        return False
    return fields[0] == "S" and fields[2] == fields[5] and call[:2] == [_READ, "0x0"]


def wait_gone(process: ProcessId, seconds: float) -> bool:
    """Wait until the process has died (a zombie counts). False if it lives on after that time."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except OSError:
        return True
    try:
        if not is_alive(process):
            return True
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        return bool(poller.poll(int(seconds * 1000)))
    finally:
        os.close(pidfd)


def kill(process: ProcessId) -> None:
    """SIGKILL the init of a sandbox, and with it all of its pid namespace. No error if it is gone."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except OSError:
        return
    try:
        # the descriptor pins the process, so what is checked is what is killed
        if is_alive(process) and is_foreign(process.pid):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        pass
    finally:
        os.close(pidfd)
