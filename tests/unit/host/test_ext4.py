"""Folders on ext4 are marked as the kernel wants it; on others nothing happens."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from crab.host import ext4, mounts
from crab.store.local import LocalStore


@pytest.fixture
def disk(tmp_path: Path):
    """A fresh ext4."""
    file, target = tmp_path / "disk", tmp_path / "mounted"
    with open(file, "wb") as content:
        content.truncate(64 << 20)
    mkfs = shutil.which("mkfs.ext4", path="/usr/sbin:/sbin")
    assert mkfs, "install e2fsprogs"
    subprocess.run([mkfs, "-q", "-b", "4096", file], check=True, capture_output=True)
    target.mkdir()
    with mounts.attached(file) as device:
        mounts.mount(device, target, "ext4")
    yield target
    mounts.unmount(target)
    assert mounts.wait_detached(file)


def is_spread(folder: Path) -> bool:
    done = subprocess.run(["lsattr", "-d", folder], capture_output=True, text=True, check=True)
    return "T" in done.stdout.split()[0]


@pytest.mark.kernel
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_process_images_of_checkpoints_are_spread_over_the_disk(disk: Path) -> None:
    class OnDisk:
        state_dir, checkpoints = disk, disk / "checkpoints"

    LocalStore(OnDisk())  # type: ignore[arg-type]
    assert is_spread(disk / "process") and not is_spread(disk)
    ext4.spread(disk / "process")
    assert is_spread(disk / "process")


def test_other_file_systems_are_left_alone() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        before = folder.stat()
        for other in (folder, Path("/proc"), Path("/nowhere")):
            ext4.spread(other)
        after = folder.stat()
    assert (after.st_mode, after.st_ctime_ns) == (before.st_mode, before.st_ctime_ns)
    assert not Path("/nowhere").exists()
