"""Restore: a checkpoint becomes a running incarnation, beside whatever runs now.

Nothing that exists is touched here. The caller switches over when the new incarnation runs, or destroys it when this
raises (laws 1 and 4).
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from crab.checkpoint import criulog
from crab.checkpoint.ground import Ground
from crab.checkpoint.manifest import Manifest
from crab.errors import LaunchFailed, RestoreFailed
from crab.host import clocks, processes, tuning
from crab.host.tuning import Tuning
from crab.sandbox import box
from crab.sandbox.incarnation import Incarnation

RESTORE_SECONDS = 120.0


def restore(
    ground: Ground,
    manifest: Manifest,
    processes_of: Manifest | None,
    incarnation: Incarnation,
    stopped: bool = False,
    sealed: bool = False,
) -> None:
    """Bring a checkpoint to life in a new incarnation (nothing made yet).

    `processes_of` is the manifest that holds the process images (the same one, or that of an earlier checkpoint whose
    processes were proven unchanged); None starts the sandbox anew on the files. `stopped` leaves every process stopped
    before its first instruction; `sealed` gives it no way out, now or later. Raises `RestoreFailed`; the caller then destroys
    the incarnation.
    """
    incarnation.clone_files(ground.files_of(manifest.checkpoint))
    if processes_of is None:
        incarnation.start()
        return
    incarnation.make_group(restoring=True)
    same_boot = processes_of.host.boot_id == ground.host.boot_id
    shift = clocks.shift_for(processes_of.clocks, processes_of.clock_shift, same_boot, clocks.host_clocks())
    with ground.store.images(processes_of.checkpoint.id) as images, _work_folder(ground, incarnation) as work:
        words = restore_words(_criu_inside(ground), incarnation, stopped)
        binds = {"images": images, "work": work, "cache": ground.restore_cache}
        if ground.criu_folder:
            binds["criu"] = ground.criu_folder

        def make_way(pid: int) -> None:
            incarnation.way.restoring(pid, processes_of.addresses, sealed=sealed)
            if incarnation.door and not sealed:
                incarnation.door.open(pid)

        awaits = incarnation.spec.network == "nat" or (incarnation.door is not None and not sealed)
        try:
            box.run(
                box.restore_command(incarnation.enclave, incarnation.layers, binds, words, shift, awaits),
                RestoreFailed,
                RESTORE_SECONDS,
                make_way if awaits else None,
                {"XDG_RUNTIME_DIR": "/run/cache"},
            )
            incarnation.adopt(int((work / "pid").read_text()))
        except (RestoreFailed, LaunchFailed, OSError, ValueError) as error:
            log = work / "restore.log"
            said = criulog.errors(log.read_text(errors="replace")) if log.exists() else []
            raise RestoreFailed(
                f"checkpoint {manifest.checkpoint.id} cannot be restored: {said[0] if said else error}",
                remedy="nothing else was changed; try another checkpoint (`crab turns`), or `crab rewind --files-only`",
                log="\n".join(said)[-2000:],
            ) from error
    _regroup(incarnation, processes_of.groups)
    _tune(incarnation, processes_of)
    incarnation.end_restoring()


def _criu_inside(ground: Ground) -> list[str]:
    """How to call CRIU where its private folder is seen as /run/criu."""
    folder = ground.criu_folder
    if folder is None:
        return list(ground.criu.argv)
    return [word.replace(str(folder), "/run/criu") for word in ground.criu.argv]


def restore_words(criu: list[str], incarnation: Incarnation, stopped: bool) -> list[str]:
    """Words of the `criu restore`, with the folders that crab-box shows in /run."""
    words = [
        *criu,
        "restore",
        "--restore-detached",
        "--images-dir",
        "/run/images",
        "--work-dir",
        "/run/work",
        "--log-file",
        "restore.log",
        "-v1",
        "--pidfile",
        "/run/work/pid",
        "--root",
        "/run/root",
        "--unprivileged",
        "--tcp-established",
        "--file-locks",
        "--manage-cgroups=ignore",
        "--action-script",
        "/run/crab-box",
    ]
    for number, _ in enumerate(incarnation.spec.mounts):
        words += ["--external", f"mnt[{box.mount_name(number)}]:/run/m{number}"]
    return [*words, "--leave-stopped"] if stopped else words


@contextlib.contextmanager
def _work_folder(ground: Ground, incarnation: Incarnation) -> Iterator[Path]:
    """A folder for CRIU's log and pid file."""
    path = ground.store.scratch(f"restore-{incarnation.key}-{time.monotonic_ns()}")
    path.mkdir(mode=0o755)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _tune(incarnation: Incarnation, manifest: Manifest) -> None:
    """Give threads back what CRIU does not keep (`host/tuning.py`)."""
    wanted = {process.pid: process.tuning for process in manifest.evidence.processes if process.tuning}
    if not wanted:
        return
    for pid in incarnation.host_pids():
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it runs already, and may end
            threads = wanted.get(processes.inner_pid(pid), {})
            for thread in map(int, os.listdir(f"/proc/{pid}/task") if threads else ()):
                inner = processes.inner_pid(thread)
                try:
                    tuning.apply(thread, threads.get(inner, Tuning()))
                except OSError as error:
                    if error.errno in (errno.ESRCH, errno.ENOENT):
                        continue
                    raise RestoreFailed(
                        f"checkpoint {manifest.checkpoint.id}: thread {inner} cannot have {threads[inner]}: {error}",
                        remedy="restore it on a host with these processors",
                    ) from error


def _regroup(incarnation: Incarnation, groups: dict[str, tuple[int, ...]]) -> None:
    """Put restored processes back into the cgroups of their execs (CRIU leaves all in the sandbox's own).

    What was started between the end of the restore and here is found by its ancestors, until nobody is left outside.
    """
    owner = {inner: name for name, members in groups.items() for inner in members}
    if not owner:
        return
    for name in groups:
        incarnation.group.child(name).path.mkdir(exist_ok=True)
    for _ in range(10):
        moved = False
        inherited: dict[int, str] = {}
        for pid in incarnation.host_pids():
            with contextlib.suppress(ProcessLookupError, OSError):
                inner = processes.inner_pid(pid)
                parent = int(processes.stat_fields(pid)[1])
                name = owner.get(inner) or inherited.get(parent)
                if name is None:
                    continue
                inherited[pid] = name
                if Path(f"/proc/{pid}/cgroup").read_text().rstrip().rpartition("/")[2] != name and processes.is_foreign(
                    pid
                ):
                    (incarnation.group.child(name).path / "cgroup.procs").write_text(str(pid))
                    moved = True
        if not moved:
            return
