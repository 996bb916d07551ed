"""Checkpoints of sandboxes: take, list, rewind, recover, fork, label, remove."""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, get_args

import msgspec

from crab.checkpoint import compatible, refs
from crab.checkpoint import manifest as manifests
from crab.checkpoint.capture import Captured, capture, snapshot
from crab.checkpoint.manifest import Manifest
from crab.checkpoint.restore import restore
from crab.daemon import requests as ask
from crab.daemon.core import Core, new_id
from crab.daemon.dispatch import answers
from crab.daemon.heirs import drop
from crab.daemon.judging import judged
from crab.daemon.past import note_fork, note_return, noting, owes, returning
from crab.daemon.registry import Owed, Record
from crab.engine.jobs import Urgency
from crab.errors import AlreadyExists, InvalidRequest, NotCapturable, NotFound, WrongState
from crab.inspector.inspector import Observation
from crab.model import Checkpoint, CheckpointKind, Decision, PolicyName, Proof, Return, Sandbox, State, Struct, Timings
from crab.sandbox import box, settle
from crab.sandbox.incarnation import Incarnation
from crab.store.local import Staging

log = logging.getLogger("crab.checkpoints")

KEPT_RETURNS = 20
"""Rewinds of a sandbox that are remembered."""


@answers(ask.TakeCheckpoint)
def take_checkpoint(core: Core, request: ask.TakeCheckpoint) -> Checkpoint:
    """Capture a running sandbox as the end of a turn."""
    if request.policy not in get_args(PolicyName):
        raise InvalidRequest(
            f"there is no policy {request.policy!r} for checkpoints", remedy=f"use {', '.join(get_args(PolicyName))}"
        )
    refs.check_label(request.label)
    with core.operation(request.sandbox, "checkpoint") as record:
        return checkpoint_of(core, record, request.label, request.policy, request.durable)


def checkpoint_of(
    core: Core,
    record: Record,
    label: str,
    policy: PolicyName,
    durable: bool,
    needs: Set[int] = frozenset(),
    urgency: Urgency = Urgency.URGENT,
    seconds: float | None = None,
    asked: bool = False,
) -> Checkpoint:
    """The same for a caller that holds the sandbox's operation. One that is taken because the agent `asked` its model is noted
    by whoever heard the question.

    `needs` are processes, by their number inside. If none of them runs any more when it is captured, it would be worth
    nothing: `NotCapturable`, and the head stays. `Busy` if it could not begin within so many `seconds`.
    """
    with core.engine.job("capture", record.id, urgency, seconds) as place:
        incarnation = core.running(record, "checkpoint")
        note = None if asked else noting(core, record)  # not before its turn: commands end while it waits
        checkpoint, settled = _published(core, record, incarnation, _Wish(label, policy, needs), place.queued_ms)
        place.writes = checkpoint.process_bytes if checkpoint.processes_from == checkpoint.id else 0
    if durable:
        core.ground.store.commit(checkpoint.id)
    if record.owed:
        log.error("%s was brought back, and its agent was never told: it may ask anew", record.name)
    core.registry.advance(
        msgspec.structs.replace(record, head=checkpoint.id, turn=checkpoint.turn, owed=None), checkpoint, durable
    )
    settled()
    if note:
        note(checkpoint)
    return checkpoint


class _Wish(NamedTuple):
    """What a checkpoint is to be."""

    label: str
    policy: PolicyName
    needs: Set[int]


