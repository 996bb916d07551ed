"""What is read at the one moment at which nothing of a sandbox moves, and remembered if its checkpoint is published."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from crab.errors import CrabError
from crab.host import processes
from crab.inspector import commands, roles, sameness, survivors, tables
from crab.inspector.baseline import Baseline, Process
from crab.inspector.netchange import refresh_stamps
from crab.inspector.survivors import Groups, Key
from crab.inspector.tracker import INODE, Tracker
from crab.model import Checkpoint
from crab.sandbox.incarnation import Incarnation

LATELY = 40_000_000
"""ns: a change that is no older may lie in the tick of the clock that still lasts (10 ms at HZ=100)."""


class Observation:
    """See the module. Made before a capture."""

    def __init__(
        self,
        tracker: Tracker,
        slot: int,
        subject: Incarnation,
        old: Baseline | None,
        seen: tuple[Groups, int] | None,
        keep: Callable[[str, Baseline | None], None],
    ) -> None:
        """`seen` are the tasks at the end of the decision, if there was one, and what the gate had counted before it."""
        self._tracker, self._slot, self._subject, self._old, self._seen = tracker, slot, subject, old, seen
        self._keep = keep
        self._shells = {pid: (shell, shell.digest()) for pid, shell in roles.shells(subject).items()}
        self._commands: commands.Commands | None = None
        with contextlib.suppress(OSError, CrabError):
            self._commands = commands.read(subject)  # the gate is closed later
        self._new: Baseline | None = None
        self._written = 0

    def frozen(self) -> None:
        """This is the moment. Never raises: what fails is doubt at the next turn."""
        try:
            self._new = self._read()
        except (OSError, ValueError, CrabError):
            self._new = None

    def begin(self) -> bool:
        """For a snapshot without a freeze: the moment begins, and `quiet` says whether it was one. False: do not try."""
        if self._seen is None:
            return False
        self.frozen()
        return self._new is not None

    def quiet(self) -> bool:
        """Whether since the decision no process but init ran, nothing was started from outside, and since `begin` nothing
        changed: also not by a command that came and went."""
        if self._seen is None or self._new is None:
            return False
        groups, stirred = self._seen
        try:
            now = survivors.by_process(self._tracker.tasks(self._slot))
            changed = any(change.epoch >= self._new.epoch for change in self._tracker.changes(self._slot))
        except (OSError, ValueError):
            return False
        moved = survivors.moving(groups, now, self._subject.pid) or survivors.running(now, self._subject.pid)
        return not moved and not changed and self._subject.gate.stirred == stirred

    def _read(self) -> Baseline:
        tracker, slot, pid = self._tracker, self._slot, self._subject.pid
        self._written = len(self._old.written) if self._old else 0
        before, now = tracker.counts(slot), time.monotonic_ns()
        if tracker.by_time:
            recent = [c.number for c in tracker.changes(slot) if c.kind == INODE and now - c.when < LATELY]
            refresh_stamps(self._subject.files, recent)
        epoch = tracker.advance(slot, grow=self._old is not None and before.lost > self._old.lost)
        counts = tracker.counts(slot)
        return Baseline(
            boot=processes.boot_id(),
            checkpoint="",
            files_from="",
            processes_from=None,
            epoch=epoch,
            lost=counts.lost,
            elsewhere=counts.elsewhere,
            in_memory=counts.in_memory,
            init=pid,
            tables=tables.read(pid),
            commands=self._commands,
            processes=dict(self._processes(survivors.by_process(tracker.tasks(slot)), now)),
            stirred=self._subject.gate.stirred,
        )

    def _processes(self, groups: Groups, now: int) -> Iterator[tuple[Key, Process]]:
        for key, threads in groups.items():
            if key[0] == self._subject.pid:
                continue
            outside = kernel = None
            shell, digest = self._shells.get(key[0], (None, None))
            with contextlib.suppress(OSError):
                kernel = sameness.outside(key[0], memory=False)
                if shell is None and not sameness.shares_memory(key[0]):
                    outside = sameness.outside(key[0])
            if shell is not None and digest is not None and digest != shell.digest():
                digest = None  # a command was run in it meanwhile
            waiting: dict[int, int] = {}
            with contextlib.suppress(OSError):
                waiting = sameness.queued(key[0])
            name, number = survivors.name_of(key[0])
            process = Process(name=name, number=number, threads=threads, shell=digest, queued=waiting, proven=now)
            process.outside, process.kernel = outside, kernel
            yield key, process

    def published(self, checkpoint: Checkpoint, files_bound: str = "") -> None:
        """The checkpoint of that moment exists. `files_bound`: why its processes need its own files."""
        new, key = self._new, self._subject.key
        if new is None:
            self._keep(key, None)
            return
        new.checkpoint = checkpoint.id
        new.files_from = checkpoint.files_from or checkpoint.id
        new.processes_from = checkpoint.processes_from
        new.files_bound = files_bound
        new.written = self._old.written[self._written :] if self._old else []
        if checkpoint.kind == "files":  # the processes are those of before
            old = self._old if checkpoint.processes_from else None
            new.processes, new.tables = (old.processes, old.tables) if old else (None, None)
            new.commands = old.commands if old else None
            new.files_bound = old.files_bound if old else ""
        self._keep(key, new)
        with contextlib.suppress(OSError):
            self._tracker.forget(self._slot, new.epoch)
