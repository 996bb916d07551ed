"""The labelled turns, decided by the inspector: nothing that a label says is left out, and little that it does not say is taken.

Without `$CRAB_TEST_ALL_TURNS=1` those scenarios are left out that differ from others in the programs alone.
"""

from __future__ import annotations

import os
import shlex
import time

import pytest
from bench.labelled_turns import RESTS, SCENARIOS, Scenario, Turn, play
from e2e.box import Box

from crab.daemon import requests as ask
from crab.model import Decision

pytestmark = [pytest.mark.kernel, pytest.mark.criu, pytest.mark.slow]
ALIKE = ("a server that waits", "netcat", "following a file")
"""A program that sleeps and is woken, as in `a server that polls`, `a job that ends later` and `tmux`."""
CHOSEN = [one for one in SCENARIOS if os.environ.get("CRAB_TEST_ALL_TURNS") or one.name not in ALIKE]
REST = 0.3
"""Seconds between turns, as for a model: those who stood still for a capture come to rest. Nobody waits if none is there."""
POLLS = {"a server that polls": 0.8}
"""Longer than what a server sleeps: it has to have run in each turn for the labels to be right."""
_PARTS = {"none": set(), "files": {"files"}, "processes": {"processes"}, "full": {"files", "processes"}}


def told(turn: Turn, decision: Decision) -> str:
    return f"{turn.command[:90]!r} is {turn.label}, decided {decision.kind}: {'; '.join((*decision.reasons, *decision.notes))}"


@pytest.mark.parametrize("scenario", CHOSEN, ids=lambda scenario: scenario.name)
def test_a_scenario_is_decided_as_it_is_labelled(box: Box, scenario: Scenario, figures) -> None:
    if not box.service._core.inspector.tier:
        pytest.skip(box.service._core.inspector.why_not)
    if missing := [name for name in scenario.needs if not box.result(f"command -v {name}").ok]:
        pytest.skip(f"the image has no {', '.join(missing)}")
    box.run(f"bash -c {shlex.quote(f'set -e{chr(10)}{RESTS}{chr(10)}{scenario.setup}')}")

    def run(command: str) -> None:
        done = box.result(f"exec bash -c {shlex.quote(command)}", cwd="/work")
        assert done.ok or "rests" not in command, (command, done)

    def tell(command: str) -> None:
        box.ask(ask.ShellRun, command=command, cwd="/work")

    def rest() -> None:
        if len(box.host_pids()) > 1:
            time.sleep(POLLS.get(scenario.name, REST))

    if scenario.has_shell:
        tell(":")
    for _ in range(2):  # the first interruption of a call may lead another way than the ones that follow
        box.checkpoint(policy="always", durable=False)
        rest()
    misses: list[str] = []
    alarms: list[str] = []
    for turn in play(scenario, run, tell):
        decision = box.checkpoint(durable=False).decision
        assert decision is not None
        needed, taken = _PARTS[turn.label], _PARTS[decision.kind]
        if not needed <= taken:
            misses.append(told(turn, decision))
        elif needed != taken:
            alarms.append(told(turn, decision))
        rest()
    figures(
        f"turns {scenario.name}: {len(scenario.turns)}, false alarms {len(alarms)}"
        + "".join(f"\n    {a}" for a in alarms)
    )
    assert not misses, "\n".join(misses)
    assert len(alarms) <= 1 + len(scenario.turns) // 4, "\n".join(alarms)
