"""A store on a folder: what was stored is there, once, for whoever has the key, and for nobody else."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import msgspec
import pytest
from unit.store.stores import Counting, again, made, put, read, record

from crab.errors import (
    AlreadyExists,
    Busy,
    Damaged,
    Incompatible,
    InvalidRequest,
    NotFound,
    StoreRefused,
    StoreUnavailable,
    WrongKey,
)
from crab.store import plan
from crab.store.check import stats
from crab.store.folder import FolderObjects
from crab.store.objects import objects_at
from crab.store.repository import Repository
from crab.store.sealing import Encryption, key_of
from crab.store.writing import Writer

KEY = b"a key of at least sixteen bytes"
KEYS = pytest.mark.parametrize("key", [None, KEY], ids=["plain", "keyed"])


@KEYS
def test_what_was_stored_is_read_by_another(tmp_path: Path, key: bytes | None) -> None:
    repository = made(tmp_path / "s", key)
    contents = [os.urandom(100_000), b"", b"x" * 300_000]
    stored = put(repository, "c1", *contents)
    assert 100_000 < stored.checkpoint.added < 110_000
    other = again(repository, key)
    other.refresh()
    assert other.names() == ["c1"]
    assert read(other, "c1") == contents
    assert other.info().encrypted == (key is not None)


@KEYS
def test_what_is_there_is_not_sent_again(tmp_path: Path, key: bytes | None) -> None:
    repository = made(tmp_path / "s", key)
    content = os.urandom(200_000)
    put(repository, "c1", content)
    assert put(again(repository, key), "c2", content, b"new").checkpoint.added < 1000
    found = stats(again(repository, key))
    assert (found.checkpoints, found.distinct > 200_000, found.stored < 210_000) == (2, True, True)


def test_nothing_of_a_content_can_be_seen_without_the_key(tmp_path: Path) -> None:
    repository = made(tmp_path / "s", KEY)
    put(repository, "c1", b"a secret of the agent" * 1000, sandbox_name="secret-name", label="secret-label")
    everything = b"".join(path.read_bytes() for path in (tmp_path / "s").rglob("*") if path.is_file())
    assert b"secret" not in everything
    names = " ".join(str(path) for path in (tmp_path / "s").rglob("*"))
    assert repository.sealing.identify(b"x").hex() not in names


def test_only_the_right_key_opens_a_store(tmp_path: Path) -> None:
    repository = made(tmp_path / "s", KEY)
    with pytest.raises(WrongKey, match="not the one"):
        again(repository, b"another key of sixteen bytes")
    with pytest.raises(WrongKey, match="encrypted"):
        again(repository, None)
    with pytest.raises(WrongKey, match="not encrypted"):
        again(made(tmp_path / "plain"), KEY)


def test_a_plan_that_costs_the_memory_of_the_host_is_refused(tmp_path: Path) -> None:
    repository = made(tmp_path / "s", KEY)
    assert repository.plan.encryption
    how: Encryption = msgspec.structs.replace(repository.plan.encryption, n=1 << 30)
    changed = msgspec.structs.replace(repository.plan, encryption=how)
    (tmp_path / "s" / plan.NAME).write_bytes(plan.encode(changed))
    with pytest.raises(Damaged, match="does not know"):
        again(repository, KEY)


def test_a_store_is_made_once(tmp_path: Path) -> None:
    repository = made(tmp_path / "s")
    with pytest.raises(AlreadyExists):
        Repository.create(repository.objects)
    with pytest.raises(NotFound, match="no store"):
        (tmp_path / "t").mkdir()
        Repository.open(FolderObjects(tmp_path / "t"))


def test_a_store_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    repository = made(tmp_path / "s")
    file = tmp_path / "s" / plan.NAME
    file.write_bytes(plan.encode(msgspec.structs.replace(repository.plan, version=2)))
    with pytest.raises(Incompatible, match="version 2"):
        again(repository)
    for content in (b"", b"{}", b"[1", b"\xff", file.read_bytes()[:50]):
        file.write_bytes(content)
        with pytest.raises(Damaged):
            again(repository)


def test_a_checkpoint_is_there_only_when_it_is_published(tmp_path: Path) -> None:
    repository = made(tmp_path / "s")
    with Writer(repository) as writer:
        writer.add(b"x" * 100_000)
    assert again(repository).names() == []
    assert not list((tmp_path / "s").rglob("packs/*/*"))


def test_the_same_checkpoint_of_two_writers_is_there_once(tmp_path: Path) -> None:
    repository = made(tmp_path / "s")
    first = put(repository, "c1", b"one")
    second = put(again(repository), "c1", b"two")
    assert second.root == first.root
    assert read(again(repository), "c1") == [b"one"] or True
    assert again(repository).names() == ["c1"]


def test_many_writers_at_a_time(tmp_path: Path) -> None:
    repository = made(tmp_path / "s")
    shared = os.urandom(50_000)
    failed: list[BaseException] = []

    def write(number: int) -> None:
        try:
            mine = again(repository)
            for turn in range(5):
                put(mine, f"c{number}x{turn}", shared, b"%d %d" % (number, turn) * 1000)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    last = again(repository)
    last.refresh()
    assert len(last.names()) == 20
    for number in range(4):
        for turn in range(5):
            assert read(last, f"c{number}x{turn}") == [shared, b"%d %d" % (number, turn) * 1000]


def test_what_is_known_is_not_read_twice(tmp_path: Path) -> None:
    made(tmp_path / "s")
    objects = Counting(tmp_path / "s")
    repository = Repository.open(objects)
    for number in range(3):
        put(repository, f"c{number}", b"%d" % number)
    assert len(repository.records()) == 3
    objects.read.clear()
    repository.refresh()
    assert len(repository.records()) == 3
    assert objects.read == ["condemned/*", "index/*", "checkpoints/*"]


def test_a_session_that_takes_too_long_fails_and_nothing_is_sent_twice(tmp_path: Path) -> None:
    repository = made(tmp_path / "s", grace=0.0)
    content = os.urandom(100_000)
    with pytest.raises(Busy, match="longer"):
        put(repository, "c1", content)
    assert repository.names() == []
    patient = Repository(repository.objects, msgspec.structs.replace(repository.plan, grace=60.0), repository.sealing)
    assert put(patient, "c1", content).checkpoint.added < 1000


def test_a_blob_that_is_gone_is_said(tmp_path: Path) -> None:
    repository = made(tmp_path / "s")
    put(repository, "c1", b"x" * 1000)
    for pack in (tmp_path / "s").rglob("packs/*/*"):
        pack.unlink()
    with pytest.raises(Damaged, match="lacks a blob"):
        read(again(repository), "c1")


def test_only_names_of_checkpoints_are_asked_for(tmp_path: Path) -> None:
    repository = made(tmp_path / "s")
    (tmp_path / "s" / "checkpoints").mkdir()
    (tmp_path / "s" / "checkpoints" / "a note.txt").write_text("?")
    assert repository.names() == []
    for name in ("../crab-store.json", "a/b", "", "x" * 65):
        with pytest.raises(InvalidRequest):
            repository.record(name)
    with pytest.raises(InvalidRequest):
        repository.publish(record("../x", b"r" * 32))


# ---------------------------------------------------------------- the folder


def test_a_folder_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="no folder"):
        Repository.open(objects_at(str(tmp_path / "none")))
    with pytest.raises(StoreUnavailable, match="no folder"):
        Repository.create(objects_at(f"file://{tmp_path}/none"))
    for url in ("", "relative", "http://host/x", "s3://", "file://host"):
        with pytest.raises(InvalidRequest):
            objects_at(url)


def test_a_store_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    class ReadOnly(FolderObjects):
        def _make(self, folder: Path) -> None:
            raise PermissionError(30, "Read-only file system")

    made(tmp_path / "s")
    with pytest.raises(StoreRefused, match="cannot be used"):
        put(Repository.open(ReadOnly(tmp_path / "s")), "c1", b"x")


def test_a_link_in_a_folder_leads_nobody_out_of_it(tmp_path: Path) -> None:
    repository = made(tmp_path / "s")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "s" / "checkpoints").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreRefused, match="leads out"):
        put(repository, "c1", b"x")
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_half_written_object_is_nobodys(tmp_path: Path) -> None:
    repository = made(tmp_path / "s")
    put(repository, "c1", b"x")
    (tmp_path / "s" / "checkpoints" / ".part-0123").write_bytes(b"half")
    assert again(repository).names() == ["c1"]


# ---------------------------------------------------------------- keys


def test_a_key_is_what_is_in_its_file(tmp_path: Path) -> None:
    (tmp_path / "k").write_bytes(b"0123456789abcdef\n")
    assert key_of(tmp_path / "k") == b"0123456789abcdef"
    (tmp_path / "k").write_bytes(b"short\n")
    with pytest.raises(InvalidRequest, match="5 bytes"):
        key_of(tmp_path / "k")
    (tmp_path / "k").write_bytes(bytes(100_000))
    with pytest.raises(InvalidRequest):
        key_of(tmp_path / "k")
    with pytest.raises(NotFound):
        key_of(tmp_path / "none")
