"""A file system of its own for a test."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from crab.host import mounts

MIB = 1 << 20


@contextlib.contextmanager
def btrfs_disk(folder: Path, size: int = 512 * MIB) -> Iterator[Path]:
    """A fresh btrfs, mounted for the length of the block."""
    mkfs = shutil.which("mkfs.btrfs", path="/usr/sbin:/sbin:/usr/bin:/bin")
    assert mkfs, "install btrfs-progs"
    file, target = folder / "disk", folder / "mounted"
    with open(file, "wb") as content:
        content.truncate(size)
    subprocess.run([mkfs, "-q", file], check=True, capture_output=True)
    target.mkdir()
    with mounts.attached(file) as device:
        mounts.mount(device, target, "btrfs")
    try:
        yield target
    finally:
        mounts.unmount(target)
    assert mounts.wait_detached(file)
