"""The gate: whatever happens in whatever order, nothing that makes an agent act goes out too early, and nothing twice."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from crab.turns import gate as gates
from crab.turns.delivery import Broken, Delivery
from crab.turns.gate import Answer, Gate, Move
from crab.turns.wires.wire import Part, Piece


class Answers(RuleBasedStateMachine):
    """One answer and what happens around it, with a reader that takes whatever it may."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.loop.run_until_complete(self._begin())
        self.pieces: list[Piece] = []
        self.whole: bool | None = None
        self.recorded = self.settled = self.failed = False
        self.seen = b""
        self.end = ""

    async def _begin(self) -> None:
        self.delivery = Delivery()
        self.delivery.begin(200, [])
        self.task = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        try:
            async for data in self.delivery.follow():
                self.seen += data
            self.end = "end"
        except Broken:
            self.end = "broken"

    def teardown(self) -> None:
        self.task.cancel()
        self.loop.run_until_complete(asyncio.gather(self.task, return_exceptions=True))
        self.loop.close()

    def turn(self) -> None:
        for _ in range(4):
            self.loop.run_until_complete(asyncio.sleep(0))

    @precondition(lambda self: self.whole is None and not self.failed)
    @rule(part=st.sampled_from(Part), data=st.binary(min_size=1, max_size=4))
    def arrives(self, part: Part, data: bytes) -> None:
        self.pieces.append(Piece(data, part))
        self.delivery.arrived(self.pieces[-1])

    @precondition(lambda self: self.whole is None and not self.failed)
    @rule(complete=st.booleans())
    def ends(self, complete: bool) -> None:
        self.whole = complete
        self.delivery.ended(complete)

    @rule()
    def is_recorded(self) -> None:
        self.recorded = True
        self.delivery.recorded()

    @rule()
    def is_settled(self) -> None:
        self.settled = True
        self.delivery.settled()

    @precondition(lambda self: not self.delivery.is_over)
    @rule()
    def breaks_off(self) -> None:
        """The connection to the model is lost, or something fails."""
        self.failed = True
        self.delivery.finish(broken=True)

    @rule()
    def comes_again(self) -> None:
        """The client goes away and asks again: it gets all from the first byte on."""
        self.task.cancel()
        self.seen, self.end = b"", ""
        self.turn()
        self.task = self.loop.create_task(self._read())

    @invariant()
    def what_went_out_was_allowed(self) -> None:
        self.turn()
        held = next((n for n, piece in enumerate(self.pieces) if piece.part != Part.TEXT), len(self.pieces))
        shown, everything = (b"".join(p.raw for p in pieces) for pieces in (self.pieces[:held], self.pieces))
        open_to_all = bool(self.whole) and self.recorded and self.settled and not self.failed
        assert self.seen == (everything if open_to_all else shown), (
            "in order, unchanged, as early as it may and no earlier"
        )
        expected = "end" if open_to_all else "broken" if self.failed or self.whole is False else ""
        assert self.end == expected and self.delivery.is_over == bool(expected)
        assert self.delivery.is_holding == (held < len(self.pieces) and not expected)


TestAnswers = Answers.TestCase
TestAnswers.settings = settings(max_examples=150, stateful_step_count=20, deadline=None)


@pytest.mark.parametrize("part", [Part.CALL, Part.END])
def test_what_makes_an_agent_act_is_held_and_everything_after_it(part: Part) -> None:
    gate, move = gates.arrived(Gate(), Part.TEXT)
    assert move == Move.PASS
    gate, move = gates.arrived(gate, part)
    assert move == Move.HOLD
    assert gates.arrived(gate, Part.TEXT)[1] == Move.HOLD


def test_a_safe_turn_does_not_open_the_gate_for_half_an_answer() -> None:
    gate = Gate(safe=True, recorded=True)
    gate, move = gates.arrived(gate, Part.CALL)
    assert move == Move.HOLD
    assert gates.ended(gate, complete=False) == (
        Gate(safe=True, recorded=True, holds=True, answer=Answer.CUT, over=True),
        Move.BREAK,
    )


def test_nothing_comes_after_the_end() -> None:
    gate, _ = gates.ended(Gate(), complete=True)
    with pytest.raises(ValueError, match="after the end"):
        gates.arrived(gate, Part.TEXT)
    with pytest.raises(ValueError, match="already"):
        gates.ended(gate, complete=True)
