"""Processes that sleep for operations to work on, and looks at what they hold, from outside."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import re
import signal
import termios
import time
from collections.abc import Callable
from typing import Any

from bench.operations.operation import (
    Look,
    checked,
    libc,
    lines,
)


def asleep(state: dict[str, Any], inside: Callable[[], None] = lambda: None) -> int:
    """Start a process that sleeps for ever, once it has done `inside`; its pid, also in the state, for who cleans up.

    It is no child of an operation: it must outlive it. It has its parent's descriptors.
    """
    r, w = os.pipe()
    middle = os.fork()
    if middle == 0:
        pid = os.fork()
        if pid:
            os._exit(0)
        os.setsid()
        for fd in lines:
            os.close(fd)
        inside()
        os.write(w, b"%d" % os.getpid())
        os.close(w)
        os.close(r)
        while True:
            signal.pause()
    os.close(w)
    os.waitpid(middle, 0)
    pid = int(os.read(r, 20))
    os.close(r)
    state.setdefault("sleepers", []).append(pid)
    while stat_of(pid)[0] != "S":
        time.sleep(0.001)
    return pid


def gone(pid: int) -> None:
    """Wait for the end of a process that was killed."""
    with contextlib.suppress(OSError):
        while os.readlink(f"/proc/{pid}/exe"):
            time.sleep(0.001)


def stat_of(pid: int) -> list[str]:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()


def status_of(pid: int, *names: str) -> list[str]:
    with open(f"/proc/{pid}/status") as file:
        text = file.read()
    return [match[1] for name in names if (match := re.search(rf"^{name}:\s*(.*)$", text, re.M))]


def of_status(*names: str) -> Look:
    """Looks at lines of /proc/PID/status of the sleeper, or of the process that lives."""
    return lambda folder, state: status_of(subject(state), *names)


def subject(state: dict[str, Any]) -> int:
    """The process that an operation is about."""
    return state["sleepers"][0] if state.get("sleepers") else state["pid"]


def memory(name: str = "at", size: int = 64) -> Look:
    """Looks at memory of the process that the operation is about."""

    def look(folder: str, state: dict[str, Any]) -> bytes:
        with open(f"/proc/{subject(state)}/mem", "rb", buffering=0) as file:
            return os.pread(file.fileno(), size, state[name])

    return look


def through(number: str, ask: Callable[[int], object]) -> Look:
    """Looks at an open file of the process that the operation is about, through a copy of its descriptor (pidfd_getfd)."""

    def look(folder: str, state: dict[str, Any]) -> object:
        pidfd = os.pidfd_open(subject(state))
        fd = checked(libc.syscall(438, pidfd, state[number], 0), "pidfd_getfd")
        try:
            return ask(fd)
        finally:
            os.close(fd)
            os.close(pidfd)

    return look


def info(number: str) -> Look:
    """Looks at /proc/PID/fdinfo of a descriptor."""

    def look(folder: str, state: dict[str, Any]) -> str:
        with open(f"/proc/{subject(state)}/fdinfo/{state[number]}") as file:
            return file.read()

    return look


def score(folder: str, state: dict[str, Any]) -> str:
    with open(f"/proc/{subject(state)}/oom_score_adj") as file:
        return file.read()


def children(folder: str, state: dict[str, Any]) -> str:
    with open(f"/proc/{state['pid']}/task/{state['pid']}/children") as file:
        return file.read()


def pending(fd: int) -> int:
    """Bytes that wait to be read."""
    answer = array.array("i", [0])
    fcntl.ioctl(fd, termios.FIONREAD, answer)
    return answer[0]
