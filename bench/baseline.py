"""The baseline: plain `criu dump` of the same sandbox, with nothing of Crab around it.

It gets the best conditions that can be given to it from outside: the frozen cgroup, the sandbox's network and uts
namespace (so that it has none to save), and a tmpfs on /run where it keeps what it learnt of the kernel. Each dump goes to
new files and the one before is removed afterwards, as ours stay too: pages that were just freed would still lie in the
processor's cache and are written up to twice as fast.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

from crab.host import ext4
from crab.host.criu import default_private_dir, find_criu


class BareCriu:
    """Plain dumps into one folder after another. A context manager: it holds a mount namespace for the time of its life."""

    def __init__(self, folder: Path) -> None:
        self.criu = find_criu(default_private_dir())
        self.folder = folder
        self._count = 0
        folder.mkdir(parents=True)
        ext4.spread(folder)
        script = "mount -t tmpfs tmpfs /run && echo ready && exec sleep infinity"
        words = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script]
        self.holder = subprocess.Popen(words, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
        assert self.holder.stdout
        self.holder.stdout.readline()

    def __enter__(self) -> BareCriu:
        return self

    def __exit__(self, *_: object) -> None:
        self.holder.kill()
        self.holder.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def dump(self, init: int) -> float:
        """Dump the tree of that init and leave it running; milliseconds from before the freeze to after the thaw."""
        self._count += 1
        images = self.folder / str(self._count)
        images.mkdir()
        group = cgroup_of(init)
        words = ["nsenter", f"--mount=/proc/{self.holder.pid}/ns/mnt", f"--net=/proc/{init}/ns/net", f"--uts=/proc/{init}/ns/uts",
                 *self.criu.argv, "dump", "--tree", str(init), "--images-dir", str(images), "--log-file", "dump.log", "-v1",
                 "--leave-running", "--freeze-cgroup", str(group), "--network-lock", "skip", "--tcp-established", "--file-locks",
                 "--link-remap", "--ghost-limit", "1G", "--manage-cgroups=ignore"]  # fmt: skip
        start = time.perf_counter()
        (group / "cgroup.freeze").write_text("1")
        try:
            while "frozen 1" not in (group / "cgroup.events").read_text():
                time.sleep(0.0001)
            subprocess.run(
                words,
                check=True,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                env={**os.environ, **self.criu.environment},
            )
        finally:
            (group / "cgroup.freeze").write_text("0")
        took = (time.perf_counter() - start) * 1e3
        shutil.rmtree(self.folder / str(self._count - 1), ignore_errors=True)
        return took


def cgroup_of(pid: int) -> Path:
    """The cgroup2 folder of a process."""
    root = next(
        Path(line.split()[4]) for line in Path("/proc/self/mountinfo").read_text().splitlines() if " - cgroup2 " in line
    )
    path = next(line[3:] for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines() if line.startswith("0::"))
    return root / os.path.relpath(path, "/")
