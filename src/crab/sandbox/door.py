"""The sandbox's door to its model: a listening socket of the host in the network namespace of the sandbox.

Whatever inside connects to it talks to the host, and to nothing else; who it is needs no header and no address, as each
sandbox has its own (law 6: an object that Crab owns and makes again). It lives as long as an incarnation: a rewind opens one in
the new namespace before the processes are there. Their old connections lead nowhere then, and are reset at once.
"""

from __future__ import annotations

import socket
from typing import Protocol

from crab.errors import LaunchFailed
from crab.host import namespaces

ADDRESS, PORT = "127.0.0.1", 2722
BACKLOG = 256


class Porter(Protocol):
    """Who serves doors."""

    def admit(self, sandbox: str, key: str, door: socket.socket) -> None:
        """Serve a listening socket, whose owner you are now. `key` names the incarnation."""
        ...

    def dismiss(self, key: str) -> None:
        """Close the door of an incarnation that has ended. No error if it has none."""
        ...


class Door:
    """See the module. Used by who holds the sandbox's operation."""

    def __init__(self, sandbox: str, key: str, porter: Porter) -> None:
        self._sandbox, self._key, self._porter = sandbox, key, porter

    def open(self, pid: int) -> None:
        """Open it in the network namespace of a process. Raises `LaunchFailed`."""
        try:
            door = namespaces.socket_in(f"/proc/{pid}/ns/net", socket.AF_INET, socket.SOCK_STREAM)
            try:
                door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                door.bind((ADDRESS, PORT))
                door.listen(BACKLOG)
                door.setblocking(False)
            except BaseException:
                door.close()
                raise
        except OSError as error:
            raise LaunchFailed(
                f"sandbox {self._key} has no way to its model: {error}",
                remedy=f"end what listens on port {PORT} in it, or restart it",
            ) from error
        self._porter.admit(self._sandbox, self._key, door)

    def close(self) -> None:
        """Close it. Can be repeated."""
        self._porter.dismiss(self._key)
