"""pidfd of a living and of a dead child, from pidfd_open and used in poll, signals and waitid."""

import os
import signal
import subprocess

from heartbeat import all_of, keep, readable

sleeper = subprocess.Popen(["sleep", "1000000"])
living = os.pidfd_open(sleeper.pid)
WATCHER = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # a handler could come between a look and the sleep after it
os.write(1, b"ready\\n")
while True:
    signal.sigwait({signal.SIGUSR1})
    os.write(1, b"hit\\n")
"""
watcher = subprocess.Popen(["python3", "-c", WATCHER], stdout=subprocess.PIPE)
watcher.stdout.readline()
target = os.pidfd_open(watcher.pid)


def alive(counter):
    signal.pidfd_send_signal(living, 0)
    return not readable(living, 0)


def new_one(counter):
    short = subprocess.Popen(["true"])
    fd = os.pidfd_open(short.pid)
    ended = readable(fd, 10)
    result = os.waitid(os.P_PIDFD, fd, os.WEXITED)
    short.returncode = result.si_status
    os.close(fd)
    return ended and result.si_status == 0


def signals(counter):
    signal.pidfd_send_signal(target, signal.SIGUSR1)
    if not readable(watcher.stdout.fileno(), 10):
        return f"no answer, its status is {watcher.poll()}"
    line = watcher.stdout.readline()
    return line == b"hit\n" or f"it says {line!r}, its status is {watcher.poll()}"


keep(all_of(alive=alive, new=new_one, signals=signals))
