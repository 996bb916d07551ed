"""Operations on processes: on one that sleeps, from outside, and on one that lives on, by itself."""

from __future__ import annotations

import ctypes
import fcntl
import os
import pty
import resource
import select
import signal
import socket
import struct
import termios
import time
from typing import Any

from bench.operations.looking import (
    asleep,
    children,
    gone,
    info,
    memory,
    of_status,
    pending,
    score,
    stat_of,
    subject,
    through,
)
from bench.operations.on_objects import nothing
from bench.operations.operation import (
    checked,
    libc,
    opened,
    operation,
)

PROCESSES: dict[str, Any] = {"kind": "processes"}


def _buffer(state: dict[str, Any]) -> None:
    state["keep"] = ctypes.create_string_buffer(b"before", 64)
    state["at"] = ctypes.addressof(state["keep"])


def _sleeper(folder: str, state: dict[str, Any]) -> None:
    """A process that sleeps, with some memory at a known place."""
    _buffer(state)
    asleep(state)


@operation("process_vm_writev into a sleeping process", prepare=_sleeper, look=memory(), needs="ptrace", **PROCESSES)
def _(folder: str, state: dict[str, Any]) -> None:
    data = ctypes.create_string_buffer(b"after", 5)
    here = struct.pack("<QQ", ctypes.addressof(data), 5)
    there = struct.pack("<QQ", state["at"], 5)
    checked(libc.process_vm_writev(subject(state), here, 1, there, 1, 0), "process_vm_writev")


@operation("write to /proc/PID/mem of a sleeping process", prepare=_sleeper, look=memory(), needs="ptrace", **PROCESSES)
def _(folder: str, state: dict[str, Any]) -> None:
    with open(f"/proc/{subject(state)}/mem", "r+b", buffering=0) as file:
        os.pwrite(file.fileno(), b"after", state["at"])


@operation("poke a sleeping process by ptrace", prepare=_sleeper, look=memory(), needs="ptrace", **PROCESSES)
def _(folder: str, state: dict[str, Any]) -> None:
    pid = subject(state)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
    libc.ptrace.restype = ctypes.c_long
    checked(libc.ptrace(0x4206, pid, None, None), "PTRACE_SEIZE")
    checked(libc.ptrace(0x4207, pid, None, None), "PTRACE_INTERRUPT")
    os.waitpid(pid, 0x40000000)  # __WALL
    checked(libc.ptrace(5, pid, state["at"], int.from_bytes(b"poked\0\0\0", "little")), "PTRACE_POKEDATA")
    checked(libc.ptrace(17, pid, None, None), "PTRACE_DETACH")


def _with_handler(folder: str, state: dict[str, Any]) -> None:
    _buffer(state)

    def inside() -> None:
        signal.signal(signal.SIGUSR1, lambda number, frame: ctypes.memmove(state["at"], b"caught", 6))

    asleep(state, inside)


@operation("signal that a sleeping process handles", prepare=_with_handler, look=memory(), **PROCESSES)
def _(folder: str, state: dict[str, Any]) -> None:
    before = memory()(folder, state)
    os.kill(subject(state), signal.SIGUSR1)
    end = time.monotonic() + 5
    while memory()(folder, state) == before and time.monotonic() < end:
        time.sleep(0.002)


def _blocking(folder: str, state: dict[str, Any]) -> None:
    asleep(state, lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1]) and None)


@operation("signal that a sleeping process blocks", prepare=_blocking, look=of_status("ShdPnd", "SigPnd"), **PROCESSES)
def _(folder: str, state: dict[str, Any]) -> None:
    os.kill(subject(state), signal.SIGUSR1)


@operation(
    "signal that a sleeping process ignores",
    changes=False,
    prepare=_sleeper,
    look=of_status("State", "ShdPnd", "SigPnd"),
    **PROCESSES,
)
def _(folder: str, state: dict[str, Any]) -> None:
    os.kill(subject(state), signal.SIGURG)


