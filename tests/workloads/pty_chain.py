"""Terminals in terminals: script(1) in script(1), and a shell at the end; raw mode and window size of the outermost."""

import os
import pty
import termios
import tty

from heartbeat import keep, read_until, scratch, wait_for

scratch()
pid, terminal = pty.fork()
if pid == 0:
    inner = "script -qfc 'stty -echo; echo ready; while read line; do echo got:$line:; done' inner.log"
    os.execvp("script", ["script", "-qfc", inner, "outer.log"])
read_until(terminal, b"ready")
own_master, own_slave = os.openpty()
tty.setraw(own_slave)
termios.tcsetwinsize(own_master, (7, 11))
locked = os.ttyname(own_slave)


def end_of(name):
    with open(name, "rb") as f:
        f.seek(max(0, os.fstat(f.fileno()).st_size - 4096))
        return f.read()


def check(counter):
    os.write(terminal, b"line%d\n" % counter)
    read_until(terminal, b"got:line%d:" % counter)
    wait_for(lambda: b"got:line%d:" % counter in end_of("inner.log"), 10)
    os.write(own_slave, b"raw\n")  # raw mode: no carriage return is added
    if os.read(own_master, 99) != b"raw\n":
        return "raw mode"
    if termios.tcgetwinsize(own_slave) != (7, 11) or os.ttyname(own_slave) != locked:
        return "window size or name"
    return True


keep(check)
