"""What terminals tell of processes: real bash on a real terminal."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from unit.sandbox.terminal import bash_on_a_terminal

from crab.host.processes import absent_foreground, children, waits_at_terminal


def eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_shell_waits_at_its_terminal_only_while_nothing_runs_in_it(tmp_path: Path) -> None:
    shell, made = bash_on_a_terminal(tmp_path)
    pid = made.process.pid
    try:
        assert shell.run("sleep 1000 &").exit_code == 0
        eventually(lambda: waits_at_terminal(pid))
        for busy in ("sleep 1000", "while :; do :; done", "wait", "while :; do printf '%010000d'; done"):
            made.write(busy.encode() + b"\n")
            eventually(lambda: not waits_at_terminal(pid))
            time.sleep(0.1)
            assert not any(waits_at_terminal(pid) for _ in range(100)), busy
            made.write(b"\x03")
            eventually(lambda: waits_at_terminal(pid))
        assert not absent_foreground([pid, *children(pid)])
        shell.run("kill -9 %1")
    finally:
        made.kill()
        made.process.wait()
    assert not waits_at_terminal(pid)


def test_a_foreground_group_without_a_member_is_noticed(tmp_path: Path) -> None:
    shell, made = bash_on_a_terminal(tmp_path)
    pid = made.process.pid
    try:
        made.write(b"sleep 1000\n")
        eventually(lambda: bool(children(pid)) and os.tcgetpgrp(made.master) == children(pid)[0])
        assert absent_foreground([pid, *children(pid)]) == set()
        assert absent_foreground([pid]) == {children(pid)[0]}
        made.write(b"\x03")
    finally:
        made.kill()
        made.process.wait()
    assert shell.name
