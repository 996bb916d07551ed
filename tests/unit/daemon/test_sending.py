"""Which sandbox is sent to a store next."""

from __future__ import annotations

from crab.daemon.registry import Record
from crab.daemon.sending import APART_SECONDS, next_to_send
from crab.model import SandboxSpec, State


def _record(name: str, head: str | None) -> Record:
    return Record(
        id=name, name=name, generation=1, spec=SandboxSpec(image="i"), created=0.0, image_fingerprint="f", runtime="r",
        wanted=State.RUNNING, head=head,
    )  # fmt: skip


def chosen(records: dict[str, str | None], known: dict[str, tuple[str, float]], now: float = 1000.0) -> str | None:
    found = next_to_send([_record(name, head) for name, head in records.items()], known, now)
    return found.id if found else None


def test_what_never_was_sent_comes_first_then_what_waits_longest() -> None:
    known = {"a": ("old", 900.0), "b": ("old", 800.0)}
    assert chosen({"a": "new", "b": "new", "c": "first"}, known) == "c"
    assert chosen({"a": "new", "b": "new"}, known) == "b"


def test_what_is_there_is_not_sent_again_nor_one_sandbox_all_the_time() -> None:
    assert chosen({"a": "same"}, {"a": ("same", 0.0)}) is None
    assert chosen({"a": "new"}, {"a": ("old", 1000.0 - APART_SECONDS + 1)}) is None
    assert chosen({"a": "new"}, {"a": ("old", 1000.0 - APART_SECONDS)}) == "a"
    assert chosen({"a": None}, {}) is None
