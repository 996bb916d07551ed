"""`crab replay`: run a recorded trajectory again, kill it on the way, compare the end.

Takes the host from the click context (`ctx.obj.host()`), and leaves errors to who prints them.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec

from crab.model import Struct
from crab.replay import kills, trajectory
from crab.replay.policy import FORMS as POLICY_FORMS
from crab.replay.policy import policy
from crab.replay.runner import TIMEOUT
from crab.replay.runner import replay as run_replay
from crab.replay.show import Outcome, Progress, table
from crab.replay.state import Observation, compare
from crab.replay.trajectory import Trajectory
from crab.sdk.sync import Host


@click.command("replay")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--id", "wanted", default="", metavar="ID", help="Only the run with this id; else all of the file.")
@click.option("--policy", "policy_name", default="adaptive", show_default=True, metavar="P", help=POLICY_FORMS + ".")
@click.option("--kill", "plan", default="", metavar="PLAN", help=f"Where to kill the sandbox: {kills.FORMS}.")
@click.option("--seed", default=0, show_default=True, help="Of random kills.")
@click.option("--image", default="", help="Image for the sandbox. Default: the trajectory's, or debian.")
@click.option("--workdir", default="", help="Where its commands start. Default: the trajectory's, or the image's.")
@click.option("--turns", "first", type=click.IntRange(min=1), default=None, metavar="N", help="Only the first N turns.")
@click.option(
    "--pace", type=click.FloatRange(min=0), default=0.0, show_default=True, help="Share of recorded waits to wait."
)
@click.option("--timeout", default=TIMEOUT, show_default=True, help="Seconds that a turn may take.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each run.")
@click.pass_context
def replay(
    ctx: click.Context,
    file: Path,
    wanted: str,
    policy_name: str,
    plan: str,
    seed: int,
    image: str,
    workdir: str,
    first: int | None,
    pace: float,
    timeout: float,
    as_json: bool,
) -> None:
    """Run a recorded trajectory, with faults if wanted.

    Each run of FILE gets a sandbox of its own. With --kill, it is killed at the named turns and the run goes on as the
    policy allows; an undisturbed run is made first, and the end states are compared. Ends with 0 if nothing differs and
    every check passes, else with 1.
    """
    runs = trajectory.read(file)
    if wanted:
        runs = (trajectory.select(runs, wanted),)
    as_json |= bool(ctx.obj.json)
    progress = Progress(sys.stderr if as_json else sys.stdout)
    good = True
    with ctx.obj.host() as host:
        for recorded in runs:
            run = _adapted(recorded, image, workdir, first)
            strikes = kills.parse(plan, len(run.turns), seed)
            complete = len(run.turns) == len(recorded.turns)
            options = _Options(policy_name, complete, pace, timeout)
            outcome = _outcome(host, run, strikes, options, progress)
            good &= outcome.good
            click.echo(msgspec.json.encode(described(outcome)).decode() if as_json else _told(outcome))
    ctx.exit(0 if good else 1)


class _Options(Struct):
    """How each run is made."""

    policy: str
    complete: bool
    pace: float
    timeout: float


def _told(outcome: Outcome) -> str:
    lines = ["", outcome.run.id, table([outcome]), *(f"  {difference}" for difference in outcome.differences or ())]
    if outcome.run.check is False:
        lines.append(f"  the check said: {outcome.run.check_output.strip()}")
    return "\n".join(lines)


def _adapted(run: Trajectory, image: str, workdir: str, first: int | None) -> Trajectory:
    """A run as the options want it."""
    return msgspec.structs.replace(
        run, image=image or run.image, workdir=workdir or run.workdir, turns=run.turns[:first] if first else run.turns
    )


def _outcome(
    host: Host, run: Trajectory, strikes: tuple[kills.Kill, ...], options: _Options, progress: Progress
) -> Outcome:
    """The run; if it is to be killed, an undisturbed one before it to compare it with."""
    once = partial(
        run_replay,
        host,
        run,
        complete=options.complete,
        pace=options.pace,
        timeout=options.timeout,
        watch=progress.watch,
    )
    rule = policy(options.policy)
    if not strikes:
        progress.begin(f"{run.id}, {options.policy}", len(run.turns))
        found = once(policy=rule, look=False)
        progress.clear()
        return Outcome(run=found, differences=None)
    progress.begin(f"{run.id}, undisturbed", len(run.turns))
    wanted = once(policy=policy("none"))
    progress.begin(f"{run.id}, {options.policy}", len(run.turns))
    found = once(policy=rule, kills=strikes, durations=wanted.durations())
    progress.clear()
    return Outcome(run=found, differences=tuple(compare(wanted.state or Observation(), found.state or Observation())))


def described(outcome: Outcome) -> dict[str, Any]:
    """The JSON form of an outcome; the fields are described in docs/replay.md. The observed state is not part of it."""
    run = outcome.run
    data: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(run, state=None))
    del data["state"]
    for crash, said in zip(run.crashes, data["crashes"], strict=True):
        said["kill"] = str(crash.kill)
    for record, said in zip(run.turns, data["turns"], strict=True):
        said["checkpoint"] = record.checkpoint.id if record.checkpoint else None
    return data | {
        "equal": None if outcome.differences is None else not outcome.differences,
        "differences": list(outcome.differences) if outcome.differences is not None else None,
    }
