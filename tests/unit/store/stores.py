"""Stores for tests: contents that look like checkpoints, in a store on a folder, and a service whose clock can be set."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from crab.model import StoredCheckpoint
from crab.store.folder import FolderObjects
from crab.store.objects import Found
from crab.store.repository import Record, Repository
from crab.store.writing import Writer


class Clocked(FolderObjects):
    """A folder whose clock is ahead by so many seconds (what was written before stays where it was)."""

    ahead = 0.0

    def put(self, name: str, data: bytes | bytearray) -> None:
        super().put(name, data)
        self._stamp(name)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        done = super().put_if_absent(name, data)
        if done:
            self._stamp(name)
        return done

    def _stamp(self, name: str) -> None:
        path = self.root / name
        at = path.stat().st_mtime + self.ahead
        os.utime(path, (at, at))


class Counting(Clocked):
    """Says what was read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.read: list[str] = []

    def get(self, name: str) -> bytes:
        self.read.append(name)
        return super().get(name)

    def list(self, prefix: str) -> Iterator[Found]:
        self.read.append(f"{prefix}*")
        return super().list(prefix)


def stored_checkpoint(identity: str, **fields: object) -> StoredCheckpoint:
    made = StoredCheckpoint(id=identity, sandbox="s1", sandbox_name="box", turn=1, kind="full", created=1.0)
    return msgspec.structs.replace(made, **fields)


def record(identity: str, root: bytes, **fields: object) -> Record:
    return Record(checkpoint=stored_checkpoint(identity, **fields), root=root)


def put(repository: Repository, identity: str, *contents: bytes, **fields: object) -> Record:
    """Store a checkpoint that consists of these contents."""
    with Writer(repository) as writer:
        inner = writer.node([writer.add(content) for content in contents], b"inner")
        return writer.publish(record(identity, writer.node([inner], identity.encode()), **fields))


def read(repository: Repository, identity: str) -> list[bytes]:
    """The contents of one, as they come out of the store."""
    (inner,), text = repository.node(repository.record(identity).root)
    assert text == identity.encode()
    return [repository.get(link) for link in repository.node(inner)[0]]


def made(folder: Path, key: bytes | None = None, grace: float = 3600.0) -> Repository:
    folder.mkdir(exist_ok=True)
    return Repository.create(Clocked(folder), key, grace)


def again(repository: Repository, key: bytes | None = None) -> Repository:
    """The same store, opened by another process."""
    return Repository.open(Clocked(Path(repository.objects.url)), key)


def forward(*repositories: Repository, seconds: float) -> None:
    """Let time pass, as the service sees it."""
    for repository in repositories:
        assert isinstance(repository.objects, Clocked)
        repository.objects.ahead += seconds
