"""TCP connections that are never idle: megabytes in both directions between two processes, every byte checked."""

import os
import socket
import threading

from heartbeat import keep, wait_for

BLOCK = bytes(range(256)) * 512  # 128 KiB


def pump(connection):
    """Send blocks for ever; each has its number in front."""
    number = 0
    while True:
        connection.sendall(number.to_bytes(8, "little") + BLOCK)
        number += 1


def drain(connection, me):
    number = 0
    while True:
        got = bytearray()
        while len(got) < 8 + len(BLOCK):
            piece = connection.recv(8 + len(BLOCK) - len(got))
            if not piece:
                failures.append(f"connection {me} ended")
                return
            got += piece
        if got[:8] != number.to_bytes(8, "little") or got[8:] != BLOCK:
            failures.append(f"connection {me}: block {number} is not what was sent")
            return
        number += 1
        counts[me] = number


listener = socket.create_server(("127.0.0.1", 0))
listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 100_000)  # more than net.core.rmem_max unread is refused
address = listener.getsockname()
counts, failures = [0, 0], []


def echo(connection):
    while data := connection.recv(65536):
        connection.sendall(data)


if os.fork() == 0:
    for _ in range(2):
        threading.Thread(target=echo, args=(listener.accept()[0],)).start()
    threading.Event().wait()
for me in range(2):
    mine = socket.socket()
    mine.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 100_000)
    mine.connect(address)
    threading.Thread(target=pump, args=(mine,), daemon=True).start()
    threading.Thread(target=drain, args=(mine, me), daemon=True).start()


def check(counter):
    before = list(counts)
    wait_for(lambda: failures or all(new > old for new, old in zip(counts, before, strict=True)), 60)
    return failures[0] if failures else True


keep(check)
