"""Subvolumes, snapshots and quotas do on a real btrfs what their names say; their errors name the place."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from bench.stored import extents
from unit.disks import MIB, btrfs_disk

from crab.errors import HostUnsuitable, NoSpace
from crab.host import btrfs, mounts

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system"),
]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A fresh btrfs of 512 MiB."""
    with btrfs_disk(tmp_path) as mounted:
        yield mounted


# ---------------------------------------------------------------- subvolumes


def test_a_subvolume_is_told_from_a_folder(disk: Path, tmp_path: Path) -> None:
    btrfs.create(disk / "sub")
    (disk / "folder").mkdir()
    (disk / "file").touch()
    os.symlink("sub", disk / "link")
    assert btrfs.is_subvolume(disk / "sub")
    assert btrfs.is_subvolume(disk)
    assert not any(btrfs.is_subvolume(disk / name) for name in ("folder", "file", "link", "missing", "file/below"))
    assert btrfs.is_btrfs(disk / "folder")
    assert not btrfs.is_btrfs(tmp_path)


def test_names_may_be_any_bytes_up_to_255(disk: Path) -> None:
    for name in (b"\xff\xfe\n", b"x" * 255):
        path = disk / os.fsdecode(name)
        btrfs.create(path)
        assert btrfs.is_subvolume(path)
        btrfs.delete(path)
        assert not path.exists()
    with pytest.raises(OSError) as caught:
        btrfs.create(disk / ("x" * 256))
    assert caught.value.errno == errno.ENAMETOOLONG


def test_a_name_that_is_taken_is_refused(disk: Path) -> None:
    btrfs.create(disk / "sub")
    with pytest.raises(FileExistsError) as caught:
        btrfs.create(disk / "sub")
    assert str(disk / "sub") in str(caught.value)


def test_a_snapshot_holds_what_was_just_written_and_stays(disk: Path) -> None:
    btrfs.create(disk / "live")
    (disk / "live/file").write_bytes(b"before")
    btrfs.snapshot(disk / "live", disk / "saved", read_only=True)
    (disk / "live/file").write_bytes(b"after")
    assert (disk / "saved/file").read_bytes() == b"before"
    with pytest.raises(OSError) as caught:
        (disk / "saved/file").write_bytes(b"no")
    assert caught.value.errno == errno.EROFS
    btrfs.snapshot(disk / "saved", disk / "again", read_only=False)
    (disk / "again/file").write_bytes(b"other")
    assert (disk / "saved/file").read_bytes() == b"before"


def test_origin_and_identity_of_a_snapshot_are_known(disk: Path) -> None:
    btrfs.create(disk / "live")
    btrfs.snapshot(disk / "live", disk / "saved", read_only=True)
    live, saved = btrfs.info(disk / "live"), btrfs.info(disk / "saved")
    assert saved.parent_uuid == live.uuid
    assert live.parent_uuid == ""
    assert (saved.read_only, live.read_only) == (True, False)
    assert saved.id > live.id >= 256
    (disk / "live/folder").mkdir()
    assert btrfs.info(disk / "live/folder").id == live.id


def test_read_only_can_be_set_and_cleared(disk: Path) -> None:
    btrfs.create(disk / "sub")
    btrfs.set_read_only(disk / "sub", True)
    assert btrfs.is_read_only(disk / "sub")
    with pytest.raises(OSError):
        (disk / "sub/file").touch()
    btrfs.set_read_only(disk / "sub", False)
    (disk / "sub/file").touch()
    assert not btrfs.is_read_only(disk / "sub")


def test_a_subvolume_goes_with_all_that_are_nested_in_it(disk: Path) -> None:
    for name in ("a", "a/b", "a/b/c"):
        btrfs.create(disk / name)
    (disk / "a/folder/deep").mkdir(parents=True)
    btrfs.create(disk / "a/folder/deep/d\udcff")
    btrfs.snapshot(disk / "a/b", disk / "a/frozen", read_only=True)
    found = btrfs.nested(disk / "a")
    assert set(found) == {Path("b/c"), Path("b"), Path("folder/deep/d\udcff"), Path("frozen")}
    assert found.index(Path("b/c")) < found.index(Path("b"))
    btrfs.delete(disk / "a")
    assert os.listdir(disk) == []


