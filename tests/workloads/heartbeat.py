"""The loop of every workload: check the state again and again, and say so in `/tmp/hb/NAME`.

A line is `COUNTER ok` or `COUNTER what is wrong`. The first failure stays: a state that came back wrong and healed is
still a state that came back wrong. The counter is in memory and in the file, so memory and files of two different
moments are noticed at once, by the workload itself.
"""

import os
import select
import subprocess
import sys
import time

FOLDER = os.environ.get("HEARTBEATS", "/tmp/hb")
PERIOD = 0.05


def scratch():
    """A folder of this workload's own, as working directory."""
    folder = f"/tmp/work/{name()}"
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)
    return folder


def name():
    return os.path.splitext(os.path.basename(sys.argv[0]))[0]


def keep(check, period=PERIOD):
    """Call check(counter) for ever; True or None is fine, anything else is what is wrong."""
    os.makedirs(FOLDER, exist_ok=True)
    path = f"{FOLDER}/{name()}"
    counter, failure = 0, ""
    while True:
        if counter and not failure:
            with open(path) as f:
                found = f.read().split()[0]
            if found != str(counter):
                failure = f"memory has counter {counter}, the file {found}"
        counter += 1
        if not failure:
            failure = judge(check, counter)
        with open(f"{FOLDER}/.{name()}", "w") as f:
            f.write(f"{counter} {failure or 'ok'}\n")
        os.rename(f"{FOLDER}/.{name()}", path)
        time.sleep(period)


def judge(check, counter):
    """What is wrong, on one line; empty if nothing is."""
    try:
        result = check(counter)
    except Exception as error:
        where = error.__traceback__
        while where.tb_next:
            where = where.tb_next
        place = f"{os.path.basename(where.tb_frame.f_code.co_filename)}:{where.tb_lineno}"
        return " ".join(f"round {counter}, {place}: {type(error).__name__}: {error}".split())
    return "" if result is None or result is True else " ".join(f"round {counter}: {result!r}".split())


def all_of(**checks):
    """One check made of several; the failure names which."""

    def check(counter):
        for what, one in checks.items():
            failure = judge(one, counter)
            if failure:
                return f"{what}: {failure}"
        return True

    return check


def readable(fd, seconds=5.0):
    """Whether a descriptor becomes readable within that time."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def read_until(fd, text, seconds=10.0):
    """Read a descriptor until `text` comes; returns all that came. TimeoutError if it does not."""
    got, end = b"", time.monotonic() + seconds
    while text not in got:
        if not readable(fd, max(0.0, end - time.monotonic())):
            raise TimeoutError(f"waited for {text!r}, got {got[-200:]!r}")
        piece = os.read(fd, 65536)
        if not piece:
            raise EOFError(f"waited for {text!r}, got {got[-200:]!r} and then the end")
        got += piece
    return got


PATIENCE = 45.0
"""Seconds until something counts as stuck; a loaded machine with a slow disk has taken more than ten for a commit."""


def wait_for(condition, seconds=PATIENCE):
    """Poll until the condition holds. TimeoutError if it does not."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("a workload did not get ready")
        time.sleep(0.02)


def child(*command, **options):
    """A child with a pipe at both ends."""
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE} | options
    return subprocess.Popen(command, bufsize=0, **options)


def talk(process, line):
    """Write a line to a child, return the line that it answers."""
    process.stdin.write(line + b"\n")
    answer = b""
    while not answer.endswith(b"\n"):
        if not readable(process.stdout.fileno(), PATIENCE):
            raise TimeoutError(f"no answer to {line!r}")
        piece = os.read(process.stdout.fileno(), 65536)
        if not piece:
            raise EOFError(f"the child ended instead of answering {line!r}")
        answer += piece
    return answer[:-1]