def _published(
    core: Core, record: Record, incarnation: Incarnation, wish: _Wish, queued_ms: float
) -> tuple[Checkpoint, Callable[[], None]]:
    """A new checkpoint, and how the inspector is told of it once it is the head."""
    begin = time.perf_counter()
    core.pool.require(1 << 20, "a checkpoint")
    decides = wish.policy in ("adaptive", "oracle")
    decision = core.inspector.decide(incarnation, record.head) if decides else None
    watching = core.inspector.observe(incarnation)
    with core.ground.store.staging(new_id("c")) as staging:
        made = _taken(core, record, incarnation, staging, wish.policy, decision, watching)
        seen = made.captured.evidence.processes
        if wish.needs and seen and wish.needs.isdisjoint(process.pid for process in seen if not process.ended):
            raise NotCapturable(
                "the agent ended before it was captured", remedy="`crab recover --force` brings it back"
            )
        checkpoint = Checkpoint(
            id=staging.path.name,
            sandbox=record.id,
            turn=record.turn + 1,
            kind=made.kind,
            created=time.time(),
            parent=record.head,
            label=wish.label,
            processes_from=made.processes_from,
            files_from=made.files_from,
            process_bytes=made.captured.process_bytes,
            process_count=made.captured.process_count,
            image=record.spec.image,
            image_fingerprint=record.image_fingerprint,
            decision=made.decision,
            proof=made.proof,
        )
        artefacts = staging.artefacts()
        now = time.perf_counter()
        spent = made.captured.timings.total_ms
        timings = msgspec.structs.replace(
            made.captured.timings,
            publish_ms=(now - begin) * 1e3 - spent,
            total_ms=(now - begin) * 1e3,
            queued_ms=queued_ms,
        )
        checkpoint = msgspec.structs.replace(checkpoint, timings=timings)
        manifest = Manifest(
            checkpoint=checkpoint,
            sandbox_name=record.name,
            spec=record.spec,
            runtime=record.runtime,
            host=core.ground.host,
            artefacts=artefacts,
            groups=made.captured.groups,
            addresses=made.captured.addresses,
            clocks=made.captured.clocks,
            clock_shift=made.captured.clock_shift,
            evidence=made.captured.evidence,
        )
        core.ground.store.publish(staging, manifests.encode(manifest))

    def settled() -> None:
        if made.kind == "none":
            core.inspector.unchanged(incarnation.key, checkpoint)
        elif watching:
            watching.published(checkpoint, made.captured.bound_to_files)
            core.later(lambda: core.inspector.settle(incarnation))

    return checkpoint, settled


class _Taken(Struct, kw_only=True):
    """What of a checkpoint was captured, and what stands in from an earlier one."""

    kind: CheckpointKind
    captured: Captured
    processes_from: str | None
    files_from: str = ""
    decision: Decision | None = None
    proof: Proof = Proof()
    """Of one that is made of exactly what another is."""


def _taken(
    core: Core,
    record: Record,
    incarnation: Incarnation,
    staging: Staging,
    policy: PolicyName,
    decision: Decision | None,
    watching: Observation | None,
) -> _Taken:
    """Capture what the policy and the decision ask for."""
    frozen = watching.frozen if watching else lambda: None
    if policy == "files":
        captured = capture(core.ground, incarnation, staging, "files", frozen)
        return _Taken(kind="files", captured=captured, processes_from=None)
    head = core.registry.checkpoint(record.head) if record.head else None
    if decision and head and decision.kind != "full" and (why := failed(core, head)):
        decision = msgspec.structs.replace(decision, kind="full", reasons=(*decision.reasons, why))
    if policy == "oracle" and decision:
        captured, decision = judged(core, incarnation, staging, head, decision, frozen)
        return _Taken(kind="full", captured=captured, processes_from=staging.path.name, decision=decision)
    if decision and head and decision.kind == "none":
        return _Taken(
            kind="none",
            captured=Captured(timings=Timings()),
            processes_from=head.processes_from,
            files_from=head.files_from or head.id,
            decision=decision,
            proof=head.proof,
        )
    if decision and head and watching and decision.kind == "files":
        if watching.begin() and (timings := snapshot(incarnation, staging, watching.quiet)):
            captured = Captured(timings=timings)
            return _Taken(kind="files", captured=captured, processes_from=head.processes_from, decision=decision)
        moved = (*decision.reasons, "a process ran while the files were being saved")
        decision = msgspec.structs.replace(decision, kind="full", reasons=moved)
    captured = capture(core.ground, incarnation, staging, "full", frozen)
    kind = decision.kind if decision else "full"
    return _Taken(kind=kind, captured=captured, processes_from=staging.path.name, decision=decision)


