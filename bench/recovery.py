"""What is left of agents' work after a crash, by what was saved of it: `python -m bench.recovery [--quick] [--json]`.

Each task of `bench/tasks` is played without faults (the reference), then once for each policy and kill: SIGKILL to everything in
its sandbox, at the end of a turn or in the middle of its command, then the policy's way back, then the rest of the work.

  restart     nothing is kept: a fresh sandbox, all over from the first turn
  chat_only   the conversation is kept: a fresh sandbox, the next turn of the conversation
  chat_files  the files of every turn are kept: their newest checkpoint without processes, the next turn
  full        files and processes of every turn are kept, all of them each time
  adaptive    files and processes of every turn are kept, only what the turn changed (Crab)

Of each policy:
  runs                 that were killed
  recovered            … in which the task's check passes and the end state equals that of the reference
  state_equal          … in which what was brought back equals the end of the last whole turn before the kill: files by
                       digest, processes and what they hold open, ports, the shell, and the task's `observe` commands
  stored_bytes         that the checkpoints of all runs take on disk, each run by itself (bench/stored.py): those of `adaptive` as
                       Crab keeps them (`crab compact`, which the daemon does by itself), those of the others as they were
                       written
  written_bytes        the same, of all as they were written
  compact_bytes        the same, of all as Crab keeps them
  logical_bytes        the same, if each checkpoint were a copy of its own
  overhead_ratio       time of a killed run to that of its reference, both with the recorded waits for the model, median.
                       With --pace 1 the waits are waited for; else what a checkpoint does not fill of them is added
  overhead_ratio_no_waits   the same for a model that answers at once
  exposed_ms_p99       what a checkpoint took longer than the wait behind which it was taken, 99 of 100 turns
  back_ms_p50          from the kill until the next turn can begin
  again                turns that were run once more, all runs together
  none, files, processes, full   what the checkpoints of the turns captured
  errors               runs that ended with an error of Crab

Without --quick or --full every task is killed `--kills` times for each policy; --full kills at every turn, in the middle and at
the end (ten thousand runs: a night). References are run twice then, and tasks whose two ends differ are named and count as an error.
The exit status is 1 if a reference is not as it should be or `adaptive` did not recover everything.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import click

import crab
from bench.figures import median, quantile, say
from bench.stored import Stored, stored
from bench.strikes import every, sample
from bench.tasks import image
from bench.tasks.catalogue import GROUPS, Task, tasks
from bench.written import Looker
from crab.errors import CrabError
from crab.replay.kills import Kill
from crab.replay.policy import policy
from crab.replay.runner import Run, replay
from crab.replay.state import Observation, compare
from crab.sdk.sync import Sandbox

POLICIES = {"restart": "restart", "chat_only": "none", "chat_files": "files", "full": "always", "adaptive": "adaptive"}
"""Names of this benchmark, and those of `crab.replay.policy`."""
QUICK = {
    "redis-leaderboard": Kill(11, False),
    "xmltodict-cdata": Kill(12),
    "git-server": Kill(10, False),
    "data-pipeline": Kill(12),
    "sqlite-inventory": Kill(9, False),
}
"""Tasks of --quick, in this order, and where each is killed."""
BUDGET = 36.0
"""Seconds after which --quick begins no further task: on a busy machine the last ones are left out, and named."""
PATIENCE = 60.0
"""Seconds for a turn: the longest takes six."""
KINDS = ("none", "files", "processes", "full")
SHOWN = 4
LOOKS = 3


@dataclass
class Killed:
    """One run with a kill."""

    task: str
    group: str
    policy: str
    kill: str
    check: bool = False
    equal: bool = False
    state_equal: bool = False
    written: int = 0
    compact: int = 0
    logical: int = 0
    ratio: float = 0.0
    ratio_no_waits: float = 0.0
    back_ms: float = 0.0
    again: int = 0
    exposed_ms: list[float] = field(default_factory=list[float])
    kinds: dict[str, int] = field(default_factory=dict[str, int])
    differences: list[str] = field(default_factory=list[str])
    """The first of the end state."""
    state_differences: list[str] = field(default_factory=list[str])
    """The first of the state that was brought back."""
    error: str = ""

    @property
    def recovered(self) -> bool:
        return self.check and self.equal

    @property
    def stored(self) -> int:
        return self.compact if self.policy == "adaptive" else self.written


@dataclass(frozen=True)
class Reference:
    """A task without faults."""

    run: Run
    differences: tuple[str, ...] = ()
    """Between two such runs."""

    @property
    def unlike(self) -> list[str]:
        """Turns that did not end as recorded: a set-up that failed half-way would show there."""
        return [
            f"turn {one.turn}: exit {one.exit_code}, recorded {one.expected}"
            for one in self.run.turns
            if not one.as_recorded
        ]

    @property
    def good(self) -> bool:
        return bool(self.run.check) and not self.differences and not self.unlike

    @property
    def paced_ms(self) -> float:
        return self.run.worked_ms + self.run.skipped_ms


class Weighing:
    """Looks at the state of a sandbox: before the kill, after the recovery and at the end. Then it is noted what the
    checkpoints take."""

    def __init__(self, host: crab.Host, state: Path, look: Looker) -> None:
        self._host = host
        self._state = state
        self._look = look
        self._looks = 0
        self.written = Stored()
        self.compact = Stored()

    def __call__(self, sandbox: Sandbox, **options: object) -> Observation:
        seen = self._look(sandbox, **options)
        self._looks += 1
        if self._looks == LOOKS:
            checkpoints = [taken.id for taken in sandbox.turns(every=True)]
            self.written = stored(self._state, checkpoints)
            self._host.compact()
            self.compact = stored(self._state, checkpoints)
        return seen


class Player:
    """Runs tasks on one host."""

    def __init__(self, host: crab.Host, state: Path, image_name: str, pace: float) -> None:
        self._host = host
        self._state = state
        self._image = image_name
        self._look = Looker(state, host.images.show(image_name))
        self._pace = pace

    def reference(self, task: Task, runs: int) -> Reference:
        """A task without faults, so many times; the one of median time."""
        found = [self._play(task, "none", (), self._look) for _ in range(runs)]
        differences = [one for run in found[1:] for one in compare(state_of(found[0]), state_of(run))]
        found.sort(key=lambda run: run.worked_ms)
        return Reference(found[(len(found) - 1) // 2], tuple(differences))

    def killed(self, task: Task, name: str, kill: Kill, wanted: Reference) -> Killed:
        """A task with a kill."""
        row = Killed(task=task.id, group=task.group, policy=name, kill=str(kill))
        weighing = Weighing(self._host, self._state, self._look)
        try:
            run = self._play(task, POLICIES[name], (kill,), weighing, wanted.run.durations())
        except CrabError as error:
            row.error = str(error)
            return row
        differences = compare(state_of(wanted.run), state_of(run))
        (crash,) = run.crashes
        row.check, row.equal, row.differences = bool(run.check), not differences, differences[:SHOWN]
        row.state_equal, row.state_differences = not crash.differences, list(crash.differences or ())[:SHOWN]
        row.written, row.compact, row.logical = (
            weighing.written.stored,
            weighing.compact.stored,
            weighing.written.logical,
        )
        row.ratio = (run.worked_ms + run.skipped_ms) / wanted.paced_ms
        row.ratio_no_waits = run.worked_ms / wanted.run.worked_ms
        row.back_ms, row.again = crash.ms, crash.again
        row.exposed_ms = list(exposed(task, run))
        row.kinds = dict(Counter(record.checkpoint.kind for record in run.turns if record.checkpoint))
        return row

    def _play(
        self,
        task: Task,
        name: str,
        kills: Sequence[Kill],
        observer: Looker | Weighing,
        durations: dict[int, float] | None = None,
    ) -> Run:
        return replay(
            self._host,
            task.run,
            policy(name),
            kills,
            image=self._image,
            around=bool(kills),
            durations=durations,
            pace=self._pace,
            timeout=PATIENCE,
            observer=observer,
        )


def state_of(run: Run) -> Observation:
    assert run.state is not None
    return run.state


def exposed(task: Task, run: Run) -> Iterator[float]:
    """Milliseconds of each turn's checkpoint that the wait before the next turn does not cover."""
    for record in run.turns:
        if record.checkpoint and record.turn < len(task.run.turns):
            yield max(0.0, record.saved_ms - task.run.turns[record.turn].wait_s * 1e3)


