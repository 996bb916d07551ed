"""From the caller's words to those of a request."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from crab.errors import InvalidRequest
from crab.model import ExecResult
from crab.sdk import words

HERE = os.getcwd()


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("debian:bookworm", "debian:bookworm"),
        ("host", "host"),
        ("dir:root", f"dir:{HERE}/root"),
        ("dir:/srv/root", "dir:/srv/root"),
        ("tar:../a.tar", f"tar:{Path(HERE).parent}/a.tar"),
        ("oci:layout:tag", f"oci:{HERE}/layout:tag"),
        ("oci:docker://registry/name", "oci:docker://registry/name"),
        ("dir:", "dir:"),
        ("wonder:x", "wonder:x"),
    ],
)
def test_the_path_in_an_image_source_is_the_callers(given: str, meant: str) -> None:
    assert words.image_source(given) == meant


@pytest.mark.parametrize(
    ("given", "meant"),
    [("a", f"{HERE}/a"), ("a/", f"{HERE}/a/"), ("/a/../b", "/b"), ("/", "/"), (Path("x"), f"{HERE}/x")],
)
def test_a_path_of_the_host_is_the_callers(given: words.Path, meant: str) -> None:
    assert words.host_path(given) == meant


def test_one_text_is_a_command_line_of_the_shell() -> None:
    assert words.argv_of("a | b") == ("sh", "-c", "a | b")
    assert words.argv_of(["a", "b"]) == ("a", "b")
    with pytest.raises(InvalidRequest):
        words.argv_of([])


def test_a_failure_says_what_ran_out_of_time() -> None:
    result = ExecResult(exit_code=124, stdout=b"", stderr=b"", timed_out=True)
    with pytest.raises(words.CommandFailed, match="'sleep 9' ran out of time"):
        words.checked(result, ["sleep", "9"], True)
