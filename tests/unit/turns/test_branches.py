"""What counts after a rewind or in a fork, against a model that simply remembers what was there at each checkpoint."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from unit.turns.stored import loose

from crab.errors import AlreadyExists
from crab.model import Struct
from crab.turns.record import Record

SANDBOX = "s1"


class Snapshot(Struct):
    line: frozenset[str]
    before: frozenset[int]
    own: int | None
    commands: frozenset[int]
    over: frozenset[int]


class Branches(RuleBasedStateMachine):
    """One agent that asks, runs commands, and is rewound to any checkpoint there ever was, abandoned ones too."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.record = Record.open(self.folder / "turns.db")
        self.alive: set[int] = set()
        self.depth: dict[int, int] = {}
        """Of each question: how long its conversation is. Questions of two branches may be the same."""
        self.complete: set[int] = set()
        self.commands: set[int] = set()
        self.over: set[int] = set()
        self.exchange_of: dict[int, int] = {}
        self.line: list[str] = []
        self.snapshots: dict[str, Snapshot] = {}
        self.numbers = itertools.count()
        self.forks = 0
        self.returned: int | None = None
        """The question at the head, right after a rewind."""

    def teardown(self) -> None:
        self.record.close()
        shutil.rmtree(self.folder)

    def keep(self, own: int | None, before: set[int], commands: set[int], over: set[int]) -> str:
        checkpoint = f"c{next(self.numbers)}"  # no two have one name, also if the first is forgotten
        self.line.append(checkpoint)
        self.snapshots[checkpoint] = Snapshot(
            frozenset(self.line), frozenset(before), own, frozenset(commands), frozenset(over & commands)
        )
        return checkpoint

    @rule(checkpoint=st.sampled_from((True, True, False)))
    def turn(self, checkpoint: bool) -> None:
        depth = 1 + len(self.alive)
        self.returned = None
        before, commands, over = set(self.alive), set(self.commands), set(self.over)
        made = self.record.begin(SANDBOX, chain=[b"%d" % n for n in range(depth)], items=[b"x"] * depth)
        self.alive.add(made.id)
        self.depth[made.id] = depth
        if checkpoint:
            name = self.keep(made.id, before, commands, over)
            self.record.protected(made.id, checkpoint=name, turn=depth, protection="durable")
        else:
            self.record.protected(made.id, checkpoint=None, turn=depth, protection="unprotected")

    @precondition(lambda self: self.alive - self.complete)
    @rule()
    def answer(self) -> None:
        made = max(self.alive - self.complete)
        self.returned = None
        self.record.answered(made, status=200, headers={}, body=b"%d" % made, complete=True)
        self.record.released(made)
        self.complete.add(made)

    @precondition(lambda self: self.returned in self.alive - self.complete)
    @rule()
    def ask_again(self) -> None:
        """The agent asks once more what it was waiting for when it was brought back, and that is a checkpoint too."""
        assert self.returned
        name = self.keep(self.returned, self.alive - {self.returned}, self.commands, self.over)
        self.record.protected(self.returned, checkpoint=name, turn=1, protection="durable")

    @rule()
    def mark(self) -> None:
        self.returned = None
        self.record.mark(SANDBOX, self.keep(None, self.alive, self.commands, self.over))

    @rule()
    def begin(self) -> None:
        self.returned = None
        newest = self.record.newest(SANDBOX, released=True)
        exchange = newest.id if newest else 0
        used = {found.index for found in self.record.outcomes.of(SANDBOX, exchange)}
        index = next(number for number in range(len(used) + 1) if number not in used)
        made = self.record.outcomes.begin(SANDBOX, exchange, index, b"d")
        self.commands.add(made.id)
        self.exchange_of[made.id] = exchange
        with pytest.raises(AlreadyExists):
            self.record.outcomes.begin(SANDBOX, exchange, index, b"d")

    @precondition(lambda self: self.exchange_of)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """Any command, also one that ends after the sandbox was rewound to before it."""
        made = data.draw(st.sampled_from(sorted(self.exchange_of)))
        self.returned = None
        if made not in self.over:
            self.record.outcomes.end(made, "done", b"r")
            self.over.add(made)

    @precondition(lambda self: self.snapshots)
    @rule(data=st.data(), ask_again=st.booleans(), times=st.sampled_from((1, 2)))
    def rewind(self, data: st.DataObject, ask_again: bool, times: int) -> None:
        """Said twice if a daemon died before it knew that it had said it."""
        head = data.draw(st.sampled_from(sorted(self.snapshots)))
        there = self.snapshots[head]
        for _ in range(times):
            self.record.rewound(SANDBOX, there.line, head, ask_again)
        own = {there.own} & self.alive if not ask_again and there.own else set[int]()
        self.alive = set(there.before) | own
        # commands of the question at the head may be in its past only if it was answered on another branch: they went too
        self.commands = {made for made in there.commands if self.exchange_of[made] != there.own}
        reset = self.commands - there.over
        self.over -= reset
        for name, other in self.snapshots.items():
            self.snapshots[name] = Snapshot(other.line, other.before, other.own, other.commands, other.over - reset)
        self.returned = there.own
        self.line = sorted(there.line, key=lambda name: int(name[1:]))

    @rule(age=st.sampled_from((-60.0, None)))
    def retain(self, age: float | None) -> None:
        """Let go of all that may go: to what was rewound away nobody comes back then."""
        self.record.retain(age, None if age else 0)
        self.snapshots = {name: there for name, there in self.snapshots.items() if name in self.line}
        self.exchange_of = {made: exchange for made, exchange in self.exchange_of.items() if made in self.commands}

    @precondition(lambda self: self.snapshots)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        head = data.draw(st.sampled_from(sorted(self.snapshots)))
        there = self.snapshots[head]
        self.forks += 1
        target = f"f{self.forks}"
        self.record.forked(SANDBOX, target, there.line, head)
        for _ in range(2):
            copies = self.record.exchanges(target)
            old = [self.record.get(identity) for identity in sorted(there.before)]
            assert [(e.key, e.checkpoint, e.complete) for e in copies] == [
                (e.key, e.checkpoint, e.complete) for e in old
            ]
            assert not any(copy.abandoned for copy in copies)
            number = {copy.id: exchange.id for copy, exchange in zip(copies, old, strict=True)} | {0: 0}
            found = sorted((number[o.exchange], o.state) for o in self.record.outcomes.of(target))
            assert found == sorted(
                (self.exchange_of[made], "done" if made in there.over else "intended") for made in there.commands
            )
            self.record.rewound(target, there.line, head, ask_again=True)  # to where it is: nothing changes

    @invariant()
    def nothing_is_kept_that_nothing_refers_to(self) -> None:
        assert not loose(self.record)

    @invariant()
    def what_counts_is_what_was_there(self) -> None:
        assert {found.id for found in self.record.exchanges(SANDBOX) if not found.abandoned} == self.alive
        found = {outcome.id: outcome.state for outcome in self.record.outcomes.of(SANDBOX)}
        assert found == {made: "done" if made in self.over else "intended" for made in self.commands}

    @invariant()
    def the_newest_whole_answer_that_counts_is_found(self) -> None:
        for depth in set(self.depth.values()):
            answers = [made for made in self.alive & self.complete if self.depth[made] == depth]
            found = self.record.find(SANDBOX, b"%d" % (depth - 1))
            assert (found.id if found else None) == max(answers, default=None)


