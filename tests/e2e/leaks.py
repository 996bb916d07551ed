"""What a state directory may leave on the machine when nobody owns it any more: nothing."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

from crab.daemon import requests as ask
from crab.daemon.service import Service
from crab.errors import CrabError
from crab.host import mounts
from crab.host.network import Nat


def clear(folder: Path) -> None:
    """Remove a state directory, also one that a killed run has left with its pool mounted and sandboxes in it."""
    if mounts.mount_at(folder / "pool") is not None:
        with contextlib.suppress(CrabError), Service.open(folder) as service:
            for sandbox in service.handle(ask.SandboxList()):
                service.handle(ask.Remove(sandbox=sandbox.name, force=True))
            service.close_down()
        if mounts.mount_at(folder / "pool") is not None:  # its file is gone, or damaged
            mounts.unmount(folder / "pool")
    shutil.rmtree(folder, ignore_errors=True)


def left_of(state_dir: Path, owner: str) -> list[str]:
    """Mounts, loop devices, control groups, caches and network of a state directory that was closed down, in words."""
    found = [f"mount {entry.target}" for entry in mounts.mounts_below(state_dir)]
    pool = state_dir / "pool.btrfs"
    if pool.exists():
        # a private mount namespace of somebody else (a package build, say) may hold a copy of the mount for a while
        found += [f"loop device {device}" for device in mounts.loops_of(pool) if not held_elsewhere(device)]
    for root in hierarchies():
        found += [f"control group {path}" for path in [root / owner] if path.exists()]
    cache = Path("/dev/shm", f"crab-{owner.partition('/')[2]}")
    pins = Path("/sys/fs/bpf", f"crab-{owner.partition('/')[2]}")
    found += [f"pinned programs {pins}"] if pins.exists() else []
    return found + ([f"cache {cache}"] if cache.exists() else []) + network_of(owner.partition("/")[2])


def network_of(owner: str) -> list[str]:
    """Interfaces, routes and rules of an owner, in words."""
    nat = Nat(owner, Path("/nonexistent"))
    found = [f"interface {name}" for name in nat.names()]
    for words in (["nft", "list", "tables"], ["ip", "route"]):
        if shutil.which(words[0]):
            lines = subprocess.run(words, capture_output=True, text=True).stdout.splitlines()
            found += [line for line in lines if line.endswith(nat.table) or f" metric {nat.metric}" in line]
    return found


def held_elsewhere(device: str) -> bool:
    """Whether a device is mounted in a mount namespace other than ours."""
    own = os.readlink("/proc/self/ns/mnt")
    for entry in os.listdir("/proc"):
        try:
            if not entry.isdigit() or os.readlink(f"/proc/{entry}/ns/mnt") == own:
                continue
            if any(mount.source == device for mount in mounts.mounts(entry)):
                return True
        except OSError:
            continue
    return False


def hierarchies() -> list[Path]:
    """Where control group file systems are mounted."""
    return [Path(entry.target) for entry in mounts.mounts() if entry.fs_type in ("cgroup", "cgroup2")]


def processes_in(owner: str) -> dict[int, str]:
    """Processes in the control groups of an owner: pid, and its name and state."""
    found: dict[int, str] = {}
    for root in hierarchies():
        for folder, _, files in os.walk(root / owner):
            if "cgroup.procs" in files:
                for pid in Path(folder, "cgroup.procs").read_text().split():
                    found[int(pid)] = describe(int(pid))
    return found


def tools_running(state_dir: Path) -> dict[int, list[str]]:
    """Command lines of every crab-box and criu that works for a state directory. (A private criu has the name of its loader.)"""
    found: dict[int, list[str]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                words = Path(f"/proc/{entry}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
            except OSError:
                continue
            here = any(word.startswith(f"{state_dir}/") for word in words)
            if here and any(os.path.basename(word) in ("crab-box", "criu") for word in words):
                found[int(entry)] = words
    return found


def describe(pid: int) -> str:
    """Name, state and tracer of a process; empty if it is gone."""
    try:
        status = dict(
            line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
        )
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return f"{status['Name']} {status['State']} tracer {status['TracerPid']}"
