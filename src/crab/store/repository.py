"""A store, opened: which blobs it has, where they lie, and the records that make checkpoints exist.

    crab-store.json    the plan, see `plan`
    packs/xx/ID        blobs, see `packs`
    index/ID           where blobs lie: a document (see `documents`) of packs and their lists
    checkpoints/ID     a record: a document that names the root node. Written last: it makes the checkpoint durable
    deleted/ID         a record that was taken away; its contents stay for the grace period, see `gc`
    condemned/ID       packs that nothing needed when that was written, see `gc`
    clock/ID           written and removed again, to know what the service's clock says

Knows nothing of what the blobs say, but which of them a node needs. Writing is in `writing`, removing in `gc`.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from crab.errors import (
    AlreadyExists,
    CrabError,
    Damaged,
    Incompatible,
    InvalidRequest,
    NotFound,
    StoreRefused,
    WrongKey,
)
from crab.model import StoredCheckpoint, StoreInfo, Struct
from crab.store import documents, packs, plan
from crab.store.objects import Found, Objects
from crab.store.packs import NODE, Pack
from crab.store.plan import Plan
from crab.store.sealing import Sealing, new_encryption, sealing

S = TypeVar("S")
_RECORD = re.compile(r"[A-Za-z0-9_-]{1,64}")
_KEPT_PACKS = 96 << 20
_KEPT_BLOBS = 24 << 20
_THREADS = 8
_TRIES = 4


class Indexed(Struct):
    """One pack in an index."""

    id: bytes
    size: int
    salt: bytes
    entries: bytes


class Record(Struct, kw_only=True):
    """What makes a checkpoint exist."""

    checkpoint: StoredCheckpoint
    root: bytes
    """Name of the node that everything of it can be reached from."""


class Repository:
    """See the module. Safe from any thread."""

    def __init__(self, objects: Objects, made: Plan, sealed: Sealing) -> None:
        self.objects = objects
        self.plan = made
        self.sealing = sealed
        self._lock = threading.RLock()
        self._indexes: dict[str, list[Pack]] = {}
        self._places: dict[bytes, tuple[Pack, int]] = {}
        self.condemned: dict[bytes, float] = {}
        """Packs that are condemned, and since when (the newest mark)."""
        self.gone: set[bytes] = set()
        """Packs that an index names and that are not there: rests of two collections at a time. Nothing relies on them."""
        self.whole: set[bytes] = set()
        """Nodes of which all that they need is known to be there (`closure.is_whole`)."""
        self._records: dict[str, tuple[Found, Record]] = {}
        """What was read of the checkpoints, with what the listing said then: one that was sent again is another object."""
        self._packs = _Kept(_KEPT_PACKS)
        self._blobs = _Kept(_KEPT_BLOBS)

    # ---- life

    @classmethod
    def create(cls, objects: Objects, key: bytes | None = None, grace: float = plan.GRACE) -> Repository:
        """Make a store where none is. Raises `AlreadyExists`, `StoreRefused`."""
        encryption, _ = (None, None) if key is None else new_encryption(key)
        made = Plan(id=secrets.token_hex(8), created=time.time(), grace=grace, encryption=encryption)
        data = plan.encode(made)
        if not objects.put_if_absent(plan.NAME, data) and objects.get(plan.NAME) != data:
            raise AlreadyExists(f"there is a store at {objects.url}", remedy="use it, or choose another place")
        if objects.put_if_absent(plan.NAME, data):
            raise StoreRefused(
                f"{objects.url}: the service ignores the condition of a write (If-None-Match), which keeps two daemons apart",
                remedy="use a service that knows it (AWS S3, MinIO, SeaweedFS, R2, …), or a folder",
            )
        return cls.open(objects, key)

    @classmethod
    def open(cls, objects: Objects, key: bytes | None = None) -> Repository:
        """Open a store. Raises `NotFound`, `Damaged`, `Incompatible`, `WrongKey`."""
        try:
            data = objects.get(plan.NAME)
        except NotFound as error:
            raise NotFound(
                f"there is no store at {objects.url}", remedy="check the URL; `crab store init` makes one"
            ) from error
        made = plan.decode(data, objects.url)
        return cls(objects, made, sealing(made.encryption, key, objects.url))

    def is_current(self) -> bool:
        """Whether the store is still the one that was opened: somebody may have made another in its place."""
        try:
            return self.objects.get(plan.NAME) == plan.encode(self.plan)
        except NotFound:
            return False

    def info(self) -> StoreInfo:
        made = self.plan
        return StoreInfo(
            url=self.objects.url,
            id=made.id,
            version=made.version,
            created=made.created,
            encrypted=made.encryption is not None,
            grace=made.grace,
        )

    # ---- where blobs lie

    def refresh(self) -> None:
        """Learn what others have written and removed since the last time. Raises `Damaged` for an index that is no more
        what was written: with a part of the blobs unknown, nothing can be written or removed safely."""
        with self._lock:
            for attempt in range(_TRIES):
                try:
                    self._refresh()
                    return
                except NotFound:  # a collection has merged what was listed a moment ago
                    if attempt == _TRIES - 1:
                        raise

    def _refresh(self) -> None:
        # marks first: whatever is not condemned now stays for the grace period from now on
        condemned: dict[bytes, float] = {}
        marks = list(self.objects.list("condemned/"))
        for found, mark in zip(marks, self._documents(marks, tuple[bytes, ...]), strict=True):
            for pack in mark:
                condemned[pack] = max(found.modified, condemned.get(pack, 0.0))
        listed = list(self.objects.list("index/"))
        names = {found.name for found in listed}
        new = [found for found in listed if found.name not in self._indexes]
        read = self._documents(new, tuple[Indexed, ...])
        gone = self._indexes.keys() - names
        for found, content in zip(new, read, strict=True):
            self._indexes[found.name] = [Pack(one.id, one.size, one.salt, one.entries) for one in content]
        for name in gone:
            del self._indexes[name]
        if gone or condemned != self.condemned:
            self._places = {}
            self.whole = set()
            self.condemned = condemned
            self._place(pack for found in self._indexes.values() for pack in found)
        else:
            self._place(pack for found in new for pack in self._indexes[found.name])

    def _documents(self, listed: list[Found], kind: type[S]) -> list[S]:
        def one(found: Found) -> S:
            return documents.decode(self.sealing, found.name, self.objects.get(found.name), kind)

        with ThreadPoolExecutor(_THREADS) as threads:
            return list(threads.map(one, listed))

    def _place(self, found: Iterable[Pack]) -> None:
        """Of several copies every process must choose the same one, or two collections at a time would remove both."""
        for pack in found:
            if pack.id in self.gone:
                continue
            rank = (pack.id in self.condemned, pack.id)
            for number, (identity, *_) in enumerate(pack.list()):
                known = self._places.get(identity)
                if known is None or rank < (known[0].id in self.condemned, known[0].id):
                    self._places[identity] = (pack, number)

    def learn(self, name: str, found: list[Pack]) -> None:
        """An index that was just written."""
        with self._lock:
            self._indexes[name] = found
            self._place(found)

    def indexes(self) -> dict[str, list[Pack]]:
        """What the indexes say, by their names, as of the last `refresh`."""
        with self._lock:
            return dict(self._indexes)

    def known_packs(self) -> dict[bytes, Pack]:
        """The packs that the indexes name."""
        return {pack.id: pack for found in self.indexes().values() for pack in found}

    def lost(self, found: set[bytes]) -> None:
        """Packs that were found missing."""
        with self._lock:
            self.gone |= found
            self._places = {}
            self.whole = set()
            self._place(pack for known in self._indexes.values() for pack in known)

    def place(self, identity: bytes) -> tuple[Pack, int] | None:
        """The pack that has a blob, and its number in it; one that is not condemned, if there is such a one."""
        with self._lock:
            return self._places.get(identity)

    # ---- reading blobs

    def get(self, identity: bytes, whole: bool = False) -> bytes:
        """A blob, compared with its name. `whole`: others of its pack will be wanted, too. Raises `Damaged` (also if it is
        missing), `StoreUnavailable`."""
        kept = self._blobs.get(identity)
        if kept is not None:
            return kept
        why: Damaged | None = None
        for attempt in range(2):
            # a copy in another pack is as good: two writers at a time make them
            for pack, number in self._all_places(identity):
                try:
                    data = self._read(pack, number, whole=whole)
                except NotFound:
                    continue
                except Damaged as error:
                    why = error
                    continue
                self._blobs.put(identity, data)
                return data
            if not attempt:
                self.refresh()  # a collection may have moved it
        raise why or Damaged(
            f"the store {self.objects.url} lacks a blob ({identity.hex()[:16]}…)",
            remedy="`crab store check` says which checkpoints are affected",
        )

    def _all_places(self, identity: bytes) -> Iterator[tuple[Pack, int]]:
        first = self.place(identity)
        if first is None:
            return
        yield first
        for found in self.indexes().values():  # looked through only if the first one failed
            for pack in found:
                if pack.id != first[0].id and identity in pack.entries:
                    yield from ((pack, number) for number in range(len(pack)) if pack.entry(number)[0] == identity)

    def _read(self, pack: Pack, number: int, whole: bool) -> bytes:
        offset, length = pack.place(number)
        if whole or pack.entry(number)[1] == NODE:
            data = self._packs.get(pack.id)
            if data is None:
                data = self.objects.get(pack.name)
                self._packs.put(pack.id, data)
            stored = data[offset : offset + length]
        else:
            stored = self.objects.get_range(pack.name, offset, length)
        return packs.opened(self.sealing, pack, number, stored)

    def node(self, identity: bytes) -> tuple[list[bytes], bytes]:
        """Links and content of a node."""
        return packs.split(self.get(identity))

    # ---- records

    def _listed(self) -> dict[str, Found]:
        found = ((one.name.removeprefix("checkpoints/"), one) for one in self.objects.list("checkpoints/"))
        return {name: one for name, one in sorted(found, key=lambda pair: pair[0]) if _RECORD.fullmatch(name)}

    def names(self) -> list[str]:
        """Ids of the checkpoints."""
        return list(self._listed())

    def record(self, identity: str) -> Record:
        """One record. Raises `NotFound`, `Damaged`."""
        if not _RECORD.fullmatch(identity):
            raise InvalidRequest(f"{identity!r} is no id of a checkpoint", remedy="`crab store ls` lists them")
        try:
            data = self.objects.get(f"checkpoints/{identity}")
        except NotFound as error:
            raise NotFound(
                f"the store {self.objects.url} has no checkpoint {identity}",
                remedy="`crab store ls` lists those it has",
            ) from error
        return self._decoded(identity, data)

    def _decoded(self, identity: str, data: bytes) -> Record:
        found = documents.decode(self.sealing, f"checkpoints/{identity}", data, Record)
        if found.checkpoint.id != identity:
            raise Damaged(f"checkpoints/{identity} of the store is that of another one", remedy="`crab store check`")
        return found

    def records(self) -> list[Record]:
        """All that can be read, oldest first."""
        return [record for record in self.every_record().values() if isinstance(record, Record)]

    def every_record(self, anew: bool = False) -> dict[str, Record | CrabError]:
        """All of them, oldest first, or why one cannot be read. `anew`: nothing is taken for known, whatever the service's
        clock and listing say. Raises `StoreUnavailable`."""
        known = {} if anew else self._records
        listed = self._listed()

        def one(identity: str) -> Record | CrabError | None:
            kept = known.get(identity)
            if kept is not None and kept[0] == listed[identity]:
                return kept[1]
            try:
                return self._decoded(identity, self.objects.get(f"checkpoints/{identity}"))
            except NotFound:
                return None  # removed a moment ago
            except (Damaged, Incompatible, WrongKey) as error:
                return error

        with ThreadPoolExecutor(_THREADS) as threads:
            read = dict(zip(listed, threads.map(one, listed), strict=True))
        self._records = {name: (listed[name], record) for name, record in read.items() if isinstance(record, Record)}

        def when(pair: tuple[str, Record | CrabError]) -> float:
            return pair[1].checkpoint.created if isinstance(pair[1], Record) else 0.0

        return dict(sorted(((name, record) for name, record in read.items() if record is not None), key=when))

    def publish(self, record: Record) -> Record:
        """Make a checkpoint exist; returns the record that is there now: another writer may have been faster."""
        identity = record.checkpoint.id
        if not _RECORD.fullmatch(identity):
            raise InvalidRequest(f"{identity!r} is no id of a checkpoint", remedy="report this")
        data = documents.encode(self.sealing, f"checkpoints/{identity}", record)
        self.objects.put_if_absent(f"checkpoints/{identity}", data)
        return self.record(identity)

    def remove(self, identity: str) -> None:
        """Take a checkpoint away. Others keep all that they need; its contents go with `gc`, not before the grace period.
        Raises `NotFound`."""
        name = f"checkpoints/{identity}"
        self.record(identity)
        self.objects.put(f"deleted/{identity}.{secrets.token_hex(4)}", self.objects.get(name))
        self.objects.delete(name)

    def deleted(self) -> Iterator[tuple[Found, Record | None]]:
        """Records that were taken away; None for one that cannot be read."""
        for found in list(self.objects.list("deleted/")):
            identity = found.name.removeprefix("deleted/").partition(".")[0]
            try:
                data = self.objects.get(found.name)
                yield found, documents.decode(self.sealing, f"checkpoints/{identity}", data, Record)
            except NotFound:
                continue
            except Damaged:
                yield found, None


class _Kept:
    """The newest of what was read, up to so many bytes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._size = 0
        self._kept: OrderedDict[bytes, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: bytes) -> bytes | None:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def put(self, key: bytes, data: bytes) -> None:
        with self._lock:
            if key not in self._kept:
                self._kept[key] = data
                self._size += len(data)
            while self._size > self._most and len(self._kept) > 1:
                self._size -= len(self._kept.popitem(last=False)[1])


def write_index(repository: Repository, found: Iterable[Pack]) -> str:
    """Write an index of some packs; its name."""
    name = f"index/{secrets.token_hex(16)}"
    listed = list(found)
    content = [Indexed(pack.id, pack.size, pack.salt, pack.entries) for pack in listed]
    repository.objects.put(name, documents.encode(repository.sealing, name, content))
    repository.learn(name, listed)
    return name
