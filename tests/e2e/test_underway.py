"""Commands of agents that were under way when their sandbox was captured: none is started a second time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from e2e.box import Box, eventually

from crab.daemon import requests as ask
from crab.daemon.service import Service
from crab.errors import CrabError, InvalidRequest, NotFound, Uncertain
from crab.model import ExecResult, ExecSpec
from crab.sandbox.command import Command

pytestmark = [pytest.mark.kernel, pytest.mark.criu]
WAIT = "while [ ! -e /root/go ]; do sleep 0.02; done"
WORK = f"echo begin >>/root/log; echo first; {WAIT}; echo end >>/root/log; echo last; exit 3"
SPEC = ExecSpec(argv=("sh", "-c", WORK), by_agent=True)
DONE = "begin\nend\n"


@pytest.fixture
def box(service: Service, image: str) -> Iterator[Box]:
    made = service.handle(ask.Create(image=image))
    try:
        yield Box(service, made.name)
    finally:
        service.handle(ask.Remove(sandbox=made.name, force=True))


class Asking:
    """Somebody who waits for an answer."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self.result, self.error = None, None
        try:
            self.result = self._call()
        except CrabError as error:
            self.error = error

    def end(self) -> Any:
        self._thread.join(60)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error
        return self.result


def running(box: Box, spec: ExecSpec = SPEC, **more: Any) -> Asking:
    return Asking(lambda: box.ask(ask.Run, spec=spec, **more))


def under_way(box: Box, spec: ExecSpec = SPEC, **more: Any) -> None:
    """The sandbox is at a checkpoint that was taken while that ran."""
    agent = running(box, spec, **more)
    eventually(lambda: box.read("/root/log"), "its beginning")
    box.checkpoint()
    box.checkpoint()
    box.ask(ask.Kill)
    with pytest.raises(CrabError):
        agent.end()
    box.ask(ask.Recover)


def go(box: Box) -> None:
    """Let it come to its end."""
    box.run("touch /root/go")


def test_a_command_that_runs_in_the_restored_sandbox_is_waited_for_and_gives_all_its_output(box: Box) -> None:
    under_way(box)
    again = running(box)
    go(box)
    result: ExecResult = again.end()
    assert (result.text(), result.exit_code, result.truncated) == ("first\nlast\n", 3, False)
    assert box.read("/root/log") == DONE, "it was not started again"
    head = box.checkpoint()
    box.rewind(head.id)
    assert box.ask(ask.Run, spec=SPEC) == result, "and its end is in the record like any other"
    assert box.read("/root/log") == DONE


def test_one_that_has_ended_meanwhile_is_told(box: Box) -> None:
    under_way(box)
    go(box)
    eventually(lambda: box.read("/root/log") == DONE, "its end")
    assert box.ask(ask.Run, spec=SPEC).text() == "first\nlast\n"
    assert box.read("/root/log") == DONE


def test_streams_are_taken_up_where_the_command_is(box: Box) -> None:
    spec = ExecSpec(argv=("sh", "-c", "read a; echo $a >>/root/log; read b; echo $b >>/root/log; echo done"),
                    by_agent=True, stdin=True)  # fmt: skip
    command = box.service.spawn(box.name, spec)
    reader = Asking(lambda: list(command.events()))
    command.write(b"one\n")
    eventually(lambda: box.read("/root/log"), "the first line")
    box.checkpoint()
    box.ask(ask.Recover, force=True)
    with contextlib.suppress(CrabError):
        reader.end()
    again = box.service.spawn(box.name, spec)
    reader = Asking(lambda: b"".join(piece.data for piece in again.events()))
    again.write(b"one\ntwo\n")
    assert reader.end() == b"done\n" and again.status().exit_code == 0
    assert box.read("/root/log") == "one\ntwo\n", "it is given what it had not"


def test_input_that_was_given_is_not_given_again(box: Box) -> None:
    spec = ExecSpec(argv=("sh", "-c", f"read a; echo $a >>/root/log; {WAIT}; cat >>/root/log"), by_agent=True)
    under_way(box, spec, input=b"one\ntwo\n")
    again = running(box, spec, input=b"one\ntwo\n")
    go(box)
    assert again.end().ok
    assert box.read("/root/log") == "one\ntwo\n"


def test_that_the_beginning_of_much_output_is_gone_is_said(box: Box) -> None:
    spec = ExecSpec(argv=("sh", "-c", f"head -c 300000 /dev/zero; {WORK}"), by_agent=True)
    under_way(box, spec)
    again = running(box, spec)
    go(box)
    result = again.end()
    assert result.truncated and b"bytes of the output are lost" in result.stderr
    assert 0 < len(result.stdout) < 300000 and result.stdout.endswith(b"\0first\nlast\n")
    assert box.read("/root/log") == DONE


def test_a_time_limit_counts_from_when_it_is_waited_for_again(box: Box) -> None:
    spec = ExecSpec(argv=("sh", "-c", WORK), by_agent=True, timeout=2.0)
    under_way(box, spec)
    assert box.ask(ask.Run, spec=spec).timed_out
    assert box.read("/root/log") == "begin\n"


def test_one_whose_processes_are_not_in_the_restored_state_is_uncertain_and_run_only_if_that_was_heard(
    box: Box,
) -> None:
    agent = running(box)
    eventually(lambda: box.read("/root/log"), "its beginning")
    head = box.checkpoint()
    box.ask(ask.Rewind, ref=head.id, files_only=True)
    with pytest.raises(CrabError):
        agent.end()
    with pytest.raises(Uncertain, match="not known"):
        box.ask(ask.Run, spec=SPEC)
    assert box.read("/root/log") == "begin\n", "it was not run"
    go(box)
    assert box.ask(ask.Run, spec=SPEC).exit_code == 3
    assert box.read("/root/log") == f"begin\n{DONE}"


def test_a_name_that_was_made_up_for_a_call_does_not_keep_it_from_being_found(box: Box) -> None:
    """The daemon's server gives one to each call, to be able to kill what nobody waits for any more."""
    under_way(box, msgspec.structs.replace(SPEC, name="run-012345678901"))
    again = running(box, msgspec.structs.replace(SPEC, name="run-112345678901"))
    found = eventually(lambda: named(box, "run-112345678901"), "the name that it has now")
    assert found.name.startswith("step:")
    go(box)
    assert again.end().exit_code == 3 and box.read("/root/log") == DONE


def named(box: Box, name: str) -> Command | None:
    with contextlib.suppress(NotFound):
        return box.service.command(box.name, name)
    return None


def test_in_a_fork_it_is_found_as_well(box: Box) -> None:
    agent = running(box)
    eventually(lambda: box.read("/root/log"), "its beginning")
    box.checkpoint()
    [clone] = box.fork(1, "head")
    try:
        for one, asking in ((clone, running(clone)), (box, agent)):
            go(one)
            assert asking.end().text() == "first\nlast\n"
            assert one.read("/root/log") == DONE
    finally:
        clone.ask(ask.Remove, force=True)


def test_the_names_of_such_commands_are_no_names_for_others(box: Box) -> None:
    with pytest.raises(InvalidRequest, match="step:"):
        box.ask(ask.Run, spec=ExecSpec(argv=("true",), name="step:1"))
    with pytest.raises(InvalidRequest, match="step:"):
        box.spawn("true", name="step:1")
