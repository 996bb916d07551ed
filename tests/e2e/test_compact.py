"""Compact checkpoints with real sandboxes: they are restored to the same state, whatever was removed, and whoever was killed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from bench.stored import stored
from e2e.box import Box, eventually
from e2e.dying import dies

from crab.daemon import requests as ask
from crab.daemon.compacting import Compacting
from crab.daemon.compacting import compacted as compacted_one
from crab.daemon.service import Service
from crab.engine.jobs import Urgency
from crab.errors import Busy
from crab.model import Checkpoint, Compaction

pytestmark = [pytest.mark.kernel, pytest.mark.criu]

HOLDER = """
import os, sys, time
heap = [os.urandom(1 << 20) for _ in range(8)]
heap.append("0" * (4 << 20))
while True:
    with open("/root/said", "a") as said:
        said.write("%d\\n" % len(said.name * len(heap)))
    heap[0] = os.urandom(1 << 20)
    time.sleep(0.05)
"""


SHELL = "kept=$(head -c 3000000 /dev/zero | tr '\\0' x); while :; do echo ${#kept} >>/root/said; sleep 0.05; done"
"""Where there is no Python."""


def aged(box: Box, turns: int = 3, script: str = "exec python3 /root/holder.py") -> list[Checkpoint]:
    """Checkpoints of a sandbox with 12 MB of memory, one of which changes."""
    box.put("/root/holder.py", HOLDER.encode())
    box.background(script)
    eventually(lambda: box.read("/root/said"), "all of its memory")
    made: list[Checkpoint] = []
    for turn in range(turns):
        box.run(f"sleep 0.1; echo {turn} >/root/turn")
        made.append(box.checkpoint(policy="always"))
    return made


def compacted(service: Service) -> Compaction:
    made = service.handle(ask.Compact())
    assert not made.failed
    assert os.listdir(service.state_dir / "process") == []
    return made


def test_compact_checkpoints_share_what_they_have_in_common_and_are_proven(service: Service, box: Box) -> None:
    made = aged(box)
    before = stored(service.state_dir, [one.id for one in made])
    found = compacted(service)
    assert found.checkpoints == len(made) and found.size > 3 * 12 << 20
    assert found.own < found.size * 0.6, "the second and third have a megabyte and a bit of their own each"
    after = stored(service.state_dir, [one.id for one in made])
    assert after.stored < before.stored * 0.6 and after.logical == pytest.approx(before.logical, rel=0.01)
    for turn, one in enumerate(made):
        assert box.ask(ask.Verify, ref=one.id).proof.verdict == "proven"
        box.rewind(one.id)
        assert box.read("/root/turn") == f"{turn}\n"
        assert any("holder" in " ".join(process.argv) for process in box.ask(ask.ProcessList))


def test_each_stays_whole_when_others_are_removed(service: Service, box: Box, tmp_path: Path) -> None:
    first, second, third = aged(box)
    compacted(service)
    (fork,) = box.fork(ref=second.id)
    box.ask(ask.RemoveCheckpoint, ref=first.id)
    assert box.ask(ask.Verify, ref=second.id).proof.verdict == "proven"
    box.ask(ask.Export, ref=third.id, path=str(tmp_path / "third.crab"))
    service.handle(ask.Remove(sandbox=box.name, force=True))
    assert fork.ask(ask.Verify, ref="head").proof.verdict == "proven"
    back = Box(service, service.handle(ask.Import(path=str(tmp_path / "third.crab"), name="")).name)
    back.ask(ask.Recover)
    assert back.read("/root/turn") == "2\n"


def test_the_heir_of_a_compact_checkpoint_has_its_images(service: Service, box: Box) -> None:
    box.background("exec sleep 100000")

    def files_alone() -> Checkpoint | None:
        box.run("date +%N >/root/more")
        one = box.checkpoint()
        return one if one.processes_from != one.id else None

    heir = eventually(files_alone, "a checkpoint whose processes are those before")
    compacted(service)
    box.ask(ask.RemoveCheckpoint, ref=heir.processes_from)
    assert box.ask(ask.Verify, ref=heir.id).proof.verdict == "proven"
    assert compacted(service).checkpoints == 0
    box.rewind(heir.id)
    assert box.read("/root/more")


def test_a_daemon_makes_compact_what_is_not_the_newest_and_nobody_reads(service: Service, box: Box) -> None:
    made = aged(box)
    core, loose = service._core, lambda: set(service._core.ground.store.loose())
    compacting = Compacting(core)
    with core.ground.store.images(made[0].id) as images:
        compacting.step()
        assert loose() == {made[0].id, made[2].id}
        assert all((images / artefact.name).is_file() for artefact in core.manifest(made[0].id).artefacts)
        with core.ground.store.images(made[0].id) as others:
            assert others != images, "who comes now reads the compact ones"
    compacting.step()
    assert loose() == {made[2].id}
    compacting.step()
    assert loose() == {made[2].id}
    for one in made:
        assert box.ask(ask.Verify, ref=one.id).proof.verdict == "proven"


def test_images_that_are_damaged_stay_as_they_are(service: Service, box: Box, caplog: pytest.LogCaptureFixture) -> None:
    made = aged(box, 3)
    victim = max((service.state_dir / "process" / made[1].id).glob("pages-*"), key=lambda path: path.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    compacting = Compacting(service._core)
    compacting.step()
    compacting.step()
    assert [record.levelname for record in caplog.records if victim.name in record.message] == ["ERROR"], "said once"
    assert service.handle(ask.Compact()).failed.keys() == {made[1].id}
    assert service._core.ground.store.loose() == [made[1].id] and victim.read_bytes() == data
    assert not list(service._core.pool.staging.iterdir())
    box.rewind(made[2].id)
    assert box.read("/root/turn") == "2\n"


def test_an_image_that_is_missing_is_said_once_and_the_others_are_done(
    service: Service, box: Box, caplog: pytest.LogCaptureFixture
) -> None:
    made = aged(box, 3)
    (service.state_dir / "process" / made[0].id / "pstree.img").unlink()
    compacting = Compacting(service._core)
    compacting.step()
    compacting.step()
    said = [record.message for record in caplog.records if made[0].id in record.message]
    assert len(said) == 1 and "pstree.img is missing" in said[0]
    assert set(service._core.ground.store.loose()) == {made[0].id, made[2].id}


def test_what_an_interrupted_removal_has_linked_is_not_taken_for_the_heirs_own(service: Service, box: Box) -> None:
    """The images would be gone with the checkpoint that has them."""
    box.background("exec sleep 100000")
    heir = eventually(lambda: (one := box.checkpoint()).kind == "none" and one, "rest")
    assert heir.processes_from is not None
    service._core.ground.store.inherit(heir.processes_from, heir.id)  # and then it was killed
    for _ in range(2):
        Compacting(service._core).step()
        assert not service.handle(ask.Compact()).failed
    box.ask(ask.RemoveCheckpoint, ref=heir.processes_from)
    service.handle(ask.Compact())
    assert box.ask(ask.Verify, ref=heir.id).proof.verdict == "proven"
    box.ask(ask.Kill)
    box.ask(ask.Recover)
    assert any("sleep" in process.argv for process in box.ask(ask.ProcessList))


def test_a_daemon_that_ends_waits_for_no_compaction(service: Service, box: Box) -> None:
    made = aged(box, 2)
    compacting = Compacting(service._core)
    compacting.ends.set()
    with pytest.raises(Busy):
        compacted_one(service._core, made[0], Urgency.BACKGROUND, compacting._ends)
    assert set(service._core.ground.store.loose()) == {one.id for one in made}
    assert not service._core.ground.store.is_compact(made[0].id)


MOMENTS = [
    ("crab.host.btrfs.clone", "before"),
    ("crab.checkpoint.compact._flush", "after"),
    ("crab.store.local.LocalStore.adopt", "before"),
    ("crab.store.local.LocalStore.adopt", "after"),
    ("crab.host.btrfs.commit", "after"),
    ("shutil.rmtree", "before"),
    ("shutil.rmtree", "after"),
]


def test_a_daemon_that_is_killed_while_it_makes_checkpoints_compact_loses_none(second_state: Path) -> None:
    with Service.open(second_state) as service:
        box = Box(service, service.handle(ask.Create(image="small")).name)
        made = aged(box, 2, SHELL)
    for moment, side in MOMENTS:
        with Service.open(second_state) as service:
            box = Box(service, box.name)
            made.append(box.checkpoint(policy="always"))
        dies(second_state, moment, side, ask.Compact())
        with Service.open(second_state) as service:
            box, store = Box(service, box.name), service._core.ground.store
            assert not list(service._core.pool.staging.iterdir())
            twice = [
                one
                for one in os.listdir(second_state / "process")
                if store.is_compact(one) or one not in store.identities()
            ]
            assert not twice, "the sweep left them"
            for one in made:
                store.check(one.id, service._core.manifest(one.id).artefacts)
    with Service.open(second_state) as service:
        box = Box(service, box.name)
        compacted(service)
        for one in made:
            assert box.ask(ask.Verify, ref=one.id).proof.verdict == "proven"
