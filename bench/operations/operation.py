"""What an operation is, the list of all, the files that they work on, and how they call the kernel."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Phase = Callable[[str, dict[str, Any]], None]
Look = Callable[[str, dict[str, Any]], object]

PAGE = 4096
SIZE = 2 * PAGE
"""Bytes of each file of `lay_out`."""
KEY = 0x43524142
"""Of all System V objects that are made here."""
lines: list[int] = []
"""Descriptors by which a process of `Runner` is spoken to; no sleeper may hold them."""
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p


@dataclass(frozen=True)
class Operation:
    """One way to change something, or not to."""

    name: str
    act: Phase
    prepare: Phase | None = None
    changes: bool = True
    """Whether anything is different afterwards."""
    target: tuple[str, ...] = ()
    """Paths in the folder that differ afterwards; an absolute path lies elsewhere."""
    needs: frozenset[str] = frozenset()
    """What the file system or the machine must have: see `filesystems.OFFERS` and `MACHINE`."""
    kind: Literal["files", "processes"] = "files"
    """What a checkpoint must hold to have the change in it."""
    lives: bool = False
    """One process does both phases and lives on after the turn; else each phase is a process that has ended."""
    look: Look | None = None
    """Of a change that is not in the folder: something that is equal exactly if nothing changed. Called from outside."""
    clean: Phase | None = None
    """Removes what lies outside of the folder and is nobody's child."""


MACHINE = frozenset({"uring", "mount", "keyring", "ptrace", "processors"})
"""Needs that are not the file system's; a sandbox denies some of them. `mount`: a mount namespace of its own; `processors`: more
than one."""
OPERATIONS: list[Operation] = []


def operation(name: str, *target: str, **options: Any) -> Callable[[Phase], Phase]:
    """Add a function to the matrix. `needs` may be a string of words."""
    options["needs"] = frozenset(options.get("needs", "").split())

    def add(act: Phase) -> Phase:
        OPERATIONS.append(Operation(name=name, act=act, target=target, **options))
        return act

    return add


def lay_out(folder: str) -> None:
    """The files that the operations work on: `a` to `f` of two pages of x, folders `sub` (with a file) and `empty`, a symlink."""
    for name in "abcdef":
        with open(f"{folder}/{name}", "w") as file:
            file.write("x" * SIZE)
    os.makedirs(f"{folder}/sub/deep")
    os.mkdir(f"{folder}/empty")
    with open(f"{folder}/sub/file", "w") as file:
        file.write("in a folder")
    os.symlink("a", f"{folder}/ln")


def checked(result: int | None, what: str) -> int:
    """The result of a system call by ctypes. Raises OSError."""
    if result is None or result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), what)
    return result


def opened(path: str, flags: int = os.O_RDWR) -> int:
    """A descriptor that lives as long as its process: children of operations end soon."""
    return os.open(path, flags | os.O_CLOEXEC)
