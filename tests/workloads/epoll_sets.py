"""epoll: level and edge triggered, one-shot, nested, with a descriptor that was closed elsewhere, and a sleeping waiter."""

import os
import select
import threading

from heartbeat import all_of, keep, wait_for

r, w = os.pipe()
level = select.epoll()
level.register(r, select.EPOLLIN)
edge_r, edge_w = os.pipe()
edge = select.epoll()
edge.register(edge_r, select.EPOLLIN | select.EPOLLET)
once_r, once_w = os.pipe()
once = select.epoll()
once.register(once_r, select.EPOLLIN | select.EPOLLONESHOT)
inner_r, inner_w = os.pipe()
inner, outer = select.epoll(), select.epoll()
inner.register(inner_r, select.EPOLLIN)
outer.register(inner.fileno(), select.EPOLLIN)
ear_r, ear_w = os.pipe()
heard = 0


def listen():
    global heard
    ear = select.epoll()
    ear.register(ear_r, select.EPOLLIN)
    while True:
        for fd, _ in ear.poll():
            heard += len(os.read(fd, 4096))


threading.Thread(target=listen, daemon=True).start()


def level_triggered(counter):
    os.write(w, b"a")
    events = level.poll(5), level.poll(5)
    os.read(r, 1)
    return events == ([(r, select.EPOLLIN)],) * 2 and not level.poll(0)


def edge_triggered(counter):
    os.write(edge_w, b"a")
    # a restore adds the descriptor anew, which may tell of an edge twice; it never loses one
    first = edge.poll(5)
    os.read(edge_r, 1)
    return first == [(edge_r, select.EPOLLIN)]


def one_shot(counter):
    os.write(once_w, b"a")
    first = once.poll(5)
    os.read(once_r, 1)
    once.modify(once_r, select.EPOLLIN | select.EPOLLONESHOT)
    return first == [(once_r, select.EPOLLIN)]


def nested(counter):
    os.write(inner_w, b"a")
    events = outer.poll(5), inner.poll(5)
    os.read(inner_r, 1)
    return events == ([(inner.fileno(), select.EPOLLIN)], [(inner_r, select.EPOLLIN)])


def waiter(counter):
    before = heard
    os.write(ear_w, b"abc")
    wait_for(lambda: heard == before + 3)
    return True


keep(all_of(level=level_triggered, edge=edge_triggered, once=one_shot, nested=nested, waiter=waiter))