@operation("signal 0", changes=False, prepare=_sleeper, look=of_status("State", "ShdPnd"), **PROCESSES)
def _(folder: str, state: dict[str, Any]) -> None:
    os.kill(subject(state), 0)


@operation("stop a process", prepare=_sleeper, look=of_status("State"), **PROCESSES)
def _(folder: str, state: dict[str, Any]) -> None:
    os.kill(subject(state), signal.SIGSTOP)
    while stat_of(subject(state))[0] != "T":
        time.sleep(0.001)


def _alive(folder: str, state: dict[str, Any]) -> list[bool]:
    return [
        os.path.exists(f"/proc/{pid}/exe") and bool(os.readlink(f"/proc/{pid}/exe"))
        for pid in state.get("sleepers", [])
    ]


@operation("kill a process", prepare=_sleeper, look=_alive, **PROCESSES)
def _(folder: str, state: dict[str, Any]) -> None:
    os.kill(subject(state), signal.SIGKILL)
    gone(subject(state))


@operation("leave a process in the background", look=lambda folder, state: len(state.get("sleepers", [])), **PROCESSES)
def _(folder: str, state: dict[str, Any]) -> None:
    asleep(state)


@operation("look at a sleeping process", changes=False, prepare=_sleeper, look=of_status("State"), **PROCESSES)
def _(folder: str, state: dict[str, Any]) -> None:
    for name in ("status", "stat", "maps", "smaps_rollup", "environ", "cmdline"):
        with open(f"/proc/{subject(state)}/{name}", "rb") as file:
            file.read()


@operation(
    "renice another process",
    prepare=_sleeper,
    look=lambda folder, state: os.getpriority(os.PRIO_PROCESS, subject(state)),
    **PROCESSES,
)
def _(folder: str, state: dict[str, Any]) -> None:
    os.setpriority(os.PRIO_PROCESS, subject(state), 7)


@operation(
    "set a limit of another process",
    prepare=_sleeper,
    look=lambda folder, state: resource.prlimit(subject(state), resource.RLIMIT_NOFILE),
    **PROCESSES,
)
def _(folder: str, state: dict[str, Any]) -> None:
    resource.prlimit(subject(state), resource.RLIMIT_NOFILE, (77, 99))


@operation(
    "set the processors of another process",
    prepare=_sleeper,
    look=lambda folder, state: os.sched_getaffinity(subject(state)),
    needs="processors",
    **PROCESSES,
)
def _(folder: str, state: dict[str, Any]) -> None:
    os.sched_setaffinity(subject(state), {min(os.sched_getaffinity(0))})


@operation(
    "set the scheduler of another process",
    prepare=_sleeper,
    look=lambda folder, state: os.sched_getscheduler(subject(state)),
    **PROCESSES,
)
def _(folder: str, state: dict[str, Any]) -> None:
    os.sched_setscheduler(subject(state), os.SCHED_BATCH, os.sched_param(0))


@operation(
    "set the score for lack of memory of another process",
    prepare=_sleeper,
    look=score,
    **PROCESSES,
)
def _(folder: str, state: dict[str, Any]) -> None:
    with open(f"/proc/{subject(state)}/oom_score_adj", "w") as file:
        file.write("777")


def _fifo(folder: str, state: dict[str, Any]) -> None:
    os.mkfifo(f"{folder}/fifo")
    state["fd"] = opened(f"{folder}/fifo")
    asleep(state)


@operation("write to a FIFO that a sleeping process holds", prepare=_fifo, look=through("fd", pending), **PROCESSES)
def _(folder: str, state: dict[str, Any]) -> None:
    os.write(opened(f"{folder}/fifo", os.O_WRONLY), b"data")


@operation(
    "write to a FIFO that a sleeping process holds, and read it",
    changes=False,
    prepare=_fifo,
    look=through("fd", pending),
    **PROCESSES,
)
def _(folder: str, state: dict[str, Any]) -> None:
    fd = opened(f"{folder}/fifo")
    os.write(fd, b"data")
    os.read(fd, 4)


