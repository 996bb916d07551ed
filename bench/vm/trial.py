"""What the inspector's programs see on the kernel that runs: `python -m bench.vm.trial`, as root.

Loads the best tier, does the operations of `bench.operations` on every file system that there is, and looks at what one process
does to the memory of another. Prints what was not seen, and figures as in `bench.inspector`.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from bench import inspector
from bench.operations import OPERATIONS, Operation, Runner
from crab.host import kernel_trials
from crab.inspector.tracker import MEMORY, SIGNAL, TASK, Tracker

REMOTE = {
    "process_vm_writev into a sleeping process": MEMORY,
    "write to /proc/PID/mem of a sleeping process": MEMORY,
    "poke a sleeping process by ptrace": MEMORY,
    "signal that a sleeping process handles": SIGNAL,
}


def seen(tracker: Tracker, group: Path, slot: int, one: Operation, flag: int) -> bool:
    """Whether the kernel noted that somebody did that to another process."""

    def enter() -> None:
        (group / "cgroup.procs").write_text("0")

    with tempfile.TemporaryDirectory() as folder, Runner(one, folder, enter) as runner:
        runner.prepare()
        tracker.forget(slot, tracker.advance(slot))
        runner.act()
        return any(change.kind == TASK and change.flags & flag for change in tracker.changes(slot))


def main() -> None:
    """See the module."""
    print("kernel", os.uname().release)
    print("tiers", kernel_trials.inspector_tiers())
    with inspector.tracked("vm") as (tracker, group, slot):
        print(f"tier {tracker.tier}, loaded and tried in {tracker.load_ms:.0f} ms", flush=True)
        for one in OPERATIONS:
            if one.name in REMOTE:
                print(f"{one.name}: {'seen' if seen(tracker, group, slot, one, REMOTE[one.name]) else 'NOT SEEN'}")
    figures: dict[str, float] = {}
    inspector.measure_operations(figures)
    print(figures)


if __name__ == "__main__":
    sys.exit(main())
