"""Checkpoints in and out of stores, and the care of stores: `crab store …`."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from blake3 import blake3

from crab.checkpoint import refs, stored
from crab.checkpoint.archive import Header
from crab.checkpoint.archive_unpack import unpacked_from
from crab.checkpoint.manifest import Manifest
from crab.checkpoint.stored_read import StoredSource
from crab.checkpoint.stored_write import Base, Snapshot, write
from crab.daemon import requests as ask
from crab.daemon.archiving import check_free, check_host_use, install, limits_of, pinned
from crab.daemon.core import Core, new_id
from crab.daemon.dispatch import answers
from crab.daemon.history import find
from crab.engine.jobs import Urgency
from crab.errors import Busy, Damaged, Incompatible, InvalidRequest, NotFound
from crab.model import Checkpoint, Sandbox, StoreCheck, StoreCollection, StoredCheckpoint, StoreInfo, StoreStats, Struct
from crab.store import check as checking
from crab.store import gc, retention
from crab.store.folder import FolderObjects
from crab.store.naming import chosen
from crab.store.objects import objects_at
from crab.store.repository import Repository
from crab.store.sealing import key_of
from crab.store.writing import Writer

_TRIES = 3
SHORTEST_GRACE = 60.0


def _key(request: ask.StoreRequest) -> bytes | None:
    if not request.key_file:
        return None
    if not os.path.isabs(request.key_file):
        raise InvalidRequest(f"the path of a key must be absolute: {request.key_file}", remedy="begin it with a slash")
    return key_of(Path(request.key_file))


def _opened(core: Core, request: ask.StoreRequest) -> Repository:
    key = _key(request)
    name = (request.url, blake3(key).digest() if key is not None else b"")
    known = core.stores.get(name)
    if known is None or not known.is_current():
        known = core.stores[name] = Repository.open(objects_at(request.url), key)
    return known


@answers(ask.StoreInit)
def init(core: Core, request: ask.StoreInit) -> StoreInfo:
    """Make a store."""
    if request.grace < SHORTEST_GRACE:
        raise InvalidRequest(
            f"a grace period of {request.grace:g} s is too short: no checkpoint may take half of it to be sent",
            remedy=f"give {SHORTEST_GRACE:.0f} s at least",
        )
    objects, key = objects_at(request.url), _key(request)
    if isinstance(objects, FolderObjects):
        objects.make()
    return Repository.create(objects, key, request.grace).info()


# ---------------------------------------------------------------- put


@answers(ask.StorePut)
def put(core: Core, request: ask.StorePut) -> StoredCheckpoint:
    """Send a checkpoint."""
    return sent(core, request, request.sandbox, request.ref)


def sent(
    core: Core,
    store: ask.StoreRequest,
    sandbox: str,
    ref: str,
    urgency: Urgency = Urgency.URGENT,
    what: str = "store put",
) -> StoredCheckpoint:
    """Send a checkpoint. The sandbox is held (for `what`) only until the checkpoint is pinned, as by `export`."""
    repository = _opened(core, store)
    for attempt in range(1, _TRIES + 1):
        with contextlib.ExitStack() as stack:
            # it begins before anything is looked up in the store: see `gc`
            writer = stack.enter_context(Writer(repository))
            names = frozenset(repository.names())
            with core.operation(sandbox, what) as record:
                checkpoint = find(core, record, ref)
                if checkpoint.id in names:
                    return repository.record(checkpoint.id).checkpoint
                parts = stack.enter_context(pinned(core, checkpoint, True))
                files = Snapshot.of(core.ground.files_of(checkpoint))
                ancestor = _ancestor(core, checkpoint, names)
                source = ancestor and ancestor.process
                process = stack.enter_context(core.ground.store.images(source)) if source else None
            base = _base(repository, ancestor, process) if ancestor else None
            try:
                with core.engine.job("upload", record.id, urgency) as place:
                    made = write(parts, files, base, writer)
                    place.writes = writer.added
                    return made.checkpoint
            except Busy:  # a collection was faster; what was sent is not sent again
                if attempt == _TRIES:
                    raise
    raise AssertionError


class _Ancestor(Struct):
    """One that is in the store and still here."""

    name: str
    """Its id in the store."""
    files: Snapshot
    process: str | None
    """Id of the checkpoint that has its process images."""


def _ancestor(core: Core, checkpoint: Checkpoint, names: frozenset[str]) -> _Ancestor | None:
    """The newest of them. One that came out of the store counts, and so does the checkpoint itself then."""
    for one in refs.branch(core.registry.checkpoints(), checkpoint.id):
        with contextlib.suppress(NotFound, Damaged, Incompatible):  # without one everything is read
            name = next((name for name in (one.id, core.manifest(one.id).stored_as) if name in names), None)
            if name is not None:
                return _Ancestor(name, Snapshot.of(core.ground.files_of(one)), one.processes_from)
    return None


def _base(repository: Repository, ancestor: _Ancestor, process: Path | None) -> Base | None:
    with contextlib.suppress(NotFound, Damaged):  # it is read anew, so a damaged store gets whole checkpoints again
        root = stored.read(repository, repository.record(ancestor.name).root)
        return Base(root=root, files=ancestor.files, process=process)
    return None


# ---------------------------------------------------------------- get


@answers(ask.StoreGet)
def get(core: Core, request: ask.StoreGet) -> Sandbox:
    """Make a sandbox of a checkpoint: all of it, or nothing. It is stopped, and `recover` brings it to life."""
    if request.name:
        check_free(core, refs.check_name(request.name))
    limits = limits_of(request.limit)
    repository = _opened(core, request)
    repository.refresh()
    record = repository.record(chosen(request.checkpoint, [one.checkpoint for one in repository.records()]).id)

    def accept(header: Header, manifest: Manifest) -> None:
        check_host_use(core, manifest, request.allow_host)

    identity = new_id("c")
    source = StoredSource(repository, record, core.images, limits)
    with unpacked_from(source, request.url, core.ground, core.images, identity, accept) as found:
        return install(core, found, identity, request.name, record.checkpoint.id)


# ---------------------------------------------------------------- care


@answers(ask.StoreList)
def list_(core: Core, request: ask.StoreList) -> tuple[StoredCheckpoint, ...]:
    """What is there."""
    return tuple(record.checkpoint for record in _opened(core, request).records())


@answers(ask.StoreRemove)
def remove(core: Core, request: ask.StoreRemove) -> ask.Removed:
    """Take a checkpoint out."""
    repository = _opened(core, request)
    everything = repository.every_record()
    if request.checkpoint in everything:
        identity = request.checkpoint
    else:
        identity = chosen(request.checkpoint, [record.checkpoint for record in repository.records()]).id
    repository.remove(identity)
    return ask.Removed(removed=(identity,))


@answers(ask.StoreLook)
def check(core: Core, request: ask.StoreLook) -> StoreCheck:
    """Look at everything."""
    return checking.check(_opened(core, request), data=request.data, repair=request.repair)


@answers(ask.StoreFigures)
def stats(core: Core, request: ask.StoreFigures) -> StoreStats:
    """How much there is."""
    return checking.stats(_opened(core, request))


@answers(ask.StoreCollect)
def collect(core: Core, request: ask.StoreCollect) -> StoreCollection:
    """Remove what nothing needs."""
    repository = _opened(core, request)
    removed: list[str] = []
    if request.policy is not None:
        everything = [record.checkpoint for record in repository.records()]
        keep = retention.kept(request.policy, everything)
        for one in everything:
            if one.id not in keep:
                with contextlib.suppress(NotFound):  # somebody else was faster
                    repository.remove(one.id)
                    removed.append(one.id)
    return gc.collect(repository, tuple(removed))
