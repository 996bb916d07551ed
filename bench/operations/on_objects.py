"""Operations on memory that is shared, System V objects, keys and mounts."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import struct
from typing import Any

from bench.operations.looking import (
    asleep,
    memory,
    through,
)
from bench.operations.operation import (
    KEY,
    PAGE,
    Look,
    checked,
    libc,
    opened,
    operation,
)

SHM = "/dev/shm/crab-operations"


def _content(path: str) -> Look:
    def look(folder: str, state: dict[str, Any]) -> bytes | None:
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
            return file.read()
        return None

    return look


def _unlink_shm(folder: str, state: dict[str, Any]) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(SHM)


def _make_shm(folder: str, state: dict[str, Any]) -> None:
    os.write(opened(SHM, os.O_CREAT | os.O_RDWR), b"posix")


@operation("make POSIX shared memory", SHM, look=_content(SHM), clean=_unlink_shm)
def _(folder: str, state: dict[str, Any]) -> None:
    _make_shm(folder, state)


@operation("store into POSIX shared memory", SHM, prepare=_make_shm, look=_content(SHM), clean=_unlink_shm)
def _(folder: str, state: dict[str, Any]) -> None:
    mmap.mmap(opened(SHM), 5)[0:1] = b"P"


def _memfd(folder: str, state: dict[str, Any]) -> None:
    state["fd"] = os.memfd_create("operations")
    os.write(state["fd"], b"memory")


@operation(
    "write to a memory file",
    prepare=_memfd,
    lives=True,
    kind="processes",
    look=through("fd", lambda fd: os.pread(fd, 99, 0)),
)
def _(folder: str, state: dict[str, Any]) -> None:
    os.pwrite(state["fd"], b"M", 0)


def _anonymous(folder: str, state: dict[str, Any]) -> None:
    state["map"] = mmap.mmap(-1, PAGE)
    state["map"][0:1] = b"1"
    state["at"] = ctypes.addressof(ctypes.c_char.from_buffer(state["map"]))
    asleep(state)


@operation(
    "store into anonymous memory that a sleeping process shares",
    prepare=_anonymous,
    lives=True,
    kind="processes",
    look=memory(),
)
def _(folder: str, state: dict[str, Any]) -> None:
    state["map"][0:1] = b"2"


def _nameless(folder: str, state: dict[str, Any]) -> None:
    state["fd"] = opened(f"{folder}/gone", os.O_CREAT | os.O_RDWR)
    os.unlink(f"{folder}/gone")


@operation(
    "write to an open file without a name",
    prepare=_nameless,
    lives=True,
    kind="processes",
    look=through("fd", lambda fd: os.pread(fd, 99, 0)),
)
def _(folder: str, state: dict[str, Any]) -> None:
    os.write(state["fd"], b"gone")


# ---------------------------------------------------------------- System V


def _table(name: str) -> Look:
    """Looks at a table of /proc/sysvipc without times and pids of the last call."""

    def look(folder: str, state: dict[str, Any]) -> object:
        get, value = {"sem": (libc.semget, _semaphore), "shm": (libc.shmget, _segment), "msg": (libc.msgget, _waiting)}[
            name
        ]
        identity = get(KEY, 0, 0) if name != "msg" else get(KEY, 0)
        return None if identity < 0 else (identity, value(identity))

    return look


def _semaphore(identity: int) -> int:
    return libc.semctl(identity, 0, 12)


def _segment(identity: int) -> bytes:
    at = libc.shmat(identity, None, 0o10000)
    try:
        return ctypes.string_at(at, 16)
    finally:
        libc.shmdt(ctypes.c_void_p(at))


def _waiting(identity: int) -> bytes:
    status = ctypes.create_string_buffer(256)
    checked(libc.msgctl(identity, 2, status), "msgctl")
    return status.raw[72:96]  # bytes, messages and the limit


def _remove_ipc(folder: str, state: dict[str, Any]) -> None:
    for identity, remove in (
        (libc.semget(KEY, 0, 0), lambda i: libc.semctl(i, 0, 0)),
        (libc.shmget(KEY, 0, 0), lambda i: libc.shmctl(i, 0, None)),
        (libc.msgget(KEY, 0), lambda i: libc.msgctl(i, 0, None)),
    ):
        if identity >= 0:
            remove(identity)


def _sem(folder: str, state: dict[str, Any]) -> None:
    checked(libc.semget(KEY, 1, 0o1600), "semget")


def _seg(folder: str, state: dict[str, Any]) -> None:
    identity = checked(libc.shmget(KEY, PAGE, 0o1600), "shmget")
    ctypes.memset(libc.shmat(identity, None, 0), 1, 4)


def _msg(folder: str, state: dict[str, Any]) -> None:
    checked(libc.msgget(KEY, 0o1600), "msgget")


def _sysv(table: str, **options: Any) -> dict[str, Any]:
    return {"kind": "processes", "look": _table(table), "clean": _remove_ipc, **options}


@operation("make a semaphore", **_sysv("sem"))
def _(folder: str, state: dict[str, Any]) -> None:
    _sem(folder, state)


@operation("semaphore operation, no process left", **_sysv("sem", prepare=_sem))
def _(folder: str, state: dict[str, Any]) -> None:
    checked(libc.semop(libc.semget(KEY, 1, 0), struct.pack("<Hhh", 0, 3, 0), 1), "semop")


@operation("semaphore up and down", changes=False, **_sysv("sem", prepare=_sem))
def _(folder: str, state: dict[str, Any]) -> None:
    for step in (3, -3):
        checked(libc.semop(libc.semget(KEY, 1, 0), struct.pack("<Hhh", 0, step, 0), 1), "semop")


@operation("make System V shared memory", **_sysv("shm"))
def _(folder: str, state: dict[str, Any]) -> None:
    _seg(folder, state)


@operation("store into System V shared memory, no process left", **_sysv("shm", prepare=_seg))
def _(folder: str, state: dict[str, Any]) -> None:
    ctypes.memset(libc.shmat(libc.shmget(KEY, PAGE, 0), None, 0), 2, 4)


@operation("make a message queue", **_sysv("msg"))
def _(folder: str, state: dict[str, Any]) -> None:
    _msg(folder, state)


@operation("send a message, no process left", **_sysv("msg", prepare=_msg))
def _(folder: str, state: dict[str, Any]) -> None:
    checked(libc.msgsnd(libc.msgget(KEY, 0), struct.pack("<q", 1) + b"hello", 5, 0), "msgsnd")


@operation("remove a semaphore", **_sysv("sem", prepare=_sem))
def _(folder: str, state: dict[str, Any]) -> None:
    _remove_ipc(folder, state)


# ---------------------------------------------------------------- keys and mounts


def _keys(folder: str, state: dict[str, Any]) -> list[str]:
    with open("/proc/keys") as file:
        return [line.split(None, 7)[-1] for line in file if "crab-operations" in line]


def _remove_key(folder: str, state: dict[str, Any]) -> None:
    identity = libc.syscall(250, 10, -4, b"user", b"crab-operations", 0)  # KEYCTL_SEARCH in the user's keyring
    if identity >= 0:
        libc.syscall(250, 9, identity, -4)  # KEYCTL_UNLINK


@operation("add a key", needs="keyring", kind="processes", look=_keys, clean=_remove_key)
def _(folder: str, state: dict[str, Any]) -> None:
    checked(libc.syscall(248, b"user", b"crab-operations", b"secret", 6, -4), "add_key")


def _mounts(folder: str, state: dict[str, Any]) -> list[str]:
    with open(f"/proc/{state['pid']}/mountinfo") as file:
        return [line.partition(" - ")[2] for line in file if "crab-operations" in line]


def _mount(target: str) -> None:
    checked(libc.mount(b"crab-operations", target.encode(), b"tmpfs", 0, None), "mount")


def nothing(folder: str, state: dict[str, Any]) -> None:
    pass


@operation("mount a tmpfs", needs="mount", kind="processes", prepare=nothing, lives=True, look=_mounts)
def _(folder: str, state: dict[str, Any]) -> None:
    _mount(f"{folder}/empty")


@operation(
    "mount a tmpfs and unmount it",
    changes=False,
    needs="mount",
    kind="processes",
    prepare=nothing,
    lives=True,
    look=_mounts,
)
def _(folder: str, state: dict[str, Any]) -> None:
    _mount(f"{folder}/empty")
    checked(libc.umount(f"{folder}/empty".encode()), "umount")


def _mount_before(folder: str, state: dict[str, Any]) -> None:
    _mount(f"{folder}/empty")


def _mounted_files(folder: str, state: dict[str, Any]) -> list[str]:
    return os.listdir(f"/proc/{state['pid']}/root{folder}/empty")


@operation(
    "write into a tmpfs that was mounted before",
    needs="mount",
    kind="processes",
    prepare=_mount_before,
    lives=True,
    look=_mounted_files,
)
def _(folder: str, state: dict[str, Any]) -> None:
    opened(f"{folder}/empty/new", os.O_CREAT)
