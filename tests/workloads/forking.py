"""Processes that are made without pause: fork, vfork, posix_spawn, threads that spawn, grandchildren, pipelines."""

import os
import subprocess
import threading
import time

from heartbeat import all_of, keep, wait_for

spawned, failed = [0, 0], []


def spawn(me):
    while True:
        pid = os.posix_spawn("/bin/true", ["true"], os.environ)
        _, status = os.waitpid(pid, 0)
        if status:
            failed.append(f"posix_spawn gave {status}")
        spawned[me] += 1
        time.sleep(0.01)


for number in range(2):
    threading.Thread(target=spawn, args=(number,), daemon=True).start()


def forked(counter):
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        if os.fork() == 0:
            os.write(w, b"%d" % counter)
        os._exit(counter % 100)
    os.close(w)
    text = os.read(r, 99)
    os.close(r)
    return text == b"%d" % counter and os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == counter % 100


def shell(counter):
    done = subprocess.run(
        ["sh", "-c", "(echo a; (echo b; echo c)) | tr a-z A-Z | cat; :"], capture_output=True, check=False
    )
    return (done.returncode, done.stdout) == (0, b"A\nB\nC\n") or done


def spawners(counter):
    before = list(spawned)
    wait_for(lambda: all(new > old for new, old in zip(spawned, before, strict=True)))
    return failed[0] if failed else True


keep(all_of(fork=forked, shell=shell, spawn=spawners), period=0.01)
