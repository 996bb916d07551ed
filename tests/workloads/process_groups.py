"""Process groups and sessions, with and without a living leader; orphans that init has adopted; who is whose parent."""

import os
import subprocess

from heartbeat import keep, wait_for


def stat(pid):
    """(parent, group, session) of a process."""
    with open(f"/proc/{pid}/stat") as f:
        fields = f.read().rpartition(")")[2].split()
    return int(fields[1]), int(fields[2]), int(fields[3])


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as f:
        return f.read().split()


def below(leader):
    """Make a child that calls `leader`; returns the pid of the process that is left of it."""
    r, w = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(r)
        leader(w)
        os._exit(0)
    os.close(w)
    os.waitpid(child, 0)
    pid = int(os.read(r, 20))
    os.close(r)
    return child, pid


def sleeper(w):
    """In a grandchild: tell the pid, then sleep for ever."""
    os.write(w, b"%d" % os.getpid())
    os.execvp("sleep", ["sleep", "1000000"])


def group_of_the_dead(w):
    os.setpgid(0, 0)
    if os.fork() == 0:
        sleeper(w)


def session_of_the_dead(w):
    os.setsid()
    if os.fork() == 0:
        if os.fork() == 0:
            os.setpgid(0, 0)
            sleeper(w)
        os._exit(0)


def ends(w):
    if os.fork() == 0:
        sleeper(w)


dead_group, in_dead_group = below(group_of_the_dead)
dead_session, in_dead_session = below(session_of_the_dead)
_, orphan = below(ends)
leader = subprocess.Popen(["sh", "-c", "sleep 1000000 & sleep 1000000 & wait"], start_new_session=True)
own = subprocess.Popen(["sleep", "1000000"], process_group=0)
wait_for(lambda: stat(orphan)[0] == 1)
wait_for(lambda: len(children(leader.pid)) == 2)


def everyone():
    found = {
        name: stat(pid)
        for name, pid in (
            ("group", in_dead_group),
            ("session", in_dead_session),
            ("orphan", orphan),
            ("own", own.pid),
            ("leader", leader.pid),
        )
    }
    return found | {f"child {pid}": stat(pid) for pid in children(leader.pid)}


expected = everyone()
if expected["group"][1] != dead_group or expected["session"][2] != dead_session:
    raise SystemExit(f"not what was meant: {expected}, {dead_group}, {dead_session}")


def check(counter):
    found = everyone()
    return found == expected or f"{found} instead of {expected}"


keep(check)
