"""`crab replay`."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result
from unit.replay.standin import Host

from crab.errors import InvalidRequest, NotFound
from crab.replay import state
from crab.replay.cli import replay
from crab.replay.state import Inside


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    # A folder is no sandbox: there is nothing to look at from inside but what the commands say.
    monkeypatch.setattr(state, "_look", lambda *_: Inside(files={}, processes=(), ports=()))
    return Host(tmp_path / "boxes")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "runs.jsonl"
    turns = [{"command": f"echo {number} >> seen", "rc": 0} for number in (1, 2, 3)]
    lines = [
        {"id": "checked", "turns": turns, "check": "test $(wc -l < seen) = 3", "observe": ["cat seen"]},
        {"id": "plain", "turns": turns[:1]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def call(host: Host, *words: object, json_wanted: bool = False) -> Result:
    session = SimpleNamespace(host=lambda: host, json=json_wanted)
    return CliRunner().invoke(replay, [str(word) for word in words], obj=session)


def test_all_runs_of_a_file_are_run_and_end_with_0_if_all_is_well(host: Host, file: Path) -> None:
    result = call(host, file)
    assert result.exit_code == 0, result.output
    assert "checked, adaptive: turn 3/3 · exit 0" in result.output
    assert result.output.count("recovery") == 2
    assert "passes" in result.output


def test_kills_bring_a_comparison_with_an_undisturbed_run(host: Host, file: Path) -> None:
    result = call(host, file, "--id", "checked", "--kill", "1,2m")
    assert result.exit_code == 0, result.output
    assert "checked, undisturbed: turn 3/3" in result.output
    assert "killed at the end of turn 1" in result.output
    assert "yes" in result.output
    assert len(host.boxes) == 2


def test_a_lost_state_ends_with_1_and_is_told_in_full(host: Host, file: Path) -> None:
    result = call(host, file, "--id", "checked", "--kill", "2", "--policy", "none")
    assert result.exit_code == 1
    assert "observed cat seen: line 2 is '3', should be '1'" in result.output
    assert "fails" in result.output


def test_json_is_one_object_a_run_and_nothing_else(host: Host, file: Path) -> None:
    result = call(host, file, "--json", "--kill", "1")
    first, second = map(json.loads, result.stdout.splitlines())
    assert (first["id"], first["equal"], first["differences"], first["check"]) == ("checked", True, [], True)
    assert [turn["turn"] for turn in first["turns"]] == [1, 2, 3]
    assert [turn["checkpoint"] for turn in first["turns"]] == [one["id"] for one in first["checkpoints"][1:]]
    assert first["crashes"][0]["kill"] == "1"
    assert first["crashes"][0]["resume"] == {"recovery": "checkpoint", "turn": 2}
    assert second["check"] is None
    assert json.loads(call(host, file, "--id", "plain", json_wanted=True).stdout)["equal"] is None


def test_the_first_turns_alone_are_not_checked(host: Host, file: Path) -> None:
    result = call(host, file, "--id", "checked", "--turns", 1)
    assert result.exit_code == 0
    assert "turn 1/1" in result.output and "turn 2" not in result.output


def test_errors_are_left_to_who_prints_them(host: Host, file: Path, tmp_path: Path) -> None:
    assert isinstance(call(host, tmp_path / "absent").exception, NotFound)
    assert isinstance(call(host, file, "--id", "absent").exception, NotFound)
    assert isinstance(call(host, file, "--kill", "9").exception, InvalidRequest)
    assert isinstance(call(host, file, "--policy", "x").exception, InvalidRequest)
    assert not host.boxes or all(box.removed for box in host.boxes)
