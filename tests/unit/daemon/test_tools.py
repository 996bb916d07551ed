"""The tools of agents: what they are called with, which requests they make of it, and what they say. Needs no root."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from unit.standin import sample

from crab import model
from crab.daemon import requests as ask
from crab.daemon.tools import LARGEST, TOOLS, Kit, changes, cut, notes, trial
from crab.errors import Busy
from crab.model import Checkpoint, Difference, ExecResult, ExecSpec, FileChange, Return, Sandbox, Trial

CHECKPOINT = msgspec.structs.replace(sample(Checkpoint), id="c0123456789ab", turn=4, label="safe", parent=None)
BACK = Return(when=0.0, checkpoint=CHECKPOINT.id, turn=4, left=9, generation=2, note="wrong way")


class Daemon:
    """Answers requests with samples, and notes them."""

    def __init__(self, returns: tuple[Return, ...] = (), generation: int = 2) -> None:
        self.asked: list[ask.Request] = []
        self.generation = generation
        self.returns = returns
        self.error: Exception | None = None

    def __call__(self, request: ask.Request) -> Any:
        self.asked.append(request)
        if self.error:
            raise self.error
        if isinstance(request, ask.Turns):
            return (CHECKPOINT,)
        if isinstance(request, ask.TakeCheckpoint):
            return CHECKPOINT
        made = sample(type(request).returns)
        if isinstance(made, Sandbox):
            return msgspec.structs.replace(
                made, returns=self.returns, generation=self.generation, head=CHECKPOINT.id, not_rolled_back=()
            )
        return made


def test_every_tool_is_described_by_a_plain_schema() -> None:
    listed = Kit(Daemon(), "s1", inside=True).described()
    assert [tool["name"] for tool in listed] == ["checkpoint", "list", "diff", "rewind", "fork_and_try"]
    for tool in listed:
        schema = tool["inputSchema"]
        assert tool["description"] and schema["type"] == "object" and schema["additionalProperties"] is False
        for argument in schema["properties"].values():
            assert isinstance(argument["type"], str) and argument["description"]
        assert "$ref" not in str(schema)
    assert listed[3]["inputSchema"]["required"] == ["ref", "note"]


@pytest.mark.parametrize(
    ("name", "arguments", "request_"),
    [
        ("checkpoint", {"label": "a"}, ask.TakeCheckpoint(sandbox="s1", label="a", policy="always")),
        ("list", {}, ask.Turns(sandbox="s1")),
        ("diff", {"ref": 4}, ask.Diff(sandbox="s1", ref="4")),
        ("diff", {"ref": "a", "to": "head", "content": True}, ask.Diff(sandbox="s1", ref="a", to="head", content=True)),
        ("rewind", {"ref": "safe", "note": "n"}, ask.Rewind(sandbox="s1", ref=CHECKPOINT.id, note="n")),
        (
            "fork_and_try",
            {"command": "make", "count": "2", "timeout": 5},
            ask.Try(sandbox="s1", spec=ExecSpec(argv=("sh", "-c", "make"), timeout=5.0), count=2, limit=LARGEST),
        ),
    ],
)
def test_each_call_is_a_request_about_its_own_sandbox(
    name: str, arguments: dict[str, Any], request_: ask.Request
) -> None:
    daemon = Daemon()
    said = Kit(daemon, "s1", inside=True).use(name, arguments)
    assert not said.failed and said.text
    assert request_ in daemon.asked
    assert all(one.sandbox == "s1" for one in daemon.asked)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("checkpoint", {"label": 1.5}),
        ("list", {"sandbox": "other"}),
        ("diff", {}),
        ("rewind", {"ref": "safe"}),
        ("rewind", {"ref": "safe", "note": ""}),
        ("rewind", {"ref": "safe", "note": "x" * 4001}),
        ("fork_and_try", {"command": "x", "count": 9}),
        ("fork_and_try", {"command": "x", "timeout": 601}),
        ("fork_and_try", {"command": ""}),
    ],
)
def test_arguments_that_make_no_sense_are_told_and_nothing_is_done(name: str, arguments: dict[str, Any]) -> None:
    daemon = Daemon()
    said = Kit(daemon, "s1", inside=True).use(name, arguments)
    assert said.failed and "remedy: " in said.text
    assert daemon.asked == []


def test_errors_are_told_with_their_remedy() -> None:
    daemon = Daemon()
    daemon.error = Busy("it is busy", remedy="wait")
    kit = Kit(daemon, "s1", inside=True)
    for name, arguments in (("checkpoint", {}), ("diff", {"ref": "1"}), ("fork_and_try", {"command": "x"})):
        said = kit.use(name, arguments)
        assert (said.failed, said.text) == (True, "it is busy\nremedy: wait")
    assert kit.lost().failed
    with pytest.raises(LookupError, match="checkpoint, list, diff, rewind, fork_and_try"):
        kit.use("exec", {})


def rewound(daemon: Daemon) -> int:
    return sum(isinstance(one, ask.Rewind) for one in daemon.asked)


def test_an_agent_that_may_not_know_of_a_rewind_is_told_before_it_rewinds_again() -> None:
    daemon = Daemon((BACK,))
    kit = Kit(daemon, "s1", inside=True)
    said = kit.use("rewind", {"ref": "safe", "note": "n"})
    assert said.failed and "wrong way" in said.text and rewound(daemon) == 0
    assert not kit.use("rewind", {"ref": "safe", "note": "n"}).failed, "now it knows"
    daemon.generation = 3
    assert kit.use("rewind", {"ref": "safe", "note": "n"}).failed, "it was brought back, and has forgotten"
    assert rewound(daemon) == 1


@pytest.mark.parametrize("reads", ["list", "checkpoint"])
def test_what_was_read_is_not_told_again(reads: str) -> None:
    daemon = Daemon((BACK,))
    kit = Kit(daemon, "s1", inside=True)
    assert "wrong way" in kit.use(reads, {}).text
    assert not kit.use("rewind", {"ref": "safe", "note": "n"}).failed


def test_an_agent_outside_knows_what_it_did_and_says_that_it_goes_on() -> None:
    daemon = Daemon((BACK,))
    said = Kit(daemon, "s1", inside=False).use("rewind", {"ref": "safe", "note": "n"})
    assert "You were not brought back" in said.text
    assert daemon.asked[-1] == ask.Rewind(sandbox="s1", ref=CHECKPOINT.id, note="n", by_agent=True)


def test_who_has_lost_an_answer_is_told_that_it_is_back_if_it_is() -> None:
    said = Kit(Daemon((BACK,), generation=2), "s1", inside=True).lost()
    assert said.text.startswith("You are back at turn 4") and "wrong way" in said.text and not said.failed
    for other in (Daemon((BACK,), generation=3), Daemon()):
        said = Kit(other, "s1", inside=True).lost()
        assert said.failed and "remedy: " in said.text, "a crash is another thing"


def test_texts_are_bounded_and_are_utf_8() -> None:
    text = cut("\udcff" + "ä" * LARGEST)
    assert text.startswith("\\udcff") and len(text.encode()) < LARGEST + 100 and "left out" in text
    files = tuple(FileChange(path=f"root/{n}", kind="added") for n in range(200))
    result = ExecResult(exit_code=3, stdout=b"\xff", stderr=b"oh", truncated=True)
    said = trial(Trial(number=2, result=result, difference=Difference(files=files)))
    assert said.startswith("Copy 2: exit status 3. It changed:\nadded: /root/0\n")
    assert "and 100 more files" in said and said.endswith("output:\n�\nerrors:\noh\n(there was more output)")
    assert changes(Difference()) == "" and notes(()) == ""
    assert notes([BACK] * 9, 2).count("wrong way") == 2


def test_no_argument_can_name_another_sandbox() -> None:
    assert not {"sandbox", "name", "box"} & {field for tool in TOOLS.values() for field in tool.__struct_fields__}
    assert sample(model.Sandbox).returns, "and what is told of it comes from its own record"
