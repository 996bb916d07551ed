"""What can be seen of a sandbox's processes from outside: the ground on which a restore is compared with a capture.

Taken while nothing runs (frozen before a capture, stopped after a trial restore). Numbers that differ by nature (host
pids, inode numbers, the host's ids) are left out or brought to the sandbox's own terms.
"""

from __future__ import annotations

import os
import re
import stat

from blake3 import blake3

from crab.host import processes, tuning
from crab.host.tuning import Tuning
from crab.model import Struct

_NUMBERED = re.compile(r"^(socket|pipe|anon_inode|mnt|net):\[?\d+\]?$")
_OF_A_THREAD = re.compile(r"/proc/(\d+)/task/(\d+)\b")
DELETED = " (deleted)"
GHOST = ".cr_link"
"""What CRIU adds to the name of a deleted file that it makes again while another file has the name."""


class ProcessEvidence(Struct, kw_only=True):
    """One process, in the sandbox's own terms."""

    pid: int
    parent: int
    ended: bool = False
    """A zombie: its parent has not asked for its status yet. The fields below are empty."""
    argv: tuple[str, ...] = ()
    environment: str = ""
    """Digest of its environment block as the kernel shows it."""
    cwd: str = ""
    executable: str = ""
    uids: str = ""
    gids: str = ""
    threads: int = 0
    descriptors: dict[int, str] = {}
    """What each descriptor is: a path, or the kind of a kernel object."""
    umask: str = ""
    signals: str = ""
    """Ignored and caught signals. (Not the blocked ones: while a task sleeps in ppoll the kernel shows those of the call.)"""
    tuning: dict[int, Tuning] = {}
    """Of its threads, by their number in the sandbox; those that are as usual are left out."""


class Evidence(Struct, kw_only=True):
    """All processes of a sandbox, by pid inside it."""

    processes: tuple[ProcessEvidence, ...] = ()


class Seen:
    """One process as /proc shows it. Each file is read once: whoever looks does so while a sandbox stands still."""

    def __init__(self, pid: int, usual: Tuning) -> None:
        """Raises ProcessLookupError or FileNotFoundError if it is gone."""
        self.pid = pid
        lines = processes.read(pid, "status").decode(errors="replace").splitlines()
        self.status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        self.inner = int(self.status["NSpid"].split()[-1])
        self.parent = int(self.status["PPid"])
        self.own_memory = sum(int(self.status.get(name, "0 kB").split()[0]) << 10 for name in ("RssAnon", "RssShmem"))
        """Bytes that are in no file: about what a dump writes."""
        self.executable = _executable(pid)
        self.descriptors: dict[int, str] = {}
        self.tuning: dict[int, Tuning] = {}
        if self.executable is not None:
            self.descriptors = {
                int(fd): os.readlink(f"/proc/{pid}/fd/{fd}") for fd in sorted(os.listdir(f"/proc/{pid}/fd"), key=int)
            }
            self.tuning = _unusual(pid, self.inner, usual)


def look(host_pids: list[int], moving: bool = False) -> list[Seen]:
    """Look at the given processes. `moving` says that they run: those that end meanwhile are left out.

    Raises ProcessLookupError or FileNotFoundError if one ends that should stand still.
    """
    usual = tuning.of(os.getpid())
    found: list[Seen] = []
    for pid in host_pids:
        try:
            found.append(Seen(pid, usual))
        except (ProcessLookupError, FileNotFoundError):
            if not moving:
                raise
    return found


def observe(host_pids: list[int], first_id: int, moving: bool = False) -> Evidence:
    """Evidence of the given processes; see `look`."""
    return evidence_of(look(host_pids, moving), first_id, moving)


def evidence_of(seen: list[Seen], first_id: int, moving: bool = False) -> Evidence:
    """What is kept of processes that were just looked at."""
    inner = {one.pid: one.inner for one in seen}
    found: list[ProcessEvidence] = []
    for one in seen:
        try:
            found.append(_process(one, inner, first_id))
        except (ProcessLookupError, FileNotFoundError):
            if not moving:
                raise
    return Evidence(processes=tuple(sorted(found, key=lambda process: process.pid)))


