"""Operations on the content of files: every way to write, and what writes nothing."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import socket
import struct
import time
from typing import Any

from bench.operations.looking import (
    asleep,
)
from bench.operations.operation import (
    PAGE,
    SIZE,
    checked,
    libc,
    opened,
    operation,
)


@operation("write", "a")
def _(folder: str, state: dict[str, Any]) -> None:
    os.write(opened(f"{folder}/a"), b"y")


@operation("append", "a")
def _(folder: str, state: dict[str, Any]) -> None:
    os.write(opened(f"{folder}/a", os.O_WRONLY | os.O_APPEND), b"y")


@operation("pwritev", "a")
def _(folder: str, state: dict[str, Any]) -> None:
    os.pwritev(opened(f"{folder}/a"), [b"1", b"2"], 5)


@operation("pwritev2 with RWF_APPEND", "a")
def _(folder: str, state: dict[str, Any]) -> None:
    os.pwritev(opened(f"{folder}/a"), [b"1"], 0, 0x10)


@operation("write with O_DIRECT", "a", needs="direct")
def _(folder: str, state: dict[str, Any]) -> None:
    os.write(opened(f"{folder}/a", os.O_WRONLY | os.O_DIRECT), mmap.mmap(-1, PAGE))


@operation("write with O_SYNC", "a")
def _(folder: str, state: dict[str, Any]) -> None:
    os.write(opened(f"{folder}/a", os.O_WRONLY | os.O_SYNC), b"y")


@operation("open with O_TRUNC", "a")
def _(folder: str, state: dict[str, Any]) -> None:
    opened(f"{folder}/a", os.O_WRONLY | os.O_TRUNC)


@operation("truncate", "a")
def _(folder: str, state: dict[str, Any]) -> None:
    os.truncate(f"{folder}/a", 10)


@operation("ftruncate to more", "a")
def _(folder: str, state: dict[str, Any]) -> None:
    os.ftruncate(opened(f"{folder}/a"), SIZE + 1)


@operation("ftruncate to what it has", changes=False)
def _(folder: str, state: dict[str, Any]) -> None:
    os.ftruncate(opened(f"{folder}/a"), SIZE)


def fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    """fallocate(2)."""
    checked(libc.fallocate(fd, mode, ctypes.c_long(offset), ctypes.c_long(length)), "fallocate")


@operation("fallocate behind the end", "a")
def _(folder: str, state: dict[str, Any]) -> None:
    fallocate(opened(f"{folder}/a"), 0, SIZE, PAGE)


@operation("fallocate, size kept", changes=False)
def _(folder: str, state: dict[str, Any]) -> None:
    fallocate(opened(f"{folder}/a"), 1, SIZE, PAGE)


@operation("punch a hole", "a")
def _(folder: str, state: dict[str, Any]) -> None:
    fallocate(opened(f"{folder}/a"), 3, 0, PAGE)


@operation("zero a range", "a", needs="zero")
def _(folder: str, state: dict[str, Any]) -> None:
    fallocate(opened(f"{folder}/a"), 0x10, 0, PAGE)


@operation("collapse a range", "a", needs="collapse")
def _(folder: str, state: dict[str, Any]) -> None:
    fallocate(opened(f"{folder}/a"), 0x08, 0, PAGE)


@operation("insert a range", "a", needs="collapse")
def _(folder: str, state: dict[str, Any]) -> None:
    fallocate(opened(f"{folder}/a"), 0x20, 0, PAGE)


def other_b(folder: str, state: dict[str, Any]) -> None:
    with open(f"{folder}/b", "w") as file:
        file.write("b" * SIZE)


@operation("sendfile", "a", prepare=other_b)
def _(folder: str, state: dict[str, Any]) -> None:
    os.sendfile(opened(f"{folder}/a"), opened(f"{folder}/b"), 0, 100)


@operation("splice from a pipe", "a")
def _(folder: str, state: dict[str, Any]) -> None:
    r, w = os.pipe()
    os.write(w, b"z" * 100)
    os.splice(r, opened(f"{folder}/a"), 100)


@operation("copy_file_range", "a", prepare=other_b)
def _(folder: str, state: dict[str, Any]) -> None:
    os.copy_file_range(opened(f"{folder}/b"), opened(f"{folder}/a"), 100)


@operation("clone a whole file (FICLONE)", "a", needs="reflink", prepare=other_b)
def _(folder: str, state: dict[str, Any]) -> None:
    fcntl.ioctl(opened(f"{folder}/a"), 0x40049409, opened(f"{folder}/b"))


@operation("clone a range (FICLONERANGE)", "a", needs="reflink", prepare=other_b)
def _(folder: str, state: dict[str, Any]) -> None:
    span = struct.pack("qQQQ", opened(f"{folder}/b"), 0, PAGE, PAGE)
    fcntl.ioctl(opened(f"{folder}/a"), 0x4020940D, span)


@operation("write through an inherited descriptor", "a")
def _(folder: str, state: dict[str, Any]) -> None:
    fd = os.open(f"{folder}/a", os.O_WRONLY)
    if pid := os.fork():
        os.waitpid(pid, 0)
    else:
        os.write(fd, b"y")
        os._exit(0)


@operation("write through a descriptor that came over a socket", "a")
def _(folder: str, state: dict[str, Any]) -> None:
    left, right = socket.socketpair()
    if pid := os.fork():
        socket.send_fds(left, [b"f"], [opened(f"{folder}/a")])
        os.waitpid(pid, 0)
    else:
        os.write(socket.recv_fds(right, 1, 1)[1][0], b"y")
        os._exit(0)


@operation("write through /proc/self/fd", "a")
def _(folder: str, state: dict[str, Any]) -> None:
    os.write(os.open(f"/proc/self/fd/{opened(f'{folder}/a', os.O_RDONLY)}", os.O_WRONLY), b"y")


def mapped(path: str, flags: int = mmap.MAP_SHARED) -> mmap.mmap:
    """The first page of a file in memory."""
    return mmap.mmap(opened(path), PAGE, flags)


@operation("first store into a shared mapping", "a")
def _(folder: str, state: dict[str, Any]) -> None:
    mapped(f"{folder}/a")[0:1] = b"M"


def _map(folder: str, state: dict[str, Any]) -> None:
    state["map"] = mapped(f"{folder}/a")


def _map_and_store(folder: str, state: dict[str, Any]) -> None:
    _map(folder, state)
    state["map"][0:1] = b"1"


@operation("store into a page that was mapped before", "a", prepare=_map, lives=True)
def _(folder: str, state: dict[str, Any]) -> None:
    state["map"][0:1] = b"M"


@operation("store into a page that is writable already", "a", prepare=_map_and_store, lives=True)
def _(folder: str, state: dict[str, Any]) -> None:
    state["map"][1:2] = b"2"


def _map_in_sleeper(folder: str, state: dict[str, Any]) -> None:
    _map_and_store(folder, state)
    asleep(state)


@operation("store by one of two processes that share a writable page", "a", prepare=_map_in_sleeper, lives=True)
def _(folder: str, state: dict[str, Any]) -> None:
    state["map"][1:2] = b"2"


@operation("store and msync", "a")
def _(folder: str, state: dict[str, Any]) -> None:
    area = mapped(f"{folder}/a")
    area[0:1] = b"M"
    area.flush()


@operation("read(2) into a shared mapping", "a", prepare=other_b)
def _(folder: str, state: dict[str, Any]) -> None:
    os.preadv(opened(f"{folder}/b"), [mapped(f"{folder}/a")], 0)


@operation("store into a private mapping", changes=False)
def _(folder: str, state: dict[str, Any]) -> None:
    mapped(f"{folder}/a", mmap.MAP_PRIVATE)[0:1] = b"M"


def uring_write(fd: int, data: bytes, polled: bool) -> None:
    """Write by io_uring; `polled`: a thread of the kernel takes the request without a system call (IORING_SETUP_SQPOLL)."""
    parameters = bytearray(120)
    struct.pack_into("<III", parameters, 0, 0, 0, 2 if polled else 0)
    struct.pack_into("<I", parameters, 16, 1000)
    pointer = (ctypes.c_char * 120).from_buffer(parameters)
    ring = checked(libc.syscall(425, 4, ctypes.byref(pointer)), "io_uring_setup")
    entries, completions = struct.unpack_from("<II", parameters, 0)
    tail, _, _, flags, _, places = struct.unpack_from("<6I", parameters, 44)
    done_head, done_tail, _, _, _, results = struct.unpack_from("<6I", parameters, 80)
    queue = mmap.mmap(ring, places + 4 * entries, mmap.MAP_SHARED, offset=0)
    done = mmap.mmap(ring, results + 16 * completions, mmap.MAP_SHARED, offset=0x8000000)
    requests = mmap.mmap(ring, 64 * entries, mmap.MAP_SHARED, offset=0x10000000)
    buffer = ctypes.create_string_buffer(data, len(data))
    requests[0:64] = struct.pack("<BBHiQQI", 23, 0, 0, fd, 0, ctypes.addressof(buffer), len(data)).ljust(64, b"\0")
    struct.pack_into("<I", queue, places, 0)
    struct.pack_into("<I", queue, tail, 1)
    if not polled:
        checked(libc.syscall(426, ring, 1, 1, 1, None, 0), "io_uring_enter")
    end = time.monotonic() + 10
    while struct.unpack_from("<I", done, done_tail) == struct.unpack_from("<I", done, done_head):
        if polled and struct.unpack_from("<I", queue, flags)[0] & 1:  # the thread went to sleep
            checked(libc.syscall(426, ring, 0, 0, 2, None, 0), "io_uring_enter")
        if time.monotonic() > end:
            raise TimeoutError("io_uring")
    (written,) = struct.unpack_from("<i", done, results + 8)
    if written != len(data):
        raise OSError(-written, os.strerror(-written), "io_uring write")
    os.close(ring)


@operation("io_uring", "a", needs="uring")
def _(folder: str, state: dict[str, Any]) -> None:
    uring_write(opened(f"{folder}/a"), b"ring", polled=False)


@operation("io_uring with SQPOLL", "a", needs="uring")
def _(folder: str, state: dict[str, Any]) -> None:
    uring_write(opened(f"{folder}/a"), b"ring", polled=True)


@operation("io_submit", "a")
def _(folder: str, state: dict[str, Any]) -> None:
    context = ctypes.c_ulong()
    checked(libc.syscall(206, 1, ctypes.byref(context)), "io_setup")
    buffer = ctypes.create_string_buffer(b"aio", 3)
    block = struct.pack("<QIIHhIQQqQII", 0, 0, 0, 1, 0, opened(f"{folder}/a"), ctypes.addressof(buffer), 3, 0, 0, 0, 0)
    request = ctypes.create_string_buffer(block, len(block))
    checked(libc.syscall(209, context, 1, ctypes.byref(ctypes.c_void_p(ctypes.addressof(request)))), "io_submit")
    event = ctypes.create_string_buffer(32)
    checked(libc.syscall(208, context, 1, 1, event, None), "io_getevents")


def _write_soon(folder: str, state: dict[str, Any]) -> None:
    state["fd"] = opened(f"{folder}/a")
    os.pwrite(state["fd"], b"1", 0)


@operation("second write within a tick of the clock", "a", prepare=_write_soon, lives=True)
def _(folder: str, state: dict[str, Any]) -> None:
    os.pwrite(state["fd"], b"2", 0)


@operation("write with the content that was there", changes=False)
def _(folder: str, state: dict[str, Any]) -> None:
    os.write(opened(f"{folder}/a"), b"x" * SIZE)


@operation("write and write back", changes=False)
def _(folder: str, state: dict[str, Any]) -> None:
    fd = opened(f"{folder}/a")
    os.pwrite(fd, b"y" * SIZE, 0)
    os.pwrite(fd, b"x" * SIZE, 0)


@operation("write nothing", changes=False)
def _(folder: str, state: dict[str, Any]) -> None:
    os.write(opened(f"{folder}/a"), b"")


def _hole(folder: str, state: dict[str, Any]) -> None:
    os.truncate(f"{folder}/a", 0)
    os.truncate(f"{folder}/a", 1 << 20)


@operation("write zeros into a hole", changes=False, prepare=_hole)
def _(folder: str, state: dict[str, Any]) -> None:
    os.pwrite(opened(f"{folder}/a"), bytes(PAGE), 1 << 19)


@operation("write into a hole", "a", prepare=_hole)
def _(folder: str, state: dict[str, Any]) -> None:
    os.pwrite(opened(f"{folder}/a"), b"y", 1 << 19)


# ---------------------------------------------------------------- nothing


@operation("read", changes=False)
def _(folder: str, state: dict[str, Any]) -> None:
    os.read(opened(f"{folder}/a", os.O_RDONLY), SIZE)


@operation("stat, list, read a link", changes=False)
def _(folder: str, state: dict[str, Any]) -> None:
    os.stat(f"{folder}/a")
    os.listdir(folder)
    os.readlink(f"{folder}/ln")


@operation("open for writing and write nothing", changes=False)
def _(folder: str, state: dict[str, Any]) -> None:
    opened(f"{folder}/a")


@operation("calls that fail", changes=False)
def _(folder: str, state: dict[str, Any]) -> None:
    for call in (
        lambda: os.unlink(f"{folder}/nothing"),
        lambda: os.mkdir(f"{folder}/sub"),
        lambda: os.rename(f"{folder}/sub", f"{folder}/sub/deep/x"),
        lambda: os.rmdir(f"{folder}/sub"),
        lambda: os.write(opened(f"{folder}/a", os.O_RDONLY), b"y"),
    ):
        with contextlib.suppress(OSError):
            call()


@operation("lock and unlock", changes=False)
def _(folder: str, state: dict[str, Any]) -> None:
    fd = opened(f"{folder}/a")
    fcntl.flock(fd, fcntl.LOCK_EX)
    fcntl.lockf(fd, fcntl.LOCK_EX)
    fcntl.lockf(fd, fcntl.LOCK_UN)


@operation("fsync", changes=False)
def _(folder: str, state: dict[str, Any]) -> None:
    os.fsync(opened(f"{folder}/a"))


@operation("read through a shared mapping", changes=False)
def _(folder: str, state: dict[str, Any]) -> None:
    bytes(mapped(f"{folder}/a")[0:10])


@operation("processes that come and go", changes=False)
def _(folder: str, state: dict[str, Any]) -> None:
    for _ in range(5):
        if pid := os.fork():
            os.waitpid(pid, 0)
        else:
            os._exit(0)
