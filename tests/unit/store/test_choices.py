"""Which checkpoints are kept, and which one a text names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.store.stores import stored_checkpoint

from crab.errors import InvalidRequest, NotFound
from crab.model import StoredCheckpoint
from crab.store.naming import chosen
from crab.store.retention import Policy, kept

LINE = [
    stored_checkpoint(f"c{turn:04}", turn=turn, created=float(turn), parent=f"c{turn - 1:04}" if turn > 1 else None)
    for turn in range(1, 11)
]


def turns(policy: Policy, everything: list[StoredCheckpoint] = LINE) -> list[int]:
    keep = kept(policy, everything)
    return [one.turn for one in everything if one.id in keep]


def test_each_rule_keeps_its_own() -> None:
    none = Policy(labelled=False, heads=False, last=1)
    assert turns(none) == [10]
    assert turns(Policy(last=3, labelled=False, heads=False)) == [8, 9, 10]
    assert turns(Policy(every=4, labelled=False, heads=False)) == [4, 8]
    assert turns(Policy(every=4)) == [4, 8, 10]
    labelled = [*LINE[:2], stored_checkpoint("c0003", turn=3, label="good", parent="c0002"), *LINE[3:]]
    assert turns(Policy(), labelled) == [3, 10]
    branch = [*LINE, stored_checkpoint("c9999", turn=6, created=20.0, parent="c0005")]
    assert turns(Policy(), branch) == [10, 6]


def test_every_sandbox_for_itself() -> None:
    other = [stored_checkpoint("d1", sandbox="s2", created=99.0), stored_checkpoint("d2", sandbox="s2", created=98.0)]
    assert kept(Policy(last=1, heads=False), [*LINE, *other]) == {"c0010", "d1"}


def test_a_policy_that_keeps_nothing_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        kept(Policy(labelled=False, heads=False), LINE)
    with pytest.raises(InvalidRequest):
        kept(Policy(last=-1), LINE)


checkpoints = st.lists(
    st.builds(
        stored_checkpoint,
        st.sampled_from([f"c{n}" for n in range(30)]),
        sandbox=st.sampled_from(["s1", "s2"]),
        turn=st.integers(0, 20),
        created=st.floats(0, 100),
        parent=st.sampled_from([None, *(f"c{n}" for n in range(30))]),
        label=st.sampled_from(["", "", "x"]),
    ),
    unique_by=lambda one: one.id,
    max_size=15,
)


@given(checkpoints, st.integers(0, 5), st.integers(0, 5))
def test_more_rules_never_keep_less(everything: list[StoredCheckpoint], last: int, every: int) -> None:
    keep = kept(Policy(last=last, every=every), everything)
    assert keep <= {one.id for one in everything}
    assert kept(Policy(last=last, every=every, labelled=False), everything) <= keep
    assert kept(Policy(last=last + 1, every=every), everything) >= keep
    for sandbox in {one.sandbox for one in everything}:
        of_it = [one.id for one in everything if one.sandbox == sandbox]
        assert len(keep & set(of_it)) >= min(last, len(of_it))


def test_names() -> None:
    everything = [*LINE, stored_checkpoint("d0001", sandbox="s2", sandbox_name="other", label="good")]
    assert chosen("box", everything).turn == 10
    assert chosen("box@head", everything).turn == 10
    assert chosen("box@3", everything).turn == 3
    assert chosen("s1@4", everything).turn == 4
    assert chosen("box@c0005", everything).turn == 5
    assert chosen("c0006", everything).turn == 6
    assert chosen("other@good", everything).id == "d0001"
    with pytest.raises(InvalidRequest, match="beginning"):
        chosen("c000", everything)
    for text in ("nobody", "box@77", "box@good", "", "c0", "c0006@head"):
        with pytest.raises(NotFound):
            chosen(text, everything)


def test_of_two_sandboxes_with_one_name_the_newest_counts() -> None:
    old = [stored_checkpoint("c1", sandbox="s1", turn=5, stored=1.0)]
    new = [stored_checkpoint("c2", sandbox="s2", turn=1, stored=2.0)]
    assert chosen("box", [*new, *old]).id == "c2"
    with pytest.raises(NotFound):
        chosen("box@5", [*new, *old])
    assert chosen("s1@5", [*new, *old]).id == "c1"
