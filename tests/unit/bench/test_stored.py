"""What is said to be on disk is what the file system says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from bench.stored import Stored, extents, metadata, own_metadata, stored
from unit.disks import MIB, btrfs_disk

from crab.host import btrfs


def test_process_images_count_by_their_blocks(tmp_path: Path) -> None:
    folder = tmp_path / "process" / "one"
    folder.mkdir(parents=True)
    (folder / "pages.img").write_bytes(b"x" * 10000)
    with (folder / "sparse.img").open("wb") as file:
        file.truncate(1 << 20)
    found = stored(tmp_path, ["one", "two"])
    assert found.logical == 10000 + (1 << 20)
    assert 10000 <= found.stored < 64 << 10
    assert stored(tmp_path, []) == Stored()


@pytest.mark.kernel
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_what_snapshots_share_counts_once_and_what_was_there_before_not_at_all(tmp_path: Path) -> None:
    """Compared with what the file system itself says is used."""
    with btrfs_disk(tmp_path) as disk:
        pool = tmp_path / "pool"
        pool.symlink_to(disk)
        checkpoints = disk / "checkpoints"
        checkpoints.mkdir()
        btrfs.create(disk / "live")
        btrfs.sync(disk)
        used = _used(disk)
        for number in range(4):
            (disk / "live" / f"file-{number}").write_bytes(os.urandom(2 * MIB))
            for small in range(200):
                (disk / "live" / f"small-{number}-{small}").write_bytes(b"%d" % small)
            (checkpoints / str(number) / "process").mkdir(parents=True)
            btrfs.snapshot(disk / "live", checkpoints / str(number) / "files", read_only=True)
            (checkpoints / str(number) / "process" / "pages-1.img").write_bytes(os.urandom(MIB))
        btrfs.sync(disk)
        found = stored(tmp_path, map(str, range(4)))
        assert found.logical == sum((number + 1) * (2 * MIB) + MIB for number in range(4)) + sum(
            len(b"%d" % small) for number in range(4) for small in range(200) for _ in range(number, 4)
        )
        # the tree of `live` itself, and the nodes of the file system's own trees, are not counted, nor how full nodes are
        assert found.stored == pytest.approx(_used(disk) - used, abs=512 << 10)
        assert metadata(disk, {btrfs.info(checkpoints / "0" / "files").id}) < metadata(
            disk, {btrfs.info(checkpoints / str(number) / "files").id for number in range(4)}
        )


@pytest.mark.kernel
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_an_extent_counts_whole_as_long_as_a_part_of_it_is_needed(tmp_path: Path) -> None:
    with btrfs_disk(tmp_path) as disk:
        (disk / "old").write_bytes(os.urandom(MIB))
        (disk / "small").write_bytes(b"few")
        btrfs.sync(disk)
        with open(disk / "old", "rb") as old, open(disk / "new", "w+b") as new:
            btrfs.clone(old.fileno(), new.fileno(), 8192, 4096, 0)
        btrfs.sync(disk)
        (found,) = extents(str(disk / "new"))
        assert found[1] == MIB and [found] == list(extents(str(disk / "old")))
        assert list(extents(str(disk / "small"))) == []
        assert own_metadata(str(disk / "small")) > 160


def _used(disk: Path) -> int:
    status = os.statvfs(disk)
    return (status.f_blocks - status.f_bfree) * status.f_frsize
