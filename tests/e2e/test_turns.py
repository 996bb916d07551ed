"""Agents, their models and their sandboxes: what each does twice (nothing), whichever of them dies."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pkgutil
import secrets
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.box import Box, eventually
from e2e.dying import dies
from examples.agents import loop

from crab.daemon import requests as ask
from crab.daemon.service import Service
from crab.errors import CommandNotFound, CrabError
from crab.model import Exchange, ExecSpec, ModelAccess, State
from crab.turns.mock import Asked, Fault, Mock

pytestmark = [pytest.mark.kernel, pytest.mark.criu]
AGENT = Path(loop.__file__)
STEPS = ["one", "two", "three", "four", "five"]
PROMPT = "\n".join([*(f"$ echo {step} >>/root/log" for step in STEPS), "> all done"])
SLOW = PROMPT.replace("$", "~ 0.1\n$")
"""The model thinks for a moment before each answer."""
LOG = "".join(f"{step}\n" for step in STEPS)


class Model(Mock):
    """A scripted model that counts its questions, and that can be made to wait."""

    def __init__(self, *faults: Fault) -> None:
        self.asked: list[Asked] = []
        super().__init__(faults, self.asked.append)

    @property
    def steps(self) -> list[int]:
        """Which steps of the script were asked for, in order."""
        return [one.step for one in self.asked if one.kind == "main"]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    """The model of all sandboxes that are made with upstream `mock`."""
    model = Model()
    monkeypatch.setattr("crab.turns.coordinator.Mock", lambda: model)
    return model


@pytest.fixture
def box(service: Service, image: str, model: Model) -> Iterator[Box]:
    """A sandbox with a model."""
    made = service.handle(ask.Create(image=image, model=ModelAccess(upstream="mock")))
    box = Box(service, made.name)
    try:
        yield box
    finally:
        service.handle(ask.Remove(sandbox=made.name, force=True))


def inside(box: Box, prompt: str = PROMPT) -> None:
    """Start the agent in the sandbox."""
    box.put("/root/agent.py", AGENT.read_bytes())
    address = box.ask(ask.ModelAddress, inside=True)
    spec = ExecSpec(argv=("python3", "/root/agent.py", address.url, prompt), name="agent:main", env=address.env)
    box.service.spawn(box.name, spec).detach()


def exchanges(box: Box) -> list[Exchange]:
    return [one for one in box.ask(ask.Exchanges) if one.kind == "main" and not one.abandoned]


def ended(box: Box) -> bool:
    """The agent has got an answer without a call, and is gone. (Asking for the commands is asking init: not all the time.)"""
    found = exchanges(box)
    if not found or found[-1].state != "released" or found[-1].calls:
        return False
    return any(one.id == "agent:main" and not one.running for one in box.ask(ask.CommandList))


def test_an_agent_inside_goes_through_its_turns_and_each_is_safe(box: Box, model: Model) -> None:
    inside(box)
    eventually(lambda: ended(box), "the end of the agent")
    assert box.read("/root/log") == LOG
    assert model.steps == [0, 1, 2, 3, 4, 5]
    found = exchanges(box)
    assert [one.protection for one in found] == ["durable"] * 6
    assert [one.state for one in found] == ["released"] * 6
    turns = [one.turn for one in found]
    assert turns == sorted(set(turns)), "each ended a turn of its own"


def told(box: Box) -> str:
    """The record, a line for each exchange."""
    return "\n".join(
        f"{one.number} {one.state} {one.protection} turn {one.turn} {one.checkpoint} {'abandoned' * one.abandoned} {one.why}"
        for one in box.ask(ask.Exchanges)
    )


def whole(box: Box) -> int:
    """How many answers are recorded."""
    return sum(one.state in ("answered", "released") for one in exchanges(box))


# ---------------------------------------------------------------- an agent inside


@pytest.mark.parametrize("seconds", [0.0, 0.07, 0.14, 0.21, 0.28, 0.35, 0.6])
def test_hazard_t07_a_killed_sandbox_comes_back_with_its_agent_and_nothing_is_done_twice(
    box: Box, model: Model, seconds: float
) -> None:
    inside(box, SLOW)
    eventually(lambda: whole(box) >= 2, "two answers")
    time.sleep(seconds)
    box.ask(ask.Kill)
    last = model.steps[-1]
    box.ask(ask.Recover)
    eventually(lambda: ended(box), lambda: f"the end of the agent; {told(box)}")
    assert box.read("/root/log") == LOG
    times = Counter(model.steps)
    assert times.keys() == set(range(6))
    assert all(times[step] == 1 for step in times if step != last), (last, model.steps, told(box))
    assert times[last] <= 2
    assert whole(box) == 6, told(box)


MOMENTS = {
    "the question is seen": "crab.turns.record.Record.begin",
    "what changed is decided": "crab.inspector.inspector.Inspector.decide",
    "it is captured": "crab.checkpoint.capture._capture_once",
    "it is published": "crab.store.local.LocalStore.publish",
    "the answer is recorded": "crab.turns.record.Record.answered",
    "the turn is noted": "crab.turns.record.Record.protected",
    "the answer is released": "crab.turns.record.Record.released",
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_hazard_t07_whatever_is_being_done_when_the_sandbox_dies_nothing_is_done_twice(
    box: Box, model: Model, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sandbox is killed at that moment of its third turn."""
    home, _, name = MOMENTS[moment].rpartition(".")
    place = pkgutil.resolve_name(home)
    real, count, killed = getattr(place, name), itertools.count(1), threading.Event()

    def killing(*values: Any, **named: Any) -> Any:
        if next(count) == 3:
            box.ask(ask.Kill)
            killed.set()
        return real(*values, **named)

    monkeypatch.setattr(place, name, killing)
    inside(box, SLOW)
    assert killed.wait(60)
    eventually(lambda: box.ask(ask.Inspect).state == State.LOST, "the death is known")
    box.ask(ask.Recover)
    eventually(lambda: ended(box), lambda: f"the end of the agent; {told(box)}")
    assert box.read("/root/log") == LOG
    times = Counter(model.steps)
    assert times.keys() == set(range(6)) and sum(times.values()) <= 7, (model.steps, told(box))