def summary(rows: Sequence[Killed]) -> dict[str, float]:
    """The figures of a policy, as in the docstring of this module."""
    whole = [row for row in rows if not row.error]
    waits = [one for row in whole for one in row.exposed_ms]
    kinds: Counter[str] = Counter()
    for row in whole:
        kinds.update(row.kinds)
    return {
        "recovered": sum(row.recovered for row in rows),
        "runs": len(rows),
        "state_equal": sum(row.state_equal for row in rows),
        "stored_bytes": sum(row.stored for row in whole),
        "written_bytes": sum(row.written for row in whole),
        "compact_bytes": sum(row.compact for row in whole),
        "logical_bytes": sum(row.logical for row in whole),
        "overhead_ratio": round(statistics.median(row.ratio for row in whole), 4) if whole else 0.0,
        "overhead_ratio_no_waits": median([row.ratio_no_waits for row in whole]) if whole else 0.0,
        "exposed_ms_p99": quantile(waits, 0.99) if waits else 0.0,
        "back_ms_p50": median([row.back_ms for row in whole]) if whole else 0.0,
        "again": sum(row.again for row in whole),
        **{kind: kinds[kind] for kind in KINDS},
        "errors": len(rows) - len(whole),
    }


def by_policy(rows: Sequence[Killed], names: Sequence[str]) -> dict[str, dict[str, float]]:
    return {name: summary([row for row in rows if row.policy == name]) for name in names}


