"""How much of a host there is to work with."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from crab.host import capacity


def test_no_more_processors_than_this_process_is_bound_to() -> None:
    assert 1 <= capacity.processors() <= len(os.sched_getaffinity(0))
    one = min(os.sched_getaffinity(0))
    code = (
        f"import os; os.sched_setaffinity(0, {{{one}}}); from crab.host import capacity; print(capacity.processors())"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "1\n"


@pytest.mark.parametrize(("quota", "expected"), [(0.4, 1), (1.6, 2), (64.0, 4), (None, 4)])
def test_no_more_processors_than_the_quota_gives(
    quota: float | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    monkeypatch.setattr(capacity, "_quota", lambda: quota)
    assert capacity.processors() == expected


def test_a_host_is_as_idle_as_its_counters_say() -> None:
    assert capacity.idle_share((100, 40), (200, 115)) == 0.75
    assert capacity.idle_share((100, 40), (100, 40)) == 0.0
    whole, idle = capacity.processor_time()
    assert whole >= idle > 0


def test_what_the_kernel_says_of_memory_is_in_bytes() -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    assert 0 < capacity.free_memory() <= os.sysconf("SC_PHYS_PAGES") * page
    assert 0 <= capacity.unwritten() < os.sysconf("SC_PHYS_PAGES") * page
    assert 0 < capacity.most_unwritten() < os.sysconf("SC_PHYS_PAGES") * page
