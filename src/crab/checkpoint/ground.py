"""What captures and restores stand on: the pool, CRIU and its caches, the identity of this host."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
from pathlib import Path

from crab.host import processes
from crab.host.cgroups import CgroupRoots
from crab.host.criu import Criu
from crab.host.pool import Pool
from crab.model import Checkpoint, HostPrint
from crab.store.local import FILES, LocalStore


class Ground:
    """Resources of the host that all sandboxes of one state directory share."""

    def __init__(self, pool: Pool, cgroups: CgroupRoots, criu: Criu, caches: Path) -> None:
        self.pool = pool
        self.cgroups = cgroups
        self.criu = criu
        self.criu_folder = criu.program.parent if criu.source == "private" else None
        """Folder that a private CRIU lies in with all that it needs; None for the host's own."""
        self.store = LocalStore(pool)
        self.host = host_print(criu.version)
        self.dump_cache = caches / "dump"
        self.restore_cache = caches / "restore"

    def prepare(self) -> None:
        """Make the folders where CRIU keeps what it learnt of the kernel.

        They lie on a tmpfs (CRIU trusts no other: it must not outlive the boot), and dumps and restores have one each
        because a restore runs with fewer rights and would learn less.
        """
        for folder in (self.dump_cache, self.restore_cache):
            folder.mkdir(parents=True, exist_ok=True)

    def own_files(self, identity: str) -> Path:
        """The snapshot that a checkpoint itself has. Raises `NotFound`."""
        return self.store.path(identity) / FILES

    def files_of(self, checkpoint: Checkpoint) -> Path:
        """The snapshot with the files of a checkpoint, which may be that of an earlier one. Raises `NotFound`."""
        return self.store.path(checkpoint.files_from or checkpoint.id) / FILES

    def remove_caches(self) -> None:
        """Remove what `prepare` made."""
        shutil.rmtree(self.dump_cache.parent, ignore_errors=True)


def host_print(criu_version: str) -> HostPrint:
    """What process images made here depend on."""
    return HostPrint(
        kernel=platform.release(),
        architecture=platform.machine(),
        cpu=_cpu(),
        criu=criu_version,
        boot_id=processes.boot_id(),
    )


def _cpu() -> str:
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if not line:
            break
        fields[name.strip()] = value.strip()
    flags = fields.get("flags", fields.get("Features", ""))
    digest = hashlib.sha256(" ".join(sorted(flags.split())).encode()).hexdigest()[:12]
    names = [fields.get(name, "?") for name in ("vendor_id", "cpu family", "model")]
    return f"{'/'.join(names)} flags:{digest}"


def caches_folder(owner: str) -> Path:
    """Folder on a tmpfs for the caches of one state directory."""
    return Path("/dev/shm" if os.path.isdir("/dev/shm") else "/run") / f"crab-{owner}"
