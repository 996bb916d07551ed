"""How long the model thinks before each turn of a task: samples of published quantiles, with a seed that is the task's id.

`python -m bench.tasks.waits` writes them into the files of the tasks (`wait_s`), which it brings into their form: one turn
a line, long commands a line each. It changes nothing in files that have it already.

QUANTILES are those of 3,484 recorded waits of Claude Sonnet 4 in mini-swe-agent runs (LLM wait only, seconds). Between two of
them the logarithm of the wait is linear in its rank; below the first one the wait is that one.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.waiting import RECORDED
from crab.replay import trajectory

QUANTILES = (*RECORDED.items(), (1.0, 138.0))
FOLDER = Path(__file__).parent
FIELDS = ("id", "image", "workdir", "files", "setup", "turns", "check", "observe", "volatile")


def wait(rank: float) -> float:
    """The wait, to a tenth of a second, below which that share of the recorded ones lies. (What `bench.waiting` draws is linear
    in it; the files of the tasks have these.)"""
    before, low = QUANTILES[0]
    for at, high in QUANTILES:
        if rank <= at:
            share = (rank - before) / (at - before) if at > before else 0.0
            return round(math.exp(math.log(low) + max(0.0, share) * math.log(high / low)), 1)
        before, low = at, high
    raise ValueError(f"{rank} is no rank")


def waits(task: str, turns: int) -> list[float]:
    """Those of a task."""
    source = random.Random(task)
    return [wait(source.random()) for _ in range(turns)]


def files() -> list[Path]:
    """Of all tasks."""
    return sorted(FOLDER.glob("*/*.json"))


def text(task: dict[str, Any]) -> str:
    """A task as it stands in its file."""
    parts = [f"  {json.dumps(name)}: {_value(task[name], 2)}" for name in FIELDS if name in task]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _value(value: Any, indent: int) -> str:
    blanks = " " * (indent + 2)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)}: {_value(one, indent)}" for name, one in value.items()) + "}"
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(blanks + _value(one, indent + 2) for one in value) + "\n" + " " * indent + "]"
    return json.dumps(value, ensure_ascii=False)


def with_waits(task: dict[str, Any]) -> dict[str, Any]:
    """The same task with its waits; the command last in each turn."""
    turns: Sequence[dict[str, Any]] = task["turns"]
    timed = [
        {
            **{name: turn[name] for name in ("kind", "cwd", "rc") if name in turn},
            "wait_s": wait_s,
            "command": turn["command"],
        }
        for turn, wait_s in zip(turns, waits(task["id"], len(turns)), strict=True)
    ]
    return {**task, "turns": timed}


def main() -> None:
    for path in files():
        trajectory.read(path)  # refuses what is misspelt, which would be lost below
        written = text(with_waits(json.loads(path.read_text())))
        if written != path.read_text():
            path.write_text(written)
            print(path)


if __name__ == "__main__":
    main()
