"""timerfd: periodic ones that are read at once or after many expiries, a fast one, a one-shot far in the future."""

import os
import struct
import time

from heartbeat import all_of, keep, readable
from kernel import call

CLOCK_REALTIME, CLOCK_MONOTONIC, TFD_NONBLOCK = 0, 1, 0o4000


def timer(first, interval, clock=CLOCK_MONOTONIC):
    fd = call("timerfd_create", clock, TFD_NONBLOCK)
    spec = [int(part) for seconds in (interval, first) for part in (seconds, seconds % 1 * 1e9)]
    call("timerfd_settime", fd, 0, struct.pack("qqqq", *spec), None)
    return fd


def remaining(fd):
    """(seconds to the next expiry, interval)"""
    buffer = bytes(32)
    call("timerfd_gettime", fd, buffer)
    interval, interval_ns, left, left_ns = struct.unpack("qqqq", buffer)
    return left + left_ns / 1e9, interval + interval_ns / 1e9


steady = timer(0.03, 0.03)
fast = timer(0.001, 0.001)
unread = timer(0.02, 0.02)
wall = timer(0.03, 0.03, CLOCK_REALTIME)
far = timer(5000, 0)
off = call("timerfd_create", CLOCK_MONOTONIC, TFD_NONBLOCK)
began = time.monotonic()


def fires(fd):
    if not readable(fd):
        return f"it does not fire any more; its settings are {remaining(fd)}"
    return struct.unpack("Q", os.read(fd, 8))[0] >= 1


def still_armed(counter):
    left, interval = remaining(unread)
    if counter % 10 == 0 and fires(unread) is not True:
        return "it does not fire any more"
    return True if left and abs(interval - 0.02) < 1e-6 else f"its settings are {(left, interval)}"


def far_away(counter):
    left, _ = remaining(far)
    passed = time.monotonic() - began
    # what is left may not grow; a restore gives back the time that the checkpoint slept
    return (0 < left <= 5000.001 and left > 5000 - passed - 1) or f"{left} s are left of 5000 after {passed} s"


keep(
    all_of(
        steady=lambda n: fires(steady),
        fast=lambda n: fires(fast),
        unread=still_armed,
        wall=lambda n: fires(wall),
        far=far_away,
        off=lambda n: remaining(off)[0] == 0,
    )
)
