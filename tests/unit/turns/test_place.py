"""The place of an agent in its past: it is kept with the record, and what is late moves nobody."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from crab.errors import SandboxGone
from crab.turns.place import Place
from crab.turns.record import Record


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return Record.open(tmp_path / "turns.db")


def keeps(record: Record, body: bytes) -> Any:
    return functools.partial(record.answered, status=200, headers={}, body=body, complete=True)


def turn(record: Record, place: Place, *links: bytes) -> int:
    assert place.step(links, "").kind == "ask"
    made = record.begin("s1", chain=links, items=links)
    record.protected(made.id, checkpoint=f"c{made.id}", turn=made.id, protection="durable")
    place.answered(made.id, place.life, keeps(record, b"to " + links[-1]))
    place.taken(made.id, place.life)
    place.keep_taken(made.id, place.life)
    return made.id


def did(place: Place, command: bytes) -> None:
    assert place.command(command)[0].kind == "run"
    place.end(place.begin(command, place.life), b"result of " + command)


def test_an_answer_of_an_earlier_life_moves_nobody(record: Record) -> None:
    place = Place(record, "s1")
    first = turn(record, place, b"a")
    life = place.life
    place.brought_back([f"c{first}"], f"c{first}", ask_again=True)
    place.answered(first, life, keeps(record, b""))
    assert place._standing.exchange == 0 and place.forwarding
    place.answered(first, place.life, keeps(record, b""))
    assert place._standing.exchange == first


def test_a_fast_forward_goes_on_after_the_daemon_was_killed(record: Record) -> None:
    place = Place(record, "s1")
    turn(record, place, b"a")
    did(place, b"x")
    last = turn(record, place, b"a", b"b")
    place.brought_back(["c1", f"c{last}"], f"c{last}", ask_again=False)
    assert place.step([b"a"], "new").exchange == 1
    again = Place(record, "s1")
    assert again.forwarding
    step, outcome = again.command(b"x")
    assert step.kind == "replay" and outcome and outcome.result == b"result of x"
    assert again.step([b"a", b"b"], "new").exchange == last and not again.forwarding


def test_an_agent_that_is_behind_a_checkpoint_by_hand_has_not_caught_up_with_its_last_answer(record: Record) -> None:
    place = Place(record, "s1")
    turn(record, place, b"a")
    did(place, b"x")
    record.mark("s1", "by hand")
    place.brought_back(["c1", "by hand"], "by hand", ask_again=False)
    step = place.step([b"a"], "new")
    assert step.kind == "replay" and not step.caught_up
    assert place.command(b"x")[0].kind == "replay"
    assert place.command(b"y")[0].kind == "run" and not place.forwarding


def test_a_command_that_was_under_way_keeps_its_place_and_its_name_in_a_fork_too(record: Record) -> None:
    place = Place(record, "s1")
    turn(record, place, b"a")
    ticket = place.begin(b"x", place.life)
    record.mark("s1", "by hand")
    record.forked("s1", "s2", {"c1", "by hand"}, "by hand")
    for name in ("s1", "s2"):
        place = Place(record, name)
        place.brought_back(["c1", "by hand"], "by hand", ask_again=False)
        assert place.step([b"a"], "new").kind == "replay" and place.forwarding
        step, outcome = place.command(b"x")
        assert step.kind == "resume" and outcome
        assert place.resume(outcome, place.life).name == ticket.name
    with pytest.raises(SandboxGone):
        place.resume(outcome, place.life - 1)


def test_a_command_that_could_not_be_waited_for_is_waited_for_when_it_comes_again(record: Record) -> None:
    place = Place(record, "s1")
    ticket = place.begin(b"x", place.life)
    record.mark("s1", "by hand")
    place.brought_back(["by hand"], "by hand", ask_again=False)
    _, outcome = place.command(b"x")
    assert outcome
    place.take_back(outcome)
    assert place.command(b"x")[0].kind == "resume"
    place.end(ticket, b"what is known", failed=True)
    place.take_back(outcome)
    assert place.command(b"x")[0].kind == "run", "it was told how that ended"


def test_which_outcomes_were_given_is_known_after_the_daemon_was_killed(record: Record) -> None:
    place = Place(record, "s1")
    for result in (b"first", b"second"):
        assert place.command(b"x")[0].kind == "run"
        place.end(place.begin(b"x", place.life), result)
    record.mark("s1", "by hand")
    place.brought_back(["by hand"], "by hand", ask_again=False)
    for result in (b"first", b"second"):
        place = Place(record, "s1")
        _, outcome = place.command(b"x")
        assert outcome and outcome.result == result
    assert Place(record, "s1").command(b"x")[0].kind == "run"
    place.brought_back(["by hand"], "by hand", ask_again=False)
    assert Place(record, "s1").command(b"x")[0].kind == "replay", "another agent is given it again"


def test_that_an_answer_was_taken_is_known_after_the_daemon_was_killed(record: Record) -> None:
    place = Place(record, "s1")
    first = turn(record, place, b"a")
    assert Place(record, "s1").step([b"a"], "").kind == "ask", "whoever had it wants another one"
    made = record.begin("s1", chain=[b"b"], items=[b"b"])
    place.answered(made.id, place.life, keeps(record, b"to b"))
    assert Place(record, "s1").step([b"b"], "").kind == "replay", "nobody has had it"
    life = place.life
    place.brought_back([f"c{first}"], f"c{first}", ask_again=False)
    assert not record.get(first).delivered, "in this life nobody has had it"
    place.taken(first, life)
    place.keep_taken(first, life)
    assert not record.get(first).delivered
    record.delivered(first)
    record.forked("s1", "s2", {f"c{first}", "c2"}, "c2")
    assert not any(one.delivered for one in record.exchanges("s2"))


def test_commands_of_agents_without_a_model_have_places_too_and_many_cost_no_more_than_few(record: Record) -> None:
    place = Place(record, "s1")
    for number in range(30):
        did(place, b"%d" % number)
    assert [one.index for one in record.outcomes.of("s1", 0)] == list(range(30))
    assert record.outcomes.next_index("s1", 0) == 30 and record.outcomes.next_index("s1", 7) == 0


def test_what_came_next_is_the_next_question_that_counts(record: Record) -> None:
    place = Place(record, "s1")
    numbers = [turn(record, place, *(b"%d" % n for n in range(length))) for length in (1, 2, 3)]
    assert [one and one.id for one in map(place.after, (0, *numbers))] == [*numbers, None]
    record.abandon(numbers[1])
    after = place.after(numbers[0])
    assert after and after.id == numbers[2] and place.next is None


def under_way(record: Record, place: Place, *commands: bytes) -> None:
    """They are begun, and then the sandbox is brought back to a checkpoint that has them running."""
    for command in commands:
        place.begin(command, place.life)
    record.mark("s1", "c1")
    place.brought_back(["c1"], "c1", ask_again=False)


def test_a_new_command_does_not_let_another_that_is_under_way_be_started_again(record: Record) -> None:
    place = Place(record, "s1")
    under_way(record, place, b"a", b"b")
    assert place.command(b"a")[0].kind == "resume"
    did(place, b"c")
    assert place.command(b"b")[0].kind == "resume"
    did(place, b"d")
    assert not place.forwarding
    did(place, b"a")


def test_who_waited_for_a_command_under_way_when_the_daemon_was_killed_waits_again(record: Record) -> None:
    under_way(record, Place(record, "s1"), b"a")
    assert Place(record, "s1").command(b"a")[0].kind == "resume"
    assert Place(record, "s1").command(b"a")[0].kind == "resume"


def test_what_was_told_to_come_later_was_not_begun(record: Record) -> None:
    place = Place(record, "s1")
    place.withdraw(place.begin(b"a", place.life))
    assert record.outcomes.of("s1") == []
    ticket = place.begin(b"a", place.life)
    place.end(ticket, b"r")
    place.withdraw(ticket)
    assert [one.state for one in record.outcomes.of("s1")] == ["done"]
