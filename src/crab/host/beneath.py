"""Open paths inside a folder tree whose content may be hostile (an image, a sandbox's files).

A path is resolved by the kernel relative to an open folder and cannot leave it (openat2(2), Linux 5.6), whatever
symlinks lie there and however they change meanwhile. Knows nothing of what the trees are.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from typing import Literal

Links = Literal["none", "beneath", "in-root"]
"""What symlinks on the way mean. `none`: refused (ELOOP), also as the last part unless O_NOFOLLOW with O_PATH is asked
for. `beneath`: followed while they stay below the folder; absolute ones and those that climb out are refused (EXDEV).
`in-root`: followed as if the folder were `/` (chroot)."""

_OPENAT2 = 437  # the same on every architecture
_NO_MAGICLINKS, _NO_SYMLINKS, _BENEATH, _IN_ROOT = 0x02, 0x04, 0x08, 0x10
_RESOLVE: dict[Links, int] = {
    "none": _BENEATH | _NO_SYMLINKS,
    "beneath": _BENEATH | _NO_MAGICLINKS,
    "in-root": _IN_ROOT | _NO_MAGICLINKS,
}
_PATH_MAX = 4096
_TRIES = 64

_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long


def open_beneath(root: int, path: bytes, flags: int, mode: int = 0, *, links: Links = "none") -> int:
    """Open `path` (relative to the folder descriptor `root`, empty for itself); returns a close-on-exec descriptor.

    Paths may be longer than PATH_MAX: they are walked in pieces. In such a path `in-root` allows no symlinks, since an
    absolute one in a later piece would have to be resolved from the start.
    """
    if len(path) < _PATH_MAX:
        return _openat2(root, path or b".", flags, mode, _RESOLVE[links])
    resolve = _RESOLVE["none" if links == "in-root" else links]
    folder = os.dup(root)
    try:
        while len(path) >= _PATH_MAX:
            cut = path.rfind(b"/", 0, _PATH_MAX - 1)
            if cut < 0:
                raise _error(errno.ENAMETOOLONG, path)
            below = _openat2(folder, path[:cut], os.O_PATH | os.O_DIRECTORY, 0, resolve)
            os.close(folder)
            folder, path = below, path[cut + 1 :]
        return _openat2(folder, path or b".", flags, mode, resolve)
    finally:
        os.close(folder)


def _openat2(folder: int, path: bytes, flags: int, mode: int, resolve: int) -> int:
    how = struct.pack("=3Q", flags | os.O_CLOEXEC, mode, resolve)
    for _ in range(_TRIES):
        descriptor = _syscall(_OPENAT2, ctypes.c_int(folder), path, how, ctypes.c_size_t(len(how)))
        if descriptor >= 0:
            return descriptor
        number = ctypes.get_errno()
        # EAGAIN: a rename elsewhere in the tree raced with "..", so that the kernel could not be sure.
        if number not in (errno.EAGAIN, errno.EINTR):
            raise _error(number, path)
    raise _error(errno.EAGAIN, path)


def _error(number: int, path: bytes) -> OSError:
    return OSError(number, os.strerror(number), os.fsdecode(path))