def _shared_pipe(folder: str, state: dict[str, Any]) -> None:
    state["fd"], state["w"] = os.pipe()
    asleep(state)


@operation(
    "write to a pipe that a sleeping process holds",
    prepare=_shared_pipe,
    lives=True,
    look=through("fd", pending),
    **PROCESSES,
)
def _(folder: str, state: dict[str, Any]) -> None:
    os.write(state["w"], b"data")


@operation(
    "close the other end of a pipe",
    prepare=_shared_pipe,
    lives=True,
    look=lambda folder, state: sorted(os.listdir(f"/proc/{state['pid']}/fd")),
    **PROCESSES,
)
def _(folder: str, state: dict[str, Any]) -> None:
    os.close(state["w"])


def _datagrams(folder: str, state: dict[str, Any]) -> None:
    state["name"] = f"\0crab-operations-{os.getpid()}"
    receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    receiver.bind(state["name"])
    state["fd"] = receiver.fileno()
    asleep(state)


@operation("send a datagram to a sleeping process", prepare=_datagrams, look=through("fd", pending), **PROCESSES)
def _(folder: str, state: dict[str, Any]) -> None:
    socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b"data", state["name"])


def _listener(folder: str, state: dict[str, Any]) -> None:
    os.chdir(folder)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("s")
    listener.listen()
    state["fd"] = listener.fileno()
    asleep(state)


@operation(
    "connect to a listening socket of a sleeping process",
    prepare=_listener,
    lives=True,
    look=through("fd", lambda fd: bool(select.select([fd], [], [], 0)[0])),
    **PROCESSES,
)
def _(folder: str, state: dict[str, Any]) -> None:
    state["client"] = socket.socket(socket.AF_UNIX)
    os.chdir(folder)
    state["client"].connect("s")


def _shared_file(folder: str, state: dict[str, Any]) -> None:
    state["fd"] = os.open(f"{folder}/a", os.O_RDWR)
    asleep(state)


@operation(
    "move the offset of an open file that a sleeping process shares",
    prepare=_shared_file,
    lives=True,
    look=info("fd"),
    **PROCESSES,
)
def _(folder: str, state: dict[str, Any]) -> None:
    if pid := os.fork():
        os.waitpid(pid, 0)
    else:
        os.lseek(state["fd"], 100, os.SEEK_SET)
        os._exit(0)


@operation(
    "set a flag of an open file that a sleeping process shares",
    prepare=_shared_file,
    lives=True,
    look=info("fd"),
    **PROCESSES,
)
def _(folder: str, state: dict[str, Any]) -> None:
    os.set_blocking(state["fd"], False)


@operation(
    "lock an open file that a sleeping process shares", prepare=_shared_file, lives=True, look=info("fd"), **PROCESSES
)
def _(folder: str, state: dict[str, Any]) -> None:
    fcntl.flock(state["fd"], fcntl.LOCK_EX)


@operation(
    "open another file by a process that lives",
    prepare=nothing,
    lives=True,
    look=lambda folder, state: sorted(os.listdir(f"/proc/{state['pid']}/fd")),
    **PROCESSES,
)
def _(folder: str, state: dict[str, Any]) -> None:
    state["new"] = os.open(f"{folder}/b", os.O_RDONLY)


def _terminal(folder: str, state: dict[str, Any]) -> None:
    state["fd"], state["slave"] = pty.openpty()
    asleep(state)


@operation(
    "change settings of a terminal of a sleeping process",
    prepare=_terminal,
    lives=True,
    look=through("fd", lambda fd: str(termios.tcgetattr(fd))),
    **PROCESSES,
)
def _(folder: str, state: dict[str, Any]) -> None:
    if pid := os.fork():
        os.waitpid(pid, 0)
    else:
        settings = termios.tcgetattr(state["slave"])
        settings[3] ^= termios.ECHO
        termios.tcsetattr(state["slave"], termios.TCSANOW, settings)
        os._exit(0)


