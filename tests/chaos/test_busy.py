"""Many captures of a sandbox that is never at rest: no failure reaches the user.

`$CRAB_TEST_CAPTURES` is their number (30; by hand, take 200).
"""

from __future__ import annotations

import os
import random
import statistics
from collections import Counter

import pytest
from e2e.box import Box

pytestmark = [pytest.mark.kernel, pytest.mark.criu, pytest.mark.slow, pytest.mark.timeout(1200)]

CAPTURES = int(os.environ.get("CRAB_TEST_CAPTURES", "30"))
BUSY = ("http_load", "redis_client", "forking", "pipelines", "many_threads", "sqlite_writer", "counters")


def test_hazard_c13_c15_many_captures_of_a_busy_tree_and_rewinds_to_some_of_them(box: Box, figures) -> None:
    box.begin(BUSY)
    points = []
    for number in range(CAPTURES):
        points.append(box.checkpoint(durable=False))
        if number % 10 == 9:
            box.healthy(BUSY, beats=1)
    box.healthy(BUSY)
    frozen = [point.timings.frozen_ms for point in points]
    attempts = dict(sorted(Counter(point.timings.attempts for point in points).items()))
    figures(
        f"busy: {CAPTURES} captures of about {points[-1].process_count} processes, frozen {statistics.median(frozen):.0f} ms "
        f"(at most {max(frozen):.0f}), attempts {attempts}"
    )
    for point in [points[-1], *random.Random(5).sample(points, max(3, CAPTURES // 10))]:
        box.rewind(point.id)
        box.healthy(BUSY)
