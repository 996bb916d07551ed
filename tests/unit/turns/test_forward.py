"""Fast-forward: the decisions as tables, and a life of kills, rewinds and forks against a model that forgets nothing."""

from __future__ import annotations

import functools
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crab.model import Struct
from crab.turns.forward import CommandStep, Kept, Known, Progress, Situation, decide, decide_command
from crab.turns.place import Place, Ticket
from crab.turns.record import Record


def known(number: int, **more: Any) -> Known:
    return Known(id=number, **{"whole": True, **more})


@pytest.mark.parametrize(
    ("now", "kind", "exchange", "caught_up"),
    [
        # live
        (Situation(forwarding=False), "ask", None, True),
        (Situation(forwarding=False, same=known(3), went_on=False), "replay", 3, True),
        (Situation(forwarding=False, same=known(3)), "ask", None, True),
        (Situation(forwarding=False, same=known(3, delivered=True)), "ask", None, True),
        (Situation(forwarding=False, same=known(3, whole=False)), "ask", None, True),
        (Situation(forwarding=False, same=known(3, session="a"), session="b"), "ask", None, True),
        (Situation(forwarding=False, same=known(3, session="a"), session="a", went_on=False), "replay", 3, True),
        # behind the sandbox
        (Situation(forwarding=True), "ask", None, True),
        (Situation(forwarding=True, same=known(3), position=known(3), head=known(5)), "replay", 3, False),
        (Situation(forwarding=True, same=known(3, session="a"), session="b", head=known(5)), "replay", 3, False),
        (Situation(forwarding=True, same=known(3, delivered=True), head=known(5)), "replay", 3, False),
        (Situation(forwarding=True, same=known(5), position=known(5), head=known(5)), "replay", 5, True),
        (Situation(forwarding=True, same=known(5), head=known(5), beyond=True), "replay", 5, False),
        (Situation(forwarding=True, same=known(5), head=known(5), followed=True), "replay", 5, False),
        (Situation(forwarding=True, same=known(5, whole=False), head=known(5, whole=False)), "ask", None, True),
        (Situation(forwarding=True, position=known(5), head=known(5), went_on=False), "ask", None, True),
        (Situation(forwarding=True, position=known(5), head=known(5), went_on=False, beyond=True), "ask", None, True),
        (Situation(forwarding=True, position=known(3), head=known(5), went_on=False), "ask", None, True),
        # something else
        (Situation(forwarding=True, position=known(3), head=known(5)), "diverged", 3, True),
        (Situation(forwarding=True, same=known(3, whole=False), position=known(2), head=known(5)), "diverged", 2, True),
        (Situation(forwarding=True, head=known(5)), "ask", None, True),
    ],
)
def test_a_question_is_answered_from_the_record_asked_or_diverges(
    now: Situation, kind: str, exchange: int | None, caught_up: bool
) -> None:
    step = decide(now)
    assert (step.kind, step.exchange, step.caught_up) == (kind, exchange, caught_up) and step.why


A, B, C = b"a", b"b", b"c"
TWO = (Kept(index=0, command=A), Kept(index=1, command=B))
TWICE = (Kept(index=0, command=A), Kept(index=1, command=A))


@pytest.mark.parametrize(
    ("kept", "at_head", "command", "given", "kind", "index"),
    [
        ((), True, A, set(), "run", 0),
        ((), False, A, set(), "diverged", 0),
        (TWO, True, A, set(), "replay", 0),
        (TWO, True, B, set(), "replay", 1),
        (TWO, True, A, {1}, "replay", 0),
        (TWO, True, C, set(), "diverged", 0),
        (TWO, True, C, {0}, "diverged", 0),
        (TWO, True, C, {0, 1}, "run", 0),
        (TWO, False, C, {0, 1}, "diverged", 0),
        (TWICE, True, A, set(), "replay", 0),
        (TWICE, True, A, {0}, "replay", 1),
        (TWICE, True, A, {0, 1}, "run", 0),
    ],
)
def test_a_command_is_given_its_outcome_run_or_diverges(
    kept: tuple[Kept, ...], at_head: bool, command: bytes, given: set[int], kind: str, index: int
) -> None:
    step = decide_command(Progress(kept=kept, at_head=at_head), command, frozenset(given))
    assert (step.kind, step.index, step.caught_up) == (kind, index, kind != "replay") and step.why
    assert isinstance(step, CommandStep)


@pytest.mark.parametrize(
    ("kept", "at_head", "given", "kind", "index"),
    [
        ((), True, set(), "resume", 3),
        ((), False, set(), "resume", 3),
        ((Kept(index=0, command=A),), True, set(), "replay", 0),
        ((Kept(index=0, command=A),), True, {0}, "resume", 3),
        ((), True, {3}, "run", 0),
        ((), False, {3}, "diverged", 0),
    ],
)
def test_a_command_that_was_under_way_is_waited_for_once_and_after_all_that_ended(
    kept: tuple[Kept, ...], at_head: bool, given: set[int], kind: str, index: int
) -> None:
    now = Progress(kept=kept, under_way=(Kept(index=3, command=A),), at_head=at_head)
    step = decide_command(now, A, frozenset(given))
    assert (step.kind, step.index) == (kind, index)
    assert step.caught_up == (kind in ("run", "diverged")), "whoever waits for it is not ahead of it"
    assert decide_command(now, C, frozenset(given)).kind != "resume"


