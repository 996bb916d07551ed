"""Plans of kills."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crab.errors import InvalidRequest
from crab.replay.kills import Kill, parse


def test_a_plan_lists_turns_ends_and_middles_in_the_order_in_which_they_strike() -> None:
    assert parse("7, 3,7m", 10) == (Kill(3), Kill(7, False), Kill(7))
    assert parse("", 10) == ()
    assert [str(kill) for kill in parse("7,3,7m", 10)] == ["3", "7m", "7"]


@pytest.mark.parametrize("plan", ["x", "3,", "m", "-1", "3 4", "random", "random:", "random:x", "３", "5mm", ","])
def test_nonsense_is_refused_with_the_forms_there_are(plan: str) -> None:
    with pytest.raises(InvalidRequest, match="random:2"):
        parse(plan, 10)


@pytest.mark.parametrize("plan", ["0", "11", "11m", "random:11"])
def test_turns_that_the_run_does_not_have_are_refused(plan: str) -> None:
    with pytest.raises(InvalidRequest, match="10"):
        parse(plan, 10)


@given(st.integers(1, 50), st.integers(), st.data())
def test_random_kills_are_as_many_as_wanted_within_the_run_and_the_same_for_the_same_seed(
    turns: int, seed: int, data: st.DataObject
) -> None:
    ends, middles = data.draw(st.integers(0, turns)), data.draw(st.integers(0, turns))
    plan = f"random:{ends},random:{middles}m"
    kills = parse(plan, turns, seed)
    assert kills == parse(plan, turns, seed) == parse(f"random:{middles}m,random:{ends}", turns, seed)
    assert len(kills) == len(set(kills)) == ends + middles
    assert all(1 <= kill.turn <= turns for kill in kills)
    assert sum(kill.at_end for kill in kills) == ends
    assert list(kills) == sorted(kills, key=lambda kill: (kill.turn, kill.at_end))


@given(st.integers(2, 20), st.integers(), st.data())
def test_random_kills_avoid_the_fixed_ones(turns: int, seed: int, data: st.DataObject) -> None:
    fixed = data.draw(st.integers(1, turns))
    kills = parse(f"{fixed},random:{turns - 1}", turns, seed)
    assert kills == tuple(Kill(turn) for turn in range(1, turns + 1))