TestBranches = Branches.TestCase
TestBranches.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


# ---- the same in words


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return Record.open(tmp_path / "turns.db")


def turn(record: Record, number: int, checkpoint: str | None) -> int:
    made = record.begin(SANDBOX, chain=[b"%d" % n for n in range(number)], items=[b"x"] * number)
    record.protected(made.id, checkpoint=checkpoint, turn=number, protection="durable")
    record.answered(made.id, status=200, headers={}, body=b"a", complete=True)
    return record.released(made.id).id


def ran(record: Record, exchange: int) -> int:
    made = record.outcomes.begin(SANDBOX, exchange, 0, b"d")
    return record.outcomes.end(made.id, "done", b"r").id


def test_a_recovery_keeps_the_answer_at_the_head_and_a_rewind_does_not(record: Record) -> None:
    turn(record, 1, "c1")
    head = turn(record, 2, "c2")
    after = turn(record, 3, "c3")
    record.rewound(SANDBOX, {"c1", "c2"}, "c2", ask_again=False)
    found = record.find(SANDBOX, b"1")
    assert found and found.id == head and found.state == "answered"
    assert record.find(SANDBOX, b"2") is None and record.get(after).state == "abandoned"
    record.rewound(SANDBOX, {"c1", "c2"}, "c2", ask_again=True)
    assert record.find(SANDBOX, b"1") is None and record.find(SANDBOX, b"0")


def test_a_crash_after_a_rewind_does_not_bring_the_unwanted_answer_back(record: Record) -> None:
    turn(record, 1, "c1")
    record.rewound(SANDBOX, {"c1"}, "c1", ask_again=True)
    record.rewound(SANDBOX, {"c1"}, "c1", ask_again=False)
    assert record.find(SANDBOX, b"0") is None


def test_commands_that_ran_after_the_head_are_run_again_in_both_cases(record: Record) -> None:
    for ask_again in (False, True):
        first, head = turn(record, 1, "c1"), 0
        kept = ran(record, first)
        head = turn(record, 2, "c2")
        ran(record, head)
        record.rewound(SANDBOX, {"c1", "c2"}, "c2", ask_again)
        assert [found.id for found in record.outcomes.of(SANDBOX)] == [kept]
        record.forget(SANDBOX)


