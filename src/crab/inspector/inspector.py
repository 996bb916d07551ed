"""The inspector of a host: for each sandbox, what changed since its last checkpoint.

It owns the programs in the kernel and what is remembered of each sandbox. How one look at a sandbox works is said in
`look`, what is read at the moment of a capture in `observation`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from crab.errors import HostUnsuitable
from crab.host import processes
from crab.inspector import baseline as baselines
from crab.inspector import commands, tables
from crab.inspector.baseline import Baseline
from crab.inspector.decide import Findings, decide
from crab.inspector.look import Look, Stored
from crab.inspector.observation import Observation
from crab.inspector.survivors import Groups
from crab.inspector.tracker import Counts, Tracker
from crab.model import Checkpoint, Decision
from crab.sandbox.incarnation import Incarnation

SETTING = "CRAB_INSPECTOR"
"""Environment variable of the owner of the state directory: `off` makes every checkpoint a full one, the name of a tier allows
that one alone."""


class Inspector:
    """See the module. Callers hold the operation of the sandbox that they ask about."""

    def __init__(self, tracker: Tracker | None, why_not: str, folder: Path, device: int, stored: Stored) -> None:
        """`device` is the file system that snapshots cover, `folder` where baselines are kept."""
        self.tracker = tracker
        self.why_not = why_not
        self._folder = folder
        self._device = device
        self._stored = stored
        self._known: dict[str, Baseline] = {}
        self._seen: dict[str, tuple[Groups, int]] = {}
        """Who was there at the end of the last decision, and what the gate had counted before it."""
        self._asked: dict[str, dict[int, object]] = {}
        """Of `Look.asked`."""
        self._looking: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()
        folder.mkdir(mode=0o700, exist_ok=True)

    @classmethod
    def open(
        cls, owner: str, parent: Path, state_dir: Path, device: int, stored: Stored, setting: str = ""
    ) -> Inspector:
        """With the best tier that works here and that the setting (see `SETTING`) allows, or with none."""
        tracker, why_not = None, "the inspector is switched off"
        if setting != "off":
            try:
                tracker = Tracker.open(owner, parent, state_dir, setting)
            except HostUnsuitable as error:
                why_not = error.message
        return cls(tracker, why_not, state_dir / "inspector", device, stored)

    @property
    def tier(self) -> str:
        """`A`, `B`, `C` or empty."""
        return self.tracker.tier if self.tracker else ""

    def close(self, remove: bool = False) -> None:
        """Let go of the kernel; it goes on tracking unless `remove`."""
        if self.tracker:
            if remove:
                self.tracker.remove()
            self.tracker.close()
            self.tracker = None

    # ---- the life of an incarnation (`crab.sandbox.incarnation.Watcher`)

    def begin(self, group: Path) -> None:
        """Track a sandbox from before its first process. Raises OSError, `HostUnsuitable`."""
        if self.tracker:
            self.tracker.track(group.stat().st_ino, self._device)

    def end(self, key: str, group: Path) -> None:
        """Forget a sandbox whose processes are gone."""
        with self._lock:
            for kept in (self._known, self._seen, self._asked, self._looking):
                kept.pop(key, None)
        baselines.forget(self._folder / key)
        if self.tracker:
            with contextlib.suppress(FileNotFoundError):
                self.tracker.untrack(group.stat().st_ino)

    def sweep(self, alive: Mapping[str, Path]) -> None:
        """Forget all but those: incarnation key -> cgroup. Those that are not tracked yet are from now on."""
        for path in self._folder.iterdir():
            if path.name not in alive:
                baselines.forget(path)
        if self.tracker is None:
            return
        self.tracker.sweep()
        groups = {group.stat().st_ino: group for group in alive.values()}
        for number in self.tracker.groups():
            if number not in groups:
                self.tracker.untrack(number)
        for key, group in alive.items():
            if self.tracker.slot(group.stat().st_ino) is None:
                self.keep(key, None)  # what it did until now was seen by programs that are no more
            self.begin(group)

    def restored(self, subject: Incarnation, checkpoint: Checkpoint, alone: bool) -> None:
        """A sandbox was brought to the state of a checkpoint: its files can be compared with that, its processes cannot.

        (They have run since, and nobody knows them from before they did.) `alone`: there are none but init.
        """
        if self.tracker is None:
            return
        slot = self._slot(subject)
        counts = self.tracker.counts(slot) if slot is not None else Counts(0)
        self.keep(
            subject.key,
            Baseline(
                boot=processes.boot_id(),
                checkpoint=checkpoint.id,
                files_from=checkpoint.files_from or checkpoint.id,
                processes_from=checkpoint.processes_from,
                epoch=counts.epoch,
                lost=counts.lost,
                elsewhere=counts.elsewhere,
                in_memory=counts.in_memory,
                init=subject.pid,
                tables=tables.read(subject.pid) if alone else None,
                commands=commands.read(subject) if alone else None,
                processes={} if alone else None,
            ),
        )

    def wrote(self, key: str, what: str) -> None:
        """The host changed files of a sandbox, which is in no list of the kernel; `what` says it in words."""
        known = self.baseline(key)
        if known is not None:
            known.written.append(what)  # also if it is there: a capture forgets those from before it, not this one
            baselines.save(self._folder / key, known)

    def inherited(self, old: str, files: str | None, processes: str | None) -> None:
        """Parts of a checkpoint that is about to be removed have another owner now."""
        for path in list(self._folder.iterdir()):
            known = self.baseline(path.name)
            if known is None:
                continue
            if files and known.files_from == old:
                known.files_from = files
            if processes and known.processes_from == old:
                known.processes_from = processes
            self.keep(path.name, known)

    # ---- what is remembered

    def baseline(self, key: str) -> Baseline | None:
        """What is known of an incarnation at its last checkpoint."""
        with self._lock:
            if key not in self._known and (found := baselines.load(self._folder / key)):
                self._known[key] = found
            return self._known.get(key)

    def keep(self, key: str, baseline: Baseline | None) -> None:
        """Remember that from now on; None: nothing."""
        with self._lock:
            if baseline is None:
                self._known.pop(key, None)
                baselines.forget(self._folder / key)
            else:
                self._known[key] = baseline
                baselines.save(self._folder / key, baseline)

    def _slot(self, subject: Incarnation) -> int | None:
        if self.tracker is None:
            return None
        try:
            return self.tracker.slot(subject.group.path.stat().st_ino)
        except FileNotFoundError:
            return None

    # ---- the decision

    def decide(self, subject: Incarnation, head: str | None) -> Decision:
        """What changed since the checkpoint `head`. Raises `SandboxGone` if the sandbox ends meanwhile."""
        begin = time.perf_counter()
        try:
            with self._one_look(subject.key):
                findings = self._find(subject, head)
        except (OSError, ValueError) as error:
            subject.pid  # noqa: B018  raises SandboxGone if that is the reason
            findings = Findings(tier=self.tier, doubts=(f"the inspector failed ({type(error).__name__}: {error})",))
        return msgspec.structs.replace(decide(findings), cost_ms=(time.perf_counter() - begin) * 1e3)

    def _find(self, subject: Incarnation, head: str | None) -> Findings:
        if self.tracker is None:
            return Findings(doubts=(self.why_not,))
        if head is None:
            return Findings(tier=self.tier, doubts=("there is no checkpoint to compare with",))
        slot, known = self._slot(subject), self.baseline(subject.key)
        if slot is None:
            return Findings(tier=self.tier, doubts=("the sandbox was not tracked",))
        if known is None:
            return Findings(tier=self.tier, doubts=("nothing is known of the state at the last checkpoint",))
        if reason := _unusable(known, subject, head, self.tracker.counts(slot)):
            return Findings(tier=self.tier, doubts=(reason,))
        findings, groups, stirred = self._look(self.tracker, slot, subject, known).findings()
        self._seen[subject.key] = groups, stirred
        return findings

    def _look(self, tracker: Tracker, slot: int, subject: Incarnation, known: Baseline) -> Look:
        asked = self._asked.setdefault(subject.key, {})
        return Look(tracker, slot, subject, known, self._stored, asked)

    @contextlib.contextmanager
    def _one_look(self, key: str) -> Iterator[None]:
        with self._lock:
            lock = self._looking.setdefault(key, threading.Lock())
        with lock:
            yield

    # ---- around a capture

    def observe(self, subject: Incarnation) -> Observation | None:
        """Begin to watch a capture; None if nothing is tracked."""
        slot = self._slot(subject)
        if self.tracker is None or slot is None:
            return None
        return Observation(
            self.tracker, slot, subject, self.baseline(subject.key), self._seen.pop(subject.key, None), self.keep
        )

    def unchanged(self, key: str, checkpoint: Checkpoint) -> None:
        """A turn was published that changed nothing: what is known is about a new head."""
        if known := self.baseline(key):
            known.checkpoint = checkpoint.id
            self.keep(key, known)

    def settle(self, subject: Incarnation) -> None:
        """After a capture: see those who stood still for it come to rest again, off the path on which somebody waits.

        What does not come to rest is looked at by the next decision. Raises OSError, ValueError, `CrabError`.
        """
        with self._one_look(subject.key):
            known, slot = self.baseline(subject.key), self._slot(subject)
            if known is None or not known.processes or slot is None or self.tracker is None:
                return
            if self._look(self.tracker, slot, subject, known).settle():
                self.keep(subject.key, known)

    def prepare(self, subject: Incarnation) -> None:
        """A command has ended in a shell: ask it now for its state, which the next decision will want to know.

        Raises OSError, ValueError, `CrabError`.
        """
        with self._one_look(subject.key):
            known, slot = self.baseline(subject.key), self._slot(subject)
            if known is not None and slot is not None and self.tracker is not None:
                self._look(self.tracker, slot, subject, known).ask_shells()


def _unusable(known: Baseline, subject: Incarnation, head: str, counts: Counts) -> str:
    """Why a baseline tells nothing about now; empty if it does."""
    if known.boot != processes.boot_id() or known.init != subject.pid:
        return "the processes are not those of the last checkpoint"
    if known.checkpoint != head:
        return f"what is known is about checkpoint {known.checkpoint}, not about the head"
    if counts.epoch < known.epoch:
        return "the kernel counts from the start again"
    return ""