def test_a_second_and_a_third_kill_lose_no_more_than_the_first(box: Box, model: Model) -> None:
    inside(box, SLOW)
    for answers in (1, 3, 4):
        eventually(lambda answers=answers: whole(box) >= answers and box.look().head, "an answer, and a checkpoint")
        box.ask(ask.Kill)
        box.ask(ask.Recover)
    eventually(lambda: ended(box), lambda: f"the end of the agent; {told(box)}")
    assert box.read("/root/log") == LOG
    assert whole(box) == 6, told(box)


def test_a_rewind_asks_anew_from_there_and_what_followed_is_abandoned(box: Box, model: Model) -> None:
    inside(box)
    eventually(lambda: ended(box), "the end of the agent")
    third = exchanges(box)[2]
    before = len(model.steps)
    box.rewind(f"{third.turn}")
    eventually(lambda: ended(box), "the end of the agent")
    assert box.read("/root/log") == LOG
    assert model.steps[before:] == [2, 3, 4, 5], "the question at that turn is a new one"
    every = [one for one in box.ask(ask.Exchanges) if one.kind == "main"]
    assert [one.abandoned for one in every] == [False, False, True, True, True, True, False, False, False, False]


def test_forks_go_on_from_their_turn_each_with_answers_of_its_own(box: Box, model: Model) -> None:
    inside(box)
    eventually(lambda: ended(box), "the end of the agent")
    before = len(model.steps)
    clones = box.fork(2, f"{exchanges(box)[3].turn}")
    try:
        for clone in clones:
            eventually(lambda clone=clone: ended(clone), "the end of the agent of a fork")
            assert clone.read("/root/log") == LOG
            assert len(exchanges(clone)) == 6, "it has the past of its source"
        assert sorted(model.steps[before:]) == [3, 3, 4, 4, 5, 5]
    finally:
        for clone in clones:
            clone.ask(ask.Remove, force=True)


