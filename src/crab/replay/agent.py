"""An agent at work in a sandbox, killed on the way: what it does twice, with Crab and without.

The agent is a program like any other (`examples/agents/loop.py`) and its model is scripted. With Crab it comes back in the
middle of its turn; without, somebody starts it again on the files that are left.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

from crab.errors import CrabError
from crab.model import ModelAccess, Struct
from crab.sdk.sync import Host, Sandbox

STEPS = ("clone", "patch", "build", "test", "commit", "push", "tag")
PROMPT = "\n".join([*(f"~ 0.2\n$ echo {step} >>/root/log" for step in STEPS), "> all done"])
NAME = "agent:demo"
PATIENCE = 60.0


class Told(Struct, kw_only=True):
    """What became of an agent."""

    recovery: str
    questions: int
    """To its model, as the record has them."""
    kills: int
    back_ms: float
    """Median time from the death of the sandbox until it was there again."""
    held_ms: float
    """Median time that an answer was kept back."""
    twice: int
    """Commands that were run more than once."""
    done: bool
    """Each was run, in order."""


def work(host: Host, image: str, agent: Path, kills: tuple[int, ...], crab: bool, watch: Callable[[str], None]) -> Told:
    """Let the agent do its steps, and kill its sandbox after that many answers each time. Raises `CrabError`."""
    access = ModelAccess(upstream="mock")
    with host.create(image=image, model_access=access) as box:
        box.run(["sh", "-c", "cat >/root/agent.py"], input=agent.read_bytes(), check=True)
        _begin(box)
        back: list[float] = []
        for answers in kills:
            watch(f"until answer {answers}")
            _until(lambda answers=answers: _answers(box) >= answers)
            box.kill()
            begin = time.perf_counter()
            if crab:
                box.recover()
            else:
                box.stop(0)
                box.start()
                _begin(box)
            back.append((time.perf_counter() - begin) * 1e3)
        watch("to the end")
        _until(lambda: _ended(box))
        lines = box.run("cat /root/log", check=True).text().split()
        found = [one for one in box.exchanges() if one.kind == "main" and not one.abandoned]
        return Told(
            recovery="crab" if crab else "start over",
            questions=len(found),
            kills=len(kills),
            back_ms=statistics.median(back) if back else 0.0,
            held_ms=statistics.median(one.held_ms for one in found),
            twice=len(lines) - len(set(lines)),
            done=tuple(lines) == STEPS,
        )


def _begin(box: Sandbox) -> None:
    address = box.model_address(inside=True)
    box.spawn(["python3", "/root/agent.py", address.url, PROMPT], name=NAME, env=address.env).detach()


def _answers(box: Sandbox) -> int:
    return sum(one.kind == "main" and not one.abandoned and one.state == "released" for one in box.exchanges())


def _ended(box: Sandbox) -> bool:
    found = [one for one in box.exchanges() if one.kind == "main" and not one.abandoned]
    return bool(found) and found[-1].state == "released" and not found[-1].calls


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            raise CrabError("the agent of the demo does not get on", remedy="please report it, with the daemon's log")
        time.sleep(0.02)


def table(found: list[Told]) -> str:
    """One row for each."""
    head = ("recovery", "questions", "kills", "back in ms", "held ms", "run twice", "work as undisturbed")
    rows = [
        (
            one.recovery,
            str(one.questions),
            str(one.kills),
            f"{one.back_ms:.0f}",
            f"{one.held_ms:.1f}",
            str(one.twice),
            "yes" if one.done else "no",
        )
        for one in found
    ]
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in (head, *rows)
    )
