"""The decision: every rule, and what no combination of findings may do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crab.inspector.decide import Fate, Findings, ProcessFinding, Role, decide
from crab.model import FileChange

FILE = FileChange(path="root/a", kind="changed", what=("content",))
PLAIN = ProcessFinding(number=7, name="redis", fate=Fate.RAN, detail="its memory changed")
SHELL = ProcessFinding(number=8, name="main", fate=Fate.CHANGED, role=Role.SHELL, detail="variable A")
AGENT = ProcessFinding(number=9, name="claude", fate=Fate.RAN, role=Role.AGENT)


@pytest.mark.parametrize(
    ("findings", "kind", "reason"),
    [
        (Findings(), "none", "no file and no process is other than it was"),
        (Findings(files=(FILE,)), "files", "files changed: root/a changed (content)"),
        (Findings(files_written=("x was copied to /y",)), "files", "files changed: x was copied to /y"),
        (Findings(files_unsure="too much to compare"), "files", "files may have changed: too much to compare"),
        (Findings(processes=(PLAIN,)), "processes", "redis (process 7) ran: its memory changed"),
        (Findings(processes=(SHELL,)), "processes", "shell main (process 8) changed: variable A"),
        (Findings(tables=("the host name was set",)), "processes", "the host name was set"),
        (Findings(files=(FILE,), processes=(PLAIN,)), "full", "files changed: root/a changed (content)"),
        (Findings(doubts=("3 changes were lost",)), "full", "3 changes were lost: everything is captured"),
        (Findings(processes=(AGENT,)), "none", "no file and no process is other than it was"),
        (Findings(files=(FILE,), processes=(AGENT,)), "full", "files changed: root/a changed (content)"),
        (Findings(files=(FILE,), files_bound="sh has a open"), "full", "files changed: root/a changed (content)"),
        (Findings(files_bound="sh has a open"), "none", "no file and no process is other than it was"),
    ],
)
def test_each_finding_leads_to_its_kind_and_says_why(findings: Findings, kind: str, reason: str) -> None:
    decision = decide(findings)
    assert (decision.kind, decision.reasons[0]) == (kind, reason)


def test_an_agent_lags_only_across_turns_that_change_nothing_else_and_it_is_said() -> None:
    assert "may lag behind" in decide(Findings(processes=(AGENT,))).notes[0]
    assert "its memory must fit the rest" in decide(Findings(files=(FILE,), processes=(AGENT,))).reasons[-1]
    ended = ProcessFinding(number=9, name="claude", fate=Fate.ENDED, role=Role.AGENT)
    assert decide(Findings(processes=(ended,))).kind == "processes"


def test_many_files_are_told_shortly() -> None:
    files = tuple(FileChange(path=f"f{n}", kind="added") for n in range(9))
    assert decide(Findings(files=files)).reasons[0].endswith("f4 added and 4 more")


words = st.lists(st.text("abc", min_size=1, max_size=5), max_size=2).map(tuple)
process = st.builds(
    ProcessFinding,
    number=st.integers(1, 9),
    name=st.text("ab", min_size=1),
    fate=st.sampled_from(Fate),
    role=st.sampled_from(Role),
)
findings = st.builds(
    Findings,
    doubts=words,
    files=st.sampled_from([(), (FILE,)]),
    files_written=words,
    files_unsure=st.sampled_from(["", "who knows"]),
    tables=words,
    processes=st.lists(process, max_size=3).map(tuple),
    files_bound=st.sampled_from(["", "it is bound"]),
    notes=words,
)  # fmt: skip


@given(findings)
def test_nothing_that_was_found_is_left_out_of_what_is_captured(found: Findings) -> None:
    decision = decide(found)
    files = bool(found.files or found.files_written or found.files_unsure)
    others = [p for p in found.processes if p.role != Role.AGENT or p.fate != Fate.RAN]
    if found.doubts:
        assert decision.kind == "full"
    if files:
        assert decision.kind in ("files", "full")
    if others or found.tables:
        assert decision.kind in ("processes", "full")
    if files and (found.processes or found.files_bound):
        assert decision.kind == "full", "an older half never stands in for what ran"
    if decision.kind == "none":
        assert not (files or others or found.tables or found.doubts)
    assert decision.reasons and all(reason.strip() for reason in decision.reasons)


@given(findings)
def test_full_is_not_said_without_a_reason_for_both_halves(found: Findings) -> None:
    decision = decide(found)
    if decision.kind == "full" and not found.doubts:
        assert found.files or found.files_written or found.files_unsure
        assert found.processes or found.tables or found.files_bound
