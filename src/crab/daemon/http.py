"""As much of an HTTP/1.1 client as the daemon's API needs: one request after the other on a kept unix socket.

Not http.client or httpx: importing them takes 35 and 200 ms of processor time, which every `crab exec` would wait for; a
command in a sandbox takes 3. Reads answers with a length and chunked ones, piece by piece as they come. Knows nothing of
what is said.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Mapping
from pathlib import Path

_LONGEST_LINE = 1 << 16
_PIECE = 1 << 16


class Answer:
    """Status and headers (names in lower case) of an answer, and its body, which is read once."""

    def __init__(self, line: Line, status: int, headers: dict[str, str], *, has_body: bool) -> None:
        self.status = status
        self.headers = headers
        self._line = line
        self._chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        self._left = 0 if self._chunked or not has_body else int(headers.get("content-length", "0"))
        """Bytes left of the body, or of the chunk."""
        self._ended = not has_body

    def piece(self) -> bytes:
        """What has come of the body, at least one byte; empty at its end. Raises OSError, EOFError, ValueError."""
        if self._ended:
            return b""
        if self._left == 0:
            self._left = self._next_chunk() if self._chunked else 0
            if self._left == 0:
                self._ended = True
                return b""
        data = self._line.read(min(self._left, _PIECE))
        self._left -= len(data)
        if self._chunked and self._left == 0:
            self._line.read_line()
        return data

    def _next_chunk(self) -> int:
        size = int(self._line.read_line().partition(b";")[0], 16)
        while size == 0 and self._line.read_line():
            pass  # a trailer
        return size

    def read(self) -> bytes:
        """The whole body (or the rest of it)."""
        pieces: list[bytes] = []
        while data := self.piece():
            pieces.append(data)
        return b"".join(pieces)

    @property
    def is_last(self) -> bool:
        """Whether the server closes the connection after it."""
        return self.headers.get("connection", "").lower() == "close"


class Line:
    """One connection. Not safe for several threads at a time."""

    def __init__(self, path: Path) -> None:
        """Connect. Raises OSError."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(str(path))
        except BaseException:
            self._socket.close()
            raise
        self._incoming = self._socket.makefile("rb")

    def ask(self, method: str, path: str, headers: Mapping[str, str], body: bytes = b"") -> Answer:
        """Send a request; returns when the head of the answer is here. Raises OSError, EOFError, ValueError."""
        head = [f"{method} {path} HTTP/1.1", "Host: crab", f"Content-Length: {len(body)}"]
        head += [f"{name}: {value}" for name, value in headers.items()]
        start = "\r\n".join([*head, "", ""]).encode("ascii")
        try:
            if len(body) <= _PIECE:
                self._socket.sendall(start + body)
            else:
                self._socket.sendall(start)
                self._socket.sendall(body)
        except BrokenPipeError:
            pass  # it may have refused the request before it had read all of it: then there is an answer
        return self._answer()

    def _answer(self) -> Answer:
        version, _, rest = self.read_line().partition(b" ")
        if not version.startswith(b"HTTP/1."):
            raise ValueError(f"no HTTP: {version[:40]!r}")
        status = int(rest[:3])
        headers: dict[str, str] = {}
        while line := self.read_line():
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.strip().lower()] = value.strip()
        return Answer(self, status, headers, has_body=status not in (204, 304))

    def read(self, most: int) -> bytes:
        """Up to so many bytes, at least one. Raises EOFError at the end."""
        data = self._incoming.read1(most)
        if not data:
            raise EOFError("the connection was closed")
        return data

    def read_line(self) -> bytes:
        """A line without its end. Raises EOFError if it is not whole, ValueError if it is too long."""
        line = self._incoming.readline(_LONGEST_LINE)
        if not line.endswith(b"\n"):
            if len(line) == _LONGEST_LINE:
                raise ValueError("a line of the answer is too long")
            raise EOFError("the connection was closed")
        return line.rstrip(b"\r\n")

    def is_stale(self) -> bool:
        """Whether the other end has closed it (or says something that nobody asked for)."""
        look = select.poll()
        look.register(self._socket, select.POLLIN)
        return bool(look.poll(0))

    def close(self) -> None:
        self._incoming.close()
        self._socket.close()
