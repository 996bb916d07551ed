"""Unix sockets of every kind, with a path and abstract, connected and listening, with unread data, options and peers."""

import contextlib
import os
import socket

from heartbeat import all_of, child, keep, scratch

scratch()
STREAM, DATAGRAM, PACKET = socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET
pairs = {kind: socket.socketpair(socket.AF_UNIX, kind) for kind in (STREAM, DATAGRAM, PACKET)}
queued = socket.socketpair()
waiting = 0
for waiting in range(100):
    queued[0].send(b"%08d" % waiting)
taken = 0


def listener(address):
    if os.path.exists(address.replace("\0", "@")):
        os.unlink(address)
    made = socket.socket(socket.AF_UNIX)
    made.bind(address)
    made.listen()
    made.settimeout(5)
    return made


listeners = {address: listener(address) for address in ("listener", "\0abstract-of-a-workload")}
client = socket.socket(socket.AF_UNIX)
client.connect("listener")
server, _ = listeners["listener"].accept()
with contextlib.suppress(FileNotFoundError):
    os.unlink("datagrams")
mailbox = socket.socket(socket.AF_UNIX, DATAGRAM)
mailbox.bind("datagrams")
sender = socket.socket(socket.AF_UNIX, DATAGRAM)
sender.connect("datagrams")
half = socket.socketpair()
half[0].shutdown(socket.SHUT_WR)
mine, theirs = socket.socketpair()
mine.settimeout(10)
echo = child("cat", stdin=theirs, stdout=theirs)
lone, gone = socket.socketpair()
gone.close()


def every_pair(counter):
    for kind, (a, b) in pairs.items():
        a.send(b"a%d" % counter)
        b.send(b"b%d" % counter)
        if (b.recv(99), a.recv(99)) != (b"a%d" % counter, b"b%d" % counter):
            return kind
    return True


def queue(counter):
    global taken, waiting
    if queued[1].recv(8) != b"%08d" % taken:
        return f"number {taken} is not next"
    taken += 1
    waiting += 1
    queued[0].send(b"%08d" % waiting)
    return True


def new_connections(counter):
    for address, one in listeners.items():
        with socket.socket(socket.AF_UNIX) as fresh:
            fresh.connect(address)
            accepted, _ = one.accept()
            with accepted:
                fresh.send(b"q")
                if accepted.recv(1) != b"q":
                    return address
    return True


def connected(counter):
    client.send(b"y%d" % counter)
    server.send(server.recv(99))
    return client.recv(99) == b"y%d" % counter


def datagrams(counter):
    sender.send(b"d%d" % counter)
    return mailbox.recv(99) == b"d%d" % counter


def echoed(counter):
    mine.send(b"e%d\n" % counter)
    got = b""
    while not got.endswith(b"\n"):
        got += mine.recv(99)
    return got == b"e%d\n" % counter


def half_closed(counter):
    half[1].send(b"h")
    return half[0].recv(9) == b"h" and half[1].recv(9) == b""


keep(
    all_of(
        pairs=every_pair,
        queue=queue,
        new_connections=new_connections,
        connected=connected,
        datagrams=datagrams,
        echo=echoed,
        half_closed=half_closed,
        peer_gone=lambda n: lone.recv(9) == b"",
    )
)
