"""TCP connections of a network namespace: list them, and cut them so that both ends learn of it."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
from pathlib import Path

import msgspec

from crab.host import netlink

_BY_FAMILY, _DESTROY = 20, 21
_CLOSE, _TIME_WAIT, _LISTEN = 7, 6, 10  # states of <linux/tcp_states.h>: those are no connections
_STATES = 0x1FFF & ~1 & ~(1 << _CLOSE | 1 << _TIME_WAIT | 1 << _LISTEN)
_ANSWER = struct.Struct("=4B48s")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

LISTENING = "0A"  # state in /proc/net/tcp: TCP_LISTEN (include/net/tcp_states.h)


class Connection(msgspec.Struct, frozen=True):
    """One end of a TCP connection."""

    family: int
    local: Address
    remote: Address
    identity: bytes
    """As the kernel names it (struct inet_diag_sockid)."""


def established() -> list[Connection]:
    """Every TCP socket of this thread's network namespace that has a peer, or is about to have one. Raises OSError."""
    found: list[Connection] = []
    for family in (socket.AF_INET, socket.AF_INET6):
        for body in netlink.ask(netlink.SOCK_DIAG, _BY_FAMILY, netlink.DUMP, _request(family, bytes(48))):
            kind, _, _, _, identity = _ANSWER.unpack_from(body)
            local, remote = _address(kind, identity[4:20]), _address(kind, identity[20:36])
            found.append(Connection(kind, local, remote, identity))
    return found


def cut(connection: Connection) -> None:
    """End a connection: its program gets ECONNABORTED, the peer a reset. No error if it is gone already.

    Raises OSError; EOPNOTSUPP on a kernel without CONFIG_INET_DIAG_DESTROY.
    """
    try:
        netlink.ask(netlink.SOCK_DIAG, _DESTROY, netlink.ACK, _request(connection.family, connection.identity))
    except FileNotFoundError:
        pass


def _request(family: int, identity: bytes) -> bytes:
    return struct.pack("=4BI", family, socket.IPPROTO_TCP, 0, 0, _STATES) + identity


def _address(family: int, data: bytes) -> Address:
    if family == socket.AF_INET:
        return ipaddress.IPv4Address(data[:4])
    address = ipaddress.IPv6Address(data)
    return address.ipv4_mapped or address


def most_unread(pid: int) -> int:
    """Bytes in the fullest receive queue of a TCP connection in the network namespace of a process."""
    most = 0
    for family in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError), open(f"/proc/{pid}/net/{family}") as table:
            next(table, None)
            for line in table:
                fields = line.split()
                if fields[3] != LISTENING:  # there it counts connections
                    most = max(most, int(fields[4].partition(":")[2], 16))
    return most


def restorable_unread() -> int:
    """The most that a restored connection can hold: without CAP_NET_ADMIN on the host its buffer has the ordinary limit."""
    return int(Path("/proc/sys/net/core/rmem_max").read_text())
