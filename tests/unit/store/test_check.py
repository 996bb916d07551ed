"""A check names what is damaged and exactly which checkpoints that costs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from unit.store.stores import again, made, put, read

from crab.errors import Damaged
from crab.store.check import check
from crab.store.repository import Repository

KEYS = pytest.mark.parametrize("key", [None, b"a key of at least sixteen bytes"], ids=["plain", "keyed"])


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    """c1 and c2 share a content, c3 stands alone."""
    return filled(tmp_path, None)


def filled(tmp_path: Path, key: bytes | None) -> Repository:
    repository = made(tmp_path / "s", key)
    shared = os.urandom(30_000)
    put(repository, "c1", shared, b"one" * 1000)
    put(repository, "c2", shared, b"two" * 1000)
    put(repository, "c3", b"three" * 1000)
    return repository


def pack_of(repository: Repository, content: bytes) -> Path:
    place = repository.place(repository.sealing.identify(content))
    assert place
    return Path(repository.objects.url) / place[0].name


@KEYS
def test_a_whole_store(tmp_path: Path, key: bytes | None) -> None:
    repository = filled(tmp_path, key)
    for data in (False, True):
        found = check(again(repository, key), data=data)
        assert (found.problems, found.affected, found.notes, found.checkpoints, found.packs) == ((), (), (), 3, 6)
    assert found.read == sum(path.stat().st_size for path in (tmp_path / "s").rglob("packs/*/*"))


@KEYS
def test_a_flipped_bit_is_found_by_reading_everything(tmp_path: Path, key: bytes | None) -> None:
    repository = filled(tmp_path, key)
    pack = pack_of(repository, b"two" * 1000)
    content = bytearray(pack.read_bytes())
    content[60] ^= 1
    pack.write_bytes(content)
    assert not check(again(repository, key)).problems
    found = check(again(repository, key), data=True)
    assert found.affected == ("c2",)
    (problem,) = found.problems
    assert problem.checkpoints == ("c2",)
    assert pack.name in problem.what
    with pytest.raises(Damaged):
        read(again(repository, key), "c2")
    read(again(repository, key), "c1")


def test_only_the_blobs_that_are_hit_count(repository: Repository) -> None:
    """The pack of c1 has the shared content and its own: one of them is damaged."""
    pack = pack_of(repository, b"one" * 1000)
    content = bytearray(pack.read_bytes())
    content[100] ^= 1  # in the shared one, which comes first
    pack.write_bytes(content)
    assert check(again(repository), data=True).affected == ("c1", "c2")
    content[100] ^= 1
    content[-60] ^= 1  # in the list at the end, which nobody needs while there is an index
    pack.write_bytes(content)
    found = check(again(repository), data=True)
    assert found.affected == ()
    assert "0 of 2 blobs lost" in found.problems[0].what


def test_a_pack_that_is_missing_or_cut(repository: Repository) -> None:
    pack = pack_of(repository, b"three" * 1000)
    whole = pack.read_bytes()
    pack.write_bytes(whole[:10])
    found = check(again(repository))
    assert found.affected == ("c3",)
    assert f"10 bytes instead of {len(whole)}" in found.problems[0].what
    pack.write_bytes(whole[:-1])  # the list at the end is cut, and no blob
    found = check(again(repository), repair=True)
    assert found.affected == () and "0 of 1 blobs lost" in found.problems[0].what
    assert read(again(repository), "c3") == [b"three" * 1000]
    mended = again(repository)
    mended.refresh()
    pack_of(mended, b"three" * 1000).unlink()
    found = check(again(repository))
    assert found.affected == ("c3",)
    assert found.problems[0].what.endswith("is missing")
    assert found.problems[0].checkpoints == ("c3",)


def test_a_damaged_record(repository: Repository) -> None:
    path = Path(repository.objects.url) / "checkpoints" / "c2"
    path.write_bytes(path.read_bytes()[:-5])
    found = check(again(repository))
    assert found.affected == ("c2",)
    assert [one.checkpoints for one in found.problems] == [("c2",)]
    assert [one.checkpoint.id for one in again(repository).records()] == ["c1", "c3"]


def test_what_is_sent_again_after_a_repair_makes_the_store_whole(repository: Repository) -> None:
    place = repository.place(repository.sealing.identify(b"one" * 1000))
    assert place
    pack = Path(repository.objects.url) / place[0].name
    shared = read(repository, "c1")[0]
    content = bytearray(pack.read_bytes())
    content[100] ^= 1  # in the shared content
    pack.write_bytes(content)
    found = check(again(repository), data=True, repair=True)
    assert found.affected == ("c1", "c2")
    assert not pack.exists()
    assert check(again(repository), data=True).affected == ("c1", "c2")
    last = again(repository)
    assert put(last, "c4", shared).checkpoint.added > 30_000
    assert not check(again(repository), data=True).problems
    assert read(last, "c1") == [shared, b"one" * 1000]


@KEYS
def test_indexes_are_made_again_from_packs_alone(tmp_path: Path, key: bytes | None) -> None:
    repository = filled(tmp_path, key)
    first, *others = sorted((tmp_path / "s" / "index").iterdir())
    first.write_bytes(b"?")
    for other in others:
        other.unlink()
    with pytest.raises(Damaged):
        again(repository, key).refresh()
    found = check(again(repository, key))
    assert found.affected == ("c1", "c2", "c3")
    assert any(first.name in one.what for one in found.problems)
    found = check(again(repository, key), repair=True)
    assert len(found.repaired) == 7
    assert (found.problems, found.affected) == ((), ())
    assert not check(again(repository, key), data=True).problems
    last = again(repository, key)
    last.refresh()
    assert read(last, "c3") == [b"three" * 1000]


def test_a_pack_that_is_no_pack_is_said_and_not_indexed(repository: Repository) -> None:
    folder = Path(repository.objects.url) / "packs" / "aa"
    folder.mkdir(exist_ok=True)
    (folder / ("aa" * 32)).write_bytes(b"something")
    (folder / "note").write_bytes(b"something")
    found = check(again(repository), repair=True)
    assert len(found.problems) == 2
    assert found.affected == ()


def test_a_copy_elsewhere_is_enough(repository: Repository) -> None:
    """The same content in two packs: the loss of one costs nothing."""
    other = again(repository)
    other._indexes, other._places = {}, {}
    other.refresh = lambda: None  # type: ignore[method-assign]  # it knows of nothing, as a writer at the same time
    put(other, "c4", b"three" * 1000)
    pack_of(repository, b"three" * 1000).unlink()
    for data in (False, True):
        found = check(again(repository), data=data)
        assert found.affected == ()
        assert not found.problems
        assert "no checkpoint misses it" in found.notes[0]
    last = again(repository)
    last.refresh()
    assert read(last, "c3") == [b"three" * 1000]
