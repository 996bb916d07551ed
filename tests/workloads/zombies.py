"""Children that have ended and that nobody has waited for yet: their status is there after a restore too."""

import os
import signal
import time

from heartbeat import all_of, keep, wait_for


def dead_child(end):
    pid = os.fork()
    if pid == 0:
        end()
        os._exit(1)
    return pid


def state(pid):
    with open(f"/proc/{pid}/stat") as f:
        return f.read().rpartition(")")[2].split()[0]


exited = dead_child(lambda: os._exit(42))
killed = dead_child(lambda: os.kill(os.getpid(), signal.SIGKILL))
stopped = dead_child(lambda: os.kill(os.getpid(), signal.SIGSTOP) or time.sleep(1e6))
wait_for(lambda: (state(exited), state(killed), state(stopped)) == ("Z", "Z", "T"))
seen = []


def stay(counter):
    wait_for(lambda: state(stopped) == "T", 10)  # a restore lets it go first, with the signal pending
    return (state(exited), state(killed)) == ("Z", "Z")


def status(counter):
    a = os.waitid(os.P_PID, exited, os.WEXITED | os.WNOWAIT)
    b = os.waitid(os.P_PID, killed, os.WEXITED | os.WNOWAIT)
    return (a.si_code, a.si_status, b.si_code, b.si_status) == (os.CLD_EXITED, 42, os.CLD_KILLED, 9) or (a, b)


def new_one(counter):
    pid = dead_child(lambda: os._exit(counter % 200))
    wait_for(lambda: state(pid) == "Z")
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == counter % 200


keep(all_of(stay=stay, status=status, new=new_one))
