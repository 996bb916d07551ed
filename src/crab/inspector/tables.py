"""Kernel tables of a sandbox: state that lies in no file and that outlives the process which changed it.

POSIX message queues, keyrings, io_uring and nested namespaces are missing here because nothing in a sandbox can make them
(`native/filter.h`).
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys
from pathlib import Path

import msgspec

from crab.host import namespaces, netlink
from crab.sandbox import door, wire

_GETALL = 13  # of semctl(2)
_TIME_WAIT = "06"  # state in /proc/net/tcp: no process has the connection any more
_LISTEN = 10
_DOOR = f"{int.from_bytes(socket.inet_aton(door.ADDRESS), sys.byteorder):08X}:{door.PORT:04X}"
"""The model's end of a connection, as /proc/net/tcp writes it."""
_SETTINGS = ("shmmax", "shmall", "shmmni", "msgmax", "msgmnb", "msgmni", "sem")
_libc = ctypes.CDLL(None, use_errno=True)
_UNIX_DIAG_BY_FAMILY = 20  # SOCK_DIAG_BY_FAMILY
_SHOW = 0x01 | 0x04 | 0x10  # UDIAG_SHOW_NAME, _PEER, _RQLEN
_NAME, _PEER, _QUEUES = 0, 2, 4  # UNIX_DIAG_NAME, _PEER, _RQLEN
_UNIX_MESSAGE = struct.Struct("=4B3I")


class Tables(msgspec.Struct, frozen=True, kw_only=True):
    """See the module; equal tables mean equal state."""

    mounts: tuple[str, ...]
    names: tuple[str, str]
    """Host and domain name."""
    shared_memory: tuple[str, ...] = ()
    semaphores: tuple[str, ...] = ()
    message_queues: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    """Limits of System V objects, which root in a sandbox may set."""
    sockets: tuple[str, ...] = ()
    """TCP, UDP and raw sockets with their state and what is queued, unix sockets with something queued. Not those that lead to
    the model: their other end is outside, and a restore resets them whatever their state was."""


def read(pid: int) -> Tables:
    """The tables of the sandbox whose init is that process. Raises OSError if it is gone."""
    with namespaces.entered(pid, "ipc", "uts", "net"):
        uname = os.uname()
        return Tables(
            mounts=tuple(Path(f"/proc/{pid}/mountinfo").read_text().splitlines()),
            names=(uname.nodename, Path("/proc/sys/kernel/domainname").read_text().strip()),
            shared_memory=tuple(" ".join(row[:-2]) for row in _rows("shm")),  # resident and swapped pages are no state
            semaphores=tuple(" ".join((*row[:-2], *_values(int(row[1]), int(row[3])))) for row in _rows("sem")),
            message_queues=tuple(map(" ".join, _rows("msg"))),
            settings=tuple(Path("/proc/sys/kernel", name).read_text() for name in _SETTINGS),
            sockets=tuple(sorted((*_internet(), *_unix()))),
        )


def _rows(kind: str) -> list[list[str]]:
    with open(f"/proc/sysvipc/{kind}") as table:
        next(table)
        return [line.split() for line in table]


def _values(identity: int, count: int) -> list[str]:
    values = (ctypes.c_ushort * count)()
    if _libc.semctl(identity, 0, _GETALL, values):
        return [f"unreadable {ctypes.get_errno()}"]
    return [str(value) for value in values]


def _internet() -> list[str]:
    found: list[str] = []
    for kind in ("tcp", "tcp6", "udp", "udp6", "raw", "raw6"):
        try:
            with open(f"/proc/thread-self/net/{kind}") as table:
                next(table, None)
                for line in table:
                    fields = line.split()
                    if fields[3] != _TIME_WAIT and _DOOR not in fields[1:3]:
                        found.append(f"{kind} {' '.join(fields[1:5])} {fields[9]}")
        except FileNotFoundError:
            continue
    return found


def _unix() -> list[str]:
    """Unix sockets in whose queue something is, without the line to init."""
    request = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, _SHOW, 0, 0)
    queues: list[tuple[int, int, str]] = []
    lines: set[int] = set()
    for body in netlink.ask(netlink.SOCK_DIAG, _UNIX_DIAG_BY_FAMILY, netlink.DUMP, request):
        _, _, state, _, inode, _, _ = _UNIX_MESSAGE.unpack_from(body)
        at = _UNIX_MESSAGE.size
        name, peer, received, sent = b"", 0, 0, 0
        while at + 4 <= len(body):
            size, kind = struct.unpack_from("=HH", body, at)
            if kind == _NAME:
                name = body[at + 4 : at + size]
            elif kind == _PEER:
                (peer,) = struct.unpack_from("=I", body, at + 4)
            elif kind == _QUEUES:
                received, sent = struct.unpack_from("=II", body, at + 4)
            at += max(4, (size + 3) & ~3)
        if name == wire.NAME:
            lines.add(inode)
        elif received or (sent and state != _LISTEN):
            queues.append((inode, peer, f"unix {inode} {state} {received} {sent}"))
    return [text for _, peer, text in queues if peer not in lines]


def changes(old: Tables, new: Tables) -> list[str]:
    """What differs, in words; sockets are left out, as they matter only to whoever holds them."""
    found: list[str] = []
    for name, what in (
        ("mounts", "file systems were mounted or unmounted"),
        ("names", "the host or domain name was set"),
        ("shared_memory", "System V shared memory was made, removed or used"),
        ("semaphores", "System V semaphores were made, removed or used"),
        ("message_queues", "System V message queues were made, removed or used"),
        ("settings", "limits of System V objects were set"),
    ):
        if getattr(old, name) != getattr(new, name):
            found.append(what)
    return found
