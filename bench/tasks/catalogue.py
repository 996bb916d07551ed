"""The tasks of this folder, read. Knows where they lie, not how they are run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from crab.replay import trajectory
from crab.replay.trajectory import Trajectory

Group = Literal["terminal", "repair"]
GROUPS: tuple[Group, ...] = ("terminal", "repair")
FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Task:
    """One piece of work."""

    group: Group
    run: Trajectory

    @property
    def id(self) -> str:
        return self.run.id


def tasks() -> tuple[Task, ...]:
    """All of them, by group and name."""
    return tuple(_found())


def _found() -> Iterator[Task]:
    for group in GROUPS:
        for path in sorted((FOLDER / group).glob("*.json")):
            yield from (Task(group, run) for run in trajectory.read(path))
