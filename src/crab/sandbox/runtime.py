"""What a sandbox stands on: its image together with Crab's own files, and blank writable layers to put above it.

For each image and version of Crab there are two read-only subvolumes, made when a sandbox first needs them:
    NAME          a snapshot of the image with crab-init, device nodes and mount points added
    NAME.blank    `u` and `k`, empty: what the writable layers of a new sandbox are a snapshot of

Why snapshots of each other: overlayfs takes all inodes of one btrfs for one set of numbers, but btrfs counts them anew in
every subvolume. Two files of a sandbox could then have the same device and inode number, and `cp -a`, `find` and `tar`
take them for one file or for a loop. A blank is a snapshot of the layer below it with everything deleted, and btrfs goes on
counting after the highest number that is left (that of `k`): so nothing written above ever has a number from below.

A checkpoint remembers the NAME it was taken on, so neither an upgrade of Crab nor a new image of the same name changes the
ground below it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import threading
import uuid
from pathlib import Path

from blake3 import blake3

from crab.errors import NotFound
from crab.host import btrfs
from crab.host.pool import Pool
from crab.native import program

LAYOUT = b"2"  # changes with what `_fill` makes
DEVICES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}
LINKS = {
    "ptmx": "pts/ptmx",
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
}
OWN = ("dev", ".crab", "proc", "sys")
"""All that a ground has of Crab: these folders, and what is in them."""
BLANK = ".blank"
_publishing = threading.Lock()


def version() -> str:
    """Identity of what this version of Crab adds to an image."""
    return blake3(LAYOUT + program("crab-init").read_bytes()).hexdigest()[:12]


def name_for(fingerprint: str) -> str:
    """Name of the ground on an image with that fingerprint."""
    return name_of(fingerprint, version())


def name_of(fingerprint: str, added: str) -> str:
    """Name of the ground on an image with that fingerprint, `added` being the identity of what was added to it."""
    return f"{fingerprint.removeprefix('blake3:')[:16]}-{added}"


def path(pool: Pool, name: str) -> Path:
    """The lower layer of that name. Raises `NotFound` if it is not in the pool."""
    found = pool.runtime / name
    if not found.is_dir():
        raise NotFound(
            f"the ground {name} that this was made on is not on this host", remedy="import an export that has it"
        )
    return found


def blank(pool: Pool, name: str) -> Path:
    """The empty writable layers that belong to it."""
    return pool.runtime / f"{name}{BLANK}"


def ensure(pool: Pool, image: Path, fingerprint: str) -> str:
    """Make the ground on an image if it is missing; its name."""
    name = name_for(fingerprint)
    if (pool.runtime / name).is_dir():
        return name
    ground, empty = (pool.staging / f"{kind}-{uuid.uuid4().hex[:12]}" for kind in ("ground", "blank"))
    try:
        lay(image, ground)
        clear(ground, empty)
        publish(pool, name, ground, empty)
    finally:
        pool.discard(ground)
        pool.discard(empty)
    return name


def lay(image: Path, ground: Path) -> None:
    """Make a ground at a new path: the image, and what this version of Crab adds to it."""
    btrfs.snapshot(image, ground, read_only=False)
    _fill(ground)


def strip(ground: Path) -> None:
    """Take away what a Crab added to an image, for that of another version to be put there."""
    for name in OWN:
        if os.path.lexists(ground / name):
            _remove(ground / name)


def clear(ground: Path, empty: Path) -> None:
    """Make the blank layers of a ground at a new path."""
    btrfs.snapshot(ground, empty, read_only=False)
    _clear(empty)


def publish(pool: Pool, name: str, ground: Path, empty: Path) -> bool:
    """Move a ground and its blank layers to where they are found, unless one of that name is there. Whether it was moved."""
    with _publishing:
        if (pool.runtime / name).is_dir():
            return False
        # the ground last: it says that both exist
        for made, final in ((empty, blank(pool, name)), (ground, pool.runtime / name)):
            pool.discard(final)
            made.rename(final)
            btrfs.set_read_only(final, True)  # afterwards: a read-only subvolume cannot be moved
        return True


def uncover(upper: Path) -> None:
    """Let a sandbox have what it cannot start without, if its root has removed it: in the upper layer, nothing may run on it.

    `/.crab` is Crab's own whatever lies in it; of `/dev` only what is missing comes back.
    """
    if os.path.lexists(upper / ".crab"):
        _remove(upper / ".crab")
    dev = upper / "dev"
    if not os.path.lexists(dev) or not stat.S_ISDIR(os.lstat(dev).st_mode):
        return
    for name in (*DEVICES, *LINKS, "pts", "shm"):
        with contextlib.suppress(FileNotFoundError):
            status = os.lstat(dev / name)
            if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:  # how overlayfs notes a removal
                os.unlink(dev / name)


def forget_unused(pool: Pool, fingerprints: set[str], used: set[str]) -> None:
    """Remove what was made on images that are gone, except the grounds in use."""
    images = {fingerprint.removeprefix("blake3:")[:16] for fingerprint in fingerprints}
    for found in list(pool.runtime.iterdir()):
        name = found.name.removesuffix(BLANK)
        if name.partition("-")[0] not in images and name not in used:
            pool.discard(found)


def _clear(root: Path) -> None:
    """Leave `u` and `k` only, with the highest inode numbers."""
    old = list(root.iterdir())
    made = root / ".crab-new"
    made.mkdir()
    for name in ("u", "k"):
        (made / name).mkdir(mode=0o755)
    for entry in old:
        _remove(entry)
    for name in ("u", "k"):
        (made / name).rename(root / name)
    made.rmdir()


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink()


def _fill(root: Path) -> None:
    """Add what is Crab's own. Whatever the image has in its /dev and /.crab gives way."""
    for name in ("dev", ".crab"):
        if os.path.lexists(root / name):
            _remove(root / name)
    umask = os.umask(0)
    try:
        for folder, mode in (
            ("proc", 0o555),
            ("sys", 0o555),
            ("dev", 0o755),
            ("dev/pts", 0o755),
            ("dev/shm", 0o1777),
            (".crab", 0o711),
            (".crab/bin", 0o755),
        ):
            if os.path.lexists(root / folder) and (root / folder).is_symlink():
                (root / folder).unlink()
            (root / folder).mkdir(mode=mode, exist_ok=True)
        for name, (major, minor) in DEVICES.items():
            os.mknod(root / "dev" / name, stat.S_IFCHR | 0o666, os.makedev(major, minor))
    finally:
        os.umask(umask)
    for name, target in LINKS.items():
        (root / "dev" / name).symlink_to(target)
    init = root / ".crab" / "bin" / "crab-init"
    shutil.copyfile(program("crab-init"), init)
    init.chmod(0o755)