def test_turns_in_which_nothing_changed_are_captured_as_none_while_the_agent_waits_inside(
    box: Box, model: Model
) -> None:
    inside(box, "$ true\n$ ls /\n$ echo one >/root/log\n$ cat /root/log\n> done")
    eventually(lambda: ended(box), "the end of the agent")
    taken = {one.turn: one for one in box.ask(ask.Turns)}
    found = [taken[one.turn] for one in exchanges(box) if one.turn is not None]
    kinds = [one.kind for one in found[1:]]
    assert kinds == ["none", "none", "full", "none"], [one.decision and one.decision.reasons for one in found]


# ---------------------------------------------------------------- an agent on the host


class Killed(BaseException):
    """The agent is no more."""


class Outside:
    """An agent on the host that acts by the API; it can be killed before any of its steps."""

    def __init__(self, box: Box, prompt: str = PROMPT, says: str = "", runs: str = "") -> None:
        """From its fourth step on it `says` or `runs` something else than another one."""
        self.box, self.prompt, self.says, self.runs = box, prompt, says, runs

    def run(self, dies_at: int = -1) -> str:
        """From its beginning to its end; `dies_at` is the number of the step before which it is killed."""
        url = self.box.ask(ask.ModelAddress).url
        messages = [{"role": "user", "content": self.prompt}]
        for number in range(100):
            if number == dies_at:
                raise Killed
            message = loop.ask(url, messages)
            messages.append(message)
            if not message.get("tool_calls"):
                return message["content"]
            for call in message["tool_calls"]:
                command = json.loads(call["function"]["arguments"])["command"]
                if number == 3 and self.runs:
                    command = self.runs
                spec = ExecSpec(argv=("sh", "-c", command), by_agent=True)
                done = self.box.ask(ask.Run, spec=spec)
                text = done.text() + (self.says if number == 3 else "")
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
        raise AssertionError("it never ends")


@pytest.mark.parametrize("dies_at", [1, 2, 4, 5])
def test_an_agent_outside_that_starts_anew_is_given_what_it_had_and_repeats_nothing(
    box: Box, model: Model, dies_at: int
) -> None:
    agent = Outside(box)
    with pytest.raises(Killed):
        agent.run(dies_at)
    asked = len(model.steps)
    box.ask(ask.Recover, force=True)
    assert agent.run() == "all done"
    assert box.read("/root/log") == LOG
    assert model.steps[asked:] == list(range(asked, 6)), "recorded answers are asked of nobody"
    assert len(box.ask(ask.Turns)) == 6, "and nothing is captured while it catches up"


def test_a_sandbox_that_dies_under_an_agent_outside_has_no_effect_twice(box: Box, model: Model) -> None:
    agent = Outside(box)
    with pytest.raises(Killed):
        agent.run(3)
    box.ask(ask.Kill)
    with pytest.raises(CrabError):
        box.ask(ask.Run, spec=ExecSpec(argv=("true",), by_agent=True))
    box.ask(ask.Recover)
    assert agent.run() == "all done"
    assert box.read("/root/log") == LOG
    assert model.steps == [0, 1, 2, 3, 4, 5]


def test_an_agent_that_asks_something_else_goes_on_alone_from_the_state_of_that_point(box: Box, model: Model) -> None:
    assert Outside(box).run() == "all done"
    box.ask(ask.Recover, force=True)
    assert Outside(box, says="and a remark").run() == "all done"
    assert box.read("/root/log") == LOG, "nothing of the first way is left"
    assert model.steps == [0, 1, 2, 3, 4, 5, 4, 5], "what came before was the same, and is asked of nobody again"


def test_an_agent_that_runs_something_else_goes_on_alone_from_the_state_of_that_point(box: Box, model: Model) -> None:
    assert Outside(box).run() == "all done"
    box.ask(ask.Recover, force=True)
    assert Outside(box, runs="echo other >>/root/log").run() == "all done"
    assert box.read("/root/log") == "one\ntwo\nthree\nfour\nother\nfive\n", (
        "it was brought to where that command had ended"
    )


