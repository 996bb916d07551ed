"""The packs of programs for the kernel: what is named is what there is."""

from __future__ import annotations

from crab.host.doctor import inspector_row
from crab.native import bpf


def test_every_source_is_a_pack_of_some_tier_and_every_pack_has_a_source() -> None:
    assert bpf.names() == sorted(bpf.TIERS)
    assert bpf.TIERS.keys() >= bpf.BY_TIME


def test_packs_are_tried_from_the_best_tier_down() -> None:
    assert list(bpf.TIERS.values()) == sorted(bpf.TIERS.values())


def test_the_doctor_says_which_tier_it_is_and_why_it_is_no_better() -> None:
    row = inspector_row({"A": "fentry is not permitted", "B": ""})
    assert (row.health, row.found) == ("ok", "tier B (tier A: fentry is not permitted)")
    row = inspector_row({"A": "no", "B": "no", "C": ""})
    assert row.health == "degraded" and row.found == "tier C (tier A: no; tier B: no)" and "system call" in row.loses
    row = inspector_row({"A": "no", "B": "no", "C": "EPERM"})
    assert row.health == "degraded" and "tier C: EPERM" in row.found and "full" in row.loses
