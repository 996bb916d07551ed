"""File systems to try things on: made in memory, in a mount namespace of their own, gone with it.

A process that does nothing else holds the namespace. It ends when its input does, so also if this process is killed; then
the kernel takes down the mounts, and the loop devices with them. The folders are reached through its /proc/PID/root.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ALL = ("btrfs", "overlay", "ext4", "xfs", "tmpfs")
_COMMON = frozenset({"direct", "tmpfile", "xattr", "acl", "flags"})
OFFERS = {
    "btrfs": _COMMON | {"reflink", "zero"},
    "overlay": _COMMON | {"reflink", "zero"},  # as the btrfs below
    "ext4": _COMMON | {"zero", "collapse"},
    "xfs": _COMMON | {"reflink", "zero", "collapse"},
    "tmpfs": _COMMON,  # O_DIRECT, flags and user.* attributes since Linux 6.6
}
"""What operations may need of each."""
_MIB = {"btrfs": 256, "overlay": 256, "ext4": 64, "xfs": 320}
_MAKE = {"btrfs": "mkfs.btrfs -q", "overlay": "mkfs.btrfs -q", "ext4": "mkfs.ext4 -qF", "xfs": "mkfs.xfs -q"}
_BASE = "/run"
"""Where the holder mounts them: a folder that every machine has."""


@dataclass(frozen=True)
class FileSystem:
    """A mounted one."""

    name: str
    path: Path
    """An empty folder on it."""
    offers: frozenset[str]
    upper: Path | None = None
    """Of an overlay: where what is written goes."""


def available(names: Sequence[str] = ALL) -> tuple[str, ...]:
    """Those for which the kernel and the tools are here."""
    known = {line.split()[-1] for line in Path("/proc/filesystems").read_text().splitlines()}
    found: list[str] = []
    for name in names:
        kinds = {"overlay", "btrfs"} if name == "overlay" else {name}
        if kinds <= known and (name not in _MAKE or shutil.which(_MAKE[name].split()[0])):
            found.append(name)
    return tuple(found)


@contextlib.contextmanager
def filesystems(names: Sequence[str] = ALL) -> Iterator[dict[str, FileSystem]]:
    """Those of the given ones that can be had here, for the length of the block. Raises RuntimeError with what the tools said."""
    names = available(names)
    script = "\n".join(
        ["set -e", f"mount -t tmpfs none {_BASE}", *(line for name in names for line in _commands(name))]
    )
    words = ["unshare", "--mount", "--propagation", "private", "sh", "-c", f"{script}\necho ready\nexec cat >/dev/null"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as holder:
        assert holder.stdin and holder.stdout and holder.stderr
        try:
            if holder.stdout.readline() != b"ready\n":
                holder.stdin.close()
                raise RuntimeError(holder.stderr.read().decode(errors="replace"))
            root = Path(f"/proc/{holder.pid}/root{_BASE}")
            yield {
                name: FileSystem(
                    name, root / name / "m", OFFERS[name], root / f"{name}-below/u" if name == "overlay" else None
                )
                for name in names
            }
        finally:
            holder.stdin.close()
            holder.wait()


def _commands(name: str) -> Iterator[str]:
    place = f"{_BASE}/{name}"
    yield f"mkdir -p {place}"
    if name == "tmpfs":
        yield f"mount -t tmpfs none {place}"
    else:
        disk = f"{_BASE}/{name}.img"
        below = f"{place}-below" if name == "overlay" else place
        yield f"truncate -s {_MIB[name]}M {disk}"
        yield f"{_MAKE[name]} {disk} >&2"
        yield f"mkdir -p {below}"
        yield f"mount -o loop {disk} {below}"
        if name == "overlay":
            yield f"mkdir {below}/l {below}/u {below}/k"
            yield f"mount -t overlay none -o lowerdir={below}/l,upperdir={below}/u,workdir={below}/k {place}"
    yield f"mkdir {place}/m"