def failed(core: Core, head: Checkpoint) -> str:
    """Why nothing can stand in from a checkpoint: what it is made of was tried, and cannot be restored. Empty if it can."""
    for identity in dict.fromkeys((head.id, head.files_from, head.processes_from)):
        found = core.registry.checkpoint(identity) if identity else None
        if found is not None and found.proof.verdict == "failed":
            return f"checkpoint {found.id}, which would stand in, cannot be restored: {found.proof.reason}"
    return ""


@answers(ask.Explain)
def explain(core: Core, request: ask.Explain) -> Decision:
    """Why a checkpoint captured what it did, or what one would capture now."""
    if not request.ref:
        with core.operation(request.sandbox, "explain") as record:
            return core.inspector.decide(core.running(record, "explain"), record.head)
    record = core.registry.find(request.sandbox)
    checkpoint = find(core, record, request.ref)
    if checkpoint.decision is not None:
        return checkpoint.decision
    return Decision(kind=checkpoint.kind, reasons=("it was asked for without a look at what had changed",))


@answers(ask.Turns)
def turns(core: Core, request: ask.Turns) -> tuple[Checkpoint, ...]:
    """Checkpoints on the branch of the head, oldest first (those of the sources of a fork included)."""
    record = core.registry.find(request.sandbox)
    if request.every:
        return tuple(core.registry.checkpoints(record.id))
    return tuple(reversed(refs.branch(core.registry.checkpoints(), record.head)))


def find(core: Core, record: Record, ref: str) -> Checkpoint:
    """The checkpoint that `SANDBOX@ref` names: on the branch of its head (which may go back into the source of a fork), or
    any other of its own."""
    everything = core.registry.checkpoints()
    own = {c.id for c in refs.branch(everything, record.head)} | {c.id for c in everything if c.sandbox == record.id}
    return refs.resolve(ref, [c for c in everything if c.id in own], record.head, record.name)


def checked(core: Core, checkpoint: Checkpoint, files_only: bool = False) -> tuple[Manifest, Manifest | None]:
    """The manifest of a checkpoint and the one with its processes, after every check that needs no restore.

    Raises `Incompatible` or `Damaged`: then nothing has been touched (laws 1 and 4, hazards R02 and R08).
    """
    manifest = core.manifest(checkpoint.id)
    image = core.images.get(manifest.spec.image)
    compatible.check_image(image.name, manifest.checkpoint.image_fingerprint, image.fingerprint)
    source = manifest.checkpoint.processes_from
    if files_only or source is None:
        return manifest, None
    with_processes = manifest if source == checkpoint.id else core.manifest(source)
    compatible.check_host(with_processes.host, core.ground.host)
    core.ground.store.check(source, with_processes.artefacts)
    return manifest, with_processes


def bring_back(core: Core, record: Record, checkpoint: Checkpoint, owed: Owed, files_only: bool = False) -> Record:
    """Restore a checkpoint beside what the sandbox is now, then switch over. On any failure what ran still runs. What is `owed`
    to its agent then is the caller's to say (`note_return`)."""
    manifest, with_processes = checked(core, checkpoint, files_only)
    old = core.life(record)
    incarnation = core.incarnation(
        msgspec.structs.replace(record, spec=manifest.spec, runtime=manifest.runtime), next_generation(core, record)
    )
    try:
        with core.engine.job("restore", record.id):
            restore(core.ground, manifest, with_processes, incarnation)
        settle.part_network(incarnation)
    except BaseException:
        incarnation.destroy("the restore failed")
        raise
    new = msgspec.structs.replace(
        record,
        generation=incarnation.generation,
        process=incarnation.process,
        wanted=State.RUNNING,
        spec=manifest.spec,
        runtime=manifest.runtime,
        head=checkpoint.id,
        turn=checkpoint.turn,
    )
    new = core.registry.save(msgspec.structs.replace(new, owed=owes(core, new, owed)))
    core.switch(new, incarnation)
    core.inspector.restored(
        incarnation, without_processes(checkpoint) if files_only else checkpoint, alone=is_alone(with_processes)
    )
    old.kill("the sandbox was brought back to another state")
    try:
        settle.network(incarnation)  # not before: its address is that of the old one
    finally:
        settle.forget_network(old)
        old.group.remove()
        if old.files.exists():
            core.discard_later(old.files)
    return new


