"""References to checkpoints."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crab.checkpoint import refs
from crab.daemon.core import new_id
from crab.errors import InvalidRequest, NotFound
from crab.model import Checkpoint


def chain(*ids: str, labels: dict[str, str] | None = None) -> list[Checkpoint]:
    """Checkpoints in a row, each the parent of the next, turns from 1."""
    labels = labels or {}
    return [
        Checkpoint(id=identity, sandbox="s", turn=n, kind="full", created=float(n), parent=ids[n - 2] if n > 1 else None,
                   label=labels.get(identity, ""))
        for n, identity in enumerate(ids, 1)
    ]  # fmt: skip


FOUR = chain("caaaa1", "cbbbb2", "cbbcc3", "cdddd4", labels={"cbbbb2": "good"})
# turn 2 was rewound to, and another turn 3 was made after it
FORKED = [*FOUR, Checkpoint(id="ceeee5", sandbox="s", turn=3, kind="full", created=5.0, parent="cbbbb2")]


@pytest.mark.parametrize(
    ("ref", "identity"),
    [
        ("head", "cdddd4"),
        ("head~1", "cbbcc3"),
        ("head~3", "caaaa1"),
        ("2", "cbbbb2"),
        ("good", "cbbbb2"),
        ("cdddd", "cdddd4"),
    ],
)
def test_a_ref_names_one_checkpoint(ref: str, identity: str) -> None:
    assert refs.resolve(ref, FOUR, "cdddd4").id == identity


def test_turn_numbers_are_those_of_the_branch_that_is_alive() -> None:
    assert refs.resolve("3", FORKED, "ceeee5").id == "ceeee5"
    assert refs.resolve("3", FORKED, "cdddd4").id == "cbbcc3"


def test_what_was_rewound_away_is_still_there_by_id() -> None:
    assert refs.resolve("cdddd4", FORKED, "ceeee5").id == "cdddd4"
    with pytest.raises(NotFound):
        refs.resolve("4", FORKED, "ceeee5")


def test_an_unknown_ref_is_answered_by_what_exists() -> None:
    with pytest.raises(NotFound) as caught:
        refs.resolve("9", FOUR, "cdddd4", "work")
    assert "1, 2, 3, 4" in caught.value.remedy and "good" in caught.value.remedy and "work" in caught.value.message


def test_an_ambiguous_beginning_is_refused() -> None:
    pair = chain("cbbbb2", "cbbbb3")
    with pytest.raises(InvalidRequest):
        refs.resolve("cbbbb", pair, "cbbbb3")


def test_a_sandbox_without_checkpoints_has_no_head() -> None:
    with pytest.raises(NotFound):
        refs.resolve("head", [], None)


@pytest.mark.parametrize(("text", "parts"), [("a@3", ("a", "3")), ("a", ("a", "head")), ("a@", ("a", "head"))])
def test_a_reference_is_a_sandbox_and_a_ref(text: str, parts: tuple[str, str]) -> None:
    assert refs.split(text) == parts


@pytest.mark.parametrize("label", ["3", "head", "head~1", "-x", "a b", "x" * 64])
def test_a_label_cannot_be_read_as_anything_else(label: str) -> None:
    with pytest.raises(InvalidRequest):
        refs.check_label(label)


@pytest.mark.parametrize("name", ["", "-a", "A", "a/b", "a b", "x" * 64, "a@b", "head"])
def test_a_name_that_no_sandbox_may_have(name: str) -> None:
    with pytest.raises(InvalidRequest):
        refs.check_name(name)


def test_no_name_and_no_label_can_be_the_id_of_another() -> None:
    with pytest.raises(InvalidRequest):
        refs.check_name(new_id("s"))
    with pytest.raises(InvalidRequest):
        refs.check_label(new_id("c"))


@given(st.lists(st.integers(min_value=0, max_value=30), max_size=30), st.integers(min_value=0, max_value=30))
def test_a_branch_ends_at_a_root_and_never_repeats(parents: list[int], head: int) -> None:
    made = [
        Checkpoint(
            id=f"c{n}", sandbox="s", turn=n, kind="full", created=0.0, parent=f"c{parent}" if parent < n else None
        )
        for n, parent in enumerate(parents)
    ]
    line = refs.branch(made, f"c{head}")
    assert len({c.id for c in line}) == len(line)
    assert not line or line[-1].parent is None or line[-1].parent not in {c.id for c in made}
