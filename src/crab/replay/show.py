"""How replays look on a terminal: a line that follows a run, and the table at the end.

`rows` and `table` are pure; `Progress` writes. Knows nothing of how a run is made.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Sequence
from typing import TextIO

from crab.model import Struct
from crab.replay.runner import Crash, Event, Run, TurnRecord

NAMES = {
    "adaptive": "crab",
    "always": "all, each turn",
    "files": "chat + files",
    "none": "chat only",
    "restart": "start over",
}
"""What the policies are called where they are compared."""

HEAD = (
    "recovery",
    "turns run",
    "captured",
    "memory saved",
    "frozen ms (max)",
    "kills",
    "back in ms",
    "state equal",
    "check",
)
_WIDEST = 100  # columns that a line of progress uses at most: wider ones are not read


class Outcome(Struct, kw_only=True):
    """A run and what a comparison with the undisturbed one found."""

    run: Run
    differences: tuple[str, ...] | None
    """None: it was not compared."""

    @property
    def good(self) -> bool:
        """Nothing differs (as far as it was compared), and the check passes (if there is one)."""
        return not self.differences and self.run.check is not False


# ---------------------------------------------------------------- the table


def row(outcome: Outcome) -> tuple[str, ...]:
    """One run in words, in the order of `HEAD`."""
    run, differences = outcome.run, outcome.differences
    captured = [checkpoint for checkpoint in run.checkpoints if checkpoint.kind != "none"]
    frozen = [checkpoint.timings.frozen_ms for checkpoint in captured if checkpoint.timings.frozen_ms]
    stored = sum(checkpoint.process_bytes for checkpoint in run.checkpoints)
    back = [crash.ms for crash in run.crashes]
    return (
        NAMES.get(run.policy, run.policy),
        str(len(run.turns)),
        f"{len(captured)} of {len(run.checkpoints)}" if captured else "–",
        size(stored) if captured else "–",
        f"{statistics.median(frozen):.0f} ({max(frozen):.0f})" if frozen else "–",
        str(len(run.crashes)),
        f"{statistics.median(back):.0f}" if back else "–",
        "–" if differences is None else f"no ({len(differences)})" if differences else "yes",
        "–" if run.check is None else "passes" if run.check else "fails",
    )


def table(outcomes: Sequence[Outcome]) -> str:
    """The outcomes below each other, and the first difference of each that has any."""
    lines = [HEAD, *map(row, outcomes)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD))]
    text = [
        "  ".join(
            cell.ljust(width) if column in (0, len(HEAD) - 1) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    for outcome in outcomes:
        if outcome.differences:
            name = NAMES.get(outcome.run.policy, outcome.run.policy)
            text.append(f"first difference of {name}: {outcome.differences[0]}")
    return "\n".join(text)


def size(number: int) -> str:
    """Bytes in words: 5.4 MB."""
    for unit, value in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= value:
            return f"{number / value:.1f} {unit}"
    return f"{number} B"


# ---------------------------------------------------------------- while it runs


def turn_line(record: TurnRecord, turns: int) -> str:
    """A turn that has ended."""
    exit_code = "started" if record.exit_code is None else f"exit {record.exit_code}"
    if not record.as_recorded:
        exit_code += f", recorded {record.expected}"
    words = [f"turn {record.turn}/{turns}", exit_code, f"{record.ms:.0f} ms"]
    if record.checkpoint is not None:
        checkpoint = record.checkpoint
        what = (
            f"{checkpoint.kind}, saved {size(checkpoint.process_bytes)}"
            if checkpoint.kind != "none"
            else "nothing changed"
        )
        frozen = f", frozen {checkpoint.timings.frozen_ms:.0f} ms" if checkpoint.timings.frozen_ms else ""
        words.append(what + frozen)
    if record.repeated:
        words.append("again")
    return " · ".join([*words, first_line(record.command)])


def crash_line(crash: Crash) -> str:
    """A kill and what came after it."""
    when = f"at the end of turn {crash.kill.turn}" if crash.kill.at_end else f"in the middle of turn {crash.kill.turn}"
    return (
        f"killed {when}; back after {crash.ms:.0f} ms ({crash.resume.recovery}), goes on with turn {crash.resume.turn}"
    )


def first_line(command: str) -> str:
    line, _, more = command.strip().partition("\n")
    return line + (" …" if more else "")


class Progress:
    """Follows runs: on a terminal in one line that is overwritten, elsewhere a line for each turn and each kill."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._in_place = stream.isatty()
        self._label = ""
        self._turns = 0

    def begin(self, label: str, turns: int) -> None:
        """What runs now, and how many turns it has."""
        self._label, self._turns = label, turns

    def watch(self, event: Event) -> None:
        """Called by the runner."""
        match event:
            case Event(what="end", record=TurnRecord() as record):
                self._say(turn_line(record, self._turns))
            case Event(what="recovered", crash=Crash() as crash):
                self._say(crash_line(crash))
            case Event(what="begin") if self._in_place:
                self._say(f"turn {event.turn}/{self._turns} · {first_line(event.command)}")
            case Event(what="setup") if self._in_place:
                self._say("a fresh sandbox")
            case Event(what="observe") if self._in_place:
                self._say("looking at the final state")
            case _:
                pass

    def note(self, text: str) -> None:
        """Something that is neither of a run nor of its result."""
        self._say(text)

    def clear(self) -> None:
        """Take the line away, before something else is printed."""
        if self._in_place:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def _say(self, text: str) -> None:
        line = f"{self._label}: {text}" if self._label else text
        line = line.replace("\t", " ").encode("unicode_escape").decode("ascii") if not line.isprintable() else line
        if self._in_place:
            width = min(shutil.get_terminal_size().columns - 1, _WIDEST)
            self._stream.write(f"\r\x1b[K{line[:width]}")
        else:
            self._stream.write(line + "\n")
        self._stream.flush()
