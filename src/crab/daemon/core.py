"""The state directory and what lives in it: opened by one process at a time, swept of what a dead one left.

Knows the resources and their life; what the operations of the API do with them is in the modules beside it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from crab.checkpoint import manifest as manifests
from crab.checkpoint.ground import Ground, caches_folder
from crab.checkpoint.manifest import Manifest
from crab.daemon.registry import Broken, Record, Registry
from crab.engine.engine import Engine
from crab.errors import Busy, CrabError, HostUnsuitable, WrongState
from crab.host.cgroups import Cgroup, CgroupRoots
from crab.host.criu import default_private_dir, find_criu
from crab.host.network import Nat
from crab.host.pool import Pool
from crab.inspector.inspector import SETTING, Inspector
from crab.inspector.look import Stored
from crab.model import Checkpoint, Sandbox, State
from crab.sandbox import network
from crab.sandbox.images import ImageStore
from crab.sandbox.incarnation import Incarnation
from crab.store.repository import Repository
from crab.turns.coordinator import Coordinator

log = logging.getLogger("crab.core")

TURN = "a turn"
"""The operation of who makes a turn safe."""
TURN_SECONDS = 60.0
CLOSE_SECONDS = 20.0
"""How long a turn that is being made safe is waited for at the end."""
TEMPORARY = "b"
"""First letter of the ids of sandboxes that live no longer than the operation which made them."""


class Core:
    """See the module. Use `Core.open`."""

    def __init__(
        self,
        state_dir: Path,
        lock: int,
        pool: Pool,
        cgroups: CgroupRoots,
        nat: Nat,
        ground: Ground,
        registry: Registry,
        inspector: Inspector,
        coordinator: Coordinator,
        engine: Engine,
    ) -> None:
        self.state_dir = state_dir
        self.pool = pool
        self.cgroups = cgroups
        self.nat = nat
        self.ground = ground
        self.registry = registry
        self.inspector = inspector
        self.coordinator = coordinator
        self.engine = engine
        self.images = ImageStore(pool, state_dir / "cache")
        self.stores: dict[tuple[str, bytes], Repository] = {}
        """Stores that were opened, by URL and key: what their indexes say is not read twice."""
        self.steps: dict[str, str] = {}
        """What is being done for each image that is being made."""
        self.names: dict[tuple[str, str], str] = {}
        """Of commands that run under another name in their sandbox than they were given: by sandbox and that name."""
        self._lock_file = lock
        self._lives: dict[str, Incarnation] = {}
        self._busy: dict[str, str] = {}
        self._changing = threading.Lock()
        """Of manifests."""
        self._mutex = threading.Lock()
        self._free = threading.Condition(self._mutex)
        self._trash = threading.Event()
        self._closed = False
        threading.Thread(target=self._empty_trash, name="crab-trash", daemon=True).start()

    @classmethod
    def open(cls, state_dir: Path) -> Core:
        """Open a state directory, making what is missing and sweeping what a dead owner left.

        Raises `Busy` if another process owns it and `HostUnsuitable` if this machine cannot hold sandboxes.
        """
        if os.geteuid() != 0:
            raise HostUnsuitable(
                "Crab needs root to make sandboxes",
                remedy="run as root, or talk to a daemon that does (without --embedded)",
            )
        state_dir = Path(os.path.realpath(state_dir))
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o711)
        lock = _own(state_dir)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, lock)
            criu = find_criu(default_private_dir())
            pool = Pool.open(state_dir)
            owner = hashlib.sha256(os.fsencode(state_dir)).hexdigest()[:10]
            cgroups = CgroupRoots(owner)
            cgroups.prepare()
            ground = Ground(pool, cgroups, criu, caches_folder(owner))
            ground.prepare()
            registry = Registry(state_dir / "registry.db")
            undo.callback(registry.close)
            parent = cgroups.unified / cgroups.owner
            setting = os.environ.get(SETTING, "")
            stored = Stored(ground.own_files, ground.store.images)
            inspector = Inspector.open(owner, parent, state_dir, pool.device, stored, setting)
            undo.callback(inspector.close)
            coordinator = Coordinator(state_dir)
            nat = Nat(owner, state_dir / "network")
            core = cls(state_dir, lock, pool, cgroups, nat, ground, registry, inspector, coordinator, Engine())
            core.sweep()
            undo.pop_all()
            return core

    def close(self) -> None:
        """Give the state directory up. Sandboxes run on; the next owner takes them over."""
        if self._closed:
            return
        self._closed = True
        self._trash.set()
        self.coordinator.end()
        with self._mutex:
            self._free.wait_for(lambda: TURN not in self._busy.values(), CLOSE_SECONDS)
        for incarnation in self._lives.values():
            incarnation.gate.destroy("the owner of the state directory was closed")
        self.inspector.close(remove=not self.registry.all())  # with no sandbox there is nothing to go on tracking
        self.registry.close()
        self.pool.close()
        os.close(self._lock_file)

    def close_down(self) -> None:
        """Give it up for good: nothing of it may run. Unmounts the pool and removes the cgroup folders, caches and nat."""
        running = [record.name for record in self.registry.all() if self.life(record).is_alive()]
        running += [one.name for one in self.registry.broken() if any(map(Cgroup.is_populated, self.groups_of(one)))]
        if running:
            raise Busy(f"sandboxes run: {', '.join(running)}", remedy="stop or remove them first")
        self.inspector.close(remove=True)
        self.close()
        self.pool.empty_trash()
        self.pool.close(unmount=True)
        self.cgroups.remove()
        self.nat.remove()
        self.ground.remove_caches()

    def open_doors(self) -> None:
        """Serve the models of sandboxes that run already. One whose door cannot be opened is said, and runs on without."""
        records = [record for record in self.registry.all() if record.spec.model]
        for record in records:
            life = self.life(record)
            if life.door and life.is_alive():
                try:
                    life.door.open(life.pid)
                except CrabError as error:
                    log.error("%s", error.message)
        if records:
            self.coordinator.resume()

    # ---- one operation at a time

    @contextlib.contextmanager
    def operation(self, name: str, what: str, patience: float = 0.0) -> Iterator[Record]:
        """Hold a sandbox for one lifecycle operation. Raises `Busy` if another has it for longer than so many seconds (hazard
        R11: at once).

        A turn that is being made safe is nobody's wish but Crab's: it is waited for without patience, too.
        """
        record = self.registry.find(name)
        if what != TURN:
            self.engine.hurry(record.id)  # whatever it does, somebody waits for its end now

        def waits() -> bool:
            other = self._busy.get(record.id)
            return other is not None and (patience > 0 or (other == TURN and what != TURN))

        with self._mutex:
            self._free.wait_for(lambda: not waits(), patience or TURN_SECONDS)
            if other := self._busy.get(record.id):
                raise Busy(f"sandbox {record.name} is busy: {other} is under way", remedy="wait for it, then try again")
            self._busy[record.id] = what
        try:
            yield self.registry.find(record.id)  # as the last operation left it
        finally:
            with self._mutex:
                self._busy.pop(record.id, None)
                self._free.notify_all()

    # ---- sandboxes

    def groups_of(self, broken: Broken) -> list[Cgroup]:
        """The cgroups of a sandbox whose record cannot be read."""
        return [self.cgroups.group(name) for name in self.cgroups.names() if name.startswith(f"{broken.id}.")]

    def life(self, record: Record) -> Incarnation:
        """The incarnation that a record speaks of; whether it is alive is another question."""
        with self._mutex:
            known = self._lives.get(record.id)
            if known is None or known.generation != record.generation:
                found = self.incarnation(record, record.generation)
                found.process = record.process
                if known is not None and known.generation > record.generation:
                    return found  # the record was read before a rewind: the life of now stays the one that is known
                self._lives[record.id] = known = found
            return known

    def incarnation(self, record: Record, generation: int) -> Incarnation:
        """An incarnation of a sandbox, nothing of it made yet."""
        return Incarnation(
            self.pool,
            self.cgroups,
            record.id,
            generation,
            record.spec,
            record.slot,
            record.runtime,
            record.name,
            self.nat,
            self.inspector,
            None if record.id.startswith(TEMPORARY) else self.coordinator,
        )

    def switch(self, record: Record, incarnation: Incarnation | None) -> None:
        """Make an incarnation the one of its sandbox (or forget it, if the sandbox is gone)."""
        with self._mutex:
            if incarnation is None:
                self._lives.pop(record.id, None)
            else:
                self._lives[record.id] = incarnation

    def view(self, record: Record) -> Sandbox:
        """The sandbox as it is now."""
        state, reason, pid = record.wanted, "", None
        if record.wanted in (State.RUNNING, State.PAUSED):
            life = self.life(record)
            if life.is_alive():
                pid = life.process.pid if life.process else None
            else:
                state, reason = State.LOST, life.why_gone()
        unread, why = self.coordinator.unread(record.id)
        return Sandbox(
            id=record.id,
            name=record.name,
            spec=record.spec,
            state=state,
            created=record.created,
            image_fingerprint=record.image_fingerprint,
            generation=record.generation,
            pid=pid,
            head=record.head,
            turn=record.turn,
            forked_from=record.forked_from,
            reason=reason,
            returns=record.returns,
            unread=unread,
            unread_why=why,
            not_rolled_back=tuple(f"{m.source} at {m.target}" for m in record.spec.mounts if m.kind == "bind"),
        )

    def running(self, record: Record, what: str) -> Incarnation:
        """The live incarnation. Raises `WrongState` if the sandbox is not running."""
        view = self.view(record)
        if view.state != State.RUNNING:
            remedies = {
                State.LOST: f"`crab recover {record.name}` restores its newest checkpoint",
                State.PAUSED: f"`crab resume {record.name}`",
                State.STOPPED: f"`crab start {record.name}`",
                State.CREATED: f"`crab start {record.name}`",
            }
            why = f" ({view.reason})" if view.reason else ""
            raise WrongState(
                f"{what} needs a running sandbox; {record.name} is {view.state}{why}",
                remedy=remedies.get(view.state, ""),
            )
        return self.life(record)

    @contextlib.contextmanager
    def called(self, record: Record, given: str, name: str) -> Iterator[None]:
        """For the length of the block a command of that sandbox is found by the name that it was given, too."""
        if given:
            self.names[record.id, given] = name
        try:
            yield
        finally:
            self.names.pop((record.id, given), None)

    # ---- checkpoints

    def manifest(self, identity: str) -> Manifest:
        """Manifest of a published checkpoint. Raises `NotFound`, `Damaged` or `Incompatible`."""
        return manifests.decode(self.ground.store.manifest(identity))

    def change(self, identity: str, change: Callable[[Manifest], Manifest]) -> Checkpoint:
        """Rewrite the manifest of a checkpoint. Others may change it at the same time, so it is read for it. Raises `NotFound`,
        `Damaged`, `NoSpace`."""
        with self._changing:
            manifest = change(self.manifest(identity))
            self.ground.store.rewrite_manifest(identity, manifests.encode(manifest))
            return self.registry.index(manifest.checkpoint)

    def change_checkpoint(self, identity: str, **fields: Any) -> Checkpoint:
        """The same of some fields of a `Checkpoint`: label, proof, parent."""

        def changed(manifest: Manifest) -> Manifest:
            return msgspec.structs.replace(manifest, checkpoint=msgspec.structs.replace(manifest.checkpoint, **fields))

        return self.change(identity, changed)

    def forget(self, sandbox: str) -> None:
        """A sandbox is gone, and what only its past was good for."""
        self.coordinator.forget(sandbox)
        self.engine.forget(sandbox)

    def users_of_image(self, name: str) -> list[str]:
        """What is based on an image, in words."""
        found = [f"sandbox {record.name}" for record in self.registry.all() if record.spec.image == name]
        found += [f"perhaps sandbox {broken.name} (damaged)" for broken in self.registry.broken()]
        return found + [f"checkpoint {c.id}" for c in self.registry.checkpoints() if c.image == name]

    # ---- tidiness

    def discard_later(self, path: Path) -> None:
        """Remove something of the pool: its name at once, its content in the background."""
        self.pool.discard(path, wait=False)
        self._trash.set()

    def drop_checkpoint(self, identity: str) -> None:
        """Remove a checkpoint that nothing needs."""
        self.registry.unindex(identity)
        self.ground.store.discard(identity)
        self._trash.set()

    def later(self, work: Callable[[], None]) -> None:
        """Let the inspector do something that nobody waits for; what fails is left for the next decision."""

        def attempt() -> None:
            with contextlib.suppress(OSError, ValueError, CrabError):
                work()

        threading.Thread(target=attempt, name="crab-inspector", daemon=True).start()

    def _empty_trash(self) -> None:
        while not self._closed:
            self._trash.wait()
            self._trash.clear()
            if not self._closed:
                with contextlib.suppress(OSError, CrabError):
                    self.pool.empty_trash()

    def sweep(self) -> None:
        """Release everything that a dead owner left: half captures and restores, groups, files; find checkpoints again."""
        for record in self.registry.all():
            # of an operation that did not end: nobody was told of it
            half = record.wanted == State.CREATED and (
                record.forked_from or not (self.pool.live / f"{record.id}.{record.generation}").is_dir()
            )
            if half or record.id.startswith(TEMPORARY):
                self.registry.remove(record.id)
        records = {record.id: record for record in self.registry.all()}
        current = {f"{record.id}.{record.generation}": record for record in records.values()}
        unknown = tuple(f"{broken.id}." for broken in self.registry.broken())
        for broken in self.registry.broken():
            log.warning("the record of sandbox %s cannot be read, it is left alone: %s", broken.name, broken.why)
        for name in self.cgroups.names():
            if name.startswith(unknown):
                continue
            group, record = self.cgroups.group(name), current.get(name)
            if record is not None and self.life(record).is_alive():
                if record.wanted != State.PAUSED:
                    group.thaw()  # the owner died in the middle of a capture
            else:
                group.kill()
                group.remove()
        lives = {life.key: life.group.path for life in map(self.life, records.values()) if life.is_alive()}
        self.inspector.sweep(lives)
        network.sweep(self.nat, {life.way: life.pid for life in map(self.life, records.values()) if life.is_alive()})
        for folder in self.pool.live.iterdir():
            if folder.name not in current and not folder.name.startswith(unknown):
                self.pool.discard(folder, wait=False)
        self.pool.sweep()
        self.ground.store.sweep()
        published = set(self.ground.store.identities())
        indexed = {checkpoint.id for checkpoint in self.registry.checkpoints()}
        for identity in indexed - published:
            self.registry.unindex(identity)
        for identity in published - indexed:
            with contextlib.suppress(CrabError):  # a damaged or newer one is reported when it is asked for
                self.registry.index(self.manifest(identity).checkpoint)


def new_id(prefix: str) -> str:
    """A new identity: short enough to type, random enough never to be made twice."""
    return prefix + secrets.token_hex(6)


def _own(state_dir: Path) -> int:
    """Descriptor of the lock that the owner of a state directory holds."""
    fd = os.open(state_dir / "owner.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(fd, 20, 0).decode(errors="replace").strip() or "?"
        os.close(fd)
        raise Busy(
            f"process {owner} owns the state directory {state_dir}",
            remedy="talk to it instead (`crab` without --embedded, crab.connect() in Python), or stop it: `crab daemon stop`",
        ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, str(os.getpid()).encode(), 0)
    return fd
