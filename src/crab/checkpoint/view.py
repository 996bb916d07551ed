"""The file system of a checkpoint or sandbox as it looks from inside: its layers put together, for reading by the host."""

from __future__ import annotations

import contextlib
import ctypes
import os
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from crab.host import btrfs, mounts
from crab.host.pool import Pool
from crab.sandbox.layers import OPTIONS, renew_work

_CLONE_NEWNS = 0x00020000
_MS_REC, _MS_PRIVATE = 16384, 1 << 18
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Tree:
    """The files of one state."""

    lower: tuple[Path, ...]
    """What is below, uppermost first."""
    files: Path | None = None
    """Subvolume with the writable layers; None: the (only) lower layer alone."""
    part: str = ""
    """Folder in it that has `u` and `k`: empty for the root file system, `mN` for a copy-on-write mount."""

    @property
    def upper(self) -> Path | None:
        """The writable layer itself."""
        return self.files / self.part / "u" if self.files else None


@contextlib.contextmanager
def seen(pool: Pool, tree: Tree) -> Iterator[Path]:
    """Path of the tree as it looks from inside, for as long as the block. Raises OSError.

    A clone of the layers is mounted like a sandbox's own (a plain stack of read-only layers would show the names of one
    hard-linked file with different contents), in a mount namespace that only one short-lived thread is in. It stays
    reachable through a descriptor: nothing is ever visible on the host or left over.
    """
    if tree.files is None:
        (only,) = tree.lower
        yield only
        return
    clone = pool.staging / f"view-{uuid.uuid4().hex[:12]}"
    btrfs.snapshot(tree.files, clone, read_only=False)
    try:
        folder = clone / tree.part
        renew_work(folder / "k", tree.lower[0])
        fd = _mounted(tree.lower, folder)
        try:
            yield Path(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)
    finally:
        pool.discard(clone, wait=False)


def _mounted(lower: tuple[Path, ...], upper: Path) -> int:
    def mount() -> int:
        if _libc.unshare(_CLONE_NEWNS):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), "unshare")
        mounts.mount(None, "/", None, _MS_REC | _MS_PRIVATE)
        layers = ":".join(_escaped(layer) for layer in lower)
        above = f"upperdir={_escaped(upper / 'u')},workdir={_escaped(upper / 'k')}"
        mounts.mount("overlay", "/run", "overlay", 0, f"lowerdir={layers},{above},{OPTIONS}")
        return os.open("/run", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    with ThreadPoolExecutor(1) as threads:
        return threads.submit(mount).result()


def _escaped(path: Path) -> str:
    return str(path).replace("\\", "\\\\").replace(":", "\\:").replace(",", "\\,")
