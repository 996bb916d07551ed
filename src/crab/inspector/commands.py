"""What init keeps of commands until somebody fetches it: how each ended, and what it wrote that nobody has read.

That is in the memory of init, which runs at every command and is therefore no survivor like others; so it is asked.
"""

from __future__ import annotations

from crab.sandbox.incarnation import Incarnation

Commands = dict[int, tuple[int, bool, int, str]]
"""By the number of the command: pid, whether it has ended, its status, its name."""


def read(subject: Incarnation) -> Commands:
    """The commands that init knows. Raises `SandboxGone`, OSError."""
    return {entry.exec: (entry.pid, entry.exited, entry.status, entry.name) for entry in subject.entries()}


def change(old: Commands, new: Commands) -> str:
    """What is other, in words; empty if nothing is.

    A command that runs is told by its processes. How much of its output was read is no state: who reads says from where.
    """
    for number, (pid, ended, _, name) in new.items():
        if ended and not (number in old and old[number][1]):
            return f"{name or f'a command (process {pid})'} has ended, and nobody has fetched how"
    for number, (pid, _, _, name) in old.items():
        if number not in new:
            return f"how {name or f'a command (process {pid})'} ended was fetched"
    return ""
