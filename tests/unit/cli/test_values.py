"""Values on the command line."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from crab.cli import values
from crab.errors import InvalidRequest
from crab.model import Mount


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("512", 512),
        ("512M", 512 << 20),
        ("2g", 2 << 30),
        ("1.5GiB", 3 << 29),
        ("10 kb", 10240),
        ("1t", 1 << 40),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert values.parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "seconds"), [("30", 30), ("1.5s", 1.5), ("500ms", 0.5), ("2m", 120), ("2min", 120), ("1h", 3600)]
)
def test_durations(text: str, seconds: float) -> None:
    assert values.parse_seconds(text) == seconds


@pytest.mark.parametrize(
    ("text", "mount"),
    [
        ("/a:/b", Mount(source="/a", target="/b")),
        ("/a:/b:copy", Mount(source="/a", target="/b")),
        ("/a:/b:bind", Mount(source="/a", target="/b", kind="bind")),
        ("/a:/b:bind:ro", Mount(source="/a", target="/b", kind="bind", read_only=True)),
        ("/a:/b:ro", Mount(source="/a", target="/b", read_only=True)),
        ("src:/b", Mount(source=f"{os.getcwd()}/src", target="/b")),
        ("~:/b", Mount(source=os.path.expanduser("~"), target="/b")),
    ],
)
def test_mounts(text: str, mount: Mount) -> None:
    assert values.parse_mount(text) == mount


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (values.parse_size, "much"),
        (values.parse_size, "-1"),
        (values.parse_size, "1x"),
        (values.parse_seconds, "soon"),
        (values.parse_seconds, "3 weeks"),
        (values.parse_mount, "/a"),
        (values.parse_mount, ":/b"),
        (values.parse_mount, "/a:"),
        (values.parse_mount, "/a:/b:move"),
        (values.parse_mount, "/a:/b:copy:bind"),
    ],
)
def test_what_is_no_value_is_refused_with_an_example(parse: Callable[[str], Any], text: str) -> None:
    with pytest.raises(ValueError, match="write"):
        parse(text)


def test_variables() -> None:
    assert values.variables(["A=1", "B=x=y", "C=", "HOME"], {"HOME": "/h"}) == {
        "A": "1",
        "B": "x=y",
        "C": "",
        "HOME": "/h",
    }
    for word in ("=1", "MISSING"):
        with pytest.raises(InvalidRequest):
            values.variables([word], {})


def test_checkpoints() -> None:
    assert values.checkpoint_of("x@3") == ("x", "3")
    assert values.checkpoint_or_head("x") == ("x", "head")
    assert values.checkpoint_or_head("x@a/b") == ("x", "a/b")
    for text in ("x", "x@", "@3"):
        with pytest.raises(InvalidRequest, match="names no checkpoint"):
            values.checkpoint_of(text)


@pytest.mark.parametrize(
    ("source", "target", "ends"),
    [
        ("f", "x:/t", ("x", "f", "/t", True)),
        ("x:/s", "f", ("x", "f", "/s", False)),
        ("./a:b", "x:/t", ("x", "./a:b", "/t", True)),
        ("x:/s:1", "/tmp/f", ("x", "/tmp/f", "/s:1", False)),
    ],
)
def test_the_ends_of_a_copy(source: str, target: str, ends: tuple[str, str, str, bool]) -> None:
    assert values.copy_ends(source, target) == ends


@pytest.mark.parametrize(("source", "target"), [("a", "b"), ("x:/a", "y:/b"), ("./x:a", "b")])
def test_a_copy_has_one_end_in_a_sandbox(source: str, target: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot copy"):
        values.copy_ends(source, target)


def test_the_command_line_may_follow_two_dashes() -> None:
    assert values.command_line(["--", "ls", "--", "-l"]) == ("ls", "--", "-l")
    assert values.command_line(["ls", "-l"]) == ("ls", "-l")
    for words in ([], ["--"]):
        with pytest.raises(InvalidRequest, match="no command"):
            values.command_line(words)
