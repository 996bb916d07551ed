"""Steps of what takes long."""

from __future__ import annotations

import time

import pytest

from crab.errors import NotFound
from crab.sdk import steps
from crab.sdk.steps import told


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "SECONDS", 0.01)


def test_each_step_is_told_once() -> None:
    said: list[str] = []
    coming = iter(["", "one", "one", "two"])
    assert told(lambda: time.sleep(0.3) or 7, lambda: next(coming, "two"), said.append) == 7
    assert said == ["one", "two"]


def test_what_takes_long_may_fail() -> None:
    def work() -> None:
        raise NotFound("there is no such package")

    with pytest.raises(NotFound):
        told(work, str, print)
