"""The collection: what no checkpoint needs leaves the store, and nothing that a concurrent writer relies on ever does.

Let G be the grace period of the store. Removing goes by three rules:
  1. A checkpoint that is taken away leaves a record in `deleted/`, which counts as one for G.
  2. A pack that nothing needs is condemned: a mark says so. Writers take what is only in condemned packs for not there.
  3. A pack is removed when its newest mark is older than G and still nothing needs it. First the indexes forget it.
And writing by one: a session publishes within G/2 of its beginning, or it looks again and fails (`writing`).

Why that is enough. A session that began at time s relies on blobs in two ways.
  - It found a blob in a pack that had no mark at s. A mark on that pack is younger than s, so by rule 3 the pack is not
    removed before s + G.
  - It took over a part of a checkpoint that existed at s, without looking at its blobs. That checkpoint, or its record in
    `deleted/`, counts until s + G at least (rule 1), and while it counts, rule 3 removes nothing that it needs.
By the rule of writing its own record is there before s + G, and from then on its packs are needed. The collection lists records
first and marks and indexes after: a record that it sees has its packs in the indexes that it sees. A pack of a session that has
not written its index yet is unknown to the indexes, and condemned like any other: it has G from then on.

Times are compared on the service's clock alone (`service_time`), lengths of sessions on a clock that nobody sets. A service
whose clock is set back removes later; one whose clock jumps ahead by more than G while somebody writes could remove too early.

Every object has a name that is never used again (packs have a random salt), so an old mark never means a new pack. Killed at
any moment nothing is lost: every step leaves a store that is whole. Two collections at a time do the same twice.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator

from crab.errors import Damaged, NotFound
from crab.model import StoreCollection, Struct
from crab.store import documents, packs
from crab.store.closure import Closure
from crab.store.folder import FolderObjects
from crab.store.objects import Found, service_time
from crab.store.repository import Repository, write_index
from crab.store.writing import repacked

_WORTH_REWRITING = 0.4
"""A pack of which less than that is needed is copied: it takes one write and one read to get the rest back."""
_MANY_INDEXES = 64
_LEFT_OVER = 3600.0
"""Seconds after which what a writer left half done is nobody's."""
_SMALL, _MANY_SMALL = 1 << 20, 64
"""Every checkpoint makes two packs, most of them small: from so many of that size on they are put together."""


class Plan(Struct, kw_only=True):
    """What a collection is going to do."""

    remove: tuple[bytes, ...]
    """Packs whose time has come."""
    condemn: tuple[bytes, ...]
    rewrite: tuple[bytes, ...]
    """Packs of which little is needed, and small ones if they are many."""


def planned(
    there: dict[bytes, int], needed: dict[bytes, int], condemned: dict[bytes, float], now: float, grace: float
) -> Plan:
    """Decide. `there` are all packs with the bytes of their blobs, `needed` those that something is needed of, with the bytes
    of that."""
    remove: list[bytes] = []
    condemn: list[bytes] = []
    rewrite: list[bytes] = []
    for pack, size in sorted(there.items()):
        if pack not in needed:
            if pack not in condemned:
                condemn.append(pack)
            elif now - condemned[pack] >= grace:
                remove.append(pack)
        elif needed[pack] < size * _WORTH_REWRITING:
            rewrite.append(pack)
    small = [pack for pack in needed if pack in there and pack not in rewrite and there[pack] < _SMALL]
    if len(small) >= _MANY_SMALL:
        rewrite += sorted(small)
    return Plan(remove=tuple(remove), condemn=tuple(condemn), rewrite=tuple(rewrite))


def collect(repository: Repository, taken: tuple[str, ...] = ()) -> StoreCollection:
    """Condemn what nothing needs, and remove what was condemned long enough ago. `taken` are checkpoints that were taken away
    for it.

    Raises `Damaged` and removes nothing if a checkpoint cannot be read whole: what cannot be seen might be needed.
    """
    objects, grace = repository.objects, repository.plan.grace
    now = service_time(objects)
    listed = {found.name: found for found in objects.list("packs/")}
    roots, old = _roots(repository, now)
    repository.refresh()
    # of two collections at a time, the later one may have written an index that names what the earlier one removed
    left = {found.name for found in objects.list("packs/")}  # after the indexes: a pack is there before it is in one
    known = repository.known_packs()
    gone = {identity for identity, pack in known.items() if pack.name not in left}
    repository.lost(gone)  # what only they have is missing, and found so below
    there = {bytes.fromhex(name.rpartition("/")[2]): found.size for name, found in listed.items() if _is_pack(name)}
    closure = Closure(repository)
    if faults := closure.faults(roots):
        raise Damaged(
            f"{len(faults)} blobs of the store {objects.url} are missing or damaged: nothing is removed from it",
            remedy="`crab store check` says what is affected; remove those checkpoints, then try again",
        )
    needed = _needed(repository, closure.seen)
    filled = {pack: known[pack].filled if pack in known else size for pack, size in there.items()}
    plan = planned(filled, needed, repository.condemned, now, grace)
    moved = _rewrite(repository, plan.rewrite, closure.seen)
    condemn = [*plan.condemn, *moved]
    if condemn:
        name = f"condemned/{secrets.token_hex(16)}"
        objects.put(name, documents.encode(repository.sealing, name, condemn))
    _remove(repository, {*plan.remove, *gone}, now)
    for found in old:
        objects.delete(found.name)
    for found in list(objects.list("clock/")):  # of whoever was killed while he asked for the time
        if now - found.modified > _LEFT_OVER:
            objects.delete(found.name)
    if isinstance(objects, FolderObjects):
        objects.sweep(now - max(grace, _LEFT_OVER))
    return StoreCollection(
        removed_checkpoints=taken,
        condemned=len(condemn),
        condemned_bytes=sum(there[pack] for pack in condemn),
        removed=len(plan.remove),
        removed_bytes=sum(there[pack] for pack in plan.remove),
        rewritten=len(moved),
    )


def _roots(repository: Repository, now: float) -> tuple[list[bytes], list[Found]]:
    """Roots of all that counts, and the records in `deleted/` that count no more."""
    roots: list[bytes] = []
    old: list[Found] = []
    for identity, record in repository.every_record(anew=True).items():
        if isinstance(record, Exception):
            raise Damaged(
                f"the record of checkpoint {identity} cannot be read: nothing is removed from the store",
                remedy=f"`crab store rm {identity}` gives it up, then try again",
            ) from record
        roots.append(record.root)
    for found, record in repository.deleted():
        if now - found.modified >= repository.plan.grace:
            old.append(found)
        elif record is not None:
            roots.append(record.root)
    return roots, old


def _needed(repository: Repository, seen: set[bytes]) -> dict[bytes, int]:
    """Bytes that are needed of each pack. Of a blob that is in several packs one counts: `Repository.place` chooses."""
    needed: dict[bytes, int] = {}
    for identity in seen:
        found = repository.place(identity)
        if found is not None:
            pack, number = found
            needed[pack.id] = needed.get(pack.id, 0) + pack.place(number)[1]
    return needed


def _rewrite(repository: Repository, old: tuple[bytes, ...], seen: set[bytes]) -> list[bytes]:
    """Copy what is needed of some packs into new ones; the packs that nothing needs any more afterwards."""
    known = repository.known_packs()

    def needed() -> Iterator[tuple[bytes, int]]:
        for identity in old:
            for number, (blob, kind, *_) in enumerate(known[identity].list()):
                place = repository.place(blob)
                if blob in seen and place and (place[0].id, place[1]) == (identity, number):
                    yield blob, kind

    if made := repacked(repository, needed()):
        write_index(repository, made)
    return list(old)


def _remove(repository: Repository, doomed: set[bytes], now: float) -> None:
    """Remove packs: from the indexes first, then themselves, then the marks that nothing is left of."""
    objects = repository.objects
    indexes = repository.indexes()
    touched = {name: found for name, found in indexes.items() if any(pack.id in doomed for pack in found)}
    if len(indexes) > _MANY_INDEXES:
        touched = indexes
    if touched:
        left = {pack.id: pack for found in touched.values() for pack in found if pack.id not in doomed}
        if left:
            write_index(repository, left.values())
        for name in touched:
            objects.delete(name)
    for identity in doomed:
        objects.delete(packs.object_name(identity))
    there = {found.name for found in objects.list("packs/")}
    for found in list(objects.list("condemned/")):
        try:
            marked = documents.decode(repository.sealing, found.name, objects.get(found.name), tuple[bytes, ...])
        except NotFound:
            continue
        if not any(packs.object_name(pack) in there for pack in marked):
            objects.delete(found.name)
    repository.refresh()


def _is_pack(name: str) -> bool:
    return re.fullmatch(r"packs/([0-9a-f]{2})/\1[0-9a-f]{62}", name) is not None
