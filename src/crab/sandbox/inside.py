"""Paths inside a sandbox, opened from outside.

A sandbox owns its file system, so every path in it may be a link to anywhere. They are resolved with the sandbox's root
as the root of everything: a link never leads to a file of the host.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from crab.host.beneath import open_beneath

T = TypeVar("T")
_PR_SET_SECUREBITS, _SECBIT_NO_SETUID_FIXUP = 28, 4
_libc = ctypes.CDLL(None, use_errno=True)


def open_in(root: int, path: str | bytes, flags: int, mode: int = 0) -> int:
    """Open a path below the directory descriptor `root` as if that were `/`. Raises OSError."""
    return open_beneath(root, os.fsencode(path).lstrip(b"/"), flags, mode, links="in-root")


@contextlib.contextmanager
def root_of(pid: int) -> Iterator[int]:
    """Descriptor of the root of a process's mount namespace."""
    fd = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def opened(pid: int, path: str | bytes, flags: int, mode: int = 0) -> Iterator[int]:
    """Descriptor of a path in the sandbox whose init has that pid."""
    with root_of(pid) as root:
        fd = open_in(root, path, flags, mode)
    try:
        yield fd
    finally:
        os.close(fd)


def read_text(pid: int, path: str, limit: int = 1 << 20) -> str:
    """Beginning of a regular file in the sandbox (undecodable bytes replaced); empty if there is none."""
    try:
        # O_NONBLOCK: it might be a FIFO
        with opened(pid, path, os.O_RDONLY | os.O_NONBLOCK) as fd:
            return os.read(fd, limit).decode(errors="replace")
    except OSError:
        return ""


def as_owner(uid: int, function: Callable[[], T]) -> T:
    """Run a function with the file system ids of a sandbox's root and all capabilities of the host's, in its own thread.

    The host's root has no place in the sandbox's map of ids: a file that it creates there gives EOVERFLOW. Credentials
    belong to the thread, so nothing else notices.
    """

    def run() -> T:
        if _libc.prctl(_PR_SET_SECUREBITS, _SECBIT_NO_SETUID_FIXUP, 0, 0, 0):  # keep the capabilities
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        _libc.setfsgid(uid)
        _libc.setfsuid(uid)
        return function()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()
