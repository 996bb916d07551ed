"""What all verbs share: notes, errors of what is done for many."""

from __future__ import annotations

import pytest

from crab.cli.session import Session, each
from crab.errors import NotFound


def test_a_program_is_told_nothing_but_results(capsys: pytest.CaptureFixture[str]) -> None:
    Session().note("extracting")
    assert capsys.readouterr() == ("", "crab: extracting\n")
    Session(json=True).note("extracting")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("as_json", [True, False])
def test_the_later_ones_are_done_also_if_one_fails(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    def action(name: str) -> str:
        if name == "b":
            raise NotFound("no b")
        return name

    results, status = each(Session(json=as_json), ["a", "b", "c"], action)
    assert status == NotFound.exit_status
    failed = {"error": "NotFound", "message": "no b", "remedy": "", "details": {}}
    assert results == (["a", failed, "c"] if as_json else ["a", "c"])
    assert capsys.readouterr().err == ("" if as_json else "crab: no b\n")
