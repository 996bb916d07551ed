"""Pipes to children, a pipeline of three, a pipe that is always nearly full, one without a reader."""

import contextlib
import os
import signal

from heartbeat import all_of, child, keep, talk

cat = child("cat")
shell = child("sh", "-c", "while read line; do echo got $line; done")
pipeline = child("sh", "-c", "stdbuf -oL tr a-z A-Z | stdbuf -oL sed s/^/x/ | cat")
full_out, full_in = os.pipe()
os.set_blocking(full_in, False)
backlog = 0
with contextlib.suppress(BlockingIOError):
    while True:
        os.write(full_in, b"%08d" % backlog)
        backlog += 1
taken = 0
broken_out, broken_in = os.pipe()
os.close(broken_out)
signal.signal(signal.SIGPIPE, signal.SIG_IGN)


def full(counter):
    global taken, backlog
    for _ in range(10):
        if os.read(full_out, 8) != b"%08d" % taken:
            return f"number {taken} is not next"
        taken += 1
    with contextlib.suppress(BlockingIOError):  # there is room when a page is empty
        while True:
            os.write(full_in, b"%08d" % backlog)
            backlog += 1


def broken(counter):
    try:
        os.write(broken_in, b"x")
    except BrokenPipeError:
        return True
    return "somebody reads it"


keep(
    all_of(
        cat=lambda n: talk(cat, b"%d" % n) == b"%d" % n,
        shell=lambda n: talk(shell, b"%d" % n) == b"got %d" % n,
        pipeline=lambda n: talk(pipeline, b"abc%d" % n) == b"xABC%d" % n,
        full=full,
        broken=broken,
    )
)
