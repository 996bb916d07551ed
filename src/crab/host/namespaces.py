"""Namespaces of other processes, entered by one thread for one system call."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
from collections.abc import Iterator

CLONE_NEWNET = 0x40000000
KINDS = {"net": CLONE_NEWNET, "ipc": 0x08000000, "uts": 0x04000000}
"""Those that one thread of a process can enter by itself."""
_PIDFD_GETFD = 438  # the same on every architecture; Linux 5.6
_SIOCGSKNS = 0x894C  # of <linux/sockios.h>: the network namespace of a socket
_libc = ctypes.CDLL(None, use_errno=True)


def _enter(fd: int, kind: int) -> None:
    if _libc.setns(fd, kind):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


@contextlib.contextmanager
def network(path: str) -> Iterator[None]:
    """Run the block with this thread (and no other) in the network namespace of `/proc/PID/ns/net`.

    A socket belongs for ever to the namespace it was made in, so it is used outside afterwards. Raises OSError.
    """
    other = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with _inside(other):
            yield
    finally:
        os.close(other)


@contextlib.contextmanager
def entered(pid: int, *kinds: str) -> Iterator[None]:
    """Run the block with this thread (and no other) in namespaces of a process. Raises OSError."""
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            theirs, own = (
                os.open(f"/proc/{who}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for who in (pid, "thread-self")
            )
            stack.callback(os.close, own)
            stack.callback(os.close, theirs)
            _enter(theirs, KINDS[kind])
            stack.callback(_enter, own, KINDS[kind])
        yield


@contextlib.contextmanager
def _inside(other: int) -> Iterator[None]:
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _enter(other, CLONE_NEWNET)
        try:
            yield
        finally:
            _enter(own, CLONE_NEWNET)
    finally:
        os.close(own)


def shares_our_network(pid: int) -> bool:
    """Whether a process is in the network namespace of this thread. Raises OSError if it is gone."""
    return os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/thread-self/ns/net")


@contextlib.contextmanager
def borrowed(pid: int, descriptor: int) -> Iterator[int]:
    """A descriptor of another process as one of ours, for the length of the block (pidfd_getfd(2)). Raises OSError."""
    process = os.pidfd_open(pid)
    try:
        ours = _libc.syscall(_PIDFD_GETFD, process, descriptor, 0)
        if ours < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
    finally:
        os.close(process)
    try:
        yield ours
    finally:
        os.close(ours)


def socket_beside(pid: int, descriptor: int, family: int, kind: int) -> socket.socket:
    """A socket of the network namespace that a socket of another process is of. Raises OSError."""
    with borrowed(pid, descriptor) as theirs:
        namespace = fcntl.ioctl(theirs, _SIOCGSKNS)
    try:
        with _inside(namespace):
            return socket.socket(family, kind)
    finally:
        os.close(namespace)


def socket_in(path: str, family: int, kind: int) -> socket.socket:
    """A socket of the network namespace at that path."""
    with network(path):
        return socket.socket(family, kind)
