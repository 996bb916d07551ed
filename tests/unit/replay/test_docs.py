"""docs/replay.md says what the code does."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from crab.replay import policy, trajectory, volatile
from crab.replay.cli import replay
from crab.replay.demo import ALL, STORIES

DOCS = (Path(__file__).parents[3] / "docs" / "replay.md").read_text()


@pytest.mark.parametrize("pattern", [*volatile.PATHS, *volatile.CONTENTS])
def test_every_exception_of_the_comparison_is_documented(pattern: str) -> None:
    assert f"`{pattern}`" in DOCS


@pytest.mark.parametrize(
    "field",
    [field.name for line in (trajectory._RunLine, trajectory._TurnLine) for field in msgspec.structs.fields(line)],
)
def test_every_field_of_a_trajectory_is_documented(field: str) -> None:
    assert f"| `{field}` |" in DOCS


@pytest.mark.parametrize("name", [*policy.POLICIES, "every:N"])
def test_every_policy_is_documented(name: str) -> None:
    assert f"| `{name}` |" in DOCS


@pytest.mark.parametrize("name", volatile.ENVIRONMENT)
def test_every_fixed_variable_is_documented(name: str) -> None:
    assert f"`{name}" in DOCS


def test_the_options_that_are_mentioned_exist() -> None:
    options = {option for parameter in replay.params for option in parameter.opts}
    assert {
        "--id",
        "--policy",
        "--kill",
        "--seed",
        "--image",
        "--workdir",
        "--turns",
        "--pace",
        "--timeout",
        "--json",
    } <= options


def test_the_example_is_a_trajectory() -> None:
    example = DOCS.partition("```json\n")[2].partition("```")[0]
    assert trajectory.parse(msgspec.json.decode(example)).turns[2].kind == "background"


def test_every_story_lies_where_the_demo_looks() -> None:
    assert all((STORIES / f"{story.name}.json").exists() for story in ALL)
