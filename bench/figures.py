"""Figures of a benchmark: medians and quantiles of runs, printed for people or as one JSON object on the last line."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence


def median(values: Sequence[float]) -> float:
    """Median, in the unit of the values, to a hundredth."""
    return round(statistics.median(values), 2)


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which that share of the values lies (nearest rank)."""
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2)


def timed(action: Callable[[], object]) -> float:
    """How long a call takes, in milliseconds."""
    start = time.perf_counter()
    action()
    return (time.perf_counter() - start) * 1e3


def say(text: str) -> None:
    """Progress, apart from the figures."""
    print(text, file=sys.stderr, flush=True)


def report(title: str, figures: dict[str, dict[str, float]], as_json: bool) -> None:
    """A table with a column for each workload; with `as_json` one JSON object on the last line instead."""
    if as_json:
        print(json.dumps(figures))
        return
    columns = list(figures)
    names = list(dict.fromkeys(name for column in figures.values() for name in column))
    print(title)
    print(f"{'':26}" + "".join(f"{column:>12}" for column in columns))
    for name in names:
        print(f"{name:26}" + "".join(f"{figures[column].get(name, float('nan')):12.2f}" for column in columns))
