"""The engine with real sandboxes: draining a host, proving in the background, and what is seen of the queue."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from e2e.box import Box, eventually

from crab.daemon import requests as ask
from crab.daemon.proving import Proving
from crab.daemon.sending import Sending
from crab.daemon.service import Service
from crab.engine.jobs import Urgency
from crab.errors import CrabError
from crab.model import Drained, EngineState, State

pytestmark = [pytest.mark.kernel, pytest.mark.criu]


def drained(service: Service, **fields: object) -> dict[str, Drained]:
    return {one.sandbox: one for one in service.handle(ask.Drain(**fields))}


@pytest.fixture
def jammed(service: Service) -> Iterator[Callable[[], None]]:
    """Takes every slot of the engine until the end of the test, or of a call."""
    engine = service._core.engine
    free = threading.Event()

    def hold(number: int) -> None:
        with engine.job("verify", f"other-{number}"):
            free.wait(120)

    with ThreadPoolExecutor(engine.slots) as pool:
        held = [pool.submit(hold, number) for number in range(engine.slots)]
        eventually(lambda: len(engine.state().running) == engine.slots, "every slot is taken")
        try:
            yield free.set
        finally:
            free.set()
            for one in held:
                one.result()


def test_drain_makes_every_running_sandbox_safe(service: Service, make_box: Callable[..., Box]) -> None:
    boxes = [make_box() for _ in range(3)]
    stopped = make_box()
    stopped.ask(ask.Stop, grace=0.0)
    for number, box in enumerate(boxes):
        box.background("exec sleep 100000")
        box.run(f"echo {number} >/root/kept")
    found = drained(service, seconds=60.0, pause=True)
    assert found.keys() == {box.name for box in boxes} and all(one.safe for one in found.values())
    for number, box in enumerate(boxes):
        assert box.look().state == State.PAUSED and box.look().head == found[box.name].checkpoint
        box.ask(ask.Kill)
        box.ask(ask.Recover)
        assert box.read("/root/kept") == f"{number}\n"
        assert any("sleep" in process.argv for process in box.ask(ask.ProcessList))


def test_what_drain_could_not_save_in_time_is_said(service: Service, box: Box, jammed: Callable[[], None]) -> None:
    before = box.look().head
    (found,) = drained(service, seconds=0.2).values()
    assert not found.safe and found.checkpoint == before
    assert re.fullmatch(rf"its turn had not come after 0\.\d s: {service._core.engine.slots} jobs run", found.why)
    jammed()
    assert drained(service, seconds=60.0)[box.name].safe


def test_drain_sends_to_a_store_and_says_what_did_not_get_there(
    service: Service, box: Box, tmp_path: Path, jammed: Callable[[], None]
) -> None:
    jammed()
    store = ask.StoreRequest(url=str(tmp_path / "store"))
    service.handle(ask.StoreInit(url=store.url))
    box.run("echo kept >/root/kept")
    found = drained(service, seconds=60.0, store=store.url)[box.name]
    assert (found.safe, found.stored, found.why) == (True, True, "")
    assert [one.id for one in service.handle(ask.StoreList(url=store.url))] == [found.checkpoint]
    missing = drained(service, seconds=60.0, store=str(tmp_path / "none"))[box.name]
    assert missing.safe and not missing.stored and "none" in missing.why


def test_the_newest_checkpoints_are_sent_as_they_come(service: Service, box: Box, tmp_path: Path) -> None:
    store = ask.StoreRequest(url=str(tmp_path / "store"))
    sending = Sending(service._core, store)
    box.checkpoint()
    with pytest.raises(CrabError):  # there is no store yet: said, and tried again
        sending.send_one()
    service.handle(ask.StoreInit(url=store.url))
    sending._known.clear()
    made = box.checkpoint()
    assert sending.send_one() == made.id and sending.send_one() is None
    box.checkpoint()
    assert sending.send_one() is None, "not all the time"
    sending._known.clear()
    assert sending.send_one() == box.look().head
    assert len(service.handle(ask.StoreList(url=store.url))) == 2


def test_the_queue_is_seen_with_its_reasons(service: Service, box: Box, jammed: Callable[[], None]) -> None:
    def state() -> EngineState:
        return service.handle(ask.Jobs())

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(box.checkpoint)
        (waits,) = eventually(lambda: state().waiting, "the capture waits")
        assert (waits.kind, waits.sandbox, waits.urgency) == ("capture", box.name, "urgent")
        assert "jobs run" in waits.reason
        jammed()
        assert asked.result(60).timings.queued_ms > 0
    eventually(lambda: not state().running, "all is done")
    assert state().done["capture"] >= 1


def test_a_turn_that_waits_in_the_queue_gives_way_to_what_a_person_wants(
    service: Service, box: Box, jammed: Callable[[], None]
) -> None:
    """It becomes urgent: the person waits for it now."""
    core = service._core
    with ThreadPoolExecutor(2) as pool:

        def turn() -> None:
            with core.operation(box.name, "a turn") as record, core.engine.job("capture", record.id, Urgency.NORMAL):
                pass

        waits = pool.submit(turn)
        eventually(lambda: service.handle(ask.Jobs()).waiting, "the turn waits")
        paused = pool.submit(box.ask, ask.Pause)
        eventually(lambda: service.handle(ask.Jobs()).waiting[0].urgency == "urgent", "it is urgent")
        jammed()
        waits.result(60)
        assert paused.result(60).state == State.PAUSED


def test_many_durable_checkpoints_at_once(make_box: Callable[..., Box]) -> None:
    boxes = [make_box() for _ in range(4)]

    def turns(box: Box) -> list[str]:
        made = []
        for number in range(3):
            box.run(f"echo {number} >>/root/log")
            made.append(box.checkpoint().id)
        return made

    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(turns, boxes))
    for box, ids in zip(boxes, made, strict=True):
        box.rewind(ids[1])
        assert box.read("/root/log") == "0\n1\n"


def test_an_idle_host_proves_the_newest_checkpoint_and_what_equals_it_is_proven_too(service: Service, box: Box) -> None:
    proving = Proving(service._core)
    box.background("exec sleep 100000")
    made = box.checkpoint()
    found = proving.prove_one()
    assert found is not None and found.id == made.id and found.proof.verdict == "proven"
    assert proving.prove_one() is None
    same = eventually(lambda: (one := box.checkpoint()).kind == "none" and one, "rest")
    assert same.proof.verdict in ("proven", "untested")
    proving.prove_one()
    assert eventually(lambda: (one := box.checkpoint()).kind == "none" and one, "rest").proof.verdict == "proven"


def test_nothing_stands_in_from_what_cannot_be_restored(service: Service, box: Box) -> None:
    made = box.checkpoint()
    images = service.state_dir / "process" / (made.processes_from or "")
    victim = next(path for path in images.iterdir() if path.name.startswith("pages-"))
    victim.write_bytes(victim.read_bytes()[:-1] + b"\x00\x00")
    found = Proving(service._core).prove_one()
    assert found is not None and found.proof.verdict == "failed" and victim.name in found.proof.reason
    again = box.checkpoint()
    assert again.kind == "full" and again.decision is not None
    assert f"checkpoint {made.id}, which would stand in, cannot be restored" in again.decision.reasons[-1]
    box.rewind("head")
    box.run("true")
