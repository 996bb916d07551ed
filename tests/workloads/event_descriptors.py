"""eventfd with a value kept in it, shared with a child; signalfd with a signal pending."""

import os
import signal
import struct

from heartbeat import all_of, keep, readable
from kernel import call

plain = os.eventfd(0)
held = os.eventfd(7)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGUSR2, signal.SIGRTMIN])
signals = call("signalfd", -1, struct.pack("Q", 1 << signal.SIGUSR1 - 1) + bytes(120), 0)
kept = call("signalfd", -1, struct.pack("Q", 1 << signal.SIGUSR2 - 1) + bytes(120), 0)
signal.raise_signal(signal.SIGUSR2)
signal.raise_signal(signal.SIGRTMIN)
ask, answer = os.eventfd(0), os.eventfd(0)
if os.fork() == 0:
    while True:
        os.eventfd_write(answer, os.eventfd_read(ask) * 2)


def counted(counter):
    os.eventfd_write(plain, counter)
    return os.eventfd_read(plain) == counter


def value_stays(counter):
    os.eventfd_write(held, 1)
    found = os.eventfd_read(held)
    os.eventfd_write(held, 7)
    return found == 8


def signalled(counter):
    os.kill(os.getpid(), signal.SIGUSR1)
    return readable(signals) and struct.unpack("I", os.read(signals, 128)[:4])[0] == signal.SIGUSR1


def stays_pending(counter):
    return readable(kept) and {signal.SIGUSR2, signal.SIGRTMIN} <= signal.sigpending()


def child(counter):
    os.eventfd_write(ask, counter)
    return readable(answer) and os.eventfd_read(answer) == counter * 2


keep(all_of(plain=counted, held=value_stays, signalfd=signalled, pending=stays_pending, child=child))
