"""An agent that saves, tries and rewinds by itself: from inside at the door, from outside by `crab mcp`."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from e2e.box import Box, eventually
from e2e.test_turns import AGENT, Model, ended, told

from crab.daemon import requests as ask
from crab.daemon.service import Service
from crab.daemon.tools import Kit
from crab.errors import InvalidRequest
from crab.model import Exchange, ExecSpec, ModelAccess
from crab.turns import mcp

pytestmark = [pytest.mark.kernel, pytest.mark.criu]
CLIENT = AGENT.with_name("tools.py")


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    """The model of all sandboxes that are made with upstream `mock`."""
    model = Model()
    monkeypatch.setattr("crab.turns.coordinator.Mock", lambda: model)
    return model


@pytest.fixture
def box(service: Service, image: str, model: Model) -> Iterator[Box]:
    """A sandbox whose agent may use tools."""
    made = service.handle(ask.Create(image=image, model=ModelAccess(upstream="mock", tools=True)))
    try:
        yield Box(service, made.name)
    finally:
        service.handle(ask.Remove(sandbox=made.name, force=True))


def tool(name: str, **arguments: object) -> str:
    """A command by which the agent calls a tool, and appends what it says to a file."""
    return f"python3 /root/tools.py {name} '{json.dumps(arguments)}' >>/root/said"


def call(name: str, **arguments: object) -> str:
    """A step of a script that does."""
    return f"$ {tool(name, **arguments)}"


def run(box: Box, *steps: str) -> None:
    """Let an agent inside take these steps, to its end."""
    box.put("/root/agent.py", AGENT.read_bytes())
    box.put("/root/tools.py", CLIENT.read_bytes())
    address = box.ask(ask.ModelAddress, inside=True)
    argv = ("python3", "/root/agent.py", address.url, "\n".join([*steps, "> all done"]))
    box.service.spawn(box.name, ExecSpec(argv=argv, name="agent:main", env=address.env)).detach()
    eventually(lambda: ended(box), lambda: f"the end of the agent; {told(box)}; {box.read('/root/said')}")


def main(box: Box) -> list[Exchange]:
    return [one for one in box.ask(ask.Exchanges) if one.kind == "main"]


def test_a_call_of_checkpoint_answers_a_second_time_with_the_note_after_a_rewind(box: Box, model: Model) -> None:
    run(
        box,
        "$ echo before >>/root/log",
        call("checkpoint", label="safe"),
        f"$ grep 'You are back' /root/said || (echo wrong >>/root/log; {tool('rewind', ref='safe', note='wrong is wrong')})",
    )
    assert model.steps == [0, 1, 2, 2, 3], "back in the middle of step 1, and no question is asked again"
    said = box.read("/root/said")
    assert said.startswith("You are back at turn ") and "wrong is wrong" in said, said
    assert "Saved as" not in said, "the first answer was given up with all else"
    assert box.read("/root/log") == "before\n"
    found = main(box)
    assert [one.abandoned for one in found] == [False, False, True, False, False], told(box)
    assert all(one.state == "released" and one.protection == "durable" for one in found if not one.abandoned), told(box)
    (back,) = box.look().returns
    assert (back.note, back.left > back.turn) == ("wrong is wrong", True)


def test_a_rewind_to_a_turn_asks_the_model_anew_and_a_loop_ends_at_its_second_round(box: Box, model: Model) -> None:
    run(box, "$ echo one >>/root/log", "$ echo two >>/root/log", call("rewind", ref="head~1", note="two is wrong"))
    assert model.steps == [0, 1, 2, 1, 2, 3]
    said = box.read("/root/said")
    assert said.startswith("failed: nothing was rewound") and "two is wrong" in said, said
    assert box.read("/root/log") == "one\ntwo\n"
    found = main(box)
    assert [one.abandoned for one in found] == [False, True, True, False, False, False], told(box)


def test_what_is_tried_in_forks_is_told_and_leaves_nothing(box: Box, model: Model, service: Service) -> None:
    before = {one.name for one in service.handle(ask.SandboxList())}
    command = 'echo "copy $CRAB_TRY of $(cat /root/log)"; echo x >/root/tried; test $CRAB_TRY = 1'
    run(
        box,
        "$ echo here >>/root/log; (sleep 600 & echo $! >/root/pid) >/dev/null 2>&1",
        call("fork_and_try", command=f"{command}; kill -0 $(cat /root/pid) && echo it runs here too", count=2),
        call("list"),
    )
    said = box.read("/root/said")
    assert "Copy 1: exit status 0. It changed:\nadded: /root/tried\n" in said, said
    assert "copy 1 of here" in said and "copy 2 of here" in said
    assert said.count("it runs here too") == 2, "processes are there"
    assert "/root/log" not in said, "its agent did not go on there"
    assert box.read("/root/tried") == ""
    assert model.steps == [0, 1, 2, 3]
    assert {one.name for one in service.handle(ask.SandboxList())} == before


def test_an_agent_under_any_name_stands_still_where_something_is_tried(box: Box, model: Model) -> None:
    """It is known by its connection; an hour of it would show in the file that it writes when it is cut."""
    box.put("/root/tools.py", CLIENT.read_bytes())
    caller = "python3 /root/tools.py fork_and_try '%s' >/root/said 2>&1; echo on >/root/gone-on"
    box.background(caller % json.dumps({"command": "sleep 1; cat /root/gone-on"}))
    core = box.service._core
    # looked at from outside: who looks inside is in the copy as well
    gone = core.life(core.registry.find(box.name)).files / "u" / "root" / "gone-on"
    eventually(gone.exists, "the end of the call")
    said = box.read("/root/said")
    assert "Copy 1: exit status 1. It changed:\nnothing" in said, said


def test_what_is_tried_has_the_network_of_its_sandbox(service: Service, image: str, model: Model) -> None:
    made = service.handle(ask.Create(image=image, network="nat", model=ModelAccess(upstream="mock", tools=True)))
    box = Box(service, made.name)
    try:
        box.put("/root/tools.py", CLIENT.read_bytes())
        own = box.run("hostname -I")
        said = box.run(f"python3 /root/tools.py fork_and_try '{json.dumps({'command': 'hostname -I'})}'")
        assert said.startswith("Copy 1: exit status 0. It changed:\nnothing\noutput:\n"), said
        assert said.split()[-1] not in ("output:", own.strip()), "an address of its own"
    finally:
        box.ask(ask.Remove, force=True)


def test_errors_are_told_with_their_remedy(box: Box) -> None:
    box.put("/root/tools.py", CLIENT.read_bytes())

    def said(tool: str, **arguments: object) -> str:
        return box.run(f"python3 /root/tools.py {tool} '{json.dumps(arguments)}'")

    missing = said("rewind", ref="nowhere", note="x")
    assert missing.startswith("failed: ") and "has no checkpoint 'nowhere'" in missing and "remedy: " in missing
    assert said("rewind", ref="1").startswith("failed: "), "a note is required"
    late = said("fork_and_try", command="sleep 60", timeout=0.2)
    assert "killed: its time was over" in late
    long = said("fork_and_try", command="head -c 1000000 /dev/zero | base64")
    assert len(long) < 70_000


def test_tools_are_off_unless_asked_for_and_never_at_the_host_s_address(box: Box, service: Service, image: str) -> None:
    box.put("/root/tools.py", CLIENT.read_bytes())
    assert box.run("python3 /root/tools.py list").startswith("Nothing was saved yet.")
    url = box.ask(ask.ModelAddress).url
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(urllib.request.Request(url + mcp.PATH, b"{}", {"Content-Type": "application/json"}))
    made = service.handle(ask.Create(image=image, model=ModelAccess(upstream="mock")))
    without = Box(service, made.name)
    try:
        without.put("/root/tools.py", CLIENT.read_bytes())
        assert without.result("python3 /root/tools.py list").stderr.startswith(b"404 ")
        assert "CRAB_TOOLS" not in without.ask(ask.ModelAddress, inside=True).env
    finally:
        without.ask(ask.Remove, force=True)


def test_an_agent_outside_goes_on_after_its_rewind_and_its_next_command_runs(box: Box, service: Service) -> None:
    kit = Kit(service.handle, box.look().id, inside=False)
    kit.use("checkpoint", {"label": "start"})
    run_one = ExecSpec(argv=("sh", "-c", "echo x >>/root/log"), by_agent=True)
    box.ask(ask.Run, spec=run_one)
    said = kit.use("rewind", {"ref": "start", "note": "n"})
    assert not said.failed and "You were not brought back" in said.text
    box.ask(ask.Run, spec=run_one)
    assert box.read("/root/log") == "x\n", "it ran once before the rewind, and once since"
    assert kit.use("diff", {"ref": "start"}).text.startswith("added: /root/log")


def test_a_try_has_bounds(box: Box) -> None:
    for spec in (ExecSpec(argv=("true",), timeout=601.0), ExecSpec(argv=("true",), tty=True), ExecSpec(argv=())):
        with pytest.raises(InvalidRequest):
            box.ask(ask.Try, spec=spec)
    with pytest.raises(InvalidRequest):
        box.ask(ask.Try, spec=ExecSpec(argv=("true",)), count=9)
