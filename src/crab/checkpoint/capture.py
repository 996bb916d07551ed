"""Capture: freeze, dump the processes and snapshot the files at one instant, thaw.

On any failure the sandbox runs on, what was written half is removed with its staging folder, and the previous
checkpoint is untouched. Why these calls and not others:
- the cgroup is frozen by the pre-dump hook (`crab-box`): letting CRIU freeze it costs 100 ms more (it polls in steps of
that length); - the snapshot is taken by CRIU's post-dump hook (`crab-box`): only there the links exist that CRIU makes for
open files without a name; - `--network-lock skip`: nothing outside talks to these sockets while they are frozen.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from crab.checkpoint import criulog, imagefiles
from crab.checkpoint.evidence import Evidence, evidence_of, file_of_a_thread, hindrance, look
from crab.checkpoint.ground import Ground
from crab.errors import CaptureFailed, CrabError, NoSpace, NotCapturable, SandboxGone
from crab.host import btrfs, clocks, connections, network, processes
from crab.host.clocks import Clocks
from crab.model import Struct, Timings
from crab.native import program
from crab.sandbox import box
from crab.sandbox.incarnation import EXEC_PREFIX, Incarnation
from crab.store.local import Staging

ATTEMPTS = 8
PAUSE = 0.004  # seconds between attempts; a connection in flight is accepted within that time
DUMP_SECONDS = 120.0
CALL_OFF_SECONDS = 2.0
WORTH_HASHING = 16 << 20
"""Bytes of memory from which on a thread that hashes them during the dump gains more than it disturbs."""
GHOST_LIMIT = "1G"
"""Largest open file without a name that is put into the image when no link can be made for it."""


class Captured(Struct, kw_only=True):
    """What a capture found and cost."""

    timings: Timings
    groups: dict[str, tuple[int, ...]] = {}
    addresses: tuple[str, ...] = ()
    evidence: Evidence = Evidence()
    clocks: Clocks = Clocks()
    clock_shift: Clocks = Clocks()
    process_bytes: int = 0
    process_count: int = 0
    bound_to_files: str = ""
    """Why these processes cannot be restored on other files than these; empty if they can."""
    own_memory: int = 0


def capture(
    ground: Ground,
    incarnation: Incarnation,
    staging: Staging,
    kind: Literal["files", "full"],
    frozen: Callable[[], None] = lambda: None,
) -> Captured:
    """Capture a running sandbox into a staging folder; `frozen` is called while nothing moves, before anything is saved.

    Raises `CaptureFailed`, `NoSpace` or `SandboxGone`.
    """
    if incarnation.spec.network == "host":
        raise NotCapturable(
            f"sandbox {incarnation.key} shares the host's network: its connections cannot be brought back, "
            "as they are the host's",
            remedy="keep its files with `crab commit`; to have checkpoints, create it with network nat or none",
        )
    begin = time.perf_counter()
    for attempt in range(1, ATTEMPTS + 1):
        try:
            captured = _capture_once(ground, incarnation, staging, kind, frozen, skip_in_flight=attempt == ATTEMPTS)
            timings = msgspec.structs.replace(
                captured.timings, attempts=attempt, total_ms=(time.perf_counter() - begin) * 1e3
            )
            return msgspec.structs.replace(captured, timings=timings)
        except _Again as again:
            _clear(ground, staging)
            incarnation.pid  # noqa: B018  raises SandboxGone if that is the reason
            if attempt >= criulog.attempts_for(again.log, ATTEMPTS):
                raise criulog.explain_dump(again.log, incarnation.name) from None
            time.sleep(PAUSE * attempt)
        except (TimeoutError, OSError) as error:
            _clear(ground, staging)
            incarnation.pid  # noqa: B018
            raise _wrap(error, incarnation) from error
    raise AssertionError("unreachable")


def snapshot(incarnation: Incarnation, staging: Staging, quiet: Callable[[], bool]) -> Timings | None:
    """The files alone, without a freeze; None (and nothing is left) unless `quiet` says afterwards that nobody ran meanwhile.

    Then no process can have changed a file, so that it is one cut all the same (law 3). Raises `NoSpace`, OSError.
    """
    begin = time.perf_counter()
    btrfs.snapshot(incarnation.files, staging.files, read_only=True)
    if not quiet():
        btrfs.delete(staging.files)
        return None
    ms = (time.perf_counter() - begin) * 1e3
    return Timings(snapshot_ms=ms, total_ms=ms)


class _Again(Exception):
    def __init__(self, log: str) -> None:
        self.log = log


def _wrap(error: OSError, incarnation: Incarnation) -> CrabError:
    if error.errno in (28, 122):
        return NoSpace(
            f"sandbox {incarnation.name} was not captured: {error}; it runs on",
            remedy="free space in the state directory",
        )
    return CaptureFailed(
        f"sandbox {incarnation.name} was not captured: {error}; it runs on",
        remedy="try again; see docs/troubleshooting.md",
    )


def _clear(ground: Ground, staging: Staging) -> None:
    shutil.rmtree(staging.process, ignore_errors=True)
    if staging.files.exists():
        ground.pool.discard(staging.files)


def _capture_once(
    ground: Ground,
    incarnation: Incarnation,
    staging: Staging,
    kind: Literal["files", "full"],
    at_freeze: Callable[[], None],
    skip_in_flight: bool,
) -> Captured:
    command: list[str] = []
    if kind == "full":
        staging.process.mkdir(mode=0o700)
        command = dump_words(ground.criu.argv, incarnation, staging.process, skip_in_flight)
    words = box.capture_command(
        incarnation.pid, incarnation.group.path, ground.dump_cache, command, staging.process if command else None
    )
    environment = {
        **os.environ,
        **ground.criu.environment,
        **box.snapshot_environment(incarnation.files, staging.files),
    }
    captured = Captured(timings=Timings())
    # crab-box owns the freezing, so that it ends even if this process is killed in the middle
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        late = threading.Timer(DUMP_SECONDS, process.terminate)
        late.start()
        try:
            with incarnation.capturing(process):
                frozen_at = _expect(process, b"ready")
                with incarnation.unattended():
                    _say(process)
                    frozen_at = _expect(process, b"frozen")
                    looking = time.perf_counter()
                    if frozen_at is not None:
                        captured = _look(incarnation) if kind == "full" else captured
                        at_freeze()
                    looked = time.perf_counter()
                    with staging.hashing() if captured.own_memory >= WORTH_HASHING else contextlib.nullcontext():
                        _say(process)
                        thawed_at = _expect(process, b"thawed")
                complaint = process.communicate()[1]
        except BaseException:
            _call_off(process)
            raise
        finally:
            late.cancel()
    if process.returncode < 0 or process.returncode > 128:
        _after_a_kill(incarnation, staging.process)
    if process.returncode or frozen_at is None or thawed_at is None or not staging.files.is_dir():
        log = staging.process / "dump.log"
        text = log.read_text(errors="replace") if log.exists() else ""
        raise _Again(text or f"Error: {complaint.decode(errors='replace').strip() or f'status {process.returncode}'}")
    frozen_ms = thawed_at - frozen_at
    after_look = frozen_ms - (looked - looking) * 1e3
    timings = Timings(
        frozen_ms=frozen_ms,
        dump_ms=after_look if kind == "full" else 0.0,
        snapshot_ms=after_look if kind == "files" else 0.0,
    )
    if kind == "full":
        imagefiles.keep_user_namespace(staging.process)
        imagefiles.rearm_timers(staging.process)
        imagefiles.trust_files(staging.process)
        bound = "a process has a file open whose name is gone" if imagefiles.has_links(staging.process) else ""
        captured = msgspec.structs.replace(
            captured,
            bound_to_files=bound,
            process_bytes=sum(entry.stat().st_size for entry in staging.process.iterdir()),
        )
    return msgspec.structs.replace(captured, timings=timings)


def _call_off(process: subprocess.Popen[bytes]) -> None:
    """End a capture that nobody wants any more. Without an answer to its questions crab-box lets CRIU give up by itself."""
    assert process.stdin
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(CALL_OFF_SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()


def _after_a_kill(incarnation: Incarnation, images: Path) -> None:
    """crab-box or CRIU was killed: let the sandbox go on if it is whole. Raises `SandboxGone` if it is not.

    CRIU runs code of its own in the tasks, init's first, and opens the image files of a task right after that. If it was
    killed then, some may never wake up again, and nothing tells which. (crab-box decides so too, if it is alive.)
    """
    touched = any(entry.name.startswith(("core-", "mm-", "pagemap-")) for entry in images.iterdir())
    if not touched:
        with contextlib.suppress(CrabError):
            incarnation.group.thaw()
            box.run(box.unblock_command(incarnation.pid))
            incarnation.entries()  # init answers: it is its own again
            return
    incarnation.kill("a capture was killed in the middle")
    raise SandboxGone(
        f"sandbox {incarnation.name}: the capture was killed in the middle, and its processes with it",
        remedy="`crab recover` restores the newest checkpoint",
    )


def _expect(process: subprocess.Popen[bytes], word: bytes) -> float | None:
    """Wait for a word of crab-box; the time that it gives (ms), 0 without one, None if it says something else or ends."""
    assert process.stdout
    said = process.stdout.readline().split()
    if not said or said[0] != word:
        return None
    return float(said[1]) if len(said) > 1 else 0.0


def _say(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(b"\n")
        process.stdin.flush()


def _look(incarnation: Incarnation) -> Captured:
    """What is there while nothing runs."""
    seen = look(incarnation.host_pids(), moving=True)  # who was dying is not frozen
    for one in seen:
        if reason := hindrance(one):
            raise NotCapturable(
                f"sandbox {incarnation.name} was not captured: process {one.inner} {reason}; it runs on",
                remedy="end that process, or what it does; the next turn captures again",
            )
        if held := file_of_a_thread(one):
            raise _Again(f"Error: process {one.inner} holds {held}, a file of a single thread")
    unread = connections.most_unread(incarnation.pid)
    if unread > connections.restorable_unread():
        raise _Again(f"Error: {unread} bytes unread in a TCP connection")
    if processes.absent_foreground(one.pid for one in seen):  # CRIU (4.1) would dump it, and fail to restore it
        raise _Again("Error: no process is left of the foreground group of a terminal")
    shift = clocks.shift_of(incarnation.pid)
    return Captured(
        timings=Timings(),
        clocks=clocks.host_clocks().plus(shift),
        clock_shift=shift,
        groups=_groups(incarnation, {one.pid: one.inner for one in seen}),
        addresses=tuple(network.addresses(incarnation.pid)) if incarnation.spec.network == "nat" else (),
        evidence=evidence_of(seen, incarnation.enclave.first_id, moving=True),
        process_count=len(seen),
        own_memory=sum(one.own_memory for one in seen),
    )


def _groups(incarnation: Incarnation, inner: dict[int, int]) -> dict[str, tuple[int, ...]]:
    """Members of each exec's cgroup by their numbers in the sandbox; `inner` has those by their numbers on the host."""
    found: dict[str, tuple[int, ...]] = {}
    for name in os.listdir(incarnation.group.path):
        if name.startswith(EXEC_PREFIX):
            members = [inner[pid] for pid in incarnation.group.child(name).members() if pid in inner]
            if members:
                found[name] = tuple(members)
    return found


def dump_words(criu: tuple[str, ...], incarnation: Incarnation, images: Path, skip_in_flight: bool) -> list[str]:
    """Words of the `criu dump` of a frozen sandbox."""
    words = [
        *criu,
        "dump",
        "--tree",
        str(incarnation.pid),
        "--images-dir",
        str(images),
        "--log-file",
        "dump.log",
        "-v1",
        "--leave-running",
        "--freeze-cgroup",
        str(incarnation.group.path),
        "--network-lock",
        "skip",
        "--tcp-established",
        "--file-locks",
        "--link-remap",
        "--ghost-limit",
        GHOST_LIMIT,
        "--manage-cgroups=ignore",
        "--action-script",
        str(program("crab-box")),
    ]
    for number, mount in enumerate(incarnation.spec.mounts):
        words += ["--external", f"mnt[{mount.target}]:{box.mount_name(number)}"]
    return [*words, "--skip-in-flight"] if skip_in_flight else words
