"""What the kernel tells of a process, read of real ones."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import termios
from collections.abc import Iterator

import pytest

from crab.inspector import sameness


@pytest.fixture
def beside_a_terminal() -> Iterator[tuple[int, int, int]]:
    """A process that holds a terminal, and both sides of that."""
    master, slave = pty.openpty()
    program = "import time; print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", program], stdin=slave, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline(), (
            "a process that still starts opens and closes its libraries"
        )
        yield process.pid, master, slave
        process.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="borrows a descriptor of another process")
def test_a_terminal_that_is_hung_up_is_other_than_before_and_no_error(
    beside_a_terminal: tuple[int, int, int],
) -> None:
    process, master, slave = beside_a_terminal
    open_ = sameness.outside(process, memory=False)
    assert sameness.outside(process, memory=False) == open_
    os.close(master)
    with pytest.raises(termios.error):
        termios.tcgetattr(slave)
    hung_up = sameness.outside(process, memory=False)
    os.close(slave)
    assert hung_up != open_ and sameness.outside(process, memory=False) == hung_up
