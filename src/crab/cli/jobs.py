"""`crab jobs` and `crab drain`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from crab.cli.session import Session, json_option
from crab.cli.text import Table, milliseconds, size
from crab.model import Drained, EngineState, JobView


@click.command()
@json_option
@click.pass_obj
def jobs(session: Session) -> None:
    """Show what the host works on for checkpoints, and what waits.

    URGENCY: somebody waits for an `urgent` job, somebody will for a `normal` one, nobody for one in the `background`. REASON
    says why a job has not begun.
    """
    with session.host() as host:
        found = host.jobs()
    session.show(found, lambda: jobs_table(found))


def jobs_table(found: EngineState) -> Table:
    """One row for each job, those that run first."""

    def row(state: str, job: JobView) -> tuple[str, ...]:
        runs = milliseconds(job.runs_ms) if job.runs_ms else "-"
        return (state, job.kind, job.sandbox, job.urgency, milliseconds(job.waited_ms), runs,
                milliseconds(job.expected_ms), size(job.expected_bytes), job.reason)  # fmt: skip

    done = ", ".join(f"{count} {kind}" for kind, count in sorted(found.done.items()))
    return Table(
        ("STATE", "KIND", "SANDBOX", "URGENCY", "WAITED", "RUNS", "EXPECTED", "WRITES", "REASON"),
        tuple([row("runs", job) for job in found.running] + [row("waits", job) for job in found.waiting]),
        right=frozenset({"WAITED", "RUNS", "EXPECTED", "WRITES"}),
        empty="nothing to do",
        notes=(
            f"{found.slots} at once; {size(found.unwritten)} wait for the disk, {size(found.most_unwritten)} may",
            f"done: {done or 'nothing'}; waited for their turn: p50 {milliseconds(found.queued_ms_p50)}, "
            f"p99 {milliseconds(found.queued_ms_p99)}",
        ),
    )


@click.command()
@click.option(
    "--deadline",
    type=click.FloatRange(min=0, min_open=True),
    default=30.0,
    show_default=True,
    help="Seconds; what has not begun by then is not done.",
)
@click.option("--pause", is_flag=True, help="Let nothing run in a sandbox from its capture on (`crab resume` goes on).")
@click.option("--store", default="", metavar="URL", help="Also send them to that store, as far as the time allows.")
@click.option("--key-file", default="", help="Of an encrypted store: absolute path on the daemon's host.")
@json_option
@click.pass_obj
def drain(session: Session, deadline: float, pause: bool, store: str, key_file: str) -> None:
    """Make every running sandbox safe before the machine goes.

    For the notice that a spot machine gets. All running sandboxes are captured, those that take least time first. The exit
    status is 1 if one of them is not safe (or not in the store that was given).
    """
    with session.host() as host:
        found = host.drain(deadline, pause=pause, store=store, key_file=key_file)
    session.show(found, lambda: drain_table(found))
    if not all(one.safe and (one.stored or not store) for one in found):
        sys.exit(1)


def drain_table(found: Sequence[Drained]) -> Table:
    """One row for each sandbox."""
    rows = tuple(
        (
            one.sandbox,
            "stored" if one.stored else "safe" if one.safe else "not safe",
            str(one.turn) if one.checkpoint else "-",
            one.checkpoint or "-",
            one.why + (f" (its newest checkpoint is {one.age_s:.0f} s old)" if one.age_s else ""),
        )
        for one in found
    )
    return Table(
        ("SANDBOX", "STATE", "TURN", "CHECKPOINT", "WHY"),
        rows,
        right=frozenset({"TURN"}),
        empty="no sandbox runs",
        tones={"safe": "green", "stored": "green", "not": "red"},
    )
