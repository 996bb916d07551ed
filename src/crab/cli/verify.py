"""`crab verify`."""

from __future__ import annotations

from collections.abc import Sequence

import click

from crab.cli.session import Session, json_option
from crab.cli.text import clean
from crab.cli.values import checkpoint_or_head
from crab.errors import RestoreFailed
from crab.model import Checkpoint, Verification


@click.command()
@click.argument("checkpoint", metavar="SANDBOX[@REF]")
@click.option("--oracle", is_flag=True, help="Judge the decisions of turns taken with `--policy oracle` instead.")
@json_option
@click.pass_obj
def verify(session: Session, checkpoint: str, oracle: bool) -> int:
    """Prove that a checkpoint can be restored.

    Restores it into a scratch sandbox, compares that with what was captured, and remembers the result (`crab turns`). The
    exit status is 0 only if it is proven.

    With --oracle: every turn taken with `crab checkpoint --policy oracle`, and whether what the inspector decided was right.
    The exit status is 0 only if no change was missed.
    """
    if oracle:
        return _judgements(session, checkpoint.partition("@")[0])
    sandbox, ref = checkpoint_or_head(checkpoint)
    with session.host() as host:
        result = host.sandbox(sandbox).verify(ref)
    session.show(result, lambda: verification_text(result))
    return 0 if result.proof.verdict == "proven" else RestoreFailed.exit_status


def verification_text(result: Verification) -> str:
    """The verdict, what was compared, and every difference."""
    compared = ", ".join(f"{count} {what}" for what, count in result.compared.items())
    reason = f": {clean(result.proof.reason)}" if result.proof.reason else ""
    lines = [f"{result.checkpoint} {result.proof.verdict}{reason}"]
    if compared:
        lines.append(f"compared: {compared}")
    return "\n".join([*lines, *(f"differs: {clean(difference)}" for difference in result.differences)])


def _judgements(session: Session, sandbox: str) -> int:
    with session.host() as host:
        turns = [turn for turn in host.sandbox(sandbox).turns() if turn.decision and turn.decision.judged]
    session.show(turns, lambda: judgements_text(turns))
    return RestoreFailed.exit_status if any(t.decision and t.decision.judged == "miss" for t in turns) else 0


def judgements_text(turns: Sequence[Checkpoint]) -> str:
    """One line for each turn, what differed below those that were not right, and a sum."""
    lines: list[str] = []
    counts: dict[str, int] = {}
    for turn in turns:
        decision = turn.decision
        assert decision and decision.judged
        counts[decision.judged] = counts.get(decision.judged, 0) + 1
        lines.append(f"turn {turn.turn}: {decision.kind}, {decision.judged}")
        if decision.judged != "right":
            lines += [f"  decided: {clean(reason)}" for reason in decision.reasons]
            lines += [f"  differs: {clean(line)}" for line in decision.truth] or ["  nothing differs"]
    counted = ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
    return "\n".join([*lines, counted or "no turn was taken with --policy oracle"])
