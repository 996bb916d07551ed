"""The line to a sandbox's init: messages as in `native/protocol.h`, and a connection that cannot be led astray.

Knows how frames look on the socket; what they mean for a command is `command.py`'s business.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
from dataclasses import dataclass
from enum import IntEnum

from crab.errors import SandboxGone
from crab.host import namespaces

PROTOCOL = 1
WINDOW = 65536
NAME = b"\0crab-init"
LISTENER = 3
"""Descriptor of init's listening socket."""
MAX_FRAME = 4 << 20
SO_SNDBUFFORCE = 32  # needs CAP_NET_ADMIN; not in Python's socket module
_FRAME = struct.Struct("<BBHIq")
_START = struct.Struct("<5I2H64I")
_ENTRY = struct.Struct("<2i2qq2i64s")


class Kind(IntEnum):
    """Types of frames; see `native/protocol.h`."""

    START = 1
    ATTACH = 2
    ACK = 3
    INPUT = 4
    SIGNAL = 5
    RESIZE = 6
    LIST = 7
    RELEASE = 8
    DETACH = 9
    STARTED = 64
    FAILED = 65
    OUTPUT = 66
    DRAINED = 67
    EXITED = 68
    INPUT_ACK = 69
    ENTRY = 70
    DONE = 71


@dataclass(frozen=True, slots=True)
class Frame:
    """One message in either direction."""

    kind: int
    stream: int = 0
    exec: int = 0
    value: int = 0
    payload: bytes = b""


@dataclass(frozen=True, slots=True)
class Entry:
    """What init knows of one command."""

    exec: int
    pid: int
    exited: bool
    status: int
    acknowledged: tuple[int, int]
    input: int
    tty: bool
    has_input: bool
    name: str


@dataclass(frozen=True, slots=True)
class StartRequest:
    """A command as init takes it: everything resolved to numbers and bytes."""

    name: str
    cwd: str
    argv: tuple[str, ...]
    env: tuple[str, ...]
    """`NAME=value` each."""
    uid: int = 0
    gid: int = 0
    groups: tuple[int, ...] = ()
    tty: bool = False
    stdin: bool = False
    rows: int = 24
    columns: int = 80

    def frame(self) -> Frame:
        """The frame to send. Strings are encoded as file names are (surrogate escapes become the original bytes)."""
        groups = self.groups[:64]
        head = _START.pack(
            self.uid,
            self.gid,
            len(groups),
            len(self.argv),
            len(self.env),
            self.rows,
            self.columns,
            *groups,
            *[0] * (64 - len(groups)),
        )
        strings = b"".join(os.fsencode(part) + b"\0" for part in (self.name, self.cwd, *self.argv, *self.env))
        return Frame(Kind.START, value=self.tty | self.stdin << 1, payload=head + strings)


class InitLine:
    """One connection to an init. Sending is safe from any thread; one thread receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    @classmethod
    def connect(cls, pid: int) -> InitLine:
        """Connect to the init with that host pid. Raises `SandboxGone` if there is none, or something else answers.

        The name is abstract: it exists only in one network namespace, so that is where the socket is made. It is that of
        the sandbox; one that shares the host's network listens in a namespace apart, which its socket leads to. Who
        listens must be that very process (law 6: nothing of the sandbox leads the host astray).
        """
        try:
            if namespaces.shares_our_network(pid):
                connection = namespaces.socket_beside(pid, LISTENER, socket.AF_UNIX, socket.SOCK_SEQPACKET)
            else:
                connection = namespaces.socket_in(f"/proc/{pid}/ns/net", socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise _unreachable(pid, error) from error
        try:
            # a START frame holds a whole command line: more than the default send buffer takes in one message
            connection.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, MAX_FRAME)
            connection.connect(NAME)
            peer = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
            if peer != pid:
                raise SandboxGone(
                    f"process {peer} answers instead of the sandbox's init {pid}",
                    remedy="`crab recover` restores the newest checkpoint",
                )
        except OSError as error:
            connection.close()
            raise _unreachable(pid, error) from error
        except BaseException:
            connection.close()
            raise
        return cls(connection)

    def send(self, frame: Frame, cgroup: int = -1) -> None:
        """Send a frame. Raises BrokenPipeError if init has closed the line."""
        head = _FRAME.pack(frame.kind, frame.stream, 0, frame.exec, frame.value)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [cgroup]))] if cgroup >= 0 else []
        self._socket.sendmsg([head, frame.payload], rights)

    def receive(self, timeout: float | None = None) -> Frame | None:
        """The next frame; None at the end of the line. Raises TimeoutError."""
        self._socket.settimeout(timeout)
        return self._receive(0)

    def receive_now(self) -> Frame | None:
        """The next frame if it is here already."""
        try:
            return self._receive(socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None

    def _receive(self, flags: int) -> Frame | None:
        try:
            data = self._socket.recv(_FRAME.size + WINDOW, flags)
        except ConnectionError:
            return None
        if len(data) < _FRAME.size:
            return None
        kind, stream, _, number, value = _FRAME.unpack_from(data)
        return Frame(kind, stream, number, value, data[_FRAME.size :])

    def entries(self) -> list[Entry] | None:
        """Ask for all commands that init knows; None if init has closed the line meanwhile (a capture makes it)."""
        try:
            self.send(Frame(Kind.LIST))
        except ConnectionError:
            return None
        found: list[Entry] = []
        while (frame := self.receive(10.0)) and frame.kind == Kind.ENTRY:
            exited, status, out, err, taken, tty, has_input, name = _ENTRY.unpack(frame.payload)
            found.append(
                Entry(
                    frame.exec,
                    frame.value,
                    bool(exited),
                    status,
                    (out, err),
                    taken,
                    bool(tty),
                    bool(has_input),
                    name.split(b"\0")[0].decode(),
                )
            )
        return found if frame is not None and frame.kind == Kind.DONE else None

    def detach(self) -> None:
        """Make init close every line, this one too. Returns when it has."""
        self.send(Frame(Kind.DETACH))
        frame = self.receive(10.0)
        if frame is None or frame.kind != Kind.DONE or self.receive(10.0) is not None:
            raise SandboxGone(
                "the init of the sandbox did not answer", remedy="`crab recover` restores the newest checkpoint"
            )

    def fileno(self) -> int:
        return self._socket.fileno()

    def shutdown(self) -> None:
        """Make a `receive` in another thread return None."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)  # what is under way can still be acknowledged

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> InitLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _unreachable(pid: int, error: OSError) -> SandboxGone:
    return SandboxGone(
        f"the init of the sandbox (pid {pid}) cannot be reached: {error.strerror}",
        remedy="`crab recover` restores the newest checkpoint",
    )
