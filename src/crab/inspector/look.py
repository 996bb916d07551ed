"""One look at a sandbox: what is other than it was at its last checkpoint.

It costs the sandbox nothing: nothing is frozen. The order makes that safe: first who runs, then what was touched, then the
tables, then the net effect, then again who runs. If anybody ran in between it begins anew, and whoever never stands still
counts as changed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

from crab.inspector import commands, roles, sameness, survivors, tables
from crab.inspector.baseline import Baseline, Holdings, Process
from crab.inspector.decide import Fate, Findings, ProcessFinding, Role
from crab.inspector.netchange import NetChange, Sides, net_changes
from crab.inspector.roles import Shell
from crab.inspector.survivors import Groups, Key, Standing
from crab.inspector.task import Task
from crab.inspector.tracker import (
    CALL,
    INODE,
    MAPPED,
    MEMORY,
    NAMED,
    REMOTE,
    RING,
    SIGNAL,
    TASK,
    UNKNOWN,
    WRITTEN,
    Change,
    Tracker,
)
from crab.sandbox.incarnation import Incarnation

ROUNDS = 3
BTRFS = 0x9123683E
REST_SECONDS = 0.15
"""How long after a capture a process may take to come to rest; it is woken by it, and most say so by EINTR."""
STEP_SECONDS = 0.004

FILE_CALLS = {
    WRITTEN: "something was written",
    NAMED: "names or attributes were set",
}
DOUBTFUL_CALLS = {
    MAPPED: "a file was mapped to be written, and stores are not seen here",
    RING: "io_uring was used",
    REMOTE: "a process asked for access to another's memory, or wrote to /proc",
    UNKNOWN: "a system call was made of which nothing is known",
}
"""What a tier that sees no inodes tells, in words."""


class Stored(NamedTuple):
    """Where the parts of a checkpoint lie, by its id."""

    files: Callable[[str], Path]
    images: Callable[[str], AbstractContextManager[Path]]
    """They stay there for the length of the block."""


class Look:
    """See the module."""

    def __init__(
        self,
        tracker: Tracker,
        slot: int,
        subject: Incarnation,
        known: Baseline,
        stored: Stored,
        asked: dict[int, object],
    ) -> None:
        self.tracker, self.slot, self.subject, self.known, self.stored = tracker, slot, subject, known, stored
        self.init = subject.pid
        self.budget = sameness.MOST_AT_ONCE
        self.shells, self.agents = roles.shells(subject), roles.agents(subject)
        self.asked = asked
        """What each shell had done when it last said what its state is."""

    def _groups(self) -> Groups:
        return survivors.by_process(self.tracker.tasks(self.slot))

    def _changes(self) -> list[Change]:
        return [change for change in self.tracker.changes(self.slot) if change.epoch >= self.known.epoch]

    def findings(self) -> tuple[Findings, Groups, int]:
        """What was found, who was there at the end, and what the gate had counted before.

        Raises OSError, ValueError, `SandboxGone`.
        """
        findings, again, stirred = Findings(), Groups(), -1
        for round_ in range(ROUNDS):
            last = round_ == ROUNDS - 1
            self.ask_shells()
            stirred, asof = self.subject.gate.stirred, time.monotonic_ns()
            groups, changes, now = self._groups(), self._changes(), tables.read(self.init)
            calls = {change.number for change in changes if change.kind == CALL}
            net = self._files(changes, calls)
            found = self._processes(groups, changes, asof)
            again = self._groups()
            passing = {f.key for f in found if f.fate == Fate.STARTED and survivors.has_ended(again.get(f.key, []))}
            if passing and not last:
                time.sleep(STEP_SECONDS)  # a child that is about to be gone: of a prompt, say
                continue
            found = [finding for finding in found if finding.key in again or finding.fate != Fate.STARTED]
            told = {finding.key for finding in found}
            moving = [key for key in survivors.moving(groups, again, self.init) if key not in told]
            if moving and last:
                detail = "it never stands still"
                found += [self._finding(Standing(key=key, fate=Fate.RAN, detail=detail)) for key in moving]
            findings = self._summary(net, now, found, calls)
            if not moving:
                break
        return findings, again, stirred

    def ask_shells(self) -> None:
        """Ask every shell that ran since it was last asked for its state, and wait until it sleeps again."""
        groups = self._groups()
        for key in [key for key in groups if key[0] in self.shells]:
            if self.asked.get(key[0]) == survivors.activity(groups[key]):
                continue
            before = self.known.processes.get(key) if self.known.processes else None
            if before is not None and survivors.activity(before.threads) == survivors.activity(groups[key]):
                continue
            self.shells[key[0]].digest(stale=True)
            now = self._groups().get(key)
            if now is not None and not any(task.runs for task in now):
                self.asked[key[0]] = survivors.activity(now)

    # ---- files

    def _files(self, changes: list[Change], calls: set[int]) -> NetChange:
        if told := [what for call, what in FILE_CALLS.items() if call in calls]:
            return NetChange(unsure=f"{' and '.join(told)}, and of what is not seen here", names_unknown=True)
        if not self.known.files_from:
            return NetChange(unsure="the last checkpoint has no files to compare with")
        numbers = [change.number for change in changes if change.kind == INODE and change.magic == BTRFS]
        if not numbers:
            return NetChange()
        copies = {b"m%d/" % n: m for n, m in enumerate(self.subject.spec.mounts) if m.kind == "copy"}
        sides = Sides(
            live=self.subject.files,
            base=self.stored.files(self.known.files_from),
            lower={b"": self.subject.layers.lower[0]} | {part: Path(m.source) for part, m in copies.items()},
            places={b"": ""} | {part: f"{m.target.strip('/')}/" for part, m in copies.items()},
        )
        same = self.known.same if self.tracker.by_time else {}
        return net_changes(sides, numbers, same, replaced=bool(self.known.processes))

    def _bound(self, net: NetChange) -> str:
        """Why the processes of the checkpoint cannot stand on the files as they are now; empty if they can."""
        if not net or not self.known.processes:
            return ""
        if net.names_unknown:
            return "a process may have a file open that was removed or replaced"
        for process, holds in self._held():
            if holds is None:
                return f"what {process.name} (process {process.number}) has open could not be read"
            if holds.by_name:
                return f"{process.name} (process {process.number}) holds a socket or watch that has the name of a file"
        return self.known.files_bound

    def _replaced(self, net: NetChange) -> list[str]:
        """Who has a file open whose name is another file's now, whatever that holds."""
        for process, holds in self._held() if net.replaced else ():
            if holds is None:
                return [
                    f"files were replaced, and what {process.name} (process {process.number}) has open is not known"
                ]
            for path in holds.paths:
                parts = path.strip("/").split("/")
                if any("/".join(parts[:n]) in net.replaced for n in range(1, len(parts) + 1)):
                    return [f"{process.name} (process {process.number}) has {path} open, which is another file now"]
        return []

    def _held(self) -> Iterator[tuple[Process, Holdings | None]]:
        """What each process of the checkpoint has open; None if that cannot be read. (Zombies have nothing.)"""
        for key, process in (self.known.processes or {}).items():
            if survivors.has_ended(process.threads):
                continue
            try:
                yield process, self._holdings(process, key[0])
            except OSError:
                yield process, None

    # ---- processes

    def _processes(self, groups: Groups, changes: list[Change], asof: int) -> list[ProcessFinding]:
        if self.known.processes is None:
            why = "nothing is known of it at the last checkpoint"
            others = [key for key in groups if key[0] != self.init]
            unknown = [self._finding(Standing(key=key, fate=Fate.RAN, detail=why)) for key in others]
            gone = ProcessFinding(number=0, name="a restored process", fate=Fate.ENDED)
            return unknown or [gone]
        old = {key: process.threads for key, process in self.known.processes.items()}
        written = {change.number: change.when for change in changes if change.is_fifo}
        found: list[ProcessFinding] = []
        for standing in survivors.compare(old, groups, self.init):
            proven = False
            agent = standing.key[0] in self.agents
            if agent and standing.fate == Fate.RAN and self._stores_unseen(standing.key[0]):
                standing = Standing(
                    key=standing.key, fate=Fate.CHANGED, detail="it ran and shares memory, maybe a file's"
                )
            if standing.fate == Fate.RAN and not standing.runs and not agent:
                standing = self._prove(standing, groups)
                proven = standing.fate is None
            if standing.fate is None:
                standing = self._from_outside(standing, [] if proven else changes, written)
            if standing.fate is not None:
                found.append(self._finding(standing))
            elif proven:
                _renew(self.known.processes[standing.key], groups[standing.key], asof)
        return found

    def _prove(self, standing: Standing, groups: Groups) -> Standing:
        """A process that ran: it may be the same all the same. (What waits in its pipes is no part of that.)"""
        assert self.known.processes is not None
        key, process = standing.key, self.known.processes[standing.key]
        if shell := self.shells.get(key[0]):
            return self._prove_shell(key, shell, process, groups)
        if why := self._other(key, process, groups[key]):
            return Standing(key=key, fate=Fate.RAN, detail=why)
        return Standing(key=key, fate=None)

    def _prove_shell(self, key: Key, shell: Shell, process: Process, groups: Groups) -> Standing:
        digest = shell.digest() if self.asked.get(key[0]) == survivors.activity(groups[key]) else None
        if digest is None or process.shell is None or process.kernel is None:
            return Standing(key=key, fate=Fate.RAN, detail="its state is not known")
        if digest != process.shell:
            return Standing(key=key, fate=Fate.CHANGED, detail=shell.changed_since(process.shell))
        if detail := next(filter(None, map(survivors.altered, process.threads, groups[key])), ""):
            return Standing(key=key, fate=Fate.CHANGED, detail=detail)
        if sameness.outside(key[0], memory=False) != process.kernel:
            return Standing(key=key, fate=Fate.CHANGED, detail="its descriptors, terminal or settings")
        return Standing(key=key, fate=None)

    def _stores_unseen(self, number: int) -> bool:
        with contextlib.suppress(OSError):
            return sameness.shares_memory(number)
        return True

    def _other(self, key: Key, process: Process, threads: list[Task]) -> str:
        """What is other about a process that ran; empty if it is proven to be what is in its image."""
        if process.outside is None:
            return "it shares memory with others"
        if self.known.processes_from is None:
            return "it has no image"
        if not sameness.same_threads(process.threads, threads):
            return "its threads do not stand where they stood"
        if detail := next(filter(None, map(survivors.altered, process.threads, threads)), ""):
            return detail
        size = sameness.size(key[0])
        if size > self.budget:
            return f"its {size >> 20} MiB of memory were not compared"
        self.budget -= size
        if sameness.outside(key[0]) != process.outside:
            return "its descriptors, mappings or settings changed"
        with self.stored.images(self.known.processes_from) as images:
            return "" if sameness.same_memory(images, process.number, key[0]) else "its memory changed"

    def _holdings(self, process: Process, number: int) -> Holdings:
        if process.holds is None:
            process.holds = sameness.holdings(number)
        return process.holds

    def _from_outside(self, standing: Standing, changes: list[Change], written: dict[int, int]) -> Standing:
        """A process that is what it was: was something of it changed from outside?"""
        assert self.known.processes is not None
        key, process = standing.key, self.known.processes[standing.key]
        for change in changes:
            if change.kind == TASK and change.number == key[0] and change.when > process.proven:
                if change.flags & MEMORY:
                    detail = "another process had access to its memory"
                    return Standing(key=key, fate=Fate.CHANGED, detail=detail)
                if change.flags & SIGNAL:
                    return Standing(key=key, fate=Fate.CHANGED, detail="it was sent a signal")
        if process.kernel is None and not survivors.has_ended(process.threads):
            return Standing(key=key, fate=Fate.CHANGED, detail="what the kernel kept for it could not be read")
        if process.kernel is not None and sameness.outside(key[0], memory=False) != process.kernel:
            detail = "another process changed its descriptors, terminal or settings"
            return Standing(key=key, fate=Fate.CHANGED, detail=detail)
        if process.queued != sameness.queued(key[0]):
            return Standing(key=key, fate=Fate.CHANGED, detail="what waits in a pipe that it holds changed")
        news = {number for number, when in written.items() if when > process.proven}
        if news and news & self._holdings(process, key[0]).fifos:
            return Standing(key=key, fate=Fate.CHANGED, detail="something was written to a pipe that it holds")
        return standing

    def _finding(self, standing: Standing) -> ProcessFinding:
        known = (self.known.processes or {}).get(standing.key)
        name, number = (known.name, known.number) if known else survivors.name_of(standing.key[0])
        host = standing.key[0]
        return ProcessFinding(
            key=standing.key,
            number=number,
            name=self.agents.get(host, name),
            fate=standing.fate or Fate.RAN,
            role=Role.SHELL if host in self.shells else Role.AGENT if host in self.agents else Role.PLAIN,
            detail=standing.detail,
        )

    # ---- all together

    def _summary(self, net: NetChange, now: tables.Tables, found: list[ProcessFinding], calls: set[int]) -> Findings:
        known, counts = self.known, self.tracker.counts(self.slot)
        doubts: list[str] = []
        if counts.lost > known.lost:
            doubts.append(f"{counts.lost - known.lost} changes of files did not fit into the kernel's set")
        doubts += [what for call, what in DOUBTFUL_CALLS.items() if call in calls]
        doubts += self._unseen_stores(found)
        changed = tables.changes(known.tables, now) if known.tables else []
        changed += self._replaced(net)
        changed += self._commands()
        if NAMED in calls and any(" - tmpfs " in mount for mount in now.mounts):
            changed.append("files on a tmpfs may have changed")
        if counts.in_memory > known.in_memory:
            changed.append("files on a tmpfs changed")
        if known.tables and known.processes and known.tables.sockets != now.sockets:
            changed.append("the state of a socket, or what waits in it, changed")
        notes: list[str] = []
        if net.times_only:
            notes.append(f"{net.times_only} files were written or touched and hold what they held: only times differ")
        if net.touched and not net:
            notes.append(f"{net.touched} files or folders were touched without effect")
        if counts.elsewhere > known.elsewhere:
            notes.append("folders of the host that are mounted changed: they are never part of a checkpoint")
        return Findings(
            tier=self.tracker.tier,
            doubts=tuple(doubts),
            files=tuple(net.changed),
            files_written=tuple(dict.fromkeys(known.written)),
            files_unsure=net.unsure,
            tables=tuple(changed),
            processes=tuple(found),
            files_bound=self._bound(net),
            notes=tuple(notes),
        )

    def _commands(self) -> list[str]:
        """What of the commands that init knows is other. Raises `SandboxGone`."""
        if self.known.processes is None:
            return []
        if self.known.commands is None:
            return ["which commands had ended at the last checkpoint is not known"]
        told = commands.change(self.known.commands, commands.read(self.subject))
        if told:  # init may be just about to forget one whose outcome was fetched
            time.sleep(STEP_SECONDS)
            told = commands.change(self.known.commands, commands.read(self.subject))
        return [told] if told else []

    def _unseen_stores(self, found: list[ProcessFinding]) -> list[str]:
        """Where a store into a shared mapping is no event: of those who ran and had one, at the last checkpoint or now."""
        if self.tracker.tier != "C":
            return []
        told: list[str] = []
        for finding in found:
            known = (self.known.processes or {}).get(finding.key)
            shares = known is not None and known.outside is None
            with contextlib.suppress(OSError):
                shares = shares or sameness.shares_memory(finding.key[0])
            if shares:
                told.append(f"{finding.name} (process {finding.number}) ran and shares memory, maybe that of a file")
        return told

    # ---- after a capture

    def settle(self) -> bool:
        """Wait until everybody who was woken by a capture rests again, and take that for what was captured; whether it did.

        A restored process is woken in the same way and comes to the same rest. So they are the same if nothing reached them
        and nothing left them meanwhile: nothing was started or sent from outside, no file, pipe, socket or table changed, no
        process came or went. If something did, whoever is still equal to its image byte by byte is found by `_prove`.
        """
        assert self.known.processes
        end = time.monotonic() + REST_SECONDS
        before = self._groups()
        while True:
            time.sleep(STEP_SECONDS)
            if self.subject.gate.stirred != self.known.stirred:
                return False
            groups = self._groups()
            if not survivors.moving(before, groups, self.init) and not survivors.running(groups, self.init):
                break
            if time.monotonic() > end:
                return False
            before = groups
        groups.pop(next((key for key in groups if key[0] == self.init), (0, 0)), None)
        asof = time.monotonic_ns()
        kernel: dict[Key, bytes] = {}
        for key, process in self.known.processes.items():
            if survivors.has_ended(process.threads):
                continue
            try:
                kernel[key] = sameness.outside(key[0], memory=False)
                if sameness.queued(key[0]) != process.queued:
                    return False
            except OSError:
                return False
        if (
            self._changes()
            or tables.read(self.init) != self.known.tables
            or groups.keys() != self.known.processes.keys()
        ):
            return False
        if survivors.moving(groups, self._groups(), self.init) or self.subject.gate.stirred != self.known.stirred:
            return False
        for key, process in self.known.processes.items():
            _renew(process, groups[key], asof)
            process.kernel = kernel.get(key)
        return True


def _renew(process: Process, threads: list[Task], asof: int) -> None:
    """It is what it was, as of then; what waits in its pipes was compared and is the same."""
    process.threads = threads
    process.proven = asof
    process.holds = None