def test_a_new_agent_in_a_state_that_was_chosen_runs_what_it_wants() -> None:
    now = Progress(kept=TWO, at_head=False, new=True)
    assert decide_command(now, C).kind == "run"
    assert decide_command(now, A).kind == "replay", "it may be the old one all the same"


# ---------------------------------------------------------------- against a model

SCRIPT = [["make", "test"], [], ["make", "make", "ls"], ["echo"]]
"""Commands after each answer; the same one may come twice."""


UNCERTAIN, NOT_DONE = b"uncertain", b"uncertain; its effect is not there"
"""What an agent is told, and sees, of a command whose end nobody saw, and that does not run any more."""


class Checkpoint(Struct, kw_only=True):
    """What a capture keeps."""

    effects: tuple[tuple[int, int], ...]
    line: tuple[str, ...]
    """Of checkpoints, with itself."""
    question: int
    """The newest question when it was taken."""
    running: frozenset[tuple[int, int]] = frozenset()
    """Commands that were started, and whose effect is still to come."""
    by_hand: bool
    """Taken while no question is on its way."""


def take(place: Place, exchange: int, life: int) -> None:
    """The agent has got an answer to its end."""
    place.taken(exchange, life)
    place.keep_taken(exchange, life)


class World:
    """A sandbox, its agent, and a model. Knows what must be, by other means than the record."""

    def __init__(self, folder: Path) -> None:
        self.record = Record.open(folder / "turns.db")
        self.record._database._db.execute("PRAGMA synchronous=OFF")
        self.sandbox, self.numbers = "s0", 0
        self.place = Place(self.record, "s0")
        self.effects: list[tuple[int, int]] = []
        self.running: set[tuple[int, int]] = set()
        self.checkpoints: dict[str, Checkpoint] = {}
        self.head: str | None = None
        self.question = -1
        self.came_to: str | None = None
        self.whole: set[int] = set()
        """Questions that are answered on the way to where the sandbox is: their answers may be given again."""
        self.safe: dict[int, str] = {}
        """The checkpoints that were taken for them."""
        self.asked: Counter[int] = Counter()
        self.finished = False
        self.session = 0

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    # ---- the agent; it can be killed wherever it yields

    def agent(self, answer_first: bool) -> Iterator[None]:
        self.session += 1
        for number, commands in enumerate(SCRIPT):
            yield from self.ask(number, answer_first)
            for index, command in enumerate(commands):
                yield from self.run(number, index, command)
        self.finished = True

    def ask(self, number: int, answer_first: bool) -> Iterator[None]:
        chain = [b"link %d" % n for n in range(number + 1)]
        place, life = self.place, self.place.life
        step = place.step(chain, f"session {self.session}")
        assert step.kind != "diverged", step
        if step.kind == "replay":
            assert step.exchange is not None and self.record.answer(step.exchange) == b"answer %d" % number
            assert number in self.whole, "an answer that the sandbox never got"
            yield
            take(place, step.exchange, life)
            return
        assert number not in self.whole or not self.kept(number), "it was asked and answered before"
        self.asked[number] += 1
        self.question = number
        made = self.record.begin(self.sandbox, chain=chain, items=chain, session=f"session {self.session}")
        yield
        works = [self.make_safe(made.id), self.hear(made.id, number, life)]
        for work in works[::-1] if answer_first else works:
            yield from work
        self.record.released(made.id)
        take(place, made.id, life)
        yield

    def kept(self, number: int) -> bool:
        """The record must know the answer to a question: the sandbox is past it, or at the checkpoint that was taken for it."""
        began = self.checkpoints[self.came_to] if self.came_to else None
        return began is not None and (
            number < began.question
            or (number == began.question and (began.by_hand or self.safe.get(number) == self.came_to))
        )

    def make_safe(self, exchange: int) -> Iterator[None]:
        name = self.capture(by_hand=False)
        yield
        self.safe[self.question] = name
        self.record.protected(exchange, checkpoint=name, turn=self.numbers, protection="durable")
        yield

    def hear(self, exchange: int, number: int, life: int) -> Iterator[None]:
        keep = functools.partial(
            self.record.answered, status=200, headers={}, body=b"answer %d" % number, complete=True
        )
        self.place.answered(exchange, life, keep)
        self.whole.add(number)
        yield

    def run(self, number: int, index: int, command: str) -> Iterator[None]:
        life, what = self.place.life, (number, index)
        step, outcome = self.place.command(command.encode())
        if outcome is not None and outcome.state == "intended" and what in self.running:
            yield from self.finish(self.place.resume(outcome, life), what)
            return
        if outcome is not None:
            result = outcome.result
            if (
                outcome.state == "intended"
            ):  # the agent is told, and has a look; it sees the same when it comes that way again
                result = UNCERTAIN if what in self.effects else NOT_DONE
                self.place.end(self.place.resume(outcome, life), result, failed=True)
            yield
            if result == NOT_DONE:
                yield from self.run(number, index, command)
                return
            assert result in (UNCERTAIN, b"did %d %d" % what), "another command's outcome"
            assert what in self.effects, "its effect is not there"
            return
        if step.kind == "diverged":  # after a rewind to a checkpoint by hand nothing tells what came next
            assert self.place.next is None
            self.place.diverged()
        assert what not in self.effects and what not in self.running, "it is done twice"
        ticket = self.place.begin(command.encode(), self.place.life)
        yield
        self.running.add(what)
        yield from self.finish(ticket, what)

    def finish(self, ticket: Ticket, what: tuple[int, int]) -> Iterator[None]:
        yield
        self.effects.append(what)
        self.running.remove(what)
        yield
        self.place.end(ticket, b"did %d %d" % what)
        yield

    # ---- what happens to the sandbox

    def capture(self, by_hand: bool) -> str:
        name = f"c{self.number()}"
        line = (*(self.checkpoints[self.head].line if self.head else ()), name)
        self.checkpoints[name] = Checkpoint(
            effects=tuple(self.effects),
            line=line,
            question=self.question,
            running=frozenset(self.running),
            by_hand=by_hand,
        )
        self.head = name
        return name

    def back(self, name: str, ask_again: bool) -> None:
        found = self.checkpoints[name]
        self.effects, self.running = list(found.effects), set(found.running)
        self.head, self.question, self.came_to = name, found.question, name
        last = found.question if found.by_hand or not ask_again else found.question - 1
        self.whole = {n for n in self.whole if n <= last}
        self.safe = {n: at for n, at in self.safe.items() if n <= last}
        self.place.brought_back(found.line, name, ask_again)

    def fork(self, name: str) -> None:
        target = f"s{self.number()}"
        found = self.checkpoints[name]
        self.record.forked(self.sandbox, target, set(found.line), name)
        self.sandbox, self.place = target, Place(self.record, target)
        self.back(name, ask_again=True)

    def restart(self) -> None:
        """The daemon is killed as well, and the next one lets go of all that may go."""
        self.record.retain(max_age_seconds=-60.0, max_bytes=0)
        self.place = Place(self.record, self.sandbox)


