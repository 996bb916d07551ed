"""The pool is made once, found again after every kind of end, never mounted twice, and keeps what is in it."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from crab.errors import Busy, Damaged, HostUnsuitable, InvalidRequest, NoSpace
from crab.host import btrfs, mounts, pool
from crab.host.pool import Pool

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system"),
]

MIB = 1 << 20
SIZE = 512 * MIB


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    """A state directory; whatever was mounted below is gone afterwards."""
    path = tmp_path / "state"
    yield path
    for entry in mounts.mounts_below(tmp_path, itself=True):
        mounts.unmount(entry.target, mounts.MNT_DETACH)
    if (path / "pool.btrfs").exists():
        assert mounts.wait_detached(path / "pool.btrfs")


def _mounts_of(state: Path) -> int:
    return sum(entry.target == str(state / "pool") for entry in mounts.mounts())


# ---------------------------------------------------------------- making and finding


def test_a_new_pool_has_its_folders_and_protects_the_host(state: Path) -> None:
    found = Pool.open(state, SIZE)
    for folder in (found.images, found.runtime, found.live, found.checkpoints):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o711
    for folder in (found.staging, found.trash):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    entry = mounts.mount_at(found.root)
    assert entry is not None
    assert entry.fs_type == "btrfs"
    assert {"noatime", "nosuid", "nodev"} <= set(entry.options)
    assert not any(option.startswith("compress") for option in entry.super_options)
    assert stat.S_IMODE((state / "pool.btrfs").stat().st_mode) == 0o600
    assert (state / "pool.btrfs").stat().st_size == SIZE
    assert (state / "pool.btrfs").stat().st_blocks * 512 < 32 * MIB


def test_opening_again_changes_nothing(state: Path) -> None:
    first = Pool.open(state, SIZE)
    (first.live / "mark").write_text("here")
    before = btrfs.filesystem_uuid(first.root)
    second = Pool.open(state)
    assert (second.live / "mark").read_text() == "here"
    assert btrfs.filesystem_uuid(second.root) == before
    assert _mounts_of(state) == 1
    assert len(mounts.loops_of(state / "pool.btrfs")) == 1


def test_a_closed_pool_comes_back_with_its_content(state: Path) -> None:
    first = Pool.open(state, SIZE)
    btrfs.create(first.live / "sandbox")
    (first.live / "sandbox/file").write_bytes(b"content")
    first.close()
    assert _mounts_of(state) == 1
    first.close(unmount=True)
    first.close(unmount=True)
    assert _mounts_of(state) == 0
    assert mounts.loops_of(state / "pool.btrfs") == ()
    again = Pool.open(state)
    assert (again.live / "sandbox/file").read_bytes() == b"content"


_OPEN_AND_DIE = """
import os, signal, sys
from crab.host.pool import Pool
pool = Pool.open(sys.argv[1], int(sys.argv[2]))
(pool.live / "mark").write_text("written by the dead")
os.kill(os.getpid(), signal.SIGKILL)
"""


def _python(program: str, *arguments: str) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return subprocess.Popen([sys.executable, "-c", program, *arguments], env={**os.environ, "PYTHONPATH": path})


def test_hazard_h02_a_killed_daemon_leaves_a_pool_that_is_found_and_not_attached_twice(state: Path) -> None:
    assert _python(_OPEN_AND_DIE, str(state), str(SIZE)).wait() == -signal.SIGKILL
    assert _mounts_of(state) == 1
    found = Pool.open(state)
    assert (found.live / "mark").read_text() == "written by the dead"
    assert _mounts_of(state) == 1
    assert len(mounts.loops_of(state / "pool.btrfs")) == 1


def test_a_pool_whose_mount_is_gone_but_whose_device_is_not_is_mounted_from_that_device(state: Path) -> None:
    first = Pool.open(state, SIZE)
    (first.live / "mark").write_text("x")
    (device,) = mounts.loops_of(state / "pool.btrfs")
    with open(first.live / "mark"):  # keeps the file system alive
        mounts.unmount(first.root, mounts.MNT_DETACH)
        assert _mounts_of(state) == 0
        second = Pool.open(state)
        assert mounts.loops_of(state / "pool.btrfs") == (device,)
        assert (second.live / "mark").read_text() == "x"


_OPEN = """
import sys
from crab.host.pool import Pool
Pool.open(sys.argv[1], int(sys.argv[2]))
"""


def test_several_processes_open_a_new_pool_at_once_and_there_is_one(state: Path) -> None:
    processes = [_python(_OPEN, str(state), str(SIZE)) for _ in range(4)]
    assert [process.wait() for process in processes] == [0] * 4
    assert _mounts_of(state) == 1
    assert len(mounts.loops_of(state / "pool.btrfs")) == 1


def test_the_lock_is_held_only_while_opening_and_a_holder_makes_others_wait(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Pool.open(state, SIZE)
    with pool._locked(state):
        monkeypatch.setattr(pool, "_LOCK_WAIT", 0.1)
        with pytest.raises(Busy, match="another process"):
            Pool.open(state)
    Pool.open(state)


@pytest.mark.parametrize("after", [0.0, 0.01, 0.02, 0.04])
def test_a_crash_while_the_pool_is_made_leaves_none_or_a_whole_one(state: Path, after: float) -> None:
    process = _python(_OPEN, str(state), str(SIZE))
    end = time.monotonic() + 10
    while not (state / "pool.lock").exists() and time.monotonic() < end:
        time.sleep(0.001)
    time.sleep(after)
    process.kill()
    process.wait()
    found = Pool.open(state, SIZE)
    (found.live / "mark").write_text("x")
    assert _mounts_of(state) == 1
    assert not list(state.glob("pool.btrfs.new*"))


def test_what_an_interrupted_mkfs_left_is_replaced(state: Path) -> None:
    state.mkdir()
    (state / "pool.btrfs.new").write_bytes(b"half a file system")
    Pool.open(state, SIZE)
    assert not (state / "pool.btrfs.new").exists()


def test_a_pool_is_found_through_a_symlink(state: Path, tmp_path: Path) -> None:
    Pool.open(state, SIZE)
    (tmp_path / "link").symlink_to(state)
    assert Pool.open(tmp_path / "link").root == state / "pool"
    assert _mounts_of(state) == 1


def test_a_larger_size_makes_an_existing_pool_grow_while_it_is_in_use(state: Path) -> None:
    found = Pool.open(state, SIZE)
    with open(found.live / "file", "wb") as file:
        file.write(b"x")
        assert Pool.open(state, 2 * SIZE).usage().total == 2 * SIZE
        found.grow(SIZE)  # never smaller
        assert found.usage().total == 2 * SIZE


# ---------------------------------------------------------------- natively on btrfs


@pytest.fixture
def native(state: Path, tmp_path: Path) -> Path:
    """A state directory that lies on btrfs already."""
    Pool.open(state, SIZE)
    path = state / "pool/native"
    path.mkdir()
    return path


def test_on_btrfs_no_file_is_made(native: Path) -> None:
    found = Pool.open(native)
    assert found.file is None
    assert not (native / "pool.btrfs").exists()
    btrfs.create(found.live / "sandbox")
    entry = mounts.mount_at(found.root)
    assert entry is not None
    assert {"nosuid", "nodev"} <= set(entry.options)
    assert Pool.open(native).file is None
    assert _mounts_of(native) == 1
    assert found.usage().free > 100 * MIB
    path = found.stage("image")
    found.discard(path)
    assert os.listdir(found.trash) == []
    with pytest.raises(InvalidRequest):
        found.grow(2 * SIZE)
    found.close(unmount=True)
    assert _mounts_of(native) == 0
    assert (Pool.open(native).live / "sandbox").exists()


def test_mounts_in_a_native_pool_do_not_appear_twice(native: Path) -> None:
    mounts.mount(None, native.parent, flags=mounts.MS_SHARED)
    found = Pool.open(native)
    target = found.runtime / "root"
    target.mkdir()
    mounts.mount("x", target, "tmpfs", 0, "size=64k")
    assert sum(entry.target == str(target) for entry in mounts.mounts()) == 1
    entry = mounts.mount_at(found.root)
    assert entry is not None and entry.propagation and entry.propagation[0].startswith("shared:")


def test_an_existing_pool_file_wins_over_a_native_btrfs(native: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Pool.open(tmp_path / "other", 256 * MIB)
    (other.live / "mark").write_text("moved")
    other.close(unmount=True)
    subprocess.run(["cp", "--sparse=always", tmp_path / "other/pool.btrfs", native / "pool.btrfs"], check=True)
    found = Pool.open(native)
    assert (found.live / "mark").read_text() == "moved"
    found.close(unmount=True)


# ---------------------------------------------------------------- what can be wrong


def test_a_corrupt_pool_file_is_reported_and_left_alone(state: Path) -> None:
    state.mkdir()
    (state / "pool.btrfs").write_bytes(b"not a file system" * 100_000)
    before = (state / "pool.btrfs").read_bytes()
    with pytest.raises(Damaged, match="does not contain a btrfs") as caught:
        Pool.open(state)
    assert "btrfs check" in caught.value.remedy
    assert (state / "pool.btrfs").read_bytes() == before
    assert mounts.wait_detached(state / "pool.btrfs")
    assert _mounts_of(state) == 0


def test_a_truncated_pool_file_is_reported_and_left_alone(state: Path) -> None:
    Pool.open(state, SIZE).close(unmount=True)
    os.truncate(state / "pool.btrfs", 16 * MIB)
    with pytest.raises(Damaged, match="cannot be mounted"):
        Pool.open(state)
    assert (state / "pool.btrfs").stat().st_size == 16 * MIB


def test_without_mkfs_the_remedy_is_named(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_program_path", lambda: "/nowhere")
    with pytest.raises(HostUnsuitable, match=r"mkfs\.btrfs") as caught:
        Pool.open(state, SIZE)
    assert "crab doctor --fix" in caught.value.remedy


def test_a_failing_mkfs_leaves_nothing(state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin/mkfs.btrfs"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'ERROR: no such luck' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(pool, "_program_path", lambda: str(program.parent))
    with pytest.raises(HostUnsuitable, match="no such luck"):
        Pool.open(state, SIZE)
    assert sorted(os.listdir(state)) == ["pool", "pool.lock"]


def test_a_state_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    place = tmp_path / "read-only"
    place.mkdir()
    mounts.mount("none", place, "tmpfs", mounts.MS_RDONLY, "size=1m")
    try:
        with pytest.raises(HostUnsuitable, match="read-only") as caught:
            Pool.open(place / "state", SIZE)
        assert caught.value.remedy
        with pytest.raises(HostUnsuitable):
            Pool.open(place, SIZE)
    finally:
        mounts.unmount(place)


def test_without_root_the_remedy_is_named(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(HostUnsuitable, match="root"):
        Pool.open(state, SIZE)
    assert not state.exists()


def test_no_free_loop_device_is_named(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_device() -> str:
        raise HostUnsuitable("no free loop device: too many", remedy="modprobe loop")

    monkeypatch.setattr(mounts, "_free_loop", no_device)
    with pytest.raises(HostUnsuitable, match="loop device"):
        Pool.open(state, SIZE)
    monkeypatch.undo()
    Pool.open(state, SIZE)


def test_a_foreign_mount_in_its_place_is_refused(state: Path) -> None:
    (state / "pool").mkdir(parents=True)
    mounts.mount("foreign", state / "pool", "tmpfs", 0, "size=64k")
    with pytest.raises(Damaged, match="something else"):
        Pool.open(state, SIZE)
    assert not (state / "pool.btrfs").exists()


def test_a_pool_file_that_was_deleted_under_its_mount_is_not_replaced_in_silence(state: Path) -> None:
    Pool.open(state, SIZE)
    (state / "pool.btrfs").unlink()
    with pytest.raises(Damaged):
        Pool.open(state, SIZE)
    assert not (state / "pool.btrfs").exists()


def test_files_that_a_mount_would_hide_are_refused(state: Path) -> None:
    (state / "pool").mkdir(parents=True)
    (state / "pool/stray").touch()
    with pytest.raises(Damaged, match="hide"):
        Pool.open(state, SIZE)
    assert (state / "pool/stray").exists()


def test_a_pool_that_went_read_only_is_reported(state: Path) -> None:
    found = Pool.open(state, SIZE)
    mounts.mount(None, found.root, flags=mounts.MS_REMOUNT | mounts.MS_RDONLY)
    with pytest.raises(Damaged, match="read-only"):
        Pool.open(state)


def test_a_size_that_is_too_small_is_refused(state: Path) -> None:
    with pytest.raises(InvalidRequest):
        Pool.open(state, MIB)
    assert not state.exists()


def test_a_pool_in_use_is_not_unmounted(state: Path) -> None:
    found = Pool.open(state, SIZE)
    with open(found.live / "file", "wb"), pytest.raises(Busy, match="in use"):
        found.close(unmount=True)
    (found.runtime / "root").mkdir()
    mounts.mount("x", found.runtime / "root", "tmpfs", 0, "size=64k")
    with pytest.raises(Busy, match="runtime/root"):
        found.close(unmount=True)
    mounts.unmount(found.runtime / "root")
    found.close(unmount=True)


# ---------------------------------------------------------------- removal


@pytest.fixture
def opened(state: Path) -> Pool:
    return Pool.open(state, SIZE)


def test_all_kinds_of_things_are_discarded(opened: Pool) -> None:
    (opened.live / "file").touch()
    (opened.live / "link").symlink_to("/etc")
    (opened.live / "folder/deep").mkdir(parents=True)
    (opened.live / "name\udcff\n").touch()
    btrfs.create(opened.live / "subvolume")
    btrfs.create(opened.live / "subvolume/nested")
    btrfs.create(opened.live / "folder/deep/subvolume")
    btrfs.snapshot(opened.live / "subvolume", opened.live / "frozen", read_only=True)
    for path in list(opened.live.iterdir()):
        opened.discard(path)
    opened.discard(opened.live / "never there")
    assert os.listdir(opened.live) == []
    assert os.listdir(opened.trash) == []
    assert Path("/etc").exists()


def test_something_inside_a_subvolume_is_discarded(opened: Pool) -> None:
    btrfs.create(opened.live / "sandbox")
    (opened.live / "sandbox/folder").mkdir()
    (opened.live / "sandbox/folder/file").touch()
    opened.discard(opened.live / "sandbox/folder")
    assert os.listdir(opened.live / "sandbox") == []


def test_only_things_in_the_pool_are_discarded(opened: Pool, tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    for path in (tmp_path / "precious", opened.root, opened.live, opened.live / "../../..", Path("/etc")):
        with pytest.raises(InvalidRequest):
            opened.discard(path)
    assert (tmp_path / "precious").exists()


def test_what_is_mounted_is_not_discarded(opened: Pool, tmp_path: Path) -> None:
    (tmp_path / "host").mkdir()
    (tmp_path / "host/precious").touch()
    (opened.runtime / "sandbox/root").mkdir(parents=True)
    mounts.mount(tmp_path / "host", opened.runtime / "sandbox/root", flags=mounts.MS_BIND)
    with pytest.raises(Busy, match="mounted"):
        opened.discard(opened.runtime / "sandbox")
    assert (tmp_path / "host/precious").exists()
    mounts.unmount(opened.runtime / "sandbox/root")
    opened.discard(opened.runtime / "sandbox")


def test_trash_can_wait_and_is_emptied_later(opened: Pool) -> None:
    btrfs.create(opened.live / "a")
    btrfs.snapshot(opened.live / "a", opened.live / "b", read_only=True)
    opened.discard(opened.live / "a", wait=False)
    opened.discard(opened.live / "b", wait=False)
    assert os.listdir(opened.live) == []
    assert len(os.listdir(opened.trash)) == 2
    assert opened.empty_trash() == []
    assert os.listdir(opened.trash) == []


def test_what_cannot_be_deleted_now_stays_in_the_trash_and_is_reported(opened: Pool) -> None:
    (opened.live / "folder").mkdir()
    opened.discard(opened.live / "folder", wait=False)
    (stuck,) = opened.trash.iterdir()
    mounts.mount("x", stuck, "tmpfs", 0, "size=64k")
    assert opened.empty_trash() == [stuck]
    mounts.unmount(stuck)
    assert opened.empty_trash() == []


def test_the_sweep_throws_away_what_was_being_built(opened: Pool) -> None:
    opened.stage("image")
    (opened.staging / "scratch").mkdir()
    (opened.live / "kept").mkdir()
    assert opened.sweep() == []
    assert os.listdir(opened.staging) == []
    assert os.listdir(opened.live) == ["kept"]


# ---------------------------------------------------------------- space


def test_usage_follows_what_is_written(opened: Pool) -> None:
    before = opened.usage()
    assert before.total == SIZE
    with open(opened.live / "file", "wb") as file:
        file.write(os.urandom(50 * MIB))
        os.fsync(file.fileno())
    btrfs.sync(opened.root)
    after = opened.usage()
    assert after.used - before.used >= 50 * MIB
    assert before.free - after.free >= 50 * MIB


def test_hazard_c17_too_little_space_names_the_file_system(opened: Pool) -> None:
    opened.require(10 * MIB)
    with pytest.raises(NoSpace, match="for a test") as caught:
        opened.require(SIZE, "a test")
    assert str(opened.root) in caught.value.message


def test_a_full_disk_below_a_sparse_pool_is_noticed_and_named(tmp_path: Path) -> None:
    place = tmp_path / "small"
    place.mkdir()
    mounts.mount("none", place, "tmpfs", 0, "size=64m")
    try:
        found = Pool.open(place / "state", 4 << 30)
        assert found.usage().total == 4 << 30
        assert found.usage().free < 64 * MIB
        with pytest.raises(NoSpace, match="below the pool") as caught:
            found.require(100 * MIB)
        assert str(place / "state") in caught.value.message
        found.close(unmount=True)
    finally:
        with contextlib.suppress(OSError):
            mounts.unmount(place / "state/pool", mounts.MNT_DETACH)
        mounts.unmount(place, mounts.MNT_DETACH)


def test_space_of_what_was_just_discarded_counts(opened: Pool) -> None:
    path = opened.stage("big")
    with open(path / "file", "wb") as file:
        file.write(os.urandom(300 * MIB))
    btrfs.sync(opened.root)
    opened.discard(path)
    opened.require(250 * MIB)
    assert opened.usage().free >= 250 * MIB
