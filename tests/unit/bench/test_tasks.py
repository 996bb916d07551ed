"""What the tasks promise, read from their files; what they do is for the benchmark and the end-to-end tests."""

from __future__ import annotations

import json
import statistics
from collections import Counter

import pytest
from bench.tasks import image, waits
from bench.tasks.catalogue import Task, tasks

ALL = tasks()


@pytest.fixture(params=ALL, ids=[task.id for task in ALL])
def task(request: pytest.FixtureRequest) -> Task:
    return request.param


def test_there_are_as_many_as_promised() -> None:
    count = Counter(task.group for task in ALL)
    assert count == {"terminal": 24, "repair": 10}
    assert len({task.id for task in ALL}) == len(ALL)


def test_runs_are_as_long_as_recorded_ones() -> None:
    turns = {group: [len(task.run.turns) for task in ALL if task.group == group] for group in ("terminal", "repair")}
    assert statistics.median(turns["terminal"]) == 18
    assert all(20 <= one <= 36 for one in turns["repair"])


def test_a_task_can_be_judged(task: Task) -> None:
    assert task.run.check
    assert task.run.observe
    assert task.run.setup
    assert not task.run.image, "all run in the one image"
    assert not task.run.files, "what a task needs is in the image or written by its set-up"
    assert all((turn.rc is None) == (turn.kind == "background") for turn in task.run.turns)


def test_nothing_runs_on_in_code_repair_and_much_in_a_terminal() -> None:
    repair = [turn.kind for task in ALL if task.group == "repair" for turn in task.run.turns]
    assert set(repair) == {"exec"}
    terminal = {turn.kind for task in ALL if task.group == "terminal" for turn in task.run.turns}
    assert terminal == {"exec", "shell", "background"}


def test_the_waits_are_those_of_the_seed(task: Task) -> None:
    assert [turn.wait_s for turn in task.run.turns] == waits.waits(task.id, len(task.run.turns))


def test_the_files_are_in_their_form() -> None:
    for path in waits.files():
        assert path.read_text() == waits.text(waits.with_waits(json.loads(path.read_text()))), path.name


def test_waits_have_the_published_quantiles() -> None:
    for rank, seconds in waits.QUANTILES:
        assert waits.wait(rank) == seconds
    assert waits.wait(0.0) == waits.QUANTILES[0][1]
    assert waits.wait(0.4) > waits.wait(0.3)
    drawn = [turn.wait_s for task in ALL for turn in task.run.turns]
    assert 2.8 <= statistics.median(drawn) <= 3.8


def test_repairs_are_of_projects_that_the_image_has(task: Task) -> None:
    if task.group == "repair":
        assert any(f"/opt/sdists/{sdist.filename}" in task.run.setup[0] for sdist in image.SDISTS)
