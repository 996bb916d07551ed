"""TCP connections within the sandbox: idle, busy, with unread data, half closed, IPv6, and options set."""

import socket

from heartbeat import all_of, keep

listeners, pairs = {}, {}


def pair(family, address):
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((address, 0))
    listener.listen()
    client = socket.socket(family)
    client.connect(listener.getsockname()[:2])
    server, _ = listener.accept()
    for end in (client, server):
        end.settimeout(10)
    return listener, client, server


listener, client, server = pair(socket.AF_INET, "127.0.0.1")
_, client6, server6 = pair(socket.AF_INET6, "::1")
_, full_client, full_server = pair(socket.AF_INET, "127.0.0.1")
for waiting in range(1000):
    full_client.send(b"%08d" % waiting)
taken = 0
_, half_client, half_server = pair(socket.AF_INET, "127.0.0.1")
half_client.shutdown(socket.SHUT_WR)
client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
client.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 77)
names = client.getsockname(), client.getpeername()


def receive(connection, size):
    got = b""
    while len(got) < size:
        piece = connection.recv(size - len(got))
        if not piece:
            raise EOFError(f"the connection ended after {got!r}")
        got += piece
    return got


def echo(a, b, counter):
    a.send(b"%08d" % counter)
    b.send(receive(b, 8))
    return receive(a, 8) == b"%08d" % counter


def queue(counter):
    global taken, waiting
    if receive(full_server, 8) != b"%08d" % taken:
        return f"number {taken} is not next"
    taken += 1
    waiting += 1
    full_client.send(b"%08d" % waiting)
    return True


def half_closed(counter):
    half_server.send(b"h")
    return receive(half_client, 1) == b"h" and half_server.recv(9) == b""


def options(counter):
    return (
        client.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        and client.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        and client.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 77
        and (client.getsockname(), client.getpeername()) == names
    )


def new_connection(counter):
    if counter % 5:
        return True
    with socket.create_connection(listener.getsockname(), timeout=10) as fresh:
        accepted, _ = listener.accept()
        with accepted:
            accepted.settimeout(10)
            return echo(fresh, accepted, counter)


keep(
    all_of(
        ipv4=lambda n: echo(client, server, n),
        ipv6=lambda n: echo(client6, server6, n),
        queue=queue,
        half_closed=half_closed,
        options=options,
        new_connection=new_connection,
    )
)
