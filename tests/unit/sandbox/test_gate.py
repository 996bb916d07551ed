"""The gate: nobody inside while it is closed, and everybody comes back afterwards."""

from __future__ import annotations

import threading

import pytest

from crab.errors import SandboxGone
from crab.sandbox.gate import Gate


def test_the_block_runs_only_when_the_last_holder_has_left() -> None:
    gate, inside, leave, order = Gate(), threading.Event(), threading.Event(), []

    def hold() -> None:
        with gate.enter():
            inside.set()
            leave.wait(10)
            order.append("left")

    holder = threading.Thread(target=hold)
    holder.start()
    inside.wait(10)
    with gate.closed(leave.set):
        order.append("alone")
    holder.join(10)
    assert order == ["left", "alone"]


def test_whoever_comes_while_it_is_closed_waits() -> None:
    gate, entered = Gate(), threading.Event()

    def come() -> None:
        with gate.enter():
            entered.set()

    with gate.closed(lambda: None):
        visitor = threading.Thread(target=come)
        visitor.start()
        assert not entered.wait(0.05)
    visitor.join(10)
    assert entered.is_set()


def test_detaching_is_repeated_for_a_holder_that_had_not_connected_yet() -> None:
    gate, inside, leave, calls = Gate(), threading.Event(), threading.Event(), []

    def detach() -> None:
        calls.append(1)
        if len(calls) == 3:
            leave.set()

    def hold() -> None:
        with gate.enter():
            inside.set()
            leave.wait(10)

    holder = threading.Thread(target=hold)
    holder.start()
    inside.wait(10)
    with gate.closed(detach):
        pass
    holder.join(10)
    assert len(calls) >= 3


def test_a_holder_that_does_not_leave_is_a_timeout_and_the_gate_opens_again() -> None:
    gate, inside, leave = Gate(), threading.Event(), threading.Event()

    def hold() -> None:
        with gate.enter():
            inside.set()
            leave.wait(10)

    holder = threading.Thread(target=hold)
    holder.start()
    inside.wait(10)
    with pytest.raises(TimeoutError), gate.closed(lambda: None, seconds=0.05):
        pytest.fail("the block must not run")
    leave.set()
    holder.join(10)
    with gate.enter():
        pass


def test_a_destroyed_gate_tells_those_who_wait_why() -> None:
    gate, told = Gate(), []

    def come() -> None:
        try:
            with gate.enter():
                pass
        except SandboxGone as error:
            told.append(error.message)

    with gate.closed(lambda: None):
        visitor = threading.Thread(target=come)
        visitor.start()
        gate.destroy("it was rewound")
        visitor.join(10)
    assert told == ["it was rewound"]


def test_a_holder_that_is_outside_for_a_while_keeps_nobody_waiting() -> None:
    gate, out, back, order = Gate(), threading.Event(), threading.Event(), []

    def hold() -> None:
        with gate.enter():
            with gate.outside():
                out.set()
                back.wait(10)
            order.append("inside again")

    holder = threading.Thread(target=hold)
    holder.start()
    out.wait(10)
    with gate.closed(lambda: None, seconds=5):
        back.set()
        order.append("closed")
    holder.join(10)
    assert order == ["closed", "inside again"]
    with gate.closed(lambda: None, seconds=1):
        pass
