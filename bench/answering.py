"""The upstream of `bench.proxy`: `python -m bench.answering STREAMS`, a server that prints its port and says what it is asked to.

Apart from the bench, so that neither waits for the other. The query of a request says what is answered:

    play=NAME&size=N           a recorded answer of the folder STREAMS, in pieces of N bytes; `-cut-` in its name: without an end
    count=N&gap=S&first=S      that many deltas of text in Anthropic's API, each with the moment (ns) at which it was written,
                               `gap` apart (0: as fast as they go); the head comes after `first` seconds, a call at the end
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from asyncio import StreamReader, StreamWriter
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

PADDING = "x" * 60
"""Deltas of real answers have some 150 bytes."""


def event(name: str, **data: object) -> bytes:
    return f"event: {name}\ndata: {json.dumps({'type': name} | data)}\n\n".encode()


USAGE = {"input_tokens": 1, "output_tokens": 1}
BEGIN = (
    event(
        "message_start",
        message={"id": "msg_1", "type": "message", "role": "assistant", "content": [], "model": "m", "usage": USAGE},
    ),
    event("content_block_start", index=0, content_block={"type": "text", "text": ""}),
)
CALL = {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {}}
END = (
    event("content_block_stop", index=0),
    event("content_block_start", index=1, content_block=CALL),
    event("content_block_delta", index=1, delta={"type": "input_json_delta", "partial_json": '{"command": "true"}'}),
    event("content_block_stop", index=1),
    event("message_delta", delta={"stop_reason": "tool_use"}, usage=USAGE),
    event("message_stop"),
)


def delta() -> bytes:
    text = f"{time.monotonic_ns()} {PADDING}"
    return event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})


class Answering:
    def __init__(self, folder: Path) -> None:
        self._bodies = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    async def connected(self, reader: StreamReader, writer: StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                line, _, rest = head.partition(b"\r\n")
                sizes = [
                    row.partition(b":")[2] for row in rest.lower().split(b"\r\n") if row.startswith(b"content-length:")
                ]
                await reader.readexactly(int(sizes[0]) if sizes else 0)
                asked = {key: values[0] for key, values in parse_qs(urlsplit(line.split()[1].decode()).query).items()}
                if "play" in asked:
                    await self.recorded(writer, asked["play"], int(asked.get("size", 1 << 16)))
                else:
                    await deltas(writer, int(asked["count"]), float(asked["gap"]), float(asked.get("first", 0)))
        except (EOFError, ConnectionError):
            pass
        finally:
            writer.close()

    async def recorded(self, writer: StreamWriter, name: str, size: int) -> None:
        body = self._bodies[name]
        begin(writer, "text/event-stream; charset=utf-8" if name.endswith(".sse") else "application/json")
        for at in range(0, len(body), size):
            await say(writer, body[at : at + size])
            await asyncio.sleep(0)
        if "-cut" in name:
            raise ConnectionAbortedError
        writer.write(b"0\r\n\r\n")


def begin(writer: StreamWriter, kind: str) -> None:
    writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())


async def say(writer: StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))
    await writer.drain()


async def deltas(writer: StreamWriter, count: int, gap: float, first: float) -> None:
    await asyncio.sleep(first)
    begin(writer, "text/event-stream")
    for data in BEGIN:
        await say(writer, data)
    for _ in range(count):
        await say(writer, delta())
        await asyncio.sleep(gap)
    for data in END:
        await say(writer, data)
    writer.write(b"0\r\n\r\n")
    await writer.drain()


async def main(folder: Path) -> None:
    server = await asyncio.start_server(Answering(folder).connected, "127.0.0.1", 0, backlog=512)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
