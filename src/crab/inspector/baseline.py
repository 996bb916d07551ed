"""What is remembered of a sandbox at its last checkpoint: what the next turn is compared with.

Written beside the registry so that a new daemon can go on where a dead one stopped. Whatever does not fit (another boot,
another head, a kernel that counts anew) makes it worthless, and the next decision `full`.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from crab.inspector.commands import Commands
from crab.inspector.survivors import Key
from crab.inspector.tables import Tables
from crab.inspector.task import Task


@dataclass
class Holdings:
    """What a process has open."""

    fifos: frozenset[int]
    """Inodes of pipes and fifos."""
    paths: frozenset[str]
    """Of files and folders that it has open, mapped, or is in; absolute, as seen in the sandbox."""
    by_name: bool = False
    """It holds something else that a restore finds by the name of a file: a socket or a watch."""


@dataclass
class Process:
    """One process as it was captured, or was proven to be since."""

    name: str
    number: int
    """In the sandbox."""
    threads: list[Task]
    outside: bytes | None = None
    """Digest of `sameness.outside` at the freeze."""
    kernel: bytes | None = None
    """The same without its mappings: what others can change while it sleeps."""
    shell: str | None = None
    """Digest of a registered shell's state; None if it is not known."""
    queued: dict[int, int] = field(default_factory=dict[int, int])
    """Bytes that wait in each pipe that it holds, by inode: taking some out is no event."""
    proven: int = 0
    """ns of CLOCK_MONOTONIC: what was done to it before has been looked at."""
    holds: Holdings | None = None
    """None: not looked at since it last ran."""


@dataclass
class Baseline:
    """See the module."""

    boot: str
    checkpoint: str
    """The head that this is about."""
    files_from: str
    """Checkpoint whose snapshot holds the files; empty: none is to be compared with."""
    processes_from: str | None
    """Checkpoint whose images hold the processes; None: it has none."""
    epoch: int
    """First epoch of changes that came after."""
    lost: int = 0
    """What was lost before is covered."""
    elsewhere: int = 0
    in_memory: int = 0
    init: int = 0
    tables: Tables | None = None
    commands: Commands | None = None
    """Read just before the capture; None: not known."""
    processes: dict[Key, Process] | None = None
    """None: they were restored or started since, and cannot be compared with the checkpoint."""
    same: dict[int, tuple[bytes, int]] = field(default_factory=dict[int, tuple[bytes, int]])
    """Of `crab.inspector.netchange.Same`: files that were touched since and found to be what they were."""
    files_bound: str = ""
    stirred: int = -1
    """Of the gate, at the freeze (of no use to a later daemon)."""
    written: list[str] = field(default_factory=list[str])
    """What the host itself wrote into the sandbox, in words."""


def save(path: Path, baseline: Baseline) -> None:
    """Write it, in one step."""
    new = path.with_suffix(".new")
    new.write_bytes(_ENCODER.encode(baseline))
    new.rename(path)


def load(path: Path) -> Baseline | None:
    """Read it; None if it is not there or cannot be read."""
    with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
        return msgspec.msgpack.decode(path.read_bytes(), type=Baseline)
    return None


def forget(path: Path) -> None:
    """Remove it; no error if it is not there."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


_ENCODER = msgspec.msgpack.Encoder()
