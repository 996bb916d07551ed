"""What the tests of the plug-ins share: a state directory of their own, a scripted model that counts, and a script.

Each module skips without its framework. How to run them: docs/integrations.md.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from crab.sdk.sync import Host
from crab.turns.mock import Asked, Mock

IMAGE = "debian"
STEPS = ("one", "two", "three", "four")
SLOW = 1.5
"""Seconds that each command but the first takes, before it has an effect: a kill finds it running."""


class Model(Mock):
    """The scripted model of all sandboxes with upstream `mock`, which counts its questions."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        super().__init__((), self.asked.append)

    @property
    def steps(self) -> list[int]:
        """Which steps of the script were asked for, in order."""
        return [one.step for one in self.asked if one.kind == "main"]


@pytest.fixture(scope="session")
def prepared() -> Path:
    """A state directory with an image, owned by nobody. It stays, since the image takes a minute."""
    if os.geteuid() != 0:
        pytest.skip("sandboxes need root")
    path = Path(os.environ.get("CRAB_TEST_STATE", "/var/lib/crab-tests") + "-integrations")
    with Host(path) as host:
        host.images.add(IMAGE, "debian:bookworm", if_missing=True)
    return path


@pytest.fixture
def state(prepared: Path) -> Iterator[Path]:
    """The same for one test, which leaves no sandbox in it."""
    _emptied(prepared)  # of a run that was killed
    yield prepared
    assert not _emptied(prepared)


def _emptied(state: Path) -> list[str]:
    with Host(state) as host:
        found = host.sandboxes()
        for box in found:
            box.remove(force=True)
    return [box.name for box in found]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    model = Model()
    monkeypatch.setattr("crab.turns.coordinator.Mock", lambda: model)
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        monkeypatch.setenv(name, "dummy")
    for name in ("CRAB_SANDBOX", "CRAB_SOCKET", "OPENAI_BASE_URL", "OPENAI_API_BASE"):
        monkeypatch.delenv(name, raising=False)
    return model


@pytest.fixture
def host(state: Path, model: Model) -> Iterator[Host]:
    """The state directory, owned by this process."""
    with Host(state) as host:
        yield host


def script(*more: str) -> str:
    """A prompt: each command adds a line to /root/log; all but the first take their time."""
    commands = [f"echo {step} >>/root/log" for step in STEPS]
    commands[1:] = [f"sleep {SLOW}; {command}" for command in commands[1:]]
    return "\n".join([*(f"$ {command}" for command in commands), *more])


LOG = "".join(f"{step}\n" for step in STEPS)


def eventually(true: Callable[[], object], what: str, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"no {what} in {seconds} seconds"
        time.sleep(0.02)


def kill_when(host: Host, name: str, true: Callable[[], object], what: str, after: float = 0.0) -> threading.Thread:
    """Kill a sandbox as soon as something is so, and `after` seconds more."""

    def work() -> None:
        eventually(true, what)
        time.sleep(after)
        host.sandbox(name).kill()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread
