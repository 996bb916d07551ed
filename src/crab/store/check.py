"""Whether all that is in a store is what was written, and which checkpoints cannot be read if not. And how much it is."""

from __future__ import annotations

from crab.errors import CrabError, Damaged, Incompatible, NotFound, WrongKey
from crab.model import StoreCheck, StoreProblem, StoreStats
from crab.store import packs
from crab.store.closure import Closure
from crab.store.documents import decode
from crab.store.packs import Pack
from crab.store.repository import Indexed, Record, Repository, write_index
from crab.store.writing import repacked


def check(repository: Repository, data: bool = False, repair: bool = False) -> StoreCheck:
    """Look at everything. Without `data` packs are compared by their sizes, and the nodes are read; with it every byte is.

    `repair` makes the index again of packs that no index knows, from the packs, and forgets those that were found damaged, so
    that their contents can be sent again. Raises `StoreUnavailable`.
    """
    return _Check(repository, data).run(repair)


class _Check:
    def __init__(self, repository: Repository, data: bool) -> None:
        self._repository = repository
        self._objects = repository.objects
        self._data = data
        self._problems: dict[str, set[bytes]] = {}
        """What is wrong, and the blobs that are lost by it."""
        self._missing: set[str] = set()
        self._hurt: list[tuple[Pack, set[bytes]]] = []
        """Damaged packs, and the blobs that are lost."""
        self._notes: list[str] = []
        self._read = 0
        self._good: set[bytes] = set()
        """Blobs that a pack has as they were written."""

    def run(self, repair: bool) -> StoreCheck:
        records = self._repository.every_record()
        listed = {found.name: found.size for found in self._objects.list("packs/")}
        damaged = self._damaged_indexes()
        repaired: list[str] = []
        if repair:
            repaired += self._index_again(listed, damaged)
            damaged = []
        for name, why in damaged:
            self._problems[f"{name}: {why}"] = set()
        count = len(listed)
        self._look(listed)
        if repair:
            repaired += self._forget()
        lost = {one: what for what, found in self._problems.items() for one in found if one not in self._good}
        closure = Closure(self._repository, frozenset(lost))
        touched: dict[str, list[str]] = {what: [] for what in self._problems}
        affected: list[str] = []
        for identity, record in records.items():
            if not isinstance(record, Record):
                touched.setdefault(f"checkpoints/{identity}: {record.message}", []).append(identity)
                affected.append(identity)
                continue
            faults = closure.faults([record.root])
            if not faults:
                continue
            affected.append(identity)
            for fault in faults:
                what = lost.get(fault, "blobs that are in no pack, or cannot be read")
                if identity not in touched.setdefault(what, []):
                    touched[what].append(identity)
        for what in [what for what, found in touched.items() if not found and what in self._missing]:
            del touched[what]
            self._notes.append(f"{what}, and no checkpoint misses it (`gc` forgets it)")
        return StoreCheck(
            checkpoints=len(records),
            packs=count,
            read=self._read,
            problems=tuple(StoreProblem(what=what, checkpoints=tuple(found)) for what, found in touched.items()),
            affected=tuple(affected),
            notes=tuple(self._notes),
            repaired=tuple(repaired),
        )

    def _damaged_indexes(self) -> list[tuple[str, str]]:
        """Indexes that cannot be read. The others are known afterwards."""
        try:
            self._repository.refresh()
            return []
        except Damaged:
            pass
        found: list[tuple[str, str]] = []
        for listed in list(self._objects.list("index/")):
            try:
                content = decode(
                    self._repository.sealing, listed.name, self._objects.get(listed.name), tuple[Indexed, ...]
                )
                known = [Pack(one.id, one.size, one.salt, one.entries) for one in content]
                self._repository.learn(listed.name, known)
            except NotFound:
                continue
            except Damaged as error:
                found.append((listed.name, error.message))
        return found

    def _look(self, listed: dict[str, int]) -> None:
        known = self._repository.known_packs()
        for pack in known.values():
            size = listed.pop(pack.name, None)
            lost = {identity for identity, *_ in pack.list()}
            if size is None:
                self._missing.add(f"{pack.name} is missing")
                self._lose(f"{pack.name} is missing", pack, lost)
            elif size != pack.size or self._data:
                self._look_into(pack)
            else:
                self._good |= lost
        for name in listed:
            self._notes.append(f"{name} is in no index: of a writer that is at work, or was killed (`gc` removes it)")

    def _look_into(self, pack: Pack) -> None:
        try:
            data = self._objects.get(pack.name)
        except NotFound:
            self._lose(f"{pack.name} is missing", pack, {identity for identity, *_ in pack.list()})
            return
        self._read += len(data)
        try:
            packs.read_list(self._repository.sealing, pack.id, data)
            self._good.update(identity for identity, *_ in pack.list())
            return
        except CrabError:
            pass
        lost: set[bytes] = set()
        for number, (identity, *_) in enumerate(pack.list()):
            offset, length = pack.place(number)
            try:
                packs.opened(self._repository.sealing, pack, number, data[offset : offset + length])
            except CrabError:
                lost.add(identity)
        length = f"{len(data)} bytes instead of {pack.size}, " if len(data) != pack.size else ""
        self._lose(f"{pack.name} is not what was written ({length}{len(lost)} of {len(pack)} blobs lost)", pack, lost)

    def _lose(self, what: str, pack: Pack, lost: set[bytes]) -> None:
        self._problems[what] = lost
        self._hurt.append((pack, lost))
        self._good.update(identity for identity, *_ in pack.list() if identity not in lost)

    def _forget(self) -> list[str]:
        """Have no index name a damaged pack: who sends one of its contents again makes the store whole. What can be read of
        it is copied before."""
        if not self._hurt:
            return []
        repository = self._repository
        saved = (
            (identity, kind) for pack, lost in self._hurt for identity, kind, *_ in pack.list() if identity not in lost
        )
        made = repacked(repository, saved)
        hurt = {pack.id for pack, _ in self._hurt}
        for name, found in repository.indexes().items():
            if any(pack.id in hurt for pack in found):
                left = [pack for pack in found if pack.id not in hurt]
                if left or made:
                    write_index(repository, [*left, *made])
                    made = []
                self._objects.delete(name)
        for pack, _ in self._hurt:
            self._objects.delete(pack.name)
        repository.refresh()
        return [f"{pack.name} was given up: sending what it had once more mends the store" for pack, _ in self._hurt]

    def _index_again(self, listed: dict[str, int], damaged: list[tuple[str, str]]) -> list[str]:
        """Index what is in no index; then the damaged indexes are good for nothing."""
        known = {pack.name for pack in self._repository.known_packs().values()}
        found: list[Pack] = []
        done: list[str] = []
        for name in sorted(listed.keys() - known):
            try:
                identity = bytes.fromhex(name.rpartition("/")[2])
                found.append(packs.read_list(self._repository.sealing, identity, self._objects.get(name)))
                done.append(f"{name} was indexed again")
            except (ValueError, Damaged, Incompatible, NotFound, WrongKey) as error:
                self._problems[f"{name}: {error}"] = set()
        if found:
            write_index(self._repository, found)
        for name, _ in damaged:
            self._objects.delete(name)
            done.append(f"{name} was removed")
        self._repository.refresh()
        return done


def stats(repository: Repository) -> StoreStats:
    """How much there is."""
    records = repository.records()
    repository.refresh()
    known = repository.known_packs()
    sizes = {identity: size for pack in known.values() for identity, _, _, size in pack.list()}
    listed = list(repository.objects.list("packs/"))
    doomed = {packs.object_name(identity) for identity in repository.condemned}
    beside = sum(found.size for prefix in ("index/", "checkpoints/") for found in repository.objects.list(prefix))
    return StoreStats(
        checkpoints=len(records),
        logical=sum(record.checkpoint.logical for record in records),
        distinct=sum(sizes.values()),
        stored=sum(found.size for found in listed) + beside,
        packs=len(listed),
        blobs=len(sizes),
        condemned=sum(found.size for found in listed if found.name in doomed),
    )