def is_alone(with_processes: Manifest | None) -> bool:
    """Whether nothing but init runs after the restore of a checkpoint."""
    return with_processes is None or len(with_processes.evidence.processes) <= 1


def without_processes(checkpoint: Checkpoint) -> Checkpoint:
    """The files of a checkpoint alone."""
    return msgspec.structs.replace(checkpoint, processes_from=None)


def next_generation(core: Core, record: Record) -> int:
    """A generation that no resource of the sandbox carries yet."""
    names = {
        name.rpartition(".")[2]
        for name in [*core.cgroups.names(), *(p.name for p in core.pool.live.iterdir())]
        if name.startswith(f"{record.id}.")
    }
    return max([record.generation, *(int(name) for name in names if name.isdigit())]) + 1


@answers(ask.Rewind)
def rewind(core: Core, request: ask.Rewind) -> Sandbox:
    """Back to a checkpoint under the same id; paused if it was."""
    with core.operation(request.sandbox, "rewind") as record, returning(core, record):
        paused = core.view(record).state == State.PAUSED
        left = record.turn
        owed = Owed(ask_again=True, goes_on=request.by_agent)
        record = bring_back(core, record, find(core, record, request.ref), owed, request.files_only)
        record = note_return(core, record)
        record = core.registry.save(returned(record, left, request.note))
        if paused:
            core.life(record).group.freeze()
            record = core.registry.save(msgspec.structs.replace(record, wanted=State.PAUSED))
        return core.view(record)


def returned(record: Record, left: int, note: str) -> Record:
    """The record of a sandbox that was rewound to its head from turn `left`."""
    assert record.head
    made = Return(
        when=time.time(),
        checkpoint=record.head,
        turn=record.turn,
        left=left,
        generation=record.generation,
        note=note,
    )
    return msgspec.structs.replace(record, returns=(*record.returns, made)[-KEPT_RETURNS:])


@answers(ask.Recover)
def recover(core: Core, request: ask.Recover) -> Sandbox:
    """Restore a sandbox that is not running from its head."""
    with core.operation(request.sandbox, "recover") as record:
        state = core.view(record).state
        if state in (State.RUNNING, State.PAUSED) and not request.force:
            raise WrongState(
                f"sandbox {record.name} is {state}: nothing to recover",
                remedy=f"`crab rewind {record.name}@head` brings it back to its newest checkpoint, so does --force",
            )
        if (
            state not in (State.LOST, State.RUNNING, State.PAUSED)
            and core.life(record).files.is_dir()
            and record.head
            and not request.force
        ):
            raise WrongState(
                f"sandbox {record.name} is {state}: its files would be replaced by those of its newest checkpoint",
                remedy=f"`crab start {record.name}` starts it on its files as they are; `crab recover --force` gives them up",
            )
        if record.head is None:
            raise NotFound(
                f"sandbox {record.name} has no checkpoint to recover from",
                remedy=f"`crab stop {record.name}` and `crab start {record.name}` start it on its files",
            )
        with returning(core, record):
            record = bring_back(core, record, find(core, record, "head"), Owed(ask_again=False))
            record = note_return(core, record)
        return core.view(record)