lives = st.lists(
    st.tuples(
        st.integers(0, 60),  # steps until the kill
        st.sampled_from(["recover", "recover", "recover", "rewind", "fork"]),
        st.integers(0, 30),  # which checkpoint
        st.booleans(),  # whether the daemon dies too
        st.booleans(),  # whether the answer comes before the capture is done
        st.sets(st.integers(0, 60), max_size=2),  # when somebody takes a checkpoint by hand
    ),
    max_size=7,
)


@settings(max_examples=60, deadline=None)
@given(lives)
def test_no_kill_no_rewind_and_no_fork_makes_an_agent_ask_or_do_anything_twice_or_never(lives: list[Any]) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # nobody pulls the plug here
        world = World(Path(folder))
        try:
            for steps, how, which, dies, answer_first, by_hand in lives:
                live(world, steps, answer_first, by_hand)
                if dies:
                    world.restart()
                come_back(world, how, which)
            live(world, 10_000, False, set())
            assert world.finished
            everything = [(n, index) for n, commands in enumerate(SCRIPT) for index in range(len(commands))]
            assert world.effects == everything, "each once, in order"
        finally:
            world.record.close()


def live(world: World, steps: int, answer_first: bool, by_hand: set[int]) -> None:
    """The agent runs until it is killed."""
    for number, _ in zip(range(steps), world.agent(answer_first), strict=False):
        newest = world.record.newest(world.sandbox)
        between = newest is None or (newest.complete and newest.protection is not None)
        if number in by_hand and between and not world.place.forwarding:
            world.record.mark(world.sandbox, world.capture(by_hand=True))


def come_back(world: World, how: str, which: int) -> None:
    if world.head is None:  # nothing was captured: the sandbox is made anew
        world.record.forget(world.sandbox)
        world.effects, world.running, world.whole, world.question = [], set(), set(), -1
        world.place = Place(world.record, world.sandbox)
        return
    line = world.checkpoints[world.head].line
    if how == "recover":
        world.back(world.head, ask_again=False)
    elif how == "rewind":
        world.back(line[which % len(line)], ask_again=True)
    else:
        world.fork(line[which % len(line)])


@pytest.mark.parametrize("head", range(len(SCRIPT)))
def test_a_rewind_asks_anew_exactly_from_the_head_on(tmp_path: Path, head: int) -> None:
    world = World(tmp_path)
    live(world, 10_000, False, set())
    assert world.head and world.asked == Counter(range(len(SCRIPT)))
    world.back(world.checkpoints[world.head].line[head], ask_again=True)
    live(world, 10_000, False, set())
    assert world.asked == Counter([*range(len(SCRIPT)), *range(head, len(SCRIPT))])
    world.record.close()
