"""Whom the demo asks."""

from __future__ import annotations

from pathlib import Path

import pytest

from crab.daemon.requests import Version
from crab.errors import Busy, DaemonUnavailable
from crab.replay import demo


class Owned:
    """A host whose state directory another process has."""

    def open(self) -> None:
        raise Busy("process 7 owns it", remedy="another")


class Daemon:
    def __init__(self, state: Path | None) -> None:
        self.state = state

    def about(self) -> Version:
        if self.state is None:
            raise DaemonUnavailable("no daemon runs", absent=True)
        return Version(crab="", api=1, pid=7, state_dir=str(self.state))


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CRAB_STATE", str(tmp_path))
    monkeypatch.setattr(demo, "Host", Owned)
    return tmp_path


def test_the_daemon_that_owns_the_state_directory_is_asked(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = Daemon(state)
    monkeypatch.setattr(demo, "connect", lambda: daemon)
    assert demo.owner_or_daemon() is daemon


@pytest.mark.parametrize("elsewhere", [None, Path("/elsewhere")])
def test_another_owner_is_told_with_what_helps_here(
    state: Path, elsewhere: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "connect", lambda: Daemon(elsewhere))
    with pytest.raises(Busy) as caught:
        demo.owner_or_daemon()
    assert "process 7" in caught.value.message and "make demo CRAB_STATE=" in caught.value.remedy
