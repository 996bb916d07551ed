"""UDP, bound and connected, and netlink. A datagram that was unread at the capture may be lost, as UDP may lose it."""

import socket

from heartbeat import all_of, keep


def bound(family, address):
    made = socket.socket(family, socket.SOCK_DGRAM)
    made.bind((address, 0))
    made.settimeout(1)
    return made


a, b = bound(socket.AF_INET, "127.0.0.1"), bound(socket.AF_INET, "127.0.0.1")
a.connect(b.getsockname())
b.connect(a.getsockname())
alone = bound(socket.AF_INET6, "::1")
netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
netlink.bind((0, 0))
number = netlink.getsockname()


def exchange(send, receive, counter):
    for _ in range(5):
        send(b"%d" % counter)
        try:
            while True:
                got = receive(99)
                if got == b"%d" % counter:
                    return True
                if int(got) > counter:
                    return f"{got!r} comes before {counter}"
        except TimeoutError:
            continue
    return "five datagrams were lost"


keep(
    all_of(
        connected=lambda n: exchange(a.send, b.recv, n) is True and exchange(b.send, a.recv, n),
        alone=lambda n: exchange(lambda data: alone.sendto(data, alone.getsockname()), alone.recv, n),
        netlink=lambda n: netlink.getsockname() == number,
    )
)
