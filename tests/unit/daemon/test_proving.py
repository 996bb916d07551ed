"""Which checkpoint is proven next."""

from __future__ import annotations

from crab.daemon.proving import next_to_prove
from crab.daemon.registry import Record
from crab.model import Checkpoint, Proof, SandboxSpec, State

UNTESTED, PROVEN, FAILED = Proof(), Proof(verdict="proven"), Proof(verdict="failed", reason="no")


def _checkpoint(name: str, created: float, proof: Proof = UNTESTED, files: str = "", processes: str = "") -> Checkpoint:
    return Checkpoint(
        id=name, sandbox="s", turn=1, kind="full", created=created, files_from=files,
        processes_from=processes or name, proof=proof,
    )  # fmt: skip


def _record(head: str | None) -> Record:
    return Record(
        id=f"s-{head}", name=f"n-{head}", generation=1, spec=SandboxSpec(image="i"), created=0.0,
        image_fingerprint="f", runtime="r", wanted=State.RUNNING, head=head,
    )  # fmt: skip


def chosen(*checkpoints: Checkpoint, heads: tuple[str | None, ...]) -> str | None:
    found = next_to_prove([_record(head) for head in heads], {one.id: one for one in checkpoints})
    return found.id if found else None


def test_the_oldest_head_comes_first_and_only_heads_count() -> None:
    checkpoints = _checkpoint("a", 3.0), _checkpoint("b", 2.0), _checkpoint("c", 1.0)
    assert chosen(*checkpoints, heads=("a", "b")) == "b"


def test_what_was_tried_is_not_tried_again() -> None:
    checkpoints = _checkpoint("a", 1.0, proof=PROVEN), _checkpoint("b", 2.0, proof=FAILED)
    assert chosen(*checkpoints, heads=("a", "b")) is None


def test_one_that_is_made_of_what_a_proven_one_is_made_of_needs_none() -> None:
    proven = _checkpoint("a", 1.0, proof=PROVEN)
    same, other = _checkpoint("b", 2.0, files="a", processes="a"), _checkpoint("c", 3.0, processes="a")
    assert chosen(proven, same, other, heads=("b",)) is None
    assert chosen(proven, same, other, heads=("b", "c")) == "c", "its files are new"


def test_nothing_to_do() -> None:
    assert chosen(heads=(None, "gone")) is None
