"""What is saved, and how a run goes on after a crash."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crab.errors import InvalidRequest
from crab.replay.kills import Kill
from crab.replay.policy import Every, Recovery, Resume, TurnEnd, answered, policy, repeated, resume

kill_of = st.builds(Kill, st.integers(1, 30), st.booleans())


def end(turn: int) -> TurnEnd:
    return TurnEnd(turn=turn, turns=30, kind="exec", exit_code=0)


def test_each_policy_saves_what_its_name_says() -> None:
    assert [policy("always").capture(end(turn)) for turn in (0, 1, 2)] == ["always"] * 3
    assert [policy("adaptive").capture(end(turn)) for turn in (0, 1)] == ["adaptive"] * 2
    assert [policy("files").capture(end(turn)) for turn in (0, 1)] == ["files"] * 2
    assert [policy("every:3").capture(end(turn)) for turn in range(5)] == ["always", None, None, "always", None]
    assert policy("none").capture(end(1)) is policy("restart").capture(end(1)) is None


@pytest.mark.parametrize(
    "name", ["", "sometimes", "every", "every:", "every:0", "every:x", "every:-1", "every:" + "9" * 99]
)
def test_an_unknown_policy_is_told_which_there_are(name: str) -> None:
    with pytest.raises(InvalidRequest, match="every:N"):
        policy(name)


@pytest.mark.parametrize(
    ("recovery", "head", "kill", "wanted", "again"),
    [
        (Recovery.CHECKPOINT, 5, Kill(5), Resume(Recovery.CHECKPOINT, 6), 0),
        (Recovery.CHECKPOINT, 4, Kill(5, False), Resume(Recovery.CHECKPOINT, 5), 0),
        (Recovery.CHECKPOINT, 3, Kill(5), Resume(Recovery.CHECKPOINT, 4), 2),
        (Recovery.CHECKPOINT, 0, Kill(1, False), Resume(Recovery.CHECKPOINT, 1), 0),
        (Recovery.CHECKPOINT, None, Kill(5), Resume(Recovery.RESTART, 1), 5),
        (Recovery.FILES, 5, Kill(5), Resume(Recovery.FILES, 6), 0),
        (Recovery.CONVERSATION, None, Kill(5), Resume(Recovery.CONVERSATION, 6), 0),
        (Recovery.CONVERSATION, None, Kill(5, False), Resume(Recovery.CONVERSATION, 5), 0),
        (Recovery.RESTART, None, Kill(5), Resume(Recovery.RESTART, 1), 5),
        (Recovery.RESTART, None, Kill(5, False), Resume(Recovery.RESTART, 1), 4),
    ],
)
def test_a_crash_is_resumed_where_the_policy_allows(
    recovery: Recovery, head: int | None, kill: Kill, wanted: Resume, again: int
) -> None:
    found = resume(recovery, head, kill)
    assert found == wanted
    assert len(repeated(found, kill)) == again


@pytest.mark.parametrize("recovery", list(Recovery))
def test_what_the_model_has_answered_is_lost_by_a_restart_alone(recovery: Recovery) -> None:
    assert answered(Resume(recovery, 3), known=7) == (0 if recovery == Recovery.RESTART else 7)


@given(st.integers(1, 10), kill_of)
def test_with_checkpoints_every_turn_is_part_of_the_restored_history_exactly_once(interval: int, kill: Kill) -> None:
    rule = Every("every", "always", Recovery.CHECKPOINT, interval)
    finished = kill.turn if kill.at_end else kill.turn - 1
    head = max(turn for turn in range(finished + 1) if rule.capture(end(turn)))
    after = resume(rule.recovery, head, kill)
    assert [*range(1, head + 1), *range(after.turn, 31)] == list(range(1, 31))
    assert [*repeated(after, kill)] == [*range(head + 1, finished + 1)]


@given(st.sampled_from(Recovery), st.none() | st.integers(0, 30), kill_of)
def test_a_run_never_skips_a_turn_of_which_nobody_knows_the_outcome(
    recovery: Recovery, head: int | None, kill: Kill
) -> None:
    if head is not None:
        head = min(head, kill.turn if kill.at_end else kill.turn - 1)
    after = resume(recovery, head, kill)
    assert 1 <= after.turn <= (kill.turn + 1 if kill.at_end else kill.turn)
