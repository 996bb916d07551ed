"""The labelled turns, decided by the inspector: nothing that a label says is left out, and little that it does not say is taken."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable

import pytest
from bench.labelled_turns import RESTS, SCENARIOS, Scenario, Turn, play
from e2e.box import Box

from crab.daemon import requests as ask
from crab.daemon.service import Service
from crab.model import Decision

pytestmark = [pytest.mark.kernel, pytest.mark.criu, pytest.mark.slow]
PACKAGES = ("make", "netcat-openbsd", "perl", "procps", "python3-pip", "sqlite3", "tmux")
REST = 0.3
"""Seconds between turns, as for a model."""
POLLS = {"a server that polls": 0.8}
"""Longer than what a server sleeps: it has to have run in each turn for the labels to be right."""
_PARTS = {"none": set(), "files": {"files"}, "processes": {"processes"}, "full": {"files", "processes"}}


@pytest.fixture(scope="module")
def turns_image(service: Service) -> str:
    return service.handle(
        ask.ImageAdd(name="turns", source=f"debian:bookworm+{','.join(PACKAGES)}", if_missing=True)
    ).name


def told(turn: Turn, decision: Decision) -> str:
    return f"{turn.command[:90]!r} is {turn.label}, decided {decision.kind}: {'; '.join((*decision.reasons, *decision.notes))}"


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_a_scenario_is_decided_as_it_is_labelled(
    make_box: Callable[..., Box], turns_image: str, scenario: Scenario, figures
) -> None:
    box = make_box(image=turns_image)
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

    if scenario.has_shell:
        tell(":")
    rest = POLLS.get(scenario.name, REST)
    for _ in range(2):  # the first interruption of a call may lead another way than the ones that follow
        box.checkpoint(policy="always", durable=False)
        time.sleep(rest)
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
        time.sleep(rest)
    figures(
        f"turns {scenario.name}: {len(scenario.turns)}, false alarms {len(alarms)}"
        + "".join(f"\n    {a}" for a in alarms)
    )
    assert not misses, "\n".join(misses)
    assert len(alarms) <= 1 + len(scenario.turns) // 4, "\n".join(alarms)
