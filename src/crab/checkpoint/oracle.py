"""The oracle: what really differs between two full checkpoints of one sandbox, told from what was captured alone.

It is what decisions about checkpoints are judged by, so it must not share their means: it reads the files of both
checkpoints, CRIU's images of both and the evidence in both manifests, compares all of it, and leaves out only what is
proven to be no state (`imagenames`, `imagefacts`, `imagememory` and `threads` give the proof beside each). It is slow (it
reads every page) and runs nothing.

One thing no single pair of captures can tell: a freeze itself wakes every thread that waits in a call which the kernel does
not begin anew (epoll_wait, nanosleep, select): nginx then renews its cached time, node and tmux count the time they will
still wait. That happens at a restore too. What a capture alone does to a sandbox is learnt from a *control*: two captures
with nothing in between (`learn`). Pages and registers that changed there are left out by a `compare` that is given it, and
counted. A control that names much (a server that is at work by itself) says so by its size.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from crab.checkpoint import difference, evidence, imagefacts, imagememory
from crab.checkpoint.evidence import Evidence
from crab.checkpoint.imagefacts import INIT, Image, Place
from crab.checkpoint.imagememory import PAGE, Memory, Words
from crab.checkpoint.manifest import Manifest
from crab.checkpoint.view import Tree, seen
from crab.host.beneath import open_beneath
from crab.host.fingerprint import file_digest
from crab.host.pool import Pool
from crab.model import FileChange

Kind = Literal["none", "files", "processes", "full"]
Judgement = Literal["right", "false alarm", "miss"]
HIDDEN = (b".crab", b"proc", b"sys")
"""Unlike in `difference`, /dev is looked into: /dev/shm is a folder of the sandbox's own files."""
_PARTS: dict[Kind, frozenset[str]] = {
    "none": frozenset(),
    "files": frozenset({"files"}),
    "processes": frozenset({"processes"}),
    "full": frozenset({"files", "processes"}),
}


@dataclass(frozen=True)
class Truth:
    """What differs."""

    files: tuple[FileChange, ...] = ()
    """Without those of which only the times differ."""
    processes: tuple[str, ...] = ()
    """One line each."""
    times_only: int = 0
    """Files that were written with the content that they had, or whose times were set."""
    left_out: int = 0
    """Differences that a control explains."""
    ran: frozenset[int] = frozenset()
    """Processes that differ in nothing but their memory and registers. Of an interpreter that waits for its next command that
    is so after every command, also after one that changed nothing that the next could tell (`:` in a shell)."""

    @property
    def kind(self) -> Kind:
        if self.files:
            return "full" if self.processes else "files"
        return "processes" if self.processes else "none"


@dataclass(frozen=True)
class Capture:
    """One full checkpoint."""

    manifest: Manifest
    images: Path
    files: Path
    """Its subvolume."""
    lower: tuple[Path, ...]
    """What its sandbox stands on, uppermost first."""

    def trees(self) -> dict[str, Tree]:
        """The root file system and the copy-on-write mounts, each under the place that its paths begin with."""
        copies = {
            f"{mount.target.strip('/')}/": Tree((Path(mount.source),), self.files, f"m{number}")
            for number, mount in enumerate(self.manifest.spec.mounts)
            if mount.kind == "copy"
        }
        return {"": Tree(self.lower, self.files), **copies}


@dataclass(frozen=True)
class Noise:
    """What captures do to a sandbox by themselves."""

    pages: frozenset[tuple[str, int]] = frozenset()
    """Address space and address of a page."""
    places: frozenset[Place] = frozenset()

    def __or__(self, other: Noise) -> Noise:
        return Noise(self.pages | other.pages, self.places | other.places)


@dataclass
class _Found:
    """All differences of two captures, before anything is left out by a control."""

    evidence: list[str]
    facts: list[tuple[Place, Any, Any]] = field(default_factory=list[tuple[Place, Any, Any]])
    registers: list[tuple[Place, Any, Any]] = field(default_factory=list[tuple[Place, Any, Any]])
    layout: list[str] = field(default_factory=list[str])
    words: list[Words] = field(default_factory=list[Words])


def judge(truth: Truth, decision: Kind) -> Judgement:
    """Whether a decision keeps what changed: a miss loses state, a false alarm costs a capture of what is the same."""
    needed, taken = _PARTS[truth.kind], _PARTS[decision]
    if not needed <= taken:
        return "miss"
    return "right" if needed == taken else "false alarm"


def compare(pool: Pool, before: Capture, after: Capture, noise: Noise | None = None) -> Truth:
    """What differs from one capture to a later one of the same sandbox. Raises OSError if a part of them is missing."""
    changed: list[FileChange] = []
    times = 0
    old_trees, new_trees = before.trees(), after.trees()
    for place in old_trees.keys() & new_trees.keys():
        hidden = () if place else HIDDEN
        for change in difference.compare(pool, old_trees[place], new_trees[place], hidden):
            if change.kind == "changed" and change.what == ("times",):
                times += 1
            else:
                changed.append(change)
    found = _differences(pool, before, after)
    inner, outer, left_out = _lines(found, noise or Noise())
    ran = {line.partition(":")[0] for line in inner} - {line.partition(":")[0] for line in outer}
    pids = frozenset(int(name.removeprefix("process ")) for name in ran if name.startswith("process "))
    return Truth(tuple(changed), (*outer, *inner), times, left_out, pids)


