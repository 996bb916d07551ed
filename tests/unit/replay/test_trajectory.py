"""Reading trajectories: what is taken, and what a bad line is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crab.errors import InvalidRequest, NotFound
from crab.replay import trajectory
from crab.replay.trajectory import LONGEST_COMMAND, Trajectory, Turn

STORIES = Path(__file__).parents[3] / "examples" / "stories"


def run(**changes: object) -> dict[str, object]:
    return {"id": "a", "turns": [{"command": "true"}]} | changes


def test_a_line_is_a_run_and_blank_lines_are_nothing(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text(json.dumps(run()) + "\n\n" + json.dumps(run(id="b", check="test -e x", setup=["touch x"])) + "\n")
    one, other = trajectory.read(path)
    assert one == Trajectory(id="a", turns=(Turn(command="true"),))
    assert (other.check, other.setup) == ("test -e x", ("touch x",))


def test_a_json_file_holds_one_run_over_many_lines(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(run(), indent=2))
    assert [found.id for found in trajectory.read(path)] == ["a"]


def test_a_command_may_be_a_list_of_lines() -> None:
    found = trajectory.parse(run(turns=[{"command": ["cat <<X", "y", "X"], "kind": "shell"}]))
    assert found.turns == (Turn(command="cat <<X\ny\nX", kind="shell"),)


def test_a_recorded_run_of_another_harness_is_read() -> None:
    data = {
        "instance_id": "psf__requests-1",
        "repo": "psf/requests",
        "base_commit": "22",
        "python": "3.9",
        "pip": ["pytest<8"],
        "test_patch": "",
        "fail_to_pass": [],
        "turns": [
            {"assistant": "I look.", "command": "ls", "rc": 0, "turn_wall_s": 3.0, "prompt_tokens": 5},
            {"assistant": "I submit.", "command": "git add -A", "rc": None, "turn_wall_s": None},
            {"command": "sleep 1000", "rc": -1},
        ],
    }
    found = trajectory.parse(data)
    assert found.id == "psf__requests-1"
    assert [(turn.command, turn.rc) for turn in found.turns] == [("ls", 0), ("git add -A", None), ("sleep 1000", None)]


def test_files_lie_beside_the_trajectory(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    found = trajectory.parse(run(files={"/root/data": "data"}), folder=tmp_path)
    assert found.files == {"/root/data": str(tmp_path / "data")}


@pytest.mark.parametrize("source", ["../secret", "/etc/passwd", "data/../../secret", "link"])
def test_files_never_lead_out_of_the_folder_of_the_trajectory(tmp_path: Path, source: str) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "link").symlink_to("/etc/passwd")
    with pytest.raises(InvalidRequest, match="leads out of the folder"):
        trajectory.parse(run(files={"/root/x": source}), folder=inner)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("[1]", "expected a JSON object, found an array"),
        ("7", "expected a JSON object, found a number"),
        ("null", "expected a JSON object, found null"),
        ("{", "this is not JSON"),
        ("[" * 100_000, "nested too deeply"),
        (json.dumps({"turns": [{"command": "true"}]}), "missing required field 'id'"),
        (json.dumps({"id": "a"}), "missing required field 'turns'"),
        (json.dumps(run(turns=[])), "length >= 1"),
        (json.dumps(run(turn=[])), "unknown field 'turn'"),
        (json.dumps(run(id="")), "length >= 1"),
        (json.dumps(run(turns=[{"command": 5}])), "turns[0].command"),
        (json.dumps(run(turns=[{"command": "  "}])), "turn 1 is empty"),
        (json.dumps(run(turns=[{"command": "x"}, {"command": "a\0b"}])), "turn 2 contains a zero byte"),
        (json.dumps(run(turns=[{"command": "\ud800"}])), "surrogate"),
        (json.dumps(run(turns=[{"command": "x" * (LONGEST_COMMAND + 1)}])), "expected at most 131071"),
        (json.dumps(run(turns=[{"command": "x", "kind": "typed"}])), "turns[0].kind"),
        (json.dumps(run(turns=[{"command": "x", "rc": 256}])), "<= 255"),
        (json.dumps(run(turns=[{"command": "x", "wait_s": -1}])), ">= 0"),
        (json.dumps(run(turns=[{"command": "x", "kind": "shell", "cwd": "/tmp"}])), "expected no cwd"),
        (json.dumps(run(turns=[{"command": "x", "cwd": "tmp"}])), "expected a path from the sandbox's root"),
        (json.dumps(run(files={"/x": "absent"})), "there is no"),
        (json.dumps({"instance_id": "a", "turns": [{"rc": 0}]}), "missing required field 'command'"),
    ],
)
def test_a_bad_line_is_named_with_what_was_expected(tmp_path: Path, line: str, expected: str) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text(json.dumps(run(id="good")) + "\n" + line + "\n")
    with pytest.raises(InvalidRequest) as caught:
        trajectory.read(path)
    assert f"{path}, line 2" in caught.value.message
    assert expected in caught.value.message
    assert "docs/replay.md" in caught.value.remedy


def test_bytes_that_are_no_text_are_named_by_their_line(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_bytes(json.dumps(run()).encode() + b'\n{"id": "\xff"}\n')
    with pytest.raises(InvalidRequest, match="line 2: byte 9 is not UTF-8"):
        trajectory.read(path)


def test_an_error_in_a_json_file_is_named_by_its_own_line(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text('{\n "id": "a",\n "turns": [}\n')
    with pytest.raises(InvalidRequest, match="line 3, column 12"):
        trajectory.read(path)


def test_an_id_twice_an_empty_file_and_no_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text((json.dumps(run()) + "\n") * 2)
    with pytest.raises(InvalidRequest, match="line 2: there is a run 'a' further up"):
        trajectory.read(path)
    path.write_text("\n")
    with pytest.raises(InvalidRequest, match="holds no run"):
        trajectory.read(path)
    with pytest.raises(NotFound, match="No such file"):
        trajectory.read(tmp_path / "absent")


def test_an_unknown_id_is_told_which_there_are() -> None:
    runs = tuple(trajectory.parse(run(id=name)) for name in "ab")
    assert trajectory.select(runs, "b").id == "b"
    with pytest.raises(NotFound, match="choose one of a, b"):
        trajectory.select(runs, "c")


@pytest.mark.parametrize("name", ["terminal", "repair"])
def test_the_stories_are_good_trajectories(name: str) -> None:
    (story,) = trajectory.read(STORIES / f"{name}.json")
    assert story.id == name
    assert 12 <= len(story.turns) <= 16
    assert story.check and story.observe


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(["id", "turns", "command", "files"]), inner)
    ),
    max_leaves=10,
)


@given(json_values)
def test_no_json_at_all_is_answered_with_anything_but_a_run_or_invalid_request(data: object) -> None:
    try:
        found = trajectory.parse(data)
    except InvalidRequest:
        return
    assert found.id and found.turns