def test_an_agent_has_all_of_its_past_when_checkpoints_of_it_were_removed(box: Box, model: Model) -> None:
    with pytest.raises(Killed):
        Outside(box).run(5)
    removed = box.service.handle(ask.Prune(policy=ask.Policy(last=1), sandbox=box.name)).removed
    assert len(removed) == 4
    box.ask(ask.Recover, force=True)
    assert Outside(box).run() == "all done"
    assert box.read("/root/log") == LOG
    assert model.steps == [0, 1, 2, 3, 4, 5], "what was answered before is asked of nobody again"


def test_requests_that_cannot_be_read_are_seen(box: Box, model: Model) -> None:
    address = box.ask(ask.ModelAddress).url
    request = urllib.request.Request(
        f"{address}/v1/chat/completions", b"{not json", {"Content-Type": "application/json"}
    )
    with contextlib.suppress(urllib.error.HTTPError):
        urllib.request.urlopen(request, timeout=30).close()
    seen = box.look()
    assert seen.unread == 1 and seen.unread_why.startswith("/v1/chat/completions: ")
    assert not box.ask(ask.Exchanges) and not box.ask(ask.Turns)


def test_another_task_begins_in_the_sandbox_as_it_is(box: Box, model: Model) -> None:
    assert Outside(box).run() == "all done"
    box.ask(ask.Recover, force=True)
    assert Outside(box, "$ echo more >>/root/log\n> done").run() == "done"
    assert box.read("/root/log") == f"{LOG}more\n"


def test_commands_of_people_are_never_taken_from_the_record(box: Box, model: Model) -> None:
    with pytest.raises(Killed):
        Outside(box).run(2)
    box.ask(ask.Recover, force=True)
    assert box.run("echo by hand >>/root/log; cat /root/log").splitlines()[-1] == "by hand"


def test_what_a_command_could_not_do_is_told_again_as_the_same_error(box: Box, model: Model) -> None:
    missing = ExecSpec(argv=("no-such-program",), by_agent=True)
    with pytest.raises(CommandNotFound):
        box.ask(ask.Run, spec=missing)
    box.checkpoint()
    box.ask(ask.Recover, force=True)
    with pytest.raises(CommandNotFound):
        box.ask(ask.Run, spec=missing)
    with pytest.raises(CommandNotFound):
        box.ask(ask.Run, spec=missing)


# ---------------------------------------------------------------- the daemon dies in the middle of a return


SWITCHED = ("crab.daemon.core.Core.switch", "before")
"""The registry has the new life, and nobody was told."""
TOLD = ("crab.turns.place.Place.brought_back", "after")
"""The record was told, and the registry does not know that."""


@pytest.mark.parametrize("moment", [SWITCHED, TOLD])
def test_a_daemon_that_dies_when_it_has_recovered_a_sandbox_leaves_its_agent_all_of_its_past(
    second_state: Path, model: Model, moment: tuple[str, str]
) -> None:
    with Service.open(second_state) as service:
        made = service.handle(ask.Create(image="small", model=ModelAccess(upstream="mock")))
        with pytest.raises(Killed):
            Outside(Box(service, made.name)).run(4)
    dies(second_state, *moment, ask.Recover(sandbox=made.name, force=True))
    with Service.open(second_state) as service:
        box = Box(service, made.name)
        assert box.look().generation == made.generation + 1, "it is the sandbox that was brought back"
        assert Outside(box).run() == "all done"
        assert box.read("/root/log") == LOG
        assert model.steps == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("moment", [SWITCHED, TOLD])
def test_a_daemon_that_dies_when_it_has_rewound_a_sandbox_gives_no_answer_of_the_future_that_was_given_up(
    second_state: Path, model: Model, moment: tuple[str, str]
) -> None:
    with Service.open(second_state) as service:
        made = service.handle(ask.Create(image="small", model=ModelAccess(upstream="mock")))
        assert Outside(Box(service, made.name)).run() == "all done"
    dies(second_state, *moment, ask.Rewind(sandbox=made.name, ref="3"))
    with Service.open(second_state) as service:
        box = Box(service, made.name)
        assert box.look().generation == made.generation + 1
        assert [one.abandoned for one in box.ask(ask.Exchanges)] == [False, False, True, True, True, True]
        assert Outside(box).run() == "all done"
        assert box.read("/root/log") == LOG
        assert model.steps == [0, 1, 2, 3, 4, 5, 2, 3, 4, 5], "what came before turn 3 is asked of nobody again"
    with Service.open(second_state) as service:  # and it is told once
        assert not Box(service, made.name).service._core.coordinator.place(made.id).forwarding


