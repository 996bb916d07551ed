"""What both ends of the daemon's socket must agree on: the API's version, JSON of requests and answers, output frames.

Knows neither sockets nor HTTP libraries, so that the two ends and their tests share it. `server.py` and `client.py` are
the ends.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, unquote_to_bytes

import msgspec

from crab import lenient
from crab.daemon.requests import CALLS, Request
from crab.errors import CrabError, DaemonUnavailable, InvalidRequest, from_wire
from crab.model import Characters, ExecSpec, ExecStatus, Struct

S = TypeVar("S", bound=Struct)

API = 1
"""Counts changes that an older client or daemon would misunderstand."""
API_HEADER = "Crab-API"
COMMAND_HEADER = "Crab-Command"
"""Of a stream's answer: JSON of the command's `Started`, percent-encoded."""
FRAMES = "application/vnd.crab.frames"

STATUS = 0
"""Stream of the last frame: JSON of an `ExecStatus`."""
ERROR = 255
"""Stream of the last frame of a command that was lost: JSON of `CrabError.to_wire`."""
HEAD = struct.Struct(">BI")


class Spawn(Struct, kw_only=True):
    """Start a command whose output is read as a stream."""

    sandbox: str
    spec: ExecSpec


class Started(Struct, kw_only=True):
    """A started command."""

    id: str
    """Its number: what the paths of its stream, input and signals have in them. Its name does as well."""
    name: str
    pid: int


class Signal(Struct, kw_only=True):
    """Send a signal to a command."""

    number: int


class Resize(Struct, kw_only=True):
    """New size of a command's terminal, in characters."""

    rows: Characters
    columns: Characters


def default_socket() -> Path:
    """`$CRAB_SOCKET`, or /run/crab/crab.sock."""
    return Path(os.environ.get("CRAB_SOCKET") or "/run/crab/crab.sock")


# ---------------------------------------------------------------- JSON


def read_request(operation: str, body: bytes) -> Request:
    """The request that a body states. Raises `InvalidRequest`: no such operation, or not its fields."""
    kind = CALLS.get(operation)
    if kind is None:
        raise InvalidRequest(f"there is no operation {operation!r}", remedy=f"use one of {', '.join(sorted(CALLS))}")
    return read_struct(kind, body or b"{}", operation)


def read_struct(kind: type[S], body: bytes, what: str) -> S:
    """The struct that a body states. Raises `InvalidRequest`, also for fields that nobody would look at."""
    try:
        raw = _raw(body)
        value = msgspec.convert(raw, kind)
    except msgspec.DecodeError as error:  # ValidationError is one
        raise InvalidRequest(f"not a request of {what}: {error}", remedy="see /v1/openapi.json") from None
    if strange := next(_unknown(raw, value), None):
        path, known = strange
        raise InvalidRequest(f"{what} has no field {path!r}", remedy=f"known are: {', '.join(known) or 'none'}")
    return value


def _raw(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError:
        return lenient.raw(body)


def _unknown(raw: Any, value: Any, path: str = "") -> Iterator[tuple[str, tuple[str, ...]]]:
    """Fields of JSON data that the struct made of it does not have."""
    if isinstance(value, msgspec.Struct) and isinstance(raw, dict):
        known = value.__struct_fields__
        for name, part in raw.items():
            if name in known:
                yield from _unknown(part, getattr(value, name), f"{path}{name}.")
            else:
                yield path + name, known
    elif isinstance(value, tuple) and isinstance(raw, list):
        for number, (part, item) in enumerate(zip(raw, value, strict=True)):
            yield from _unknown(part, item, f"{path}{number}.")


def started_header(started: Started) -> str:
    """Value of `COMMAND_HEADER`."""
    return quote(lenient.encode(started), safe="")


def read_started_header(value: str) -> Started:
    """Inverse of `started_header`."""
    return lenient.decode(unquote_to_bytes(value), Started)


def command_path(sandbox: str, command: str, what: str) -> str:
    """Path of one of a command's resources: `events`, `input`, `signal`, `resize`, `kill`, `detach`."""
    first, second = (quote(name, safe="", errors="surrogateescape") for name in (sandbox, command))
    return f"/v1/commands/{first}/{second}/{what}"


# ---------------------------------------------------------------- versions


def check_version(theirs: str | None, ours_is: str) -> None:
    """Compare versions of the API. `ours_is` is "client" or "daemon". Raises `DaemonUnavailable`, naming both."""
    if theirs is None or theirs == str(API):
        return
    other = "daemon" if ours_is == "client" else "client"
    raise DaemonUnavailable(
        f"the {other} speaks version {theirs} of the API, this {ours_is} speaks version {API}",
        remedy="run the same version of Crab on both sides; `crab daemon stop`, then start the new one: sandboxes run on",
    )


# ---------------------------------------------------------------- frames


def frame(stream: int, data: bytes) -> bytes:
    """A frame: one byte for the stream, four for the length (big endian), the data."""
    return HEAD.pack(stream, len(data)) + data


class FrameReader:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """The frames that are complete with this piece: (stream, data)."""
        self._rest += data
        while len(self._rest) >= HEAD.size:
            stream, length = HEAD.unpack_from(self._rest)
            end = HEAD.size + length
            if len(self._rest) < end:
                return
            whole = bytes(self._rest[HEAD.size : end])
            del self._rest[:end]
            yield stream, whole


def read_status(stream: int, data: bytes) -> ExecStatus | None:
    """What a frame says about the end of its command; None for output. Raises the error of an error frame."""
    if stream == ERROR:
        raise read_error(data)
    return lenient.decode(data, ExecStatus) if stream == STATUS else None


def read_error(data: bytes) -> CrabError:
    """The error in the body of a failed call, or in an error frame."""
    try:
        return from_wire(lenient.decode(data, dict[str, Any]))
    except (msgspec.DecodeError, TypeError):
        text = data[:200].decode(errors="replace")
        return CrabError(
            f"the daemon answered what is no answer of Crab: {text!r}", remedy="check who listens on the socket"
        )