def test_an_exchange_without_a_checkpoint_is_in_the_past_of_the_next_one(record: Record) -> None:
    turn(record, 1, "c1")
    bare = turn(record, 2, None)
    effect = ran(record, bare)
    turn(record, 3, "c3")
    record.rewound(SANDBOX, {"c1", "c3"}, "c3", ask_again=True)
    assert record.get(bare).state == "released" and record.outcomes.of(SANDBOX)[0].id == effect
    record.rewound(SANDBOX, {"c1"}, "c1", ask_again=False)
    assert record.get(bare).state == "abandoned" and record.outcomes.of(SANDBOX) == []


def test_a_rewind_that_is_taken_back_finds_what_it_abandoned(record: Record) -> None:
    first = turn(record, 1, "c1")
    effect = ran(record, first)
    second = turn(record, 2, "c2")
    turn(record, 3, "c3")
    record.rewound(SANDBOX, {"c1"}, "c1", ask_again=False)
    other = ran(record, first)
    turn(record, 2, "c4")
    record.rewound(SANDBOX, {"c1", "c2", "c3"}, "c3", ask_again=False)
    found = record.find(SANDBOX, b"1")
    assert found and found.id == second and [o.id for o in record.outcomes.of(SANDBOX)] == [effect]
    record.rewound(SANDBOX, {"c1", "c4"}, "c4", ask_again=False)
    assert [o.id for o in record.outcomes.of(SANDBOX)] == [other]


def test_a_command_that_was_under_way_at_the_head_is_intended_again(record: Record) -> None:
    first = turn(record, 1, "c1")
    server = record.outcomes.begin(SANDBOX, first, 0, b"d")
    turn(record, 2, "c2")
    record.outcomes.end(server.id, "done", b"r")
    turn(record, 3, "c3")
    record.rewound(SANDBOX, {"c1", "c2", "c3"}, "c3", ask_again=False)
    assert record.outcomes.of(SANDBOX)[0].state == "done"
    record.rewound(SANDBOX, {"c1", "c2"}, "c2", ask_again=False)
    found = record.outcomes.of(SANDBOX)[0]
    assert (found.id, found.state, found.result, found.ended) == (server.id, "intended", None, None)


def test_a_command_that_was_begun_while_a_checkpoint_was_taken_may_be_in_it(record: Record) -> None:
    first = turn(record, 1, "c1")
    asked = record.begin(SANDBOX, chain=[b"0", b"1"], items=[b"x"] * 2)
    begun = record.outcomes.begin(SANDBOX, first, 0, b"d")  # by a second agent
    record.protected(asked.id, checkpoint="c2", turn=2, protection="durable")
    later = record.outcomes.begin(SANDBOX, first, 1, b"d")
    record.outcomes.end(begun.id, "done", b"r")
    record.rewound(SANDBOX, {"c1", "c2"}, "c2", ask_again=False)
    assert [(one.id, one.state) for one in record.outcomes.of(SANDBOX)] == [(begun.id, "intended")]
    assert record.outcomes.begin(SANDBOX, first, 1, b"d").id > later.id


def test_of_a_command_that_ended_while_a_checkpoint_was_taken_by_hand_its_end_is_not_in_it(record: Record) -> None:
    first = turn(record, 1, "c1")
    before, during = ran(record, first), record.outcomes.begin(SANDBOX, first, 1, b"d").id
    ended = record.outcomes.ended(SANDBOX)
    record.outcomes.end(during, "done", b"r")
    record.mark(SANDBOX, "c2", 2, ended)
    record.mark(SANDBOX, "c3", 3)
    for line, states in ((("c1", "c2", "c3"), ["done", "done"]), (("c1", "c2"), ["done", "intended"])):
        record.rewound(SANDBOX, set(line), line[-1], ask_again=False)
        assert [(one.id, one.state) for one in record.outcomes.of(SANDBOX)] == list(
            zip((before, during), states, strict=True)
        )
    assert record.outcomes.ended(SANDBOX) == frozenset()


def test_a_helper_s_answer_outlives_a_recovery_and_no_rewind(record: Record) -> None:
    turn(record, 1, "c1")
    helper = record.begin(SANDBOX, chain=[b"title"], items=[b"title"], kind="helper")
    record.answered(helper.id, status=200, headers={}, body=b"a", complete=True)
    record.rewound(SANDBOX, {"c1"}, "c1", ask_again=False)
    assert record.find(SANDBOX, b"title")
    record.rewound(SANDBOX, {"c1"}, "c1", ask_again=True)
    assert record.find(SANDBOX, b"title") is None


