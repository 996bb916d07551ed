"""Which folders of the host may be mounted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from crab.daemon.lifecycle import check_mounts
from crab.errors import InvalidRequest
from crab.model import Mount


@pytest.mark.parametrize("source", ["state", "state/process", "", "link"])
@pytest.mark.parametrize("kind", ["bind", "copy"])
def test_no_mount_shows_crabs_own_state(tmp_path: Path, source: str, kind: str) -> None:
    state = tmp_path / "state"
    (state / "process").mkdir(parents=True)
    os.symlink(state, tmp_path / "link")
    mount = Mount(source=os.path.normpath(tmp_path / source), target="/x", kind=kind)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest) as caught:
        check_mounts((mount,), state)
    assert str(state) in caught.value.message and caught.value.remedy


def test_a_folder_beside_it_may_be_mounted(tmp_path: Path) -> None:
    for name in ("state", "state-not"):
        (tmp_path / name).mkdir()
    mount = Mount(source=str(tmp_path / "state-not"), target="/x")
    assert check_mounts((mount,), tmp_path / "state") == (mount,)
