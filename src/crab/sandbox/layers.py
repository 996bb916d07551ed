"""The writable layers of an overlay, seen from outside: what has to be done to them when they are cloned."""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
from pathlib import Path

OPTIONS = "index=on,nfs_export=on,redirect_dir=on,metacopy=off"
"""As in `native/box.c`: index and nfs_export make inotify watches dumpable, redirect_dir lets folders of a lower layer be
renamed."""

# struct ovl_fb (fs/overlayfs/overlayfs.h): version, magic, length, flags, type, uuid of the file system, file handle
_HANDLE = struct.Struct("<BBBBB16s")
_MAGIC = 0xFB
_libc = ctypes.CDLL(None, use_errno=True)


def renew_work(work: Path, lower: Path) -> None:
    """Make the work folder of an overlay fit the clone of its upper layer; `lower` is the layer below.

    overlayfs keeps an index in it, an entry for each copy of something below. Entries of folders hold file handles of the
    upper layer, which are those of the subvolume that was cloned (ESTALE at the mount); overlayfs makes them again when it
    needs them. Those of files are further links of the copy:
    - of a file that has several names below, all names find the copy by it; without it a name that was not written itself
      would show the old content;
    - of a file with one name it is only there for nfs_export, and would be counted as a link (`stat` would say 2).
    """
    index = work / "index"
    for entry in work.iterdir():
        if entry != index:
            _remove(entry)
    if not index.is_dir():
        return
    ground = os.open(lower, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for entry in index.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif _links(ground, entry.name) < 2:
                entry.unlink()
    finally:
        os.close(ground)
    for name in os.listxattr(index):
        if name.startswith("trusted.overlay."):
            os.removexattr(index, name)  # which upper layer it belongs to


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink()


def _links(ground: int, name: str) -> int:
    """How many names the file has in the lower layer that an index entry stands for; 0 if it is not there (any more)."""
    try:
        data = bytes.fromhex(name)
        _, magic, length, _, kind, _ = _HANDLE.unpack_from(data)
    except (ValueError, struct.error):
        return 0
    handle = data[_HANDLE.size : length]
    if magic != _MAGIC or not handle:
        return 0
    request = struct.pack("=Ii", len(handle), kind) + handle  # struct file_handle
    fd = _libc.open_by_handle_at(ground, request, os.O_PATH | os.O_CLOEXEC)
    if fd < 0:
        return 0
    try:
        return os.fstat(fd).st_nlink
    finally:
        os.close(fd)
