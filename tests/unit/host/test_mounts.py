"""The mount table is read as the kernel writes it; mounts and loop devices are found again by what the kernel says."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from crab.host import mounts

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts things")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder that is free of mounts afterwards."""
    yield tmp_path
    for entry in mounts.mounts_below(tmp_path, itself=True):
        mounts.unmount(entry.target, mounts.MNT_DETACH)


# ---------------------------------------------------------------- parsing


def test_a_line_without_optional_fields_is_understood() -> None:
    (entry,) = mounts.parse_mountinfo(b"36 35 98:0 /mnt1 /mnt2 rw,noatime - ext3 /dev/root rw,errors=continue\n")
    assert (entry.id, entry.parent, entry.device) == (36, 35, "98:0")
    assert (entry.root, entry.target) == ("/mnt1", "/mnt2")
    assert entry.options == ("rw", "noatime")
    assert entry.propagation == ()
    assert (entry.fs_type, entry.source) == ("ext3", "/dev/root")
    assert entry.super_options == ("rw", "errors=continue")
    assert not entry.read_only


def test_several_optional_fields_are_understood() -> None:
    (entry,) = mounts.parse_mountinfo(b"1 0 0:1 / /a ro shared:7 master:2 propagate_from:1 - tmpfs none rw\n")
    assert entry.propagation == ("shared:7", "master:2", "propagate_from:1")
    assert entry.read_only


def test_octal_escapes_stand_for_bytes() -> None:
    (entry,) = mounts.parse_mountinfo(rb"1 0 0:1 /x\134y /a\040b\011c\012d rw - tmpfs so\040urce rw" + b"\n")
    assert entry.root == "/x\\y"
    assert entry.target == "/a b\tc\nd"
    assert entry.source == "so urce"


def test_names_that_are_not_utf8_come_back_as_the_same_bytes() -> None:
    (entry,) = mounts.parse_mountinfo(b"1 0 0:1 / /a\xff\xfe rw - tmpfs none rw\n")
    assert os.fsencode(entry.target) == b"/a\xff\xfe"


def test_an_empty_source_does_not_shift_the_fields() -> None:
    (entry,) = mounts.parse_mountinfo(b"1 0 0:1 / /a rw - tmpfs  rw,size=4k\n")
    assert entry.source == ""
    assert entry.super_options == ("rw", "size=4k")


def test_the_table_of_this_machine_can_be_read() -> None:
    entries = mounts.mounts()
    assert any(entry.target == "/" for entry in entries)
    assert any(entry.fs_type == "proc" for entry in entries)


def test_the_root_is_not_below_itself() -> None:
    below = mounts.mounts_below("/")
    assert below and "/" not in {entry.target for entry in below}
    assert mounts.mounts_below("/", itself=True)[-1].target == "/"


# ---------------------------------------------------------------- mounting


@needs_root
@pytest.mark.kernel
def test_a_mount_is_found_and_gone_after_unmount(place: Path) -> None:
    target = place / "with space\nand newline\\"
    target.mkdir()
    assert mounts.mount_at(target) is None
    mounts.mount("crab-test", target, "tmpfs", mounts.MS_NOSUID | mounts.MS_NODEV, "size=64k")
    entry = mounts.mount_at(target)
    assert entry is not None
    assert entry.target == str(target)
    assert (entry.fs_type, entry.source) == ("tmpfs", "crab-test")
    assert {"nosuid", "nodev"} <= set(entry.options)
    mounts.unmount(target)
    assert mounts.mount_at(target) is None


@needs_root
@pytest.mark.kernel
def test_a_bind_mount_within_one_file_system_is_seen(place: Path) -> None:
    source, target = place / "source", place / "target"
    source.mkdir()
    target.mkdir()
    mounts.mount(source, target, flags=mounts.MS_BIND)
    assert not os.path.ismount(target)
    entry = mounts.mount_at(target)
    assert entry is not None
    assert entry.root.endswith("/source")


