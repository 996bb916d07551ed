"""The labels of the turns agree with the oracle, which sees every page and every file.

Two seconds for each turn: `$CRAB_TEST_ALL_TURNS=1` takes all scenarios, else a few of every kind.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from typing import get_args

import pytest
from bench.labelled_turns import RESTS, SCENARIOS, Label, Scenario, Turn, play
from e2e.box import Box
from e2e.judged import Judged

from crab.checkpoint import oracle
from crab.checkpoint.oracle import Truth
from crab.daemon.requests import ProcessList

FEW = ("jobs", "a shell beside commands", "sqlite", "temporary files", "an interpreter", "building with make")
CHOSEN = [one for one in SCENARIOS if os.environ.get("CRAB_TEST_ALL_TURNS") or one.name in FEW]

pytestmark = [pytest.mark.kernel, pytest.mark.criu, pytest.mark.slow]


def test_there_are_enough_of_each_label() -> None:
    turns = [turn for scenario in SCENARIOS for turn in scenario.turns]
    assert len(turns) >= 60 and all(sum(t.label == label for t in turns) >= 6 for label in get_args(Label))
    assert len({scenario.name for scenario in SCENARIOS}) == len(SCENARIOS)


def agree(turn: Turn, truth: Truth, shell: int | None) -> bool:
    """Of a shell that differs in its memory alone the oracle cannot tell whether its next command would notice."""
    only_shell = truth.ran == {shell} and all(line.startswith(f"process {shell}:") for line in truth.processes)
    if only_shell and turn.shell:
        return (turn.label in ("files", "full")) == bool(truth.files)
    return turn.label == truth.kind


@pytest.mark.parametrize("scenario", CHOSEN, ids=lambda scenario: scenario.name)
def test_the_labels_of_a_scenario_are_right(make_box: Callable[..., Box], pruned: str, scenario: Scenario) -> None:
    box = make_box(image=pruned)
    if missing := [name for name in scenario.needs if not box.result(f"command -v {name}").ok]:
        pytest.skip(f"the image has no {', '.join(missing)}")
    judged = Judged(box)
    script = f"set -e\n{RESTS}\n{scenario.setup}"
    box.run(f"bash -c {shlex.quote(script)}")
    tell = judged.shell("/work") if scenario.has_shell else print
    pid = next((info.pid for info in box.ask(ProcessList) if info.argv == ("bash",)), None)

    def run(command: str) -> None:
        done = box.result(f"exec bash -c {shlex.quote(command)}", cwd="/work")
        assert done.ok or "rests" not in command, (command, done)

    judged.capture()
    wrong: list[str] = []
    before = judged.capture()
    for turn in play(scenario, run, tell):
        after = judged.capture()
        truth = judged.compare(before, after)
        if not agree(turn, truth, pid):
            files = [f"{change.path} {change.kind} {change.what}" for change in truth.files[:4]]
            wrong.append(f"{turn.command[:80]!r} is {truth.kind}, not {turn.label}: {files} {truth.processes[:6]}")
        before = after
        if scenario.restless:
            before = judged.capture()
            judged.noise = oracle.learn(judged.core.pool, after, before) | (judged.noise or oracle.Noise())
    assert not wrong, "\n".join(wrong)
