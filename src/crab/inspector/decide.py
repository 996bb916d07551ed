"""The decision what to capture: a pure function over what was found.

The rules, in the words of ARCHITECTURE.md: doubt means full; an older half of a checkpoint may stand in only if it was proven
unchanged; the memory of an agent that lives in the sandbox may lag behind only across turns that changed nothing else, since
those can be run again without harm.
"""

from __future__ import annotations

import os
from enum import StrEnum

import msgspec

from crab.model import CheckpointKind, Decision, FileChange, Struct

TOLD = 5
"""Files that are named in a reason."""


class Role(StrEnum):
    """What a process is to the sandbox."""

    PLAIN = "plain"
    SHELL = "shell"
    """A persistent shell whose state can be asked for."""
    AGENT = "agent"
    """The agent itself: its memory moves at every turn."""


class Fate(StrEnum):
    """What became of a process since the last checkpoint."""

    STARTED = "started"
    ENDED = "ended"
    CHANGED = "changed"
    RAN = "ran"
    """It ran, and nothing proves that it is the same."""


class ProcessFinding(Struct, kw_only=True):
    """A process that is not what it was."""

    key: tuple[int, int] = (0, 0)
    """Of `crab.inspector.survivors`; nothing is decided by it."""
    number: int
    """In the sandbox."""
    name: str
    fate: Fate
    role: Role = Role.PLAIN
    detail: str = ""
    """What is known of the change."""


class Findings(Struct, kw_only=True):
    """Everything that a decision is made of."""

    tier: str = ""
    doubts: tuple[str, ...] = ()
    """Reasons why something may have changed that was not seen."""
    files: tuple[FileChange, ...] = ()
    files_written: tuple[str, ...] = ()
    """What the host itself wrote, in words."""
    files_unsure: str = ""
    """Why it is not known whether files changed."""
    tables: tuple[str, ...] = ()
    """Changes of kernel tables, in words."""
    processes: tuple[ProcessFinding, ...] = ()
    files_bound: str = ""
    """Why the processes of the last checkpoint cannot stand on other files than its own; empty if they can."""
    notes: tuple[str, ...] = ()
    """What was seen and does not count."""


def decide(findings: Findings) -> Decision:
    """What to capture, and why."""
    doubts = [f"{doubt}: everything is captured" for doubt in findings.doubts]
    files = _files(findings)
    processes = [*findings.tables, *(_process(p) for p in findings.processes if p.role != Role.AGENT)]
    agents = [p for p in findings.processes if p.role == Role.AGENT]
    gone = [_process(p) for p in agents if p.fate != Fate.RAN]
    ran = [p for p in agents if p.fate == Fate.RAN]
    processes += gone
    notes = list(findings.notes)
    if ran:
        names = ", ".join(f"{p.name} (process {p.number})" for p in ran)
        if doubts or files or processes:
            processes.append(f"the agent {names} ran, and its memory must fit the rest")
        else:
            notes.append(f"the agent {names} ran: its memory may lag behind turns that change nothing else")
    if files and not processes and findings.files_bound:
        processes.append(findings.files_bound)
    kind: CheckpointKind = "none"
    if doubts or (files and processes):
        kind = "full"
    elif files or processes:
        kind = "files" if files else "processes"
    return Decision(
        kind=kind,
        reasons=(*doubts, *files, *processes) or ("no file and no process is other than it was",),
        notes=tuple(notes),
        files=tuple(msgspec.structs.replace(file, path=printable(file.path)) for file in findings.files),
        tier=findings.tier,
    )


def _files(findings: Findings) -> list[str]:
    found: list[str] = []
    if findings.files:
        told = ", ".join(f"{printable(f.path)} {_how(f)}" for f in findings.files[:TOLD])
        more = len(findings.files) - TOLD
        found.append(f"files changed: {told}" + (f" and {more} more" if more > 0 else ""))
    found += [f"files changed: {what}" for what in findings.files_written]
    if findings.files_unsure:
        found.append(f"files may have changed: {findings.files_unsure}")
    return found


def printable(path: str) -> str:
    """A path for people: bytes that are no UTF-8 as `\\xff`."""
    return os.fsencode(path).decode(errors="backslashreplace")


def _how(change: FileChange) -> str:
    return f"{change.kind} ({', '.join(change.what)})" if change.what else change.kind


def _process(p: ProcessFinding) -> str:
    who = f"{p.name} (process {p.number})" if p.role == Role.PLAIN else f"{p.role} {p.name} (process {p.number})"
    text = f"{who} {p.fate}"
    return f"{text}: {p.detail}" if p.detail else text
