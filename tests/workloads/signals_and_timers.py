"""Signal handlers, a pending and a blocked signal, interval timers of all three clocks, POSIX timers."""

import ctypes
import os
import signal
import struct
import time

from heartbeat import PATIENCE, all_of, keep, wait_for
from kernel import call

SIGEV_SIGNAL = 0
hits = {}


def count(number, frame):
    hits[number] = hits.get(number, 0) + 1


for number in (
    signal.SIGUSR1,
    signal.SIGALRM,
    signal.SIGPROF,
    signal.SIGVTALRM,
    signal.SIGRTMIN + 1,
    signal.SIGRTMIN + 2,
):
    signal.signal(number, count)
signal.siginterrupt(signal.SIGUSR1, False)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2, signal.SIGRTMIN])
os.kill(os.getpid(), signal.SIGUSR2)
signal.setitimer(signal.ITIMER_REAL, 0.04, 0.04)
signal.setitimer(signal.ITIMER_VIRTUAL, 0.02, 0.02)
signal.setitimer(signal.ITIMER_PROF, 0.02, 0.02)


def posix_timer(number, first, interval):
    event = struct.pack("QiiI", 0, number, SIGEV_SIGNAL, 0) + bytes(44)
    timer = ctypes.c_void_p()
    call("timer_create", time.CLOCK_MONOTONIC, event, ctypes.byref(timer))
    spec = [int(part) for seconds in (interval, first) for part in (seconds, seconds % 1 * 1e9)]
    call("timer_settime", timer, 0, struct.pack("qqqq", *spec), None)
    return timer


ticking = posix_timer(signal.SIGRTMIN + 1, 0.03, 0.03)
far = posix_timer(signal.SIGRTMIN + 2, 5000.0, 0)


def delivered(counter):
    before = hits.get(signal.SIGUSR1, 0)
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGHUP)
    wait_for(lambda: hits.get(signal.SIGUSR1, 0) == before + 1)
    return True


def interval(number):
    def check(counter):
        before, end = hits.get(number, 0), time.monotonic() + PATIENCE
        while hits.get(number, 0) <= before:  # it counts only while this runs
            if time.monotonic() > end:
                return f"{signal.Signals(number).name} does not come any more"
        return True

    return check


def posix(counter):
    before = hits.get(signal.SIGRTMIN + 1, 0)
    wait_for(lambda: hits.get(signal.SIGRTMIN + 1, 0) > before)
    left = bytes(32)
    call("timer_gettime", far, left)
    seconds = struct.unpack("qqqq", left)[2]
    return (signal.SIGRTMIN + 2 not in hits and 0 < seconds <= 5000) or f"{seconds} s are left"


def blocked(counter):
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    return mask == {signal.SIGUSR2, signal.SIGRTMIN} and signal.sigpending() == {signal.SIGUSR2}


keep(
    all_of(
        delivered=delivered,
        real=interval(signal.SIGALRM),
        virtual=interval(signal.SIGVTALRM),
        prof=interval(signal.SIGPROF),
        posix=posix,
        blocked=blocked,
        ignored=lambda n: signal.getsignal(signal.SIGHUP) == signal.SIG_IGN,
    )
)
