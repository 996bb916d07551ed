"""The client of `bench.proxy`: raw, it notes when each piece of an answer arrives; and the processes that it talks to."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import crab
from crab.errors import DaemonUnavailable

STREAMS = Path(__file__).parents[1] / "tests" / "unit" / "turns" / "streams"
PATHS = {
    "anthropic": "/v1/messages",
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "gemini": "/v1beta/models/m:streamGenerateContent",
}
TOOLS = 20
"""Descriptions of tools and the instructions make most of a real request: some 30 kB here."""
_STAMP = re.compile(rb'"text": "(\d{9,}) ')
_numbers = itertools.count(time.monotonic_ns())


# ---------------------------------------------------------------- what is asked


def body(wire: str = "anthropic", stream: bool = True) -> bytes:
    """A question of an agent's main loop, in the shape of the API, that nobody asked before."""
    text = f"question {next(_numbers)}"
    message = {"role": "user", "content": text}
    schema = {"type": "object", "properties": {"command": {"type": "string", "description": "d" * 900}}}
    tools = [{"name": f"tool{number}", "description": "t" * 300} for number in range(TOOLS)]
    rest: dict[str, object]
    match wire:
        case "anthropic":
            rest = {
                "messages": [message],
                "system": "s" * 4000,
                "tools": [tool | {"input_schema": schema} for tool in tools],
            }
        case "gemini":
            rest = {
                "contents": [{"role": "user", "parts": [{"text": text}]}],
                "tools": [{"functionDeclarations": tools}],
            }
        case "responses":
            rest = {"input": [message], "tools": [tool | {"type": "function", "parameters": schema} for tool in tools]}
        case _:
            rest = {"messages": [message], "tools": [{"type": "function", "function": tool} for tool in tools]}
    return json.dumps({"model": "m", "stream": stream} | rest).encode()


def request(base: str, target: str, data: bytes) -> bytes:
    parts = urlsplit(base)
    head = f"POST {parts.path}{target} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


class Line:
    """A connection that is kept, like that of an agent."""

    def __init__(self, base: str) -> None:
        self._base = base
        parts = urlsplit(base)
        self._socket = socket.create_connection((parts.hostname or "", parts.port or 0), timeout=30)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def deltas(self, target: str) -> tuple[float, list[float]]:
        """Milliseconds from the question to the first byte, and from the writing of each delta to its arrival."""
        data = request(self._base, target, body())
        first, delays = 0.0, list[float]()
        asked = time.monotonic_ns()
        self._socket.sendall(data)
        got = b""
        while not got.endswith(b"0\r\n\r\n"):
            got = self._socket.recv(1 << 16)
            now = time.monotonic_ns()
            if not got:
                raise ConnectionError("the answer was cut")
            first = first or (now - asked) / 1e6
            delays += [(now - int(stamp)) / 1e6 for stamp in _STAMP.findall(got)]
        return first, delays


def fetched(base: str, target: str, data: bytes) -> tuple[int, str, bytes, bool]:
    """Status, type, the bytes of the answer, and whether its end came."""
    parts = urlsplit(base)
    line = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    with contextlib.closing(line):
        line.request("POST", parts.path + target, data, {"Content-Type": "application/json"})
        try:
            answer = line.getresponse()
        except http.client.HTTPException:
            return 0, "", b"", False
        kind = answer.headers.get("Content-Type", "")
        try:
            return answer.status, kind, answer.read(), True
        except http.client.IncompleteRead as cut:
            return answer.status, kind, cut.partial, False


async def crowd(base: str, target: str, streams: int, each: int) -> int:
    """That many clients at once, each with its questions one after the other; returns the number of bytes that came."""
    parts = urlsplit(base)

    async def one() -> int:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 20)
        count = 0
        for _ in range(each):
            writer.write(request(base, target, body()))
            got = b""
            while not got.endswith(b"0\r\n\r\n"):
                got = await reader.read(1 << 16)
                if not got:
                    raise ConnectionError("the answer was cut")
                count += len(got)
        writer.close()
        return count

    return sum(await asyncio.gather(*(one() for _ in range(streams))))


# ---------------------------------------------------------------- who is asked


def python_path() -> str:
    """So that they are the same Crab and the same bench as this one."""
    return os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])


@contextlib.contextmanager
def process(*words: str) -> Iterator[tuple[int, str]]:
    """A Python program, its pid and the first line that it says."""
    with subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": python_path()}
    ) as program:
        try:
            assert program.stdout
            yield program.pid, program.stdout.readline().strip()
        finally:
            program.kill()


@contextlib.contextmanager
def daemon(state: Path, keep: bool = False) -> Iterator[tuple[int, crab.Host]]:
    """A daemon of its own, so that its time and memory are told apart from those of the bench. It removes the sandboxes that are
    there, unless told to `keep` them."""
    address = state / "bench.sock"
    with subprocess.Popen(
        [sys.executable, "-m", "crab.cli", "--state", str(state), "--socket", str(address), "daemon", "run"],
        stderr=(log := open(state / "bench.log", "w")),
        env=os.environ | {"PYTHONPATH": python_path()},
    ) as program:
        try:
            while True:
                time.sleep(0.05)
                if program.poll() is not None:
                    raise SystemExit(f"the daemon has ended; {state / 'bench.log'} says why")
                with contextlib.suppress(DaemonUnavailable), crab.connect(address):
                    break
            with log, crab.connect(address) as host:
                for left in () if keep else host.sandboxes():
                    left.remove(force=True)
                yield program.pid, host
        finally:
            program.terminate()
            program.wait(60)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process until now."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mb(pid: int, field: str = "VmRSS") -> float:
    """Resident memory of a process (`VmHWM`: the most since `watch_memory`)."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(rf"{field}:\s+(\d+)", text)[0]) / 1024


def watch_memory(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")
