"""Retention on this host: what is kept can be restored as before, whatever it had in common with what went."""

from __future__ import annotations

import pytest
from e2e.box import Box

from crab.daemon import pruning as pruning_module
from crab.daemon import requests as ask
from crab.daemon.core import Core
from crab.daemon.pruning import Pruning
from crab.daemon.service import Service
from crab.errors import InvalidRequest
from crab.model import Checkpoint
from crab.store.retention import Policy

pytestmark = [pytest.mark.kernel, pytest.mark.criu]


def aged(box: Box) -> list[Checkpoint]:
    """Twelve checkpoints of all kinds: every third turn changes nothing, and the others the files or a process, too."""
    made: list[Checkpoint] = []
    for turn in range(1, 13):
        if turn % 3:
            box.run(f"echo {turn} >/root/turn")
        if turn % 5 == 0:
            box.background(f"exec sleep 10000{turn}")
        made.append(box.checkpoint("named" if turn == 2 else ""))
    return made


def sleeping(box: Box) -> list[str]:
    return sorted(process.argv[1] for process in box.ask(ask.ProcessList) if process.argv[:1] == ("sleep",))


def turn_at(turn: int) -> str:
    return f"{max(one for one in range(1, turn + 1) if one % 3)}\n"


def test_what_is_kept_is_whole(service: Service, box: Box) -> None:
    made = aged(box)
    (fork,) = box.fork(ref=made[5].id)
    policy = Policy(last=2, every=4)
    wanted = {one.id for one in made if one.turn not in (2, 4, 8, 11, 12, 6)}
    told = service.handle(ask.Prune(policy=policy, sandbox=box.name, dry=True)).removed
    assert set(told) == wanted and len(box.ask(ask.Turns)) == 12
    assert set(service.handle(ask.Prune(policy=policy, sandbox=box.name)).removed) == wanted
    assert [one.turn for one in box.ask(ask.Turns)] == [2, 4, 6, 8, 11, 12], "the sixth is the head of the fork"
    for one in box.ask(ask.Turns):
        box.rewind(one.id)
        assert box.read("/root/turn") == turn_at(one.turn)
        assert sleeping(box) == sorted(f"10000{turn}" for turn in (5, 10) if turn <= one.turn)
        assert box.ask(ask.Verify, ref=one.id).proof.verdict == "proven"
    fork.rewind()
    assert fork.read("/root/turn") == turn_at(6)


def test_all_at_once_and_by_itself(service: Service, make_box) -> None:
    boxes = [make_box() for _ in range(2)]
    for box in boxes:
        for turn in range(4):
            box.run(f"echo {turn} >/root/turn")
            box.checkpoint()
    service.handle(ask.Prune(policy=Policy(last=3)))
    assert [[one.turn for one in box.ask(ask.Turns)] for box in boxes] == [[2, 3, 4]] * 2
    pruning = Pruning(service._core, Policy(last=1))
    with service._core.operation(boxes[0].name, "a test"):
        pruning.step()
    assert [[one.turn for one in box.ask(ask.Turns)] for box in boxes] == [[2, 3, 4], [4]]
    pruning.step()
    for box in boxes:
        assert [one.turn for one in box.ask(ask.Turns)] == [4]
        box.rewind()
        assert box.read("/root/turn") == "3\n"
        box.checkpoint()


def test_a_branch_that_was_left_stays_unless_told_otherwise(service: Service, box: Box) -> None:
    first = box.checkpoint()
    box.run("echo left >/root/branch")
    left = box.checkpoint()
    box.rewind(first.id)
    head = box.checkpoint()
    service.handle(ask.Prune(policy=Policy(last=1), sandbox=box.name))
    assert {one.id for one in box.ask(ask.Turns, every=True)} == {left.id, head.id}
    box.rewind(left.id)
    assert box.read("/root/branch") == "left\n"
    service.handle(ask.Prune(policy=Policy(last=1, heads=False), sandbox=box.name))
    assert {one.id for one in box.ask(ask.Turns, every=True)} == {left.id, head.id}, "one is the newest, one the head"
    with pytest.raises(InvalidRequest):
        service.handle(ask.Prune(policy=Policy(labelled=False, heads=False), sandbox=box.name))


def test_what_got_a_label_meanwhile_stays_and_what_cannot_be_removed_is_said(
    service: Service, make_box, monkeypatch: pytest.MonkeyPatch
) -> None:
    box, other = make_box(), make_box()
    made = [box.checkpoint() for _ in range(4)]
    others = [other.checkpoint() for _ in range(2)]
    real = pruning_module.doomed

    def labelling(core: Core, policy: Policy) -> dict[str, list[Checkpoint]]:
        found = real(core, policy)
        box.ask(ask.Label, ref=made[1].id, label="precious")
        return found

    monkeypatch.setattr(pruning_module, "doomed", labelling)
    manifest = service._core.ground.store.path(made[3].id) / "manifest.json"
    whole = manifest.read_bytes()
    manifest.write_bytes(b"{")
    with service._core.operation(other.name, "a test"):
        done = service.handle(ask.Prune(policy=Policy(last=1)))
    assert "busy" in done.stays[others[0].id]
    assert "cannot be read" in done.stays[made[2].id], "its child cannot be told who its parent is"
    assert made[1].id not in done.removed
    left = {one.id for one in box.ask(ask.Turns, every=True)}
    assert left == {one.id for one in made} - set(done.removed)
    manifest.write_bytes(whole)
    assert not service.handle(ask.Prune(policy=Policy(last=1))).stays
    assert {one.id for one in box.ask(ask.Turns, every=True)} == {made[1].id, made[3].id}


def test_a_source_is_not_pruned_while_a_fork_takes_a_checkpoint_that_builds_on_it(service: Service, box: Box) -> None:
    box.run("echo kept >/root/kept")
    base = box.checkpoint()
    (fork,) = box.fork(ref=base.id)
    taken = fork.checkpoint()
    assert taken.kind == "files" and taken.processes_from == base.id, taken.decision
    for turn in range(2):
        box.run(f"echo {turn} >/root/kept")
        box.checkpoint()
    with service._core.operation(fork.name, "a checkpoint"):
        done = service.handle(ask.Prune(policy=Policy(last=1), sandbox=box.name))
    assert "busy" in done.stays[base.id]
    assert base.id in service.handle(ask.Prune(policy=Policy(last=1), sandbox=box.name)).removed
    fork.ask(ask.Kill)
    fork.ask(ask.Recover)
    assert fork.read("/root/kept") == "kept\n"
