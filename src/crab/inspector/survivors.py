"""The processes of a sandbox now against those of its last checkpoint, over two lists of tasks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from crab.host import processes
from crab.inspector.decide import Fate
from crab.inspector.task import Task, altered
from crab.model import Struct

Key = tuple[int, int]
"""Host number of a process and when it was started: never two processes."""


Groups = dict[Key, list[Task]]
"""Threads of each process, in the order of their numbers."""


_UNREAPED = "its parent has not asked for its status"


class Standing(Struct, kw_only=True):
    """How one process stands to the last checkpoint."""

    key: Key
    fate: Fate | None
    """None: it is what it was; `ran`: that remains to be seen."""
    detail: str = ""
    runs: bool = False
    """It runs at this moment."""


def by_process(tasks: Iterable[Task]) -> Groups:
    """Threads of each process, by thread."""
    threads: dict[int, list[Task]] = {}
    for task in tasks:
        threads.setdefault(task.process, []).append(task)
    found: Groups = {}
    for number, members in threads.items():
        leader = next((task for task in members if task.leads), members[0])
        found[number, leader.start] = sorted(members, key=lambda task: task.thread)
    return found


def compare(old: Mapping[Key, list[Task]], new: Mapping[Key, list[Task]], init: int) -> list[Standing]:
    """How every process of either list stands. `init` is Crab's own and left out."""
    found: list[Standing] = []
    for key in sorted(old.keys() | new.keys()):
        if key[0] == init:
            continue
        if key not in new:
            found.append(Standing(key=key, fate=Fate.ENDED))
        elif key not in old:
            zombie = all(task.ended for task in new[key])
            found.append(
                Standing(
                    key=key,
                    fate=Fate.STARTED,
                    detail=_UNREAPED if zombie else "",
                    runs=any(task.runs for task in new[key]),
                )
            )
        else:
            found.append(_compare(key, old[key], new[key]))
    return found


def _compare(key: Key, old: list[Task], new: list[Task]) -> Standing:
    runs = any(task.runs for task in new)
    if all(task.ended for task in new) and not all(task.ended for task in old):
        return Standing(key=key, fate=Fate.ENDED, detail=_UNREAPED)
    if activity(old) != activity(new):
        return Standing(key=key, fate=Fate.RAN, runs=runs)
    detail = next(filter(None, (altered(a, b) for a, b in zip(old, new, strict=True))), "")
    if detail:
        return Standing(key=key, fate=Fate.CHANGED, detail=detail, runs=runs)
    return Standing(key=key, fate=Fate.RAN if runs else None, runs=runs)


def activity(threads: Iterable[Task]) -> list[tuple[int, ...]]:
    """Equal lists mean that no thread ran, came or went in between."""
    return [(task.thread, task.start, *task.activity) for task in threads]


def moving(old: Mapping[Key, list[Task]], new: Mapping[Key, list[Task]], init: int) -> list[Key]:
    """Processes that ran, came or went between two readings, without `init`."""
    return [
        key
        for key in sorted(old.keys() | new.keys())
        if key[0] != init and (key not in old or key not in new or activity(old[key]) != activity(new[key]))
    ]


def has_ended(threads: Iterable[Task]) -> bool:
    """Whether a process is gone, or a zombie."""
    return all(task.ended for task in threads)


def running(groups: Groups, init: int) -> bool:
    """Whether any process but `init` is on a processor or waits for one."""
    return any(task.runs for key, threads in groups.items() if key[0] != init for task in threads)


def name_of(process: int) -> tuple[str, int]:
    """Name of a process and its number in the sandbox; `?` and 0 if it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/comm").read_text(errors="replace").strip(), processes.inner_pid(process)
    return "?", 0