def _process(seen: Seen, inner: dict[int, int], first_id: int) -> ProcessEvidence:
    parent = inner.get(seen.parent, 0)
    if seen.executable is None:  # nothing is left of it but its number
        return ProcessEvidence(pid=seen.inner, parent=parent, ended=True)
    return ProcessEvidence(
        pid=seen.inner,
        parent=parent,
        argv=tuple(os.fsdecode(word) for word in processes.read(seen.pid, "cmdline").split(b"\0")[:-1]),
        environment=_digest(processes.read(seen.pid, "environ")),
        cwd=_plain(os.readlink(f"/proc/{seen.pid}/cwd")),
        executable=_plain(seen.executable),
        uids=_ids(seen.status["Uid"], first_id),
        gids=_ids(seen.status["Gid"], first_id),
        threads=int(seen.status["Threads"]),
        descriptors={fd: _plain(target) for fd, target in seen.descriptors.items()},
        umask=seen.status.get("Umask", ""),
        signals=" ".join(seen.status[name].strip() for name in ("SigIgn", "SigCgt")),
        tuning=seen.tuning,
    )


def _executable(pid: int) -> str | None:
    """None of a zombie, and of one that is dying so far that its memory is gone (it may still be called running then)."""
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except (FileNotFoundError, ProcessLookupError):
        return None


def _unusual(pid: int, inner: int, usual: Tuning) -> dict[int, Tuning]:
    found: dict[int, Tuning] = {}
    for thread in map(int, os.listdir(f"/proc/{pid}/task")):
        first = thread == pid
        try:
            noted = tuning.unlike(tuning.of(thread, first), usual)
            if noted != Tuning():
                found[inner if first else processes.inner_pid(thread)] = noted
        except (ProcessLookupError, FileNotFoundError):
            if first:
                raise
    return found


def hindrance(seen: Seen) -> str:
    """What a process does that CRIU cannot dump, or would restore as something else; empty if nothing.

    CRIU itself would notice a traced process only at its time limit of ten seconds, during which all stand still, and the
    others not at all, or not before a restore.
    """
    if seen.executable is None:
        return ""
    if seen.status["TracerPid"] != "0":
        return "is being traced (a debugger or strace)"
    if seen.executable.startswith("/memfd:"):
        return "runs a program that lies in a memfd"
    for fd, target in seen.descriptors.items():
        if target == "anon_inode:[eventfd]" and b"eventfd-semaphore: 1" in processes.read(seen.pid, f"fdinfo/{fd}"):
            return "holds an eventfd that is a semaphore (EFD_SEMAPHORE)"
        if target.endswith(DELETED) and stat.S_ISCHR(os.stat(f"/proc/{seen.pid}/fd/{fd}").st_mode):
            # nobody in a user namespace can make it anew (criu/files-reg.c: "Can't create node for ghost dev")
            return f"holds {target.removesuffix(DELETED)}, which was removed (a stop and a start bring it back)"
    return ""


def file_of_a_thread(seen: Seen) -> str:
    """What a process has open of `/proc/PID/task/TID` of a thread that is not its first; empty if nothing. A restore opens
    files before there are threads. Mostly somebody reads something and closes it again."""
    for target in seen.descriptors.values():
        thread = _OF_A_THREAD.match(target)
        if thread and thread[1] != thread[2]:
            return target.removesuffix(DELETED)
    return ""


def _digest(data: bytes) -> str:
    return blake3(data).hexdigest(16)


def _ids(text: str, first_id: int) -> str:
    return " ".join(str(int(word) - first_id) for word in text.split())


def _plain(target: str) -> str:
    """Target of a link in /proc without the numbers that a restore cannot and need not keep."""
    if not target.startswith("/") and (match := _NUMBERED.match(target)):
        return match.group(1)
    # CRIU names the file that it links an open deleted one to; once restored it is deleted again
    return target.removesuffix(DELETED).removesuffix(GHOST) if target.endswith(DELETED) else target


def differences(before: Evidence, after: Evidence) -> list[str]:
    """What differs, one line each; empty if the two are equal."""
    found: list[str] = []
    old, new = ({p.pid: p for p in evidence.processes} for evidence in (before, after))
    for pid in sorted(old.keys() | new.keys()):
        a, b = old.get(pid), new.get(pid)
        if a is None or b is None:
            found.append(f"process {pid} ({' '.join((a or b).argv)[:60]}) is {'missing' if b is None else 'new'}")  # type: ignore[union-attr]
            continue
        for name in ProcessEvidence.__struct_fields__:
            if name == "descriptors":
                for fd in sorted(a.descriptors.keys() | b.descriptors.keys()):
                    if a.descriptors.get(fd) != b.descriptors.get(fd):
                        found.append(
                            f"process {pid}: descriptor {fd} was {a.descriptors.get(fd)}, is {b.descriptors.get(fd)}"
                        )
            elif getattr(a, name) != getattr(b, name):
                found.append(f"process {pid}: {name} was {getattr(a, name)!r}, is {getattr(b, name)!r}")
    return found
