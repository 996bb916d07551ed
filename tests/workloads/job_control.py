"""An interactive bash on a terminal with a stopped job, a job in the background, a trap, a function and variables."""

import os
import pty
import struct
import termios

from heartbeat import keep, read_until, scratch

scratch()
pid, terminal = pty.fork()
if pid == 0:
    os.execvp("bash", ["bash", "--norc", "--noprofile", "-i"])
termios.tcsetwinsize(terminal, (31, 97))
os.write(terminal, b"PS1= PS2=; bind 'set enable-bracketed-paste off'; stty -echo; echo 'rea''dy'\n")
read_until(terminal, b"ready")
os.write(terminal, b"export SECRET=xyz42; twice() { echo $(($1 * 2)); }; trap 'echo trapped' USR1; echo 'do''ne'\n")
read_until(terminal, b"done")
os.write(terminal, b"sleep 100000 & echo 'sta''rted'\n")
read_until(terminal, b"started")
os.write(terminal, b"cat\n")
os.write(terminal, b"hello\n")
read_until(terminal, b"hello")
os.write(terminal, b"\x1a")  # ^Z
read_until(terminal, b"Stopped")


def check(counter):
    os.write(terminal, b"jobs; echo A$SECRET; twice %d; kill -USR1 $$; stty size; echo E''%d\n" % (counter, counter))
    text = read_until(terminal, b"E%d" % counter).decode()
    missing = [
        word
        for word in ("Running", "sleep 100000", "Stopped", "Axyz42", str(counter * 2), "trapped", "31 97")
        if word not in text
    ]
    if missing:
        return f"no {missing} in {text!r}"
    if counter % 20 == 0:  # the stopped job goes on in the foreground, and is stopped again
        os.write(terminal, b"fg\n")
        read_until(terminal, b"cat")
        os.write(terminal, b"more%d\n" % counter)
        read_until(terminal, b"more%d" % counter)
        os.write(terminal, b"\x1a")
        read_until(terminal, b"Stopped")
    foreground = struct.unpack("i", struct.pack("i", os.tcgetpgrp(terminal)))[0]
    return True if foreground == pid else f"the foreground belongs to {foreground}, not to bash {pid}"


keep(check)
