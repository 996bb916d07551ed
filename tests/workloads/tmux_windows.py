"""A tmux server with two windows and a split one; shells and a full-screen program in them; an attached client."""

import os
import pty
import subprocess
import termios

from heartbeat import keep, read_until, readable, scratch, wait_for

home = scratch()
env = os.environ | {"TERM": "xterm-256color", "TMUX_TMPDIR": home, "PS1": "", "HISTFILE": ""}


def tmux(*words):
    return subprocess.run(["tmux", *words], check=True, capture_output=True, text=True, env=env).stdout


tmux("-f", "/dev/null", "new-session", "-d", "-s", "main", "-x", "120", "-y", "40", "bash --norc --noprofile")
tmux("new-window", "-t", "main", "bash --norc --noprofile")
tmux("split-window", "-t", "main:1", "top")
pid, terminal = pty.fork()
if pid == 0:
    os.execvpe("tmux", ["tmux", "attach", "-t", "main"], env)
termios.tcsetwinsize(terminal, (40, 120))
wait_for(lambda: "load average" in tmux("capture-pane", "-p", "-t", "main:1.1"))
panes = tmux("list-panes", "-s", "-t", "main", "-F", "#{pane_id} #{pane_pid}")
tmux("send-keys", "-t", "main:0", "export MEMORY=kept", "Enter")


def drain():
    while readable(terminal, 0):
        if not os.read(terminal, 65536):
            raise EOFError("the client of tmux is gone")


def check(counter):
    drain()
    for window in ("main:0", "main:1.0"):
        tmux("send-keys", "-t", window, f"clear; echo $MEMORY''-{counter}-$(({counter} * 2))", "Enter")
    wait_for(lambda: f"kept-{counter}-{counter * 2}" in tmux("capture-pane", "-p", "-t", "main:0"), 20)
    wait_for(lambda: f"-{counter}-{counter * 2}" in tmux("capture-pane", "-p", "-t", "main:1.0"), 20)
    if "load average" not in tmux("capture-pane", "-p", "-t", "main:1.1"):
        return "top shows nothing"
    found = tmux("list-panes", "-s", "-t", "main", "-F", "#{pane_id} #{pane_pid}")
    if found != panes:
        return f"panes {found!r} instead of {panes!r}"
    if "main" not in tmux("list-clients"):
        return "the client is not attached any more"
    if counter % 10 == 0:  # through the client: what a person types
        os.write(terminal, b"\x02c")
        wait_for(lambda: len(tmux("list-windows", "-t", "main").splitlines()) == 3, 20)
        os.write(terminal, b"exit\n")
        wait_for(lambda: len(tmux("list-windows", "-t", "main").splitlines()) == 2, 20)
        read_until(terminal, b"\x1b")
    return True


keep(check, period=0.1)