# ---------------------------------------------------------------- keys


def test_hazard_t08_no_key_reaches_disk_log_or_the_sandbox(
    box: Box, model: Model, service: Service, state_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secret = f"sk-crabtest-{secrets.token_hex(16)}"
    box.ask(ask.ModelKeys, keys={"openai": secret})
    inside(box)
    eventually(lambda: ended(box), "the end of the agent")
    os.environ["OPENAI_API_KEY"] = secret
    try:
        Outside(box, "$ echo hello\n> done").run()
    finally:
        del os.environ["OPENAI_API_KEY"]
    assert secret not in caplog.text
    command = ["grep", "-rlaF", "--exclude=pool.btrfs", "--exclude-dir=cache", secret, str(state_dir)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.stdout == "", "it is in no file of ours, checkpoints included"
    assert secret not in box.run("cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n'")


@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.25])
def test_an_agent_that_is_killed_alone_is_brought_back_and_no_turn_without_it_takes_its_place(
    box: Box, model: Model, seconds: float
) -> None:
    inside(box, PROMPT.replace("$", "~ 0.2\n$"))
    eventually(lambda: 2 in model.steps, "the third question")
    time.sleep(seconds)
    for pid in box.host_pids()[1:]:  # with its tools: they would go on without it
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    eventually(lambda: not any(one.running for one in box.ask(ask.CommandList)), "its end")
    last = model.steps[-1]
    box.ask(ask.Recover, force=True)
    eventually(lambda: ended(box), lambda: f"the end of the agent; {told(box)}")
    assert box.read("/root/log") == LOG
    times = Counter(model.steps)
    assert times.keys() == set(range(6)), model.steps
    assert all(times[step] == 1 for step in times if step != last), "only what was under way may be asked again"
    assert times[last] <= 2


# ---------------------------------------------------------------- turns without a model


def test_each_command_that_ends_is_a_turn_where_that_is_wanted(service: Service, image: str) -> None:
    made = service.handle(ask.Create(image=image, exec_turns=True))
    box = Box(service, made.name)
    try:
        box.run("echo one >/root/log")
        assert [one.kind for one in box.ask(ask.Turns)] == ["full"]
        list(box.spawn("sh", "-c", "echo two >>/root/log").events())
        assert len(box.ask(ask.Turns)) == 2
        box.run("ls")
        assert [one.kind for one in box.ask(ask.Turns)][2:] == ["none"]
        box.ask(ask.ShellRun, command="cd /srv")
        assert len(box.ask(ask.Turns)) == 4
        box.ask(ask.Kill)
        box.ask(ask.Recover)
        assert box.ask(ask.ShellRun, command="pwd; cat /root/log").output.split() == ["/srv", "one", "two"]
    finally:
        box.ask(ask.Remove, force=True)


def test_without_a_model_the_commands_of_an_agent_are_run_once_all_the_same(service: Service, image: str) -> None:
    made = service.handle(ask.Create(image=image))
    box = Box(service, made.name)
    try:
        commands = [f"echo {step} >>/root/log; cat /root/log" for step in STEPS]

        def run(count: int) -> list[str]:
            specs = [ExecSpec(argv=("sh", "-c", command), by_agent=True) for command in commands[:count]]
            return [box.ask(ask.Run, spec=spec).text() for spec in specs]

        first = run(3)
        box.checkpoint()
        box.ask(ask.Run, spec=ExecSpec(argv=("sh", "-c", "echo lost >>/root/log"), by_agent=True))
        box.ask(ask.Kill)
        box.ask(ask.Recover)
        again = run(5)
        assert again[:3] == first, "told, not run"
        assert again[4] == box.read("/root/log") == LOG
    finally:
        box.ask(ask.Remove, force=True)
