"""Compact images: the same bytes, each page on disk once."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.stored import extents
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.checkpoint.dumps import Dump, dumps, image, space
from unit.disks import MIB, btrfs_disk

from crab.checkpoint import compact
from crab.checkpoint.compact import Compacted
from crab.checkpoint.pages import PAGE, Layout
from crab.errors import NoSpace
from crab.host import btrfs

pytestmark = [pytest.mark.kernel, pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")]


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with btrfs_disk(tmp_path_factory.mktemp("disk")) as mounted:
        yield mounted


@pytest.fixture
def place(disk: Path) -> Iterator[Path]:
    folder = disk / "place"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def made(images: Path, target: Path, before: Path | None = None) -> Compacted:
    """Make images compact, and compare every byte, size and mode."""
    found = compact.compact(images, sorted(os.listdir(images)), target, before)
    assert sorted(os.listdir(target)) == sorted(os.listdir(images))
    for name in os.listdir(images):
        assert (target / name).read_bytes() == (images / name).read_bytes(), name
        assert (target / name).stat().st_mode == (images / name).stat().st_mode
    return found


def on_disk(*folders: Path) -> int:
    """Bytes of data that they take together."""
    found = {extent for folder in folders for path in folder.iterdir() for extent in extents(str(path))}
    return sum(length for _, length in found)


def noise(number: int) -> bytes:
    """A page that cannot be compressed."""
    return number.to_bytes(8, "little") + os.urandom(PAGE - 8)


def test_what_changed_is_all_that_is_written(tmp_path: Path, place: Path) -> None:
    pages = {(1 << 24) + number * PAGE: noise(number) for number in range(1000)}
    first = made(Dump(tmp_path / "1", {1: pages}).folder, place / "1")
    alone = on_disk(place / "1")
    assert alone >= 1000 * PAGE and first.own >= 1000 * PAGE
    for changed in (0, 10, 11, 999):
        pages[(1 << 24) + changed * PAGE] = noise(changed)
    second = made(Dump(tmp_path / "2", {1: pages}).folder, place / "2", place / "1")
    assert 4 * PAGE <= second.own < 6 * PAGE and second.size == first.size
    assert on_disk(place / "1", place / "2") - alone <= 5 * PAGE
    shutil.rmtree(place / "1")
    made(Dump(tmp_path / "3", {1: pages}).folder, place / "3", place / "2")


def test_pages_that_are_apart_are_compressed_together(tmp_path: Path, place: Path) -> None:
    numbers = list(range(1, 2001))
    made(Dump(tmp_path / "1", {1: space(*numbers)}).folder, place / "1")
    alone = on_disk(place / "1")
    assert alone < 2000 * PAGE / 8
    for changed in range(0, 2000, 20):
        numbers[changed] += 10**6
    assert made(Dump(tmp_path / "2", {1: space(*numbers)}).folder, place / "2", place / "1").own < 110 * PAGE
    assert on_disk(place / "1", place / "2") - alone < 100 * PAGE / 4


def test_zeros_and_what_a_forked_process_shares_are_written_once(tmp_path: Path, place: Path) -> None:
    parent = {(1 << 24) + number * PAGE: noise(number) for number in range(300)}
    found = made(Dump(tmp_path / "1", {7: parent, 3: parent, 9: space(*[0] * 500)}, {3: 7, 7: 1}).folder, place / "1")
    assert 300 * PAGE <= found.own < 310 * PAGE
    assert on_disk(place / "1") < 310 * PAGE
    with open(place / "1" / "pages-9.img", "rb") as zeros:
        assert os.lseek(zeros.fileno(), 0, os.SEEK_HOLE) == 500 * PAGE, "zeros are data, as they were"


def test_memory_in_too_many_pieces_is_written_anew(tmp_path: Path, place: Path) -> None:
    numbers, before = list(range(1, 1501)), None
    most = 0
    for turn in range(12):
        target = place / str(turn)
        made(Dump(tmp_path / str(turn), {1: space(*numbers)}).folder, target, before)
        pieces = len(btrfs.pieces(target / "pages-1.img"))
        assert pieces <= 256 + 1500 // 4 + 2 * 100
        most, before = max(most, pieces), target
        for changed in range(turn % 15, 1500, 15):
            numbers[changed] += 10**6
    assert most > 256, "the bound was reached"


def test_no_dump_holds_much_more_than_it_needs(tmp_path: Path, place: Path) -> None:
    """An extent stays as long as one page of it is needed."""
    pages = {(1 << 24) + number * PAGE: noise(number) for number in range(1600)}
    before: Path | None = None
    for turn in range(120):
        target = place / str(turn)
        made(Dump(tmp_path / str(turn), {1: pages}).folder, target, before)
        shutil.rmtree(tmp_path / str(turn))
        if before:
            shutil.rmtree(before)
        btrfs.sync(place)
        before = target
        assert on_disk(target) <= (1 << 20) + 2 * 1600 * PAGE + 100 * PAGE
        for changed in range(turn * 32 % 1600, turn * 32 % 1600 + 32):
            pages[(1 << 24) + changed * PAGE] = noise(changed)


def test_it_can_be_left_off_at_any_moment(tmp_path: Path, place: Path) -> None:
    dump = Dump(tmp_path / "1", {1: space(*range(1, 400)), 2: space(*range(500, 700))})
    for moment in range(12):
        looks = iter(range(moment))

        def look(looks: Iterator[int] = looks) -> None:
            if next(looks, None) is None:
                raise InterruptedError

        with pytest.raises(InterruptedError):
            compact.compact(dump.folder, sorted(os.listdir(dump.folder)), place / f"left-{moment}", None, look)
    made(dump.folder, place / "1")


def test_a_pagemap_that_speaks_of_more_pages_than_there_are_is_not_believed(tmp_path: Path, place: Path) -> None:
    dump = Dump(tmp_path / "1", {1: space(1, 2, 3)})
    image(dump.folder / "pagemap-1.img", [(1, 0, 1)], [(1, 0, 1 << 24), (2, 0, 1 << 40), (4, 0, 4)])
    with pytest.raises(ValueError, match="more pages than there are"):
        Layout(dump.folder)
    made(dump.folder, place / "1")


def test_images_that_are_not_understood_are_copied(tmp_path: Path, place: Path) -> None:
    dump = Dump(tmp_path / "1", {1: space(1, 2, 3)})
    (dump.folder / "pagemap-1.img").write_bytes(os.urandom(100))
    assert made(dump.folder, place / "1").own == made(dump.folder, place / "2", place / "1").size
    odd = Dump(tmp_path / "2", {1: space(1, 2, 3)})
    with open(odd.folder / "pages-1.img", "ab") as file:
        file.write(b"more")
    made(odd.folder, place / "3")


def test_one_before_that_is_gone_costs_room_only(tmp_path: Path, place: Path) -> None:
    dump = Dump(tmp_path / "1", {1: space(*range(1, 100))})
    assert made(dump.folder, place / "1", place / "nothing").own >= 99 * PAGE


def test_a_full_disk_is_said(tmp_path: Path, disk: Path) -> None:
    pages = {(1 << 24) + number * PAGE: noise(number) for number in range(2000)}
    dump = Dump(tmp_path / "1", {1: pages})
    with open(disk / "ballast", "wb") as ballast, pytest.raises(NoSpace):
        while True:
            try:
                ballast.write(os.urandom(4 * MIB))
                os.fsync(ballast.fileno())
            except OSError:
                break
        compact.compact(dump.folder, sorted(os.listdir(dump.folder)), disk / "full", None)
    (disk / "ballast").unlink()
    shutil.rmtree(disk / "full", ignore_errors=True)
    btrfs.reclaim(disk)


@given(st.lists(dumps, min_size=1, max_size=4), st.dictionaries(st.integers(1, 3), st.integers(0, 3), max_size=3))
@settings(max_examples=15, deadline=None)
def test_whatever_the_pages_are_they_are_there(
    tmp_path_factory: pytest.TempPathFactory,
    disk: Path,
    history: list[dict[int, dict[int, bytes]]],
    parents: dict[int, int],
) -> None:
    folder, before = tmp_path_factory.mktemp("dumps"), None
    place = disk / folder.name
    place.mkdir()
    try:
        for number, spaces in enumerate(history):
            dump = Dump(folder / str(number), spaces, parents)
            made(dump.folder, place / str(number), before)
            before = place / str(number)
    finally:
        shutil.rmtree(place)
