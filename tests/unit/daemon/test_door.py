"""What makes no sense is refused at the door, by name, before anything is done."""

from __future__ import annotations

import math
from typing import Any

import pytest

from crab.daemon import requests as ask
from crab.daemon.door import checked, checked_command
from crab.errors import InvalidRequest
from crab.model import ExecSpec


@pytest.mark.parametrize(
    "fields",
    [
        {"timeout": -1.0},
        {"timeout": math.nan},
        {"timeout": math.inf},
        {"rows": -5},
        {"columns": 70000},
        {"argv": ()},
        {"argv": ("echo", "a\0b")},
        {"argv": ("echo", "\ud800")},
        {"argv": (1,)},
        {"env": {"A": "a\0B=b"}},
        {"env": {"A=B": ""}},
        {"env": {"": "b"}},
        {"cwd": "/tmp\0"},
        {"user": "\udfff"},
        {"name": "x\0y"},
        {"name": "é" * 32},
    ],
    ids=str,
)
def test_a_command_that_makes_no_sense(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        checked_command(ExecSpec(**{"argv": ("true",)} | fields))
    assert caught.value.remedy


@pytest.mark.parametrize(
    "request_",
    [
        ask.Run(sandbox="s", spec=ExecSpec(argv=("true",)), limit=-1),
        ask.Run(sandbox="s", spec=ExecSpec(argv=("true",), timeout=-1)),
        ask.Stop(sandbox="s", grace=math.nan),
        ask.CopyOut(sandbox="s", source="/a", target="/b\0c"),
        ask.Inspect(sandbox="\ud800"),
        ask.Fork(sandbox="s", count="2"),  # type: ignore[arg-type]
    ],
    ids=lambda request: request.operation,
)
def test_a_request_that_makes_no_sense(request_: ask.Request) -> None:
    with pytest.raises(InvalidRequest) as caught:
        checked(request_, request_.operation)
    assert request_.operation in caught.value.message


@pytest.mark.parametrize("word", ["\udcff", "naïve", "\n", ""])
def test_names_that_are_no_utf8_pass(word: str) -> None:
    spec = ExecSpec(argv=("echo", word), timeout=0.0, rows=0, name="é" * 31)
    assert checked_command(spec) == spec


def test_bytes_are_handed_on_as_they_are() -> None:
    data = bytes(1 << 20)
    assert checked(ask.Run(sandbox="s", spec=ExecSpec(argv=("cat",)), input=data), "run").input is data
