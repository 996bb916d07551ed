"""How much of this host there is to work with: processors, and what the kernel lets pile up for the disk."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

_WAITING = ("Dirty", "Writeback")


def processors() -> int:
    """Processors that this process may use: those it is bound to, and no more than its cgroup's quota gives; at least one."""
    count = len(os.sched_getaffinity(0))
    quota = _quota()
    return max(1, count if quota is None else min(count, round(quota)))


def _quota() -> float | None:
    """Processors' worth of time of this process's own cgroup (cgroup-v2.rst `cpu.max`; version 1 `cpu.cfs_quota_us`)."""
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                words = Path(f"/sys/fs/cgroup{path}/cpu.max")
                if words.exists():
                    quota, period = words.read_text().split()
                    return None if quota == "max" else int(quota) / int(period)
            elif "cpu" in controllers.split(","):
                folder = Path(f"/sys/fs/cgroup/cpu{path}")
                if (folder / "cpu.cfs_quota_us").exists():
                    quota = int((folder / "cpu.cfs_quota_us").read_text())
                    return None if quota < 0 else quota / int((folder / "cpu.cfs_period_us").read_text())
    return None


def unwritten() -> int:
    """Bytes in the page cache that wait for a disk, whoever wrote them (proc_meminfo(5)); 0 if the kernel does not say."""
    found = _memory()
    return sum(found.get(name, 0) for name in _WAITING)


def free_memory() -> int:
    """Bytes that new processes could have without anything being swapped out."""
    return _memory().get("MemAvailable", 0)


def _memory() -> dict[str, int]:
    """What the kernel says of memory, in bytes (proc_meminfo(5)); nothing if it does not."""
    with contextlib.suppress(OSError):
        found = re.findall(r"^(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
        return {name: int(size) << 10 for name, size in found}
    return {}


def most_unwritten() -> int:
    """How much that may be before the kernel makes writers wait for the disk: half-way between its two thresholds
    (balance_dirty_pages, mm/page-writeback.c). They follow the memory that is free."""
    with contextlib.suppress(OSError, ValueError):
        found = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        pages = int(found["nr_dirty_threshold"]) + int(found["nr_dirty_background_threshold"])
        return pages * os.sysconf("SC_PAGE_SIZE") // 2
    return 256 << 20


def idle_share(before: tuple[int, int], after: tuple[int, int]) -> float:
    """Which share of all processors' time nobody used between two readings of `processor_time`; 0 if none passed."""
    whole = after[0] - before[0]
    return (after[1] - before[1]) / whole if whole > 0 else 0.0


def processor_time() -> tuple[int, int]:
    """Ticks of all processors since the boot: in all, and idle (proc_stat(5); waiting for a disk is no idleness)."""
    fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return sum(fields), fields[3]