def table(figures: dict[str, dict[str, float]]) -> str:
    """A line for each policy."""
    columns = (
        "runs",
        "recovered",
        "state_equal",
        "stored_bytes",
        "logical_bytes",
        "overhead_ratio",
        "back_ms_p50",
        "errors",
    )
    lines = [f"{'':12}" + "".join(f"{name:>16}" for name in columns)]
    lines += [f"{name:12}" + "".join(f"{row[one]:>16,}" for one in columns) for name, row in figures.items()]
    return "\n".join(lines)


def machine() -> dict[str, object]:
    """Where and when this was measured."""
    return {
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "crab": crab.__version__,
    }


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@click.option("--quick", is_flag=True, help="A fixed sample, one kill each: below 50 s once the image is there.")
@click.option("--full", "whole", is_flag=True, help="Kill at every turn, in the middle and at the end.")
@click.option(
    "--kills", type=click.IntRange(min=1), default=2, show_default=True, help="Kills of each task and policy."
)
@click.option("--policies", default=",".join(POLICIES), show_default=True)
@click.option("--only", default="", help="Tasks whose name has this in it.")
@click.option("--pace", default=0.0, show_default=True, help="Share of the recorded waits that is waited for.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on the last line.")
@click.option("--raw", type=click.Path(dir_okay=False, path_type=Path), help="File for the figures of every run.")
@click.option(
    "--state", default=lambda: os.environ.get("CRAB_BENCH_STATE", "/var/lib/crab-bench"), help="State directory."
)
def main(
    quick: bool,
    whole: bool,
    kills: int,
    policies: str,
    only: str,
    pace: float,
    as_json: bool,
    raw: Path | None,
    state: str,
) -> None:
    names = policies.split(",")
    if unknown := set(names) - POLICIES.keys():
        raise click.BadParameter(f"{', '.join(sorted(unknown))}: choose of {', '.join(POLICIES)}")
    chosen = [task for task in tasks() if only in task.id and (not quick or task.id in QUICK)]
    if not chosen:
        raise click.BadParameter(f"no task has {only!r} in its name", param_hint="--only")
    if quick:
        chosen.sort(key=lambda task: list(QUICK).index(task.id))
    left_out: list[str] = []
    rows: list[Killed] = []
    faulty: dict[str, list[str]] = {}
    begin, about = time.monotonic(), machine()
    with crab.Host(state) as host:
        for left in host.sandboxes():  # of a run that was killed
            left.remove(force=True)
        player = Player(host, Path(state), image.build(host, Path(state) / "cache" / "sdists"), pace)
        ready = time.monotonic()
        for number, task in enumerate(chosen, 1):
            turns = len(task.run.turns)
            if quick and time.monotonic() - ready > BUDGET:
                say(f"{task.id}: left out, the machine is too busy")
                left_out.append(task.id)
                continue
            wanted = player.reference(task, 1 if quick else 2)
            say(f"{time.monotonic() - begin:6.0f} s  {task.group} {task.id} ({number} of {len(chosen)}): {turns} turns")
            if not wanted.good:
                faulty[task.id] = [*wanted.differences, *wanted.unlike][:SHOWN] or [wanted.run.check_output]
                say(f"  the reference is not as it should be: {faulty[task.id]}")
                continue
            strikes = (QUICK[task.id],) if quick else every(turns) if whole else sample(task.id, turns, kills)
            for kill in strikes:
                for name in names:
                    row = player.killed(task, name, kill, wanted)
                    rows.append(row)
                    if row.error or (name in ("full", "adaptive") and not (row.recovered and row.state_equal)):
                        why = row.error or row.differences or row.state_differences or "the check fails"
                        say(f"  {name}, killed at {kill}: {why}")
    figures = {
        "policies": by_policy(rows, names),
        "groups": {group: by_policy([row for row in rows if row.group == group], names) for group in GROUPS},
        "tasks": len(chosen) - len(left_out),
        "left_out": left_out,
        "pace": pace,
        "faulty": faulty,
        "machine": about,
        "seconds": round(time.monotonic() - begin),
    }
    if raw:
        raw.parent.mkdir(parents=True, exist_ok=True)
        kept = [{**asdict(row), "exposed_ms": round(sum(row.exposed_ms), 1)} for row in rows]
        lines = ",\n".join(json.dumps(_rounded(row)) for row in kept)
        raw.write_text(f'{{"figures": {json.dumps(figures)},\n"runs": [\n{lines}\n]}}\n')
    if as_json:
        print(json.dumps(figures))
    else:
        for title, part in {"all": figures["policies"], **figures["groups"]}.items():
            print(f"{title}\n{table(part)}\n")
    ours = figures["policies"].get("adaptive")
    sys.exit(1 if faulty or (ours and ours["recovered"] < ours["runs"]) else 0)


def _rounded(row: dict[str, object]) -> dict[str, object]:
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in row.items() if value != []}


if __name__ == "__main__":
    main()