def test_an_open_question_at_the_head_is_still_expected_after_a_recovery(record: Record) -> None:
    made = record.begin(SANDBOX, chain=[b"0"], items=[b"x"])
    record.protected(made.id, checkpoint="c1", turn=1, protection="durable")
    record.rewound(SANDBOX, {"c1"}, "c1", ask_again=False)
    assert [found.id for found in record.open_ones(SANDBOX)] == [made.id]
    record.rewound(SANDBOX, {"c1"}, "c1", ask_again=True)
    assert record.open_ones(SANDBOX) == []


def test_a_fork_has_its_own_rows_and_shares_what_was_said(record: Record) -> None:
    first = turn(record, 1, "c1")
    ran(record, first)
    turn(record, 2, "c2")
    before = record.size()
    record.forked(SANDBOX, "f", {"c1", "c2"}, "c2")
    found = record.find("f", b"0")
    assert found and found.id != first and record.answer(found.id) == b"a" and record.find("f", b"1") is None
    assert record.outcomes.at("f", found.id, 0) and record.size().stored == before.stored
    record.forget(SANDBOX)
    assert record.answer(found.id) == b"a" and record.conversation(found.id) == [b"x"]


def test_a_fork_knows_the_checkpoints_that_were_taken_when_its_question_came_before(record: Record) -> None:
    first = turn(record, 1, "c1")
    ran(record, first)
    asked = record.begin(SANDBOX, chain=[b"0", b"1"], items=[b"x"] * 2)
    for checkpoint in ("c2", "c3"):  # a recovery came in between
        record.protected(asked.id, checkpoint=checkpoint, turn=2, protection="durable")
    record.forked(SANDBOX, "f", {"c1", "c2", "c3"}, "c3")
    for line in ({"c1", "c2", "c3"}, {"c1", "c2"}):
        record.rewound("f", line, max(line), ask_again=True)
        assert [one.state for one in record.outcomes.of("f")] == ["done"]


def test_a_checkpoint_published_just_before_a_crash_is_that_of_the_question_that_waited_for_it(record: Record) -> None:
    first = turn(record, 1, "c1")
    effect = ran(record, first)
    waiting = record.begin(SANDBOX, chain=[b"0", b"1"], items=[b"x"] * 2)
    record.answered(waiting.id, status=200, headers={}, body=b"a", complete=True)
    record.rewound(SANDBOX, {"c1", "c2"}, "c2", ask_again=False)  # nobody has said that c2 was taken
    found = record.find(SANDBOX, b"1")
    assert found and (found.id, found.checkpoint, found.state) == (waiting.id, "c2", "answered")
    assert record.get(first).state == "released"
    assert [(o.id, o.state) for o in record.outcomes.of(SANDBOX)] == [(effect, "done")]


def test_of_commands_around_a_checkpoint_that_nobody_reported_it_is_not_claimed_how_they_ended(record: Record) -> None:
    first = turn(record, 1, "c1")
    effect = ran(record, first)
    record.rewound(SANDBOX, {"c1", "by-hand"}, "by-hand", ask_again=False)
    assert record.get(first).state == "released"
    assert [(o.id, o.state) for o in record.outcomes.of(SANDBOX)] == [(effect, "intended")]


def test_a_rewind_to_before_everything_leaves_nothing(record: Record) -> None:
    ran(record, turn(record, 1, "c1"))
    record.begin(SANDBOX, chain=[b"0", b"1"], items=[b"x"] * 2)
    record.rewound(SANDBOX, {"c0"}, "c0", ask_again=False)
    assert all(found.abandoned for found in record.exchanges(SANDBOX)) and record.outcomes.of(SANDBOX) == []


def test_questions_that_were_made_safe_in_another_order_are_both_kept(record: Record) -> None:
    main = record.begin(SANDBOX, chain=[b"main"], items=[b"x"])
    sub = record.begin(SANDBOX, chain=[b"sub"], items=[b"x"], agent="sub")
    for identity, checkpoint in ((sub.id, "c1"), (main.id, "c2")):
        record.protected(identity, checkpoint=checkpoint, turn=1, protection="durable")
        record.answered(identity, status=200, headers={}, body=b"a", complete=True)
    record.rewound(SANDBOX, {"c1", "c2"}, "c2", ask_again=False)
    assert record.find(SANDBOX, b"main") and record.find(SANDBOX, b"sub")


def test_a_checkpoint_that_was_removed_takes_nothing_with_it(record: Record) -> None:
    made = [turn(record, number, f"c{number}") for number in range(1, 5)]
    record.rewound(SANDBOX, {"c1", "c4"}, "c4", ask_again=False)
    assert [found.id for found in record.exchanges(SANDBOX) if not found.abandoned] == made