@answers(ask.Fork)
def fork(core: Core, request: ask.Fork) -> tuple[Sandbox, ...]:
    """New sandboxes from one checkpoint, restored side by side. All of them, or none."""
    if not 1 <= request.count <= 1000:
        raise InvalidRequest(f"{request.count} forks make no sense", remedy="give a number from 1 to 1000")
    if request.names and len(request.names) != request.count:
        raise InvalidRequest(
            f"{len(request.names)} names for {request.count} forks", remedy="give one name for each fork, or none"
        )
    with core.operation(request.sandbox, "fork") as source:
        if request.ref:
            checkpoint = find(core, source, request.ref)
        else:
            checkpoint = checkpoint_of(core, source, "", "adaptive", durable=False)
        manifest, with_processes = checked(core, checkpoint)
    taken = {one.name for one in (*core.registry.all(), *core.registry.broken())}
    free = (name for name in _fork_names(source.name) if name not in taken)
    names = [refs.check_name(name) for name in request.names] or list(itertools.islice(free, request.count))
    made: list[tuple[Record, Incarnation]] = []
    lock = threading.Lock()

    def added(name: str) -> Record:
        record = Record(
            id=new_id("s"),
            name=name,
            generation=1,
            spec=msgspec.structs.replace(manifest.spec, hostname=name),
            created=time.time(),
            image_fingerprint=manifest.checkpoint.image_fingerprint,
            runtime=manifest.runtime,
            wanted=State.CREATED,
            head=checkpoint.id,
            turn=checkpoint.turn,
            forked_from=checkpoint.id,
        )
        try:
            return core.registry.add(record, box.RANGES)
        except AlreadyExists:
            if request.names:
                raise
            return added(next(free))  # somebody was faster

    def one(name: str) -> Record:
        with lock:
            record = added(name)
            incarnation = core.life(record)
            made.append((record, incarnation))
        note_fork(core, source, record, checkpoint.id)
        with core.engine.job("restore", source.id):
            restore(core.ground, manifest, with_processes, incarnation)
        core.inspector.restored(incarnation, checkpoint, alone=is_alone(with_processes))
        settle.identity(incarnation, record.id)
        core.inspector.wrote(incarnation.key, "the clone was given a name and a machine id of its own")
        settle.network(incarnation)
        return core.registry.save(msgspec.structs.replace(record, wanted=State.RUNNING, process=incarnation.process))

    try:
        with ThreadPoolExecutor(min(request.count, 8), thread_name_prefix="crab-fork") as pool:
            records = list(pool.map(one, names))
    except BaseException:
        for record, incarnation in made:
            with contextlib.suppress(Exception):
                incarnation.destroy("the fork failed")
            core.forget(record.id)
            core.registry.remove(record.id)
            core.switch(record, None)
        raise
    return tuple(core.view(record) for record in records)


def _fork_names(source: str) -> Iterator[str]:
    """Names that say where forks come from: SOURCE-fork-1, SOURCE-fork-2, …; a fork of a fork counts on with it."""
    stem = re.sub(r"-fork-\d+$", "", source)
    for number in itertools.count(1):
        end = f"-fork-{number}"
        yield stem[: 63 - len(end)] + end


@answers(ask.Label)
def label(core: Core, request: ask.Label) -> Checkpoint:
    """Name a checkpoint."""
    refs.check_label(request.label)
    with core.operation(request.sandbox, "label") as record:
        checkpoint = find(core, record, request.ref)
        if request.label and any(
            c.label == request.label and c.id != checkpoint.id for c in core.registry.checkpoints(record.id)
        ):
            raise AlreadyExists(
                f"sandbox {record.name} has a checkpoint labelled {request.label!r}",
                remedy="choose another label, or take it away there first",
            )
        return core.change_checkpoint(checkpoint.id, label=request.label)


@answers(ask.RemoveCheckpoint)
def remove_checkpoint(core: Core, request: ask.RemoveCheckpoint) -> ask.Removed:
    """Remove a checkpoint; its children become those of its parent, and what they need of it becomes theirs."""
    with core.operation(request.sandbox, "rm-checkpoint") as record:
        checkpoint = find(core, record, request.ref)
        drop(core, checkpoint.id, record.id)
        return ask.Removed(removed=(checkpoint.id,))