@needs_root
@pytest.mark.kernel
def test_the_topmost_of_stacked_mounts_counts(place: Path) -> None:
    for name in ("lower", "upper"):
        mounts.mount(name, place, "tmpfs", 0, "size=64k")
    top = mounts.mount_at(place)
    assert top is not None and top.source == "upper"
    assert [entry.source for entry in mounts.mounts_below(place, itself=True)] == ["upper", "lower"]
    mounts.unmount(place)
    top = mounts.mount_at(place)
    assert top is not None and top.source == "lower"


@needs_root
@pytest.mark.kernel
def test_mounts_below_come_in_an_order_to_unmount_them(place: Path) -> None:
    mounts.mount("one", place, "tmpfs", 0, "size=64k")
    (place / "two").mkdir()
    mounts.mount("two", place / "two", "tmpfs", 0, "size=64k")
    (place / "two/three").mkdir()
    mounts.mount("three", place / "two/three", "tmpfs", 0, "size=64k")
    assert [entry.source for entry in mounts.mounts_below(place)] == ["three", "two"]
    for entry in mounts.mounts_below(place, itself=True):
        mounts.unmount(entry.target)
    assert mounts.mount_at(place) is None


@needs_root
@pytest.mark.kernel
def test_a_folder_with_a_similar_name_is_not_below(place: Path) -> None:
    (place / "a").mkdir()
    (place / "ab").mkdir()
    mounts.mount("x", place / "ab", "tmpfs", 0, "size=64k")
    assert mounts.mounts_below(place / "a", itself=True) == ()


@needs_root
@pytest.mark.kernel
def test_errors_keep_their_number_and_name_the_path(place: Path) -> None:
    with pytest.raises(OSError) as caught:
        mounts.mount("none", place / "missing", "tmpfs")
    assert caught.value.errno == errno.ENOENT
    assert str(place / "missing") in str(caught.value)
    with pytest.raises(OSError) as caught:
        mounts.mount("none", place, "no-such-fs")
    assert caught.value.errno == errno.ENODEV
    with pytest.raises(OSError) as caught:
        mounts.unmount(place)
    assert caught.value.errno == errno.EINVAL
    assert str(place) in str(caught.value)


# ---------------------------------------------------------------- loop devices


def _sparse(path: Path) -> Path:
    with open(path, "wb") as file:
        file.truncate(8 << 20)
    return path


@needs_root
@pytest.mark.kernel
def test_an_attached_file_is_found_under_all_its_names(place: Path) -> None:
    file = _sparse(place / "disk ")  # the space at the end is part of the name
    os.link(file, place / "hard")
    os.symlink(file, place / "soft")
    _sparse(place / "other")
    assert mounts.loops_of(file) == ()
    with mounts.attached(file) as device:
        for name in ("disk ", "hard", "soft"):
            assert mounts.loops_of(place / name) == (device,)
        assert mounts.loops_of(place / "other") == ()
    assert mounts.wait_detached(file)


@needs_root
@pytest.mark.kernel
def test_an_attached_file_is_not_attached_again(place: Path) -> None:
    file = _sparse(place / "disk")
    with mounts.attached(file) as device, mounts.attached(file) as again:
        assert again == device
        assert len(mounts.loops_of(file)) == 1
    assert mounts.wait_detached(file)


@needs_root
@pytest.mark.kernel
def test_a_device_knows_that_its_file_has_grown(place: Path) -> None:
    file = _sparse(place / "disk")
    with mounts.attached(file) as device:
        os.truncate(file, 16 << 20)
        mounts.grow_loop(device)
        assert int(Path("/sys/block", Path(device).name, "size").read_text()) * 512 == 16 << 20
    assert mounts.wait_detached(file)


@needs_root
@pytest.mark.kernel
def test_a_missing_file_cannot_be_attached(place: Path) -> None:
    with pytest.raises(FileNotFoundError), mounts.attached(place / "missing"):
        pass
