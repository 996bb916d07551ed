"""The registry of sandboxes and checkpoints."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from crab.daemon.registry import Record, Registry
from crab.errors import AlreadyExists, Damaged, Incompatible, NotFound
from crab.model import Checkpoint, SandboxSpec, State


def record(identity: str, name: str, slot: int = 0) -> Record:
    return Record(id=identity, name=name, slot=-1, generation=1, spec=SandboxSpec(image="debian"), created=float(slot),
                  image_fingerprint="blake3:x", runtime="r", wanted=State.RUNNING)  # fmt: skip


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(tmp_path / "registry.db")


def test_a_sandbox_is_found_by_name_id_and_beginning_of_its_id(registry: Registry) -> None:
    made = registry.add(record("sabcdef", "work"), 10)
    assert registry.find("work") == registry.find("sabcdef") == registry.find("sabc") == made


def test_an_unknown_sandbox_is_answered_by_what_exists(registry: Registry) -> None:
    registry.add(record("s1", "work", 0), 10)
    with pytest.raises(NotFound) as caught:
        registry.find("wrok")
    assert "work" in caught.value.remedy


def test_a_name_is_given_once(registry: Registry) -> None:
    registry.add(record("s1", "work", 0), 10)
    with pytest.raises(AlreadyExists):
        registry.add(record("s2", "work", 1), 10)


def test_slots_are_reused_lowest_first(registry: Registry) -> None:
    for slot in range(3):
        assert registry.add(record(f"s{slot}", f"n{slot}", slot), 10).slot == slot
    registry.remove("s1")
    assert registry.add(record("s9", "n9"), 10).slot == 1
    with pytest.raises(NotFound):
        registry.add(record("s8", "n8"), 3)


def test_concurrent_creations_never_share_a_slot(registry: Registry) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda n: registry.add(record(f"s{n}", f"n{n}"), 100), range(40)))
    assert sorted(found.slot for found in made) == list(range(40))


def test_a_removed_sandbox_does_not_come_back(registry: Registry) -> None:
    made = registry.add(record("s1", "work"), 10)
    registry.remove("s1")
    with pytest.raises(NotFound):
        registry.save(made)
    assert registry.all() == []


def test_a_checkpoint_and_the_head_of_its_sandbox_are_written_together(registry: Registry) -> None:
    made = registry.add(record("s1", "work"), 10)
    checkpoint = Checkpoint(id="c1", sandbox="s1", turn=1, kind="full", created=1.0)
    registry.advance(msgspec.structs.replace(made, head="c1"), checkpoint)
    assert registry.find("work").head == "c1" and registry.checkpoints("s1") == [checkpoint] == registry.checkpoints()
    registry.unindex("c1")
    assert registry.checkpoint("c1") is None


def test_everything_is_there_when_it_is_opened_again(tmp_path: Path) -> None:
    first = Registry(tmp_path / "r.db")
    first.add(record("s1", "work", 0), 10)
    first.close()
    assert [found.name for found in Registry(tmp_path / "r.db").all()] == ["work"]


def test_a_file_that_is_no_registry_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "r.db"
    path.write_bytes(b"not a database at all" * 100)
    with pytest.raises(Damaged):
        Registry(path)
    assert path.read_bytes().startswith(b"not a database")


def test_a_registry_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.db"
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 99")
    db.commit()
    db.close()
    with pytest.raises(Incompatible):
        Registry(path)


def spoil(registry: Registry, table: str, identity: str) -> None:
    with registry._transaction() as db:
        db.execute(f"UPDATE {table} SET record = ? WHERE id = ?", (b'{"half": ', identity))


def test_one_record_that_cannot_be_read_hides_no_other(registry: Registry) -> None:
    registry.add(record("s1abc", "one", 0), 10)
    registry.add(record("s2abc", "two", 1), 10)
    spoil(registry, "sandboxes", "s1abc")
    assert [found.name for found in registry.all()] == ["two"]
    assert [(found.id, found.name, found.generation) for found in registry.broken()] == [("s1abc", "one", 1)]
    for name in ("one", "s1abc", "s1ab"):
        with pytest.raises(Damaged) as caught:
            registry.find(name)
        assert "rm --force one" in caught.value.remedy
    with pytest.raises(AlreadyExists):
        registry.add(record("s3", "one", 2), 10)
    assert registry.add(record("s3", "three", 2), 10).slot == 2


def test_a_checkpoint_that_cannot_be_read_is_as_if_it_were_not_in_the_index(registry: Registry) -> None:
    for name in ("c1", "c2"):
        registry.index(Checkpoint(id=name, sandbox="s1", turn=1, kind="full", created=1.0))
    spoil(registry, "checkpoints", "c1")
    assert [found.id for found in registry.checkpoints()] == ["c2"]
    assert registry.checkpoint("c1") is None
