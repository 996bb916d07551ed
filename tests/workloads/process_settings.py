"""What belongs to a process: umask, limits, niceness, name, out-of-memory score."""

import ctypes
import os
import resource

from heartbeat import all_of, keep
from kernel import call

PR_SET_PDEATHSIG, PR_GET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 1, 2, 15, 36, 37
os.environ["LATE"] = "set after the start"
os.umask(0o027)
LIMITS = {
    resource.RLIMIT_NOFILE: (333, 4000),
    resource.RLIMIT_CORE: (0, 0),
    resource.RLIMIT_STACK: (16 << 20, 64 << 20),
    resource.RLIMIT_CPU: (100000, 200000),
    resource.RLIMIT_FSIZE: (1 << 30, 1 << 31),
}
for number, limit in LIMITS.items():
    resource.setrlimit(number, limit)
os.nice(5)
call("prctl", PR_SET_NAME, b"a (strange) 1 R")
call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
call("prctl", PR_SET_PDEATHSIG, 12, 0, 0, 0)
with open("/proc/self/oom_score_adj", "w") as f:
    f.write("321")


def name():
    with open("/proc/self/comm") as f:
        return f.read()


def flag(option):
    value = bytearray(4)
    call("prctl", option, (ctypes.c_char * 4).from_buffer(value), 0, 0, 0)
    return int.from_bytes(value, "little")


def file_mode(counter):
    fd = os.open("/tmp/umask", os.O_CREAT | os.O_WRONLY, 0o666)
    os.close(fd)
    mode = os.stat("/tmp/umask").st_mode & 0o777
    os.unlink("/tmp/umask")
    return mode == 0o640 or oct(mode)


def limits(counter):
    found = {number: resource.getrlimit(number) for number in LIMITS}
    return found == LIMITS or found


def score():
    with open("/proc/self/oom_score_adj") as f:
        return f.read()


keep(
    all_of(
        umask=file_mode,
        limits=limits,
        nice=lambda n: os.nice(0) == 5,
        name=lambda n: name() == "a (strange) 1 R\n" or name(),
        subreaper=lambda n: flag(PR_GET_CHILD_SUBREAPER) == 1,
        parent_death=lambda n: flag(PR_GET_PDEATHSIG) == 12,
        score=lambda n: score() == "321\n" or score(),
        environment=lambda n: os.environ["LATE"] == "set after the start",
    )
)