def test_many_nested_subvolumes_are_all_found(disk: Path) -> None:
    # The kernel lists 255 at a time.
    btrfs.create(disk / "top")
    for number in range(300):
        btrfs.create(disk / f"top/{number}")
    assert len(btrfs.nested(disk / "top")) == 300
    btrfs.delete(disk / "top")


def test_a_tree_of_folders_files_and_subvolumes_is_removed(disk: Path) -> None:
    (disk / "tree/one/two").mkdir(parents=True)
    (disk / "tree/one/file").touch()
    btrfs.create(disk / "tree/one/two/sub")
    btrfs.snapshot(disk / "tree/one/two/sub", disk / "tree/one/frozen", read_only=True)
    (disk / "outside").mkdir()
    (disk / "outside/keep").touch()
    os.symlink(disk / "outside", disk / "tree/link")
    btrfs.remove_tree(disk / "tree")
    btrfs.remove_tree(disk / "tree")
    assert os.listdir(disk) == ["outside"]
    assert (disk / "outside/keep").exists()


def test_what_is_mounted_in_a_tree_is_never_removed(disk: Path, tmp_path: Path) -> None:
    host = tmp_path / "host"
    host.mkdir()
    (host / "precious").touch()
    (disk / "tree/mountpoint").mkdir(parents=True)
    (disk / "tree/file").touch()
    mounts.mount(host, disk / "tree/mountpoint", flags=mounts.MS_BIND)
    try:
        for path in ("tree", "tree/mountpoint"):
            with pytest.raises(OSError) as caught:
                btrfs.remove_tree(disk / path)
            assert caught.value.errno == errno.EBUSY
        assert (host / "precious").exists()
        assert (disk / "tree/file").exists()
    finally:
        mounts.unmount(disk / "tree/mountpoint")
    btrfs.remove_tree(disk / "tree")
    assert (host / "precious").exists()


def test_deleted_space_can_be_had_back_at_once(disk: Path) -> None:
    btrfs.create(disk / "big")
    (disk / "big/file").write_bytes(os.urandom(64 * MIB))
    btrfs.sync(disk)
    before = os.statvfs(disk).f_bfree
    btrfs.delete(disk / "big")
    assert btrfs.reclaim(disk)
    assert btrfs.deletions_pending(disk) == 0
    after = os.statvfs(disk)
    assert (after.f_bfree - before) * after.f_frsize > 60 * MIB


@pytest.mark.parametrize("end", [btrfs.commit, btrfs.sync])
def test_a_commit_ends_the_transaction(disk: Path, end: Callable[[Path], None]) -> None:
    (disk / "file").write_bytes(b"x")
    before = btrfs.info(disk).generation
    end(disk)
    (disk / "other").write_bytes(b"x")
    end(disk)
    assert btrfs.info(disk).generation > before


# ---------------------------------------------------------------- errors


def test_another_file_system_is_named_as_such(tmp_path: Path) -> None:
    with pytest.raises(HostUnsuitable, match="not on a btrfs"):
        btrfs.create(tmp_path / "sub")
    with pytest.raises(HostUnsuitable):
        btrfs.filesystem_uuid(tmp_path)