def learn(pool: Pool, before: Capture, after: Capture) -> Noise:
    """What captures do by themselves, from two with nothing in between. Only memory and registers: all else that differs
    there is a change that the caller did not know of."""
    found = _differences(pool, before, after)
    pages = {(words.space, at // PAGE * PAGE) for words in found.words for at in (*words.before, *words.after)}
    return Noise(frozenset(pages), frozenset(place for place, _, _ in found.registers))


# ---------------------------------------------------------------- gathering


@contextlib.contextmanager
def _open(pool: Pool, capture: Capture) -> Iterator[tuple[Image, imagememory.Beneath]]:
    """The images of a capture, which may look into its files."""
    with seen(pool, Tree(capture.lower, capture.files)) as root:
        top = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

        def descriptor(path: str) -> int:
            return open_beneath(top, os.fsencode(path.lstrip("/")), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)

        def linked(path: str) -> str:
            try:
                fd = descriptor(path)
            except OSError:
                return "unreadable"
            try:
                return file_digest(fd)
            finally:
                os.close(fd)

        def beneath(path: str, offset: int) -> bytes | None:
            try:
                fd = descriptor(path)
            except OSError:
                return None
            try:
                return os.pread(fd, PAGE, offset).ljust(PAGE, b"\0")
            finally:
                os.close(fd)

        try:
            yield Image(capture.images, linked), beneath
        finally:
            os.close(top)


def _differences(pool: Pool, before: Capture, after: Capture) -> _Found:
    with _open(pool, before) as (old, old_files), _open(pool, after) as (new, new_files):
        alone = {
            f"process {pid}" for pid in old.processes.keys() ^ new.processes.keys()
        }  # the evidence has a line for each
        found = _Found(
            evidence=[
                *evidence.differences(_of_commands(before.manifest.evidence), _of_commands(after.manifest.evidence)),
                *_group_changes(before.manifest, after.manifest),
            ],
            facts=[one for one in imagefacts.differences(old.facts, new.facts) if one[0][0] not in alone],
        )
        old_memory, new_memory = Memory(old), Memory(new)
        found.registers = [*_register_changes(old_memory, new_memory)]
        for pid in sorted(old.processes.keys() & new.processes.keys() - {INIT}):
            found.layout += _layout_changes(pid, old_memory, new_memory)
        found.words = [
            words for words in imagememory.compare(old_memory, new_memory, old_files, new_files) if len(words)
        ]
    return found


def _of_commands(seen_there: Evidence) -> Evidence:
    """Evidence without pid 1."""
    return Evidence(processes=tuple(process for process in seen_there.processes if process.pid != INIT))


def _group_changes(before: Manifest, after: Manifest) -> Iterator[str]:
    old, new = ({pid: name for name, pids in m.groups.items() for pid in pids} for m in (before, after))
    for pid in sorted(old.keys() & new.keys()):
        if old[pid] != new[pid]:
            yield f"process {pid}: group was {old[pid]}, is {new[pid]}"


def _register_changes(before: Memory, after: Memory) -> Iterator[tuple[Place, Any, Any]]:
    """Registers that differ, but for copies of the time that a thread will still sleep."""
    left: dict[str, tuple[set[int], set[int]]] = {}
    alone = {f"process {pid}" for pid in before.image.processes.keys() ^ after.image.processes.keys()}
    for pid, process in after.image.processes.items():
        old_threads = (
            {one.tid: one for one in before.image.processes[pid].threads} if pid in before.image.processes else {}
        )
        for one in process.threads:
            if one.sleep and one.tid in old_threads:
                old = old_threads[one.tid]
                left[f"thread {one.tid}"] = (
                    imagememory.times_left(before, pid, old),
                    imagememory.times_left(after, pid, one),
                )
    for place, old, new in imagefacts.differences(before.image.thread_facts(), after.image.thread_facts()):
        times = left.get(place[1], (set[int](), set[int]()))
        if place[0] in alone:
            continue
        if not (place[2] == "register" and old in times[0] and new in times[1]):
            yield place, old, new


def _layout_changes(pid: int, before: Memory, after: Memory) -> Iterator[str]:
    def keys(memory: Memory) -> dict[str, str]:
        found: dict[str, str] = {}
        for mapping in memory.mappings(memory.image.processes[pid]):
            place = f"up to {mapping.end:#x} (stack)" if mapping.is_stack else f"{mapping.start:#x}-{mapping.end:#x}"
            found[place] = f"{mapping.what or 'anonymous'} at {mapping.offset:#x} {dict(mapping.attributes)}"
        return found

    old, new = keys(before), keys(after)
    for place in sorted(old.keys() | new.keys()):
        if old.get(place) != new.get(place):
            yield f"process {pid}: mapping {place} was {old.get(place, 'not there')}, is {new.get(place, 'not there')}"


# ---------------------------------------------------------------- telling


def _lines(found: _Found, noise: Noise) -> tuple[list[str], list[str], int]:
    """Lines about memory and registers, lines about all else, and how many differences the noise explains."""
    left_out = 0
    outer = [*found.evidence, *(_line(*one) for one in found.facts), *found.layout]
    inner: list[str] = []
    for place, old, new in found.registers:
        if place in noise.places:
            left_out += 1
        else:
            inner.append(_line(place, old, new))
    for words in found.words:
        kept = {at for at in (*words.before, *words.after) if (words.space, at // PAGE * PAGE) not in noise.pages}
        left_out += len({*words.before, *words.after}) - len(kept)
        if kept:
            first = min(kept)
            pages = len({at // PAGE for at in kept})
            inner.append(
                f"{words.space}: {len(kept)} words of memory in {pages} pages, first at {first:#x}: "
                f"was {words.before.get(first, 0):#x}, is {words.after.get(first, 0):#x}"
            )
    return inner, outer, left_out


def _line(place: Place, old: Any, new: Any) -> str:
    return f"{': '.join((place[0], ' '.join(place[1:])))} was {_short(old)}, is {_short(new)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
