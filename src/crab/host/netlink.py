"""Netlink: a question to the kernel and its answers. Knows the envelope of messages, nothing of what is in them."""

from __future__ import annotations

import os
import socket
import struct

SOCK_DIAG = 4  # protocol numbers of <linux/netlink.h>
NETFILTER = 12
REQUEST, ACK, DUMP = 1, 4, 0x300
_ERROR, _DONE = 2, 3
_HEAD = struct.Struct("=IHHII")
_BUFFER = 1 << 17


def ask(protocol: int, kind: int, flags: int, body: bytes) -> list[bytes]:
    """Send one message and return the bodies of the answers, from the network namespace of this thread.

    `flags` holds `DUMP` for a list or `ACK` for a command. Raises OSError with what the kernel says.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol) as line:
        line.settimeout(10.0)
        line.bind((0, 0))
        line.send(_HEAD.pack(_HEAD.size + len(body), kind, flags | REQUEST, 1, 0) + body)
        found: list[bytes] = []
        while True:
            data = line.recv(_BUFFER)
            while len(data) >= _HEAD.size:
                size, answer, _, _, _ = _HEAD.unpack_from(data)
                content = data[_HEAD.size : size]
                data = data[(size + 3) & ~3 :]
                if answer == _DONE:
                    return found
                if answer == _ERROR:
                    code = -struct.unpack_from("=i", content)[0]
                    if code:
                        raise OSError(code, os.strerror(code))
                    return found
                found.append(content)
