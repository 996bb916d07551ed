"""The work of the engine, and how a host is left: `jobs`, `drain`."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec

from crab.daemon import requests as ask
from crab.daemon.core import Core
from crab.daemon.dispatch import answers
from crab.daemon.history import checkpoint_of
from crab.daemon.registry import Record
from crab.daemon.storing import sent
from crab.errors import CrabError, InvalidRequest
from crab.model import Drained, EngineState, State

log = logging.getLogger("crab.drain")


@answers(ask.Jobs)
def jobs(core: Core, request: ask.Jobs) -> EngineState:
    """What the host works on for checkpoints, sandboxes by their names."""
    names = {record.id: record.name for record in core.registry.all()}
    state = core.engine.state()
    named = {
        part: tuple(msgspec.structs.replace(view, sandbox=names.get(view.sandbox, view.sandbox)) for view in views)
        for part, views in (("running", state.running), ("waiting", state.waiting))
    }
    return msgspec.structs.replace(state, **named)


@answers(ask.Drain)
def drain(core: Core, request: ask.Drain) -> tuple[Drained, ...]:
    """Make every running sandbox safe. They are all urgent, so the engine takes the shortest first: that saves most of them."""
    if request.seconds <= 0:
        raise InvalidRequest(f"a deadline of {request.seconds:g} s makes no sense", remedy="give some seconds")
    end = time.monotonic() + request.seconds
    records = [record for record in core.registry.all() if core.view(record).state == State.RUNNING]
    if not records:
        return ()
    with ThreadPoolExecutor(len(records), "crab-drain") as pool:
        found = tuple(pool.map(lambda record: _drained(core, record, end, request), records))
    late = [one.sandbox for one in found if not one.safe or one.why]
    log.info(
        "%d of %d sandboxes are safe%s", len(found) - len(late), len(found), f", not: {', '.join(late)}" if late else ""
    )
    return found


def _drained(core: Core, record: Record, end: float, request: ask.Drain) -> Drained:
    """Take a checkpoint, send it if that is wanted, and say what came of it; never raises `CrabError` or OSError."""
    try:
        with core.operation(record.id, "drain", _left(end)) as record:
            made = checkpoint_of(core, record, "", "adaptive", durable=True, seconds=_left(end))
            if request.pause:
                core.life(record).group.freeze()
                core.registry.save(msgspec.structs.replace(core.registry.find(record.id), wanted=State.PAUSED))
    except (CrabError, OSError) as error:  # one of many: the others go on
        head = core.registry.checkpoint(record.head) if record.head else None
        age = time.time() - head.created if head else 0.0
        return Drained(
            sandbox=record.name, safe=False, checkpoint=record.head, turn=record.turn, age_s=age, why=_said(error)
        )
    found = Drained(sandbox=record.name, safe=True, checkpoint=made.id, turn=made.turn, paused=request.pause)
    if not request.store:
        return found
    why = _sent(core, request, record, made.id, end)
    return msgspec.structs.replace(found, stored=not why, why=why)


def _left(end: float) -> float:
    return max(end - time.monotonic(), 0.0)


def _said(error: CrabError | OSError) -> str:
    return error.message if isinstance(error, CrabError) else str(error)


def _sent(core: Core, request: ask.Drain, record: Record, checkpoint: str, end: float) -> str:
    """Send a checkpoint; why it is not in the store, or empty. What goes on after the deadline is not waited for."""
    why = ["it was not sent in time"]
    store = ask.StoreRequest(url=request.store, key_file=request.key_file)

    def send() -> None:
        try:
            sent(core, store, record.id, checkpoint)
            why[0] = ""
        except (CrabError, OSError) as error:
            why[0] = _said(error)

    thread = threading.Thread(target=send, name="crab-drain-send", daemon=True)
    thread.start()
    thread.join(_left(end))
    return why[0]
