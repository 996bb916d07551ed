"""Locks on files: flock, POSIX record locks, and those of open file descriptions; held and refused to others."""

import fcntl
import os
import struct
import subprocess

from heartbeat import all_of, child, keep, scratch, talk

F_OFD_SETLK = 37
scratch()
whole = open("whole", "w")  # noqa: SIM115  they stay open
fcntl.flock(whole, fcntl.LOCK_EX)
records = open("records", "w+")  # noqa: SIM115
records.truncate(1000)
fcntl.lockf(records, fcntl.LOCK_EX, 100, 50)
fcntl.lockf(records, fcntl.LOCK_SH, 100, 500)
description = open("description", "w+")  # noqa: SIM115
fcntl.fcntl(description, F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 10, 0))
PROBE = """
import fcntl, os, struct, sys
def refused(function):
    try:
        function()
    except OSError:
        return True
    return False
while line := sys.stdin.readline():
    whole, records = open("whole", "r+"), open("records", "r+")
    description = open("description", "r+")
    print(
        refused(lambda: fcntl.flock(whole, fcntl.LOCK_EX | fcntl.LOCK_NB)),
        refused(lambda: fcntl.lockf(records, fcntl.LOCK_EX | fcntl.LOCK_NB, 10, 60)),
        refused(lambda: fcntl.lockf(records, fcntl.LOCK_EX | fcntl.LOCK_NB, 10, 510)),
        not refused(lambda: fcntl.lockf(records, fcntl.LOCK_SH | fcntl.LOCK_NB, 10, 510)),
        not refused(lambda: fcntl.lockf(records, fcntl.LOCK_EX | fcntl.LOCK_NB, 10, 300)),
        refused(lambda: fcntl.fcntl(description, 37, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 5, 0))),
        flush=True,
    )
    for file in (whole, records, description):
        file.close()
"""
probe = child("python3", "-c", PROBE)
holder = subprocess.Popen(["flock", "other", "sleep", "1000000"])


def from_outside(counter):
    said = talk(probe, b"?")
    return True if said == b"True True True True True True" else said


def by_the_tool(counter):
    if counter < 3 or counter % 10:
        return True
    return subprocess.run(["flock", "-n", "other", "true"], check=False).returncode == 1 and holder.poll() is None


keep(all_of(other_process=from_outside, tool=by_the_tool))
