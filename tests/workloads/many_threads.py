"""Threads that count, wait for each other by a condition, hand things over by a queue, and have names and locals."""

import queue
import threading
import time

from heartbeat import keep, wait_for
from kernel import call

PR_SET_NAME, PR_GET_NAME = 15, 16
counts = [0] * 8
local = threading.local()
turn = threading.Condition()
ball = 0
asked, answered = queue.Queue(), queue.Queue()


def count(me):
    call("prctl", PR_SET_NAME, b"counter-%d" % me)
    local.me = me
    while True:
        counts[local.me] += 1
        time.sleep(0.01)


def play(me):
    global ball
    while True:
        with turn:
            turn.wait_for(lambda: ball % 2 == me)  # noqa: B023  the global one, as it is then
            ball += 1
            turn.notify_all()
        time.sleep(0.005)


def answer():
    while True:
        answered.put(asked.get() * 3)


for number in range(8):
    threading.Thread(target=count, args=(number,), daemon=True).start()
for number in range(2):
    threading.Thread(target=play, args=(number,), daemon=True).start()
threading.Thread(target=answer, daemon=True).start()


def names():
    found = []
    for thread in threading.enumerate():
        with open(f"/proc/self/task/{thread.native_id}/comm") as f:
            found.append(f.read().strip())
    return found


def check(counter):
    before, ball_before = list(counts), ball
    wait_for(lambda: all(new > old for new, old in zip(counts, before, strict=True)) and ball > ball_before + 1)
    asked.put(counter)
    if answered.get(timeout=10) != counter * 3:
        return "the queue"
    missing = {f"counter-{me}" for me in range(8)} - set(names())
    return f"thread names {missing}" if missing else True


wait_for(lambda: len([name for name in names() if name.startswith("counter-")]) == 8)
keep(check)