@operation(
    "resize a terminal of a sleeping process",
    prepare=_terminal,
    lives=True,
    look=through("fd", termios.tcgetwinsize if hasattr(termios, "tcgetwinsize") else pending),
    **PROCESSES,
)
def _(folder: str, state: dict[str, Any]) -> None:
    fcntl.ioctl(state["fd"], termios.TIOCSWINSZ, struct.pack("4H", 11, 22, 0, 0))


@operation(
    "type at a terminal of a sleeping process",
    prepare=_terminal,
    lives=True,
    look=lambda folder, state: through("slave", pending)(folder, state),
    **PROCESSES,
)
def _(folder: str, state: dict[str, Any]) -> None:
    os.write(state["fd"], b"typed\n")
    while not pending(state["slave"]):  # a worker of the kernel carries it over
        time.sleep(0.001)


def _eventfd(folder: str, state: dict[str, Any]) -> None:
    state["fd"] = os.eventfd(1)
    asleep(state)


@operation("count up an eventfd of a sleeping process", prepare=_eventfd, lives=True, look=info("fd"), **PROCESSES)
def _(folder: str, state: dict[str, Any]) -> None:
    os.eventfd_write(state["fd"], 5)


def _timerfd(folder: str, state: dict[str, Any]) -> None:
    state["fd"] = checked(libc.timerfd_create(1, 0), "timerfd_create")
    asleep(state)


@operation("set a timerfd of a sleeping process", prepare=_timerfd, lives=True, look=info("fd"), **PROCESSES)
def _(folder: str, state: dict[str, Any]) -> None:
    checked(libc.timerfd_settime(state["fd"], 0, struct.pack("<4q", 0, 0, 9999, 0), None), "timerfd_settime")


def _epoll(folder: str, state: dict[str, Any]) -> None:
    state["set"] = select.epoll()
    state["fd"] = state["set"].fileno()
    state["r"], state["w"] = os.pipe()
    asleep(state)


@operation("add to an epoll set of a sleeping process", prepare=_epoll, lives=True, look=info("fd"), **PROCESSES)
def _(folder: str, state: dict[str, Any]) -> None:
    state["set"].register(state["r"], select.EPOLLIN)


# ---------------------------------------------------------------- a process that lives, by itself


@operation(
    "store into its own memory", prepare=lambda folder, state: _buffer(state), lives=True, look=memory(), **PROCESSES
)
def _(folder: str, state: dict[str, Any]) -> None:
    state["keep"].value = b"after"


@operation(
    "chdir",
    prepare=nothing,
    lives=True,
    look=lambda folder, state: os.readlink(f"/proc/{state['pid']}/cwd"),
    **PROCESSES,
)
def _(folder: str, state: dict[str, Any]) -> None:
    os.chdir(f"{folder}/sub")


@operation("umask", prepare=nothing, lives=True, look=of_status("Umask"), **PROCESSES)
def _(folder: str, state: dict[str, Any]) -> None:
    os.umask(0o077)


@operation("set its name", prepare=nothing, lives=True, look=of_status("Name"), **PROCESSES)
def _(folder: str, state: dict[str, Any]) -> None:
    checked(libc.prctl(15, b"renamed", 0, 0, 0), "prctl")


@operation("catch a signal from now on", prepare=nothing, lives=True, look=of_status("SigCgt"), **PROCESSES)
def _(folder: str, state: dict[str, Any]) -> None:
    signal.signal(signal.SIGUSR2, lambda number, frame: None)


@operation("give up rights", prepare=nothing, lives=True, look=of_status("Uid", "CapEff"), **PROCESSES)
def _(folder: str, state: dict[str, Any]) -> None:
    os.setresuid(1, 1, 0)


@operation(
    "leave a zombie",
    prepare=nothing,
    lives=True,
    look=children,
    **PROCESSES,
)
def _(folder: str, state: dict[str, Any]) -> None:
    if os.fork() == 0:
        os._exit(0)
    os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
