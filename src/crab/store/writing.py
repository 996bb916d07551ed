"""Writing to a store: blobs are gathered into packs, packs are sent, then an index of them, and last the record.

Killed at any moment, what was sent is unreachable and goes with a later `gc`; what an index names already is not sent again.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

import msgspec

from crab.errors import Busy
from crab.store import packs
from crab.store.packs import DATA, NODE, Blob, Pack
from crab.store.repository import Record, Repository, write_index

PACK = 16 << 20
"""Bytes of content in a pack, about: enough that an object store takes it well, little enough that compressing and sending
begin early."""
_THREADS = 2
_WAITING = 2
"""Packs beside those being sent: what bounds the memory."""
_INDEX_EVERY = 16
LEVELS = {DATA: 1, NODE: 3}
"""zstd: memory of programs gets 2% to 5% smaller with level 3, at half the speed. Nodes are small and read often."""


class Writer:
    """One session of writing. A context manager; `publish` ends it, and without it nothing was written.

    Raises `StoreUnavailable`, `StoreRefused`, `NoSpace` in any call.
    """

    def __init__(self, repository: Repository) -> None:
        self.repository = repository
        self.added = 0
        """Bytes that were sent."""
        self._began = _now()
        repository.refresh()
        self._own: set[bytes] = set()
        self._relied: set[bytes] = set()
        """Packs of others that have something of this checkpoint."""
        self._waiting: dict[int, list[Blob]] = {DATA: [], NODE: []}
        self._sizes = {DATA: 0, NODE: 0}
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="crab-store")
        self._room = threading.BoundedSemaphore(_THREADS + _WAITING)
        self._sending: list[Future[Pack]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def has(self, identity: bytes) -> bool:
        """Whether a blob is in the store and will stay until this session has ended."""
        if identity in self._own:
            return True
        found = self.repository.place(identity)
        if found is None or found[0].id in self.repository.condemned:
            return False
        self._relied.add(found[0].id)
        return True

    def add(self, data: bytes, kind: int = DATA) -> bytes:
        """Have a blob in the store; its name."""
        identity = self.repository.sealing.identify(data)
        if not self.has(identity):
            self._own.add(identity)
            self._waiting[kind].append(Blob(identity, kind, data))
            self._sizes[kind] += len(data)
            if self._sizes[kind] >= PACK:
                self._send(kind)
        return identity

    def node(self, links: list[bytes], content: bytes) -> bytes:
        """The same for a node."""
        return self.add(packs.node(links, content), NODE)

    def publish(self, record: Record) -> Record:
        """Send what waits, and make the checkpoint exist. Returns the record that is there now.

        Raises `Busy` if a collection has removed what this relied on, which takes a session of half the grace period: what
        has been sent is not sent again.
        """
        for kind in (DATA, NODE):
            self._send(kind)
        self._index(0)
        self._check(self.repository.plan.grace / 2)
        checkpoint = msgspec.structs.replace(record.checkpoint, added=self.added)
        record = msgspec.structs.replace(record, checkpoint=checkpoint)
        published = self.repository.publish(record)
        if _now() - self._began > self.repository.plan.grace:
            try:
                self._check(float("inf"))
            except Busy:
                if published.root == record.root:  # else it is another writer's, and good
                    self.repository.remove(record.checkpoint.id)
                raise
        return published

    def _send(self, kind: int) -> None:
        blobs = self._waiting[kind]
        if not blobs:
            return
        self._waiting[kind], self._sizes[kind] = [], 0
        self._room.acquire()
        self._sending.append(self._threads.submit(self._sent, blobs, LEVELS[kind]))
        if sum(future.done() for future in self._sending) >= _INDEX_EVERY:
            self._index(_THREADS)

    def _sent(self, blobs: list[Blob], level: int) -> Pack:
        try:
            pack, data = packs.build(self.repository.sealing, blobs, level)
            self.repository.objects.put(pack.name, data)
            return pack
        finally:
            self._room.release()

    def _index(self, leave: int) -> None:
        """Index what was sent, all but the newest `leave` packs, which may still be on their way."""
        ready = self._sending[: len(self._sending) - leave]
        self._sending = self._sending[len(ready) :]
        sent = [future.result() for future in ready]
        if sent:
            write_index(self.repository, sent)
            self.added += sum(pack.size for pack in sent)

    def _check(self, seconds: float) -> None:
        """See `gc` for why this is enough."""
        again = "try again: what has been sent is not sent again"
        if _now() - self._began > seconds:
            raise Busy("sending the checkpoint took longer than a store keeps what nothing needs yet", remedy=again)
        folders = {packs.object_name(identity)[:9] for identity in self._relied}
        prefixes = folders if len(folders) < 16 else {"packs/"}
        there = {found.name for prefix in prefixes for found in self.repository.objects.list(prefix)}
        if gone := {identity for identity in self._relied if packs.object_name(identity) not in there}:
            self.repository.lost(gone)
            raise Busy("what the checkpoint shares with others was removed meanwhile", remedy=again)


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)  # goes on while the machine sleeps, and nobody can set it


def repacked(repository: Repository, blobs: Iterable[tuple[bytes, int]]) -> list[Pack]:
    """Send blobs of the store once more, each given by its name and kind, in new packs that no index names yet. Holds about one
    pack of each kind in memory. Raises `Damaged`, `StoreUnavailable`, `StoreRefused`, `NoSpace`."""
    waiting: dict[int, list[Blob]] = {}
    sizes: Counter[int] = Counter()
    made: list[Pack] = []

    def send(kind: int) -> None:
        pack, data = packs.build(repository.sealing, waiting.pop(kind), LEVELS[kind])
        sizes[kind] = 0
        repository.objects.put(pack.name, data)
        made.append(pack)

    for identity, kind in blobs:
        blob = Blob(identity, kind, repository.get(identity, whole=True))
        waiting.setdefault(kind, []).append(blob)
        sizes[kind] += len(blob.data)
        if sizes[kind] >= PACK:
            send(kind)
    for kind in list(waiting):
        send(kind)
    return made
