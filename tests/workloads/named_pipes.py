"""FIFOs: between two processes, with unread data, opened for both, and one that a reader waits to be opened."""

import os
import stat
import threading

from heartbeat import all_of, child, keep, readable, scratch

scratch()
for name in ("ask", "answer", "kept", "late"):
    if not (os.path.exists(name) and stat.S_ISFIFO(os.stat(name).st_mode)):
        os.mkfifo(name)
other = child("sh", "-c", "while read line; do echo got $line; done <ask >answer")
ask = os.open("ask", os.O_WRONLY)
answer = os.open("answer", os.O_RDONLY)
kept = os.open("kept", os.O_RDWR)
waiting = 0
for waiting in range(100):
    os.write(kept, b"%08d" % waiting)
taken = 0
opened = []


def open_late():
    with open("late") as f:
        opened.append(f.read())


def talk(counter):
    os.write(ask, b"%d\n" % counter)
    return readable(answer, 10) and os.read(answer, 99) == b"got %d\n" % counter


def queue(counter):
    global waiting, taken
    if os.read(kept, 8) != b"%08d" % taken:
        return f"number {taken} is not next"
    taken += 1
    waiting += 1
    os.write(kept, b"%08d" % waiting)
    return True


def waits_to_be_opened(counter):
    thread = threading.Thread(target=open_late)
    thread.start()
    with open("late", "w") as f:
        f.write(str(counter))
    thread.join(10)
    return opened.pop() == str(counter)


keep(all_of(talk=talk, queue=queue, late=waits_to_be_opened))
