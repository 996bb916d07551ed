from __future__ import annotations

from bench.strikes import every, sample
from hypothesis import given
from hypothesis import strategies as st

from crab.replay.kills import Kill


def test_every_turn_is_struck_in_its_middle_and_at_its_end() -> None:
    assert every(2) == (Kill(1, False), Kill(1), Kill(2, False), Kill(2))


@given(st.text(max_size=5), st.integers(1, 40), st.integers(1, 50))
def test_a_sample_is_spread_over_the_run_and_always_the_same(task: str, turns: int, count: int) -> None:
    found = sample(task, turns, count)
    assert found == sample(task, turns, count)
    assert len(found) == min(turns, count)
    assert [kill.turn for kill in found] == sorted({kill.turn for kill in found})
    assert set(found) <= set(every(turns))
    if len(found) > 1:
        assert {kill.at_end for kill in found} == {True, False}
