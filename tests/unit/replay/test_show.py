"""Tables and lines of progress."""

from __future__ import annotations

import io

import pytest

from crab.model import Checkpoint, Timings
from crab.replay.kills import Kill
from crab.replay.policy import Recovery, Resume
from crab.replay.runner import Crash, Event, Run, TurnRecord
from crab.replay.show import HEAD, Outcome, Progress, row, size, table


def checkpoint(frozen: float) -> Checkpoint:
    timings = Timings(frozen_ms=frozen)
    return Checkpoint(id="c", sandbox="s", turn=1, kind="full", created=0, process_bytes=2_500_000, timings=timings)


RECORD = TurnRecord(
    turn=1, kind="exec", command="ls\npwd", exit_code=0, expected=0, ms=5.0, output="", checkpoint=checkpoint(8)
)
CRASH = Crash(kill=Kill(1, False), head=0, resume=Resume(Recovery.CHECKPOINT, 1), again=0, ms=40.0)


def outcome(policy: str = "adaptive", differences: tuple[str, ...] | None = (), check: bool | None = True) -> Outcome:
    saved = (checkpoint(8), checkpoint(10), checkpoint(30)) if policy == "adaptive" else ()
    run = Run(
        id="a",
        policy=policy,
        turns=(RECORD,),
        checkpoints=saved,
        crashes=(CRASH,),
        check=check,
        check_output="",
        state=None,
        ms=1.0,
    )
    return Outcome(run=run, differences=differences)


def test_a_row_says_what_was_saved_and_whether_it_came_back() -> None:
    assert row(outcome()) == ("crab", "1", "3 of 3", "7.5 MB", "10 (30)", "1", "40", "yes", "passes")
    assert row(outcome("none", ("x", "y"), False)) == ("chat only", "1", "–", "–", "–", "1", "40", "no (2)", "fails")
    assert row(outcome(differences=None, check=None))[-2:] == ("–", "–")


@pytest.mark.parametrize(
    ("differences", "check", "good"),
    [
        ((), True, True),
        ((), None, True),
        (None, True, True),
        (("x",), True, False),
        ((), False, False),
        (None, False, False),
    ],
)
def test_an_outcome_is_good_only_if_nothing_speaks_against_it(
    differences: tuple[str, ...] | None, check: bool | None, good: bool
) -> None:
    assert outcome("adaptive", differences, check).good is good


def test_a_table_has_columns_and_the_first_difference() -> None:
    lines = table([outcome(), outcome("none", ("the file is missing", "x"), False)]).splitlines()
    assert len(lines) == 4
    assert lines[0].split("  ")[0] == HEAD[0]
    assert lines[0].index("check") and lines[1].rindex("passes") == lines[2].rindex("fails")
    assert lines[3] == "first difference of chat only: the file is missing"


def test_sizes_are_short() -> None:
    assert [size(number) for number in (0, 999, 1000, 5_449_000, 2_000_000_000)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "5.4 MB",
        "2.0 GB",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def follow(stream: io.StringIO) -> str:
    progress = Progress(stream)
    progress.begin("story, crab", 2)
    progress.watch(Event(what="setup"))
    progress.watch(Event(what="begin", turn=1, command="ls\npwd"))
    progress.watch(Event(what="end", turn=1, record=RECORD))
    progress.watch(Event(what="recovered", turn=1, crash=CRASH))
    progress.watch(Event(what="observe"))
    progress.clear()
    return stream.getvalue()


def test_elsewhere_than_on_a_terminal_there_is_a_line_for_each_turn_and_kill() -> None:
    assert follow(io.StringIO()) == (
        "story, crab: turn 1/2 · exit 0 · 5 ms · full, saved 2.5 MB, frozen 8 ms · ls …\n"
        "story, crab: killed in the middle of turn 1; back after 40 ms (checkpoint), goes on with turn 1\n"
    )


def test_on_a_terminal_one_line_is_written_over_and_taken_away() -> None:
    text = follow(Terminal())
    assert "\n" not in text
    assert text.count("\r\x1b[K") == 6
    assert text.endswith("\r\x1b[K")


def test_a_command_cannot_write_control_characters_on_the_terminal() -> None:
    stream = Terminal()
    Progress(stream).watch(Event(what="begin", turn=1, command="echo \x1b]0;title\x07"))
    assert "\x07" not in stream.getvalue()