def test_a_missing_path_is_named(disk: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing"):
        btrfs.snapshot(disk / "missing", disk / "x", read_only=True)
    with pytest.raises(FileNotFoundError, match="gone"):
        btrfs.delete(disk / "gone")


def test_a_full_file_system_is_no_space_and_named(disk: Path) -> None:
    btrfs.create(disk / "sub")
    with pytest.raises(NoSpace) as caught, btrfs.checked(disk / "sub"), open(disk / "sub/fill", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, 600 * MIB)
    assert str(disk) in caught.value.message
    assert caught.value.remedy


# ---------------------------------------------------------------- quotas


@pytest.fixture
def quotas(disk: Path) -> Path:
    if not btrfs.quota_supported():
        pytest.skip("the kernel has no simple quotas (Linux 6.7)")
    return disk


def _write(path: Path, size: int) -> None:
    with btrfs.checked(path), open(path, "ab", buffering=0) as file:
        for _ in range(size // MIB):
            file.write(os.urandom(MIB))


def test_writes_beyond_the_limit_fail_and_name_the_quota(quotas: Path) -> None:
    assert btrfs.quota_mode(quotas) == "none"
    btrfs.create(quotas / "limited")
    btrfs.create(quotas / "free")
    btrfs.set_limit(quotas / "limited", 20 * MIB)
    assert btrfs.quota_mode(quotas) == "simple"
    _write(quotas / "limited/file", 15 * MIB)
    with pytest.raises(NoSpace, match="quota"):
        _write(quotas / "limited/file", 15 * MIB)
    with pytest.raises(OSError) as caught:
        (quotas / "limited/other").write_bytes(os.urandom(6 * MIB))
    assert caught.value.errno == errno.EDQUOT
    _write(quotas / "free/file", 40 * MIB)


def test_usage_is_counted_and_space_comes_back_by_deleting(quotas: Path) -> None:
    btrfs.create(quotas / "limited")
    assert btrfs.quota_usage(quotas / "limited") is None
    btrfs.set_limit(quotas / "limited", 20 * MIB)
    with pytest.raises(NoSpace):
        _write(quotas / "limited/file", 30 * MIB)
    btrfs.sync(quotas)
    used = btrfs.quota_usage(quotas / "limited")
    assert used is not None and 15 * MIB < used <= 20 * MIB
    (quotas / "limited/file").unlink()
    btrfs.sync(quotas)
    _write(quotas / "limited/again", 15 * MIB)


def test_a_limit_can_be_lifted(quotas: Path) -> None:
    btrfs.create(quotas / "sub")
    btrfs.set_limit(quotas / "sub", None)
    assert btrfs.quota_mode(quotas) == "none"
    btrfs.set_limit(quotas / "sub", 5 * MIB)
    with pytest.raises(NoSpace):
        _write(quotas / "sub/file", 10 * MIB)
    btrfs.set_limit(quotas / "sub", None)
    _write(quotas / "sub/file", 10 * MIB)


def test_a_fresh_snapshot_owns_nothing_and_has_its_own_limit(quotas: Path) -> None:
    btrfs.create(quotas / "live")
    btrfs.set_limit(quotas / "live", 20 * MIB)
    _write(quotas / "live/file", 15 * MIB)
    btrfs.snapshot(quotas / "live", quotas / "clone", read_only=False)
    btrfs.set_limit(quotas / "clone", 20 * MIB)
    _write(quotas / "clone/more", 15 * MIB)
    with pytest.raises(NoSpace):
        _write(quotas / "clone/more", 15 * MIB)


def test_a_kernel_without_simple_quotas_is_named(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(btrfs, "quota_supported", lambda: False)
    btrfs.create(disk / "sub")
    with pytest.raises(HostUnsuitable, match="quota"):
        btrfs.set_limit(disk / "sub", MIB)
    assert btrfs.quota_mode(disk) == "none"


# ---------------------------------------------------------------- what was changed


def test_every_kind_of_change_since_a_snapshot_is_seen_and_nothing_else(disk: Path) -> None:
    """Also what no clock tells: a change in the same tick, with the times put back."""
    live = disk / "live"
    btrfs.create(live)
    (live / "folder").mkdir()
    names = [
        "same",
        "written",
        "appended",
        "mapped",
        "chmod",
        "xattr",
        "linked",
        "renamed",
        "utime",
        "truncated",
        "large",
    ]
    for name in names:
        (live / name).write_bytes(b"x" * 9000)
    for number in range(2000):
        (live / "folder" / str(number)).write_bytes(b"small")
    inodes = {name: (live / name).stat().st_ino for name in [*names, "folder"]}
    before = (live / "written").stat()
    btrfs.snapshot(live, disk / "first", read_only=True)
    since = btrfs.info(disk / "first").made_in
    with open(live / "written", "r+b") as file:
        file.write(b"y")
    os.utime(live / "written", ns=(before.st_atime_ns, before.st_mtime_ns))
    with open(live / "appended", "ab") as file:
        file.write(b"z")
    with open(live / "mapped", "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[5000] = 1
    (live / "chmod").chmod(0o600)
    os.setxattr(live / "xattr", "user.a", b"1")
    os.link(live / "linked", live / "folder" / "again")
    (live / "renamed").rename(live / "moved")
    os.utime(live / "utime", ns=(1, 1))
    os.truncate(live / "truncated", 100)
    with open(live / "large", "r+b") as file:
        for place in range(0, 200 << 20, 1 << 20):
            file.seek(place)
            file.write(b"w")
    (live / "new").write_bytes(b"new")
    btrfs.snapshot(live, disk / "second", read_only=True)
    found = btrfs.changed_inodes(disk / "second", since)
    changed = {name for name, inode in inodes.items() if inode in found}
    assert changed == {*names, "folder"} - {"same"}
    assert (live / "new").stat().st_ino in found
    assert len(found) <= len(changed) + 2  # those, the new file, and the top folder
    assert btrfs.changed_inodes(disk / "second", btrfs.info(disk / "second").made_in) == set()
    assert len(btrfs.changed_inodes(disk / "second", 0)) == 2000 + len(names) + 3


def test_a_clone_of_a_snapshot_has_only_its_own_changes(disk: Path) -> None:
    btrfs.create(disk / "live")
    for number in range(100):
        (disk / "live" / str(number)).write_bytes(b"x")
    btrfs.snapshot(disk / "live", disk / "saved", read_only=True)
    (disk / "live" / "1").write_bytes(b"given up")
    btrfs.snapshot(disk / "saved", disk / "restored", read_only=False)
    (disk / "restored" / "2").write_bytes(b"y")
    btrfs.snapshot(disk / "restored", disk / "next", read_only=True)
    found = btrfs.changed_inodes(disk / "next", btrfs.info(disk / "saved").made_in)
    assert found == {(disk / "next" / "2").stat().st_ino}


# ---------------------------------------------------------------- parts of files


def test_a_clone_has_the_content_and_takes_no_room(disk: Path) -> None:
    source, target = disk / "source", disk / "target"
    data = os.urandom(4 * MIB)
    source.write_bytes(data)
    target.write_bytes(b"x" * 8192)
    btrfs.sync(disk)
    before = os.statvfs(disk).f_bfree
    with open(source, "rb") as old, open(target, "r+b") as new:
        btrfs.clone(old.fileno(), new.fileno(), 4096, 3 * MIB, 8192)
    btrfs.sync(disk)
    assert target.read_bytes() == b"x" * 8192 + data[4096 : 4096 + 3 * MIB]
    assert (before - os.statvfs(disk).f_bfree) * 4096 < MIB
    source.unlink()
    assert target.read_bytes()[8192:] == data[4096 : 4096 + 3 * MIB]


def test_a_clone_that_is_not_of_whole_blocks_is_refused(disk: Path) -> None:
    source, target = disk / "source", disk / "target"
    source.write_bytes(bytes(8192))
    with open(source, "rb") as old, open(target, "w+b") as new, pytest.raises(OSError) as error:
        btrfs.clone(old.fileno(), new.fileno(), 100, 4096, 0)
    assert error.value.errno == errno.EINVAL


def test_what_is_written_in_a_folder_is_compressed(disk: Path) -> None:
    folder = disk / "folder"
    folder.mkdir()
    btrfs.compress(folder)
    (folder / "file").write_bytes(b"0123456789abcdef" * (MIB // 2))
    (disk / "file").write_bytes(b"0123456789abcdef" * (MIB // 2))
    btrfs.sync(disk)
    packed, plain = (sum(length for _, length in extents(str(place / "file"))) for place in (folder, disk))
    assert plain == 8 * MIB and packed < MIB
    assert len(btrfs.pieces(folder / "file")) == 64 and len(btrfs.pieces(disk / "file")) < 64
    btrfs.compress(Path("/proc"))  # where nothing can be compressed nothing happens
