"""Operations on modes, owners, times, extended attributes and flags."""

from __future__ import annotations

import array
import fcntl
import os
import struct
from typing import Any

from bench.operations.operation import (
    opened,
    operation,
)


@operation("chmod", "a")
def _(folder: str, state: dict[str, Any]) -> None:
    os.chmod(f"{folder}/a", 0o600)


@operation("chmod of a folder", "sub")
def _(folder: str, state: dict[str, Any]) -> None:
    os.chmod(f"{folder}/sub", 0o1777)


@operation("chmod to what it is", changes=False)
def _(folder: str, state: dict[str, Any]) -> None:
    os.chmod(f"{folder}/a", os.stat(f"{folder}/a").st_mode & 0o7777)


def _setuid(folder: str, state: dict[str, Any]) -> None:
    os.chown(f"{folder}/a", 1, 1)
    os.chmod(f"{folder}/a", 0o4755)


@operation("write that clears set-user-id, as another user", "a", prepare=_setuid)
def _(folder: str, state: dict[str, Any]) -> None:
    fd = opened(f"{folder}/a")
    os.setuid(1)
    os.write(fd, b"x")


@operation("chown", "a")
def _(folder: str, state: dict[str, Any]) -> None:
    os.chown(f"{folder}/a", 1, 1)


@operation("lchown of a symlink", "ln")
def _(folder: str, state: dict[str, Any]) -> None:
    os.lchown(f"{folder}/ln", 1, 1)


@operation("set times", changes=False)
def _(folder: str, state: dict[str, Any]) -> None:
    os.utime(f"{folder}/a", (1, 1))


def _attribute(folder: str, state: dict[str, Any]) -> None:
    os.setxattr(f"{folder}/a", "user.k", b"v")


@operation("setxattr", "a", needs="xattr")
def _(folder: str, state: dict[str, Any]) -> None:
    _attribute(folder, state)


@operation("setxattr over another", "a", needs="xattr", prepare=_attribute)
def _(folder: str, state: dict[str, Any]) -> None:
    os.setxattr(f"{folder}/a", "user.k", b"w")


@operation("setxattr to what it is", changes=False, needs="xattr", prepare=_attribute)
def _(folder: str, state: dict[str, Any]) -> None:
    _attribute(folder, state)


@operation("removexattr", "a", needs="xattr", prepare=_attribute)
def _(folder: str, state: dict[str, Any]) -> None:
    os.removexattr(f"{folder}/a", "user.k")


@operation("set a file capability", "a", needs="xattr")
def _(folder: str, state: dict[str, Any]) -> None:
    os.setxattr(f"{folder}/a", "security.capability", struct.pack("<IIIII", 0x02000001, 1 << 10, 0, 0, 0))


def _acl() -> bytes:
    """u::rw- u:1:r-- g::r-- m::r-- o::r-- in the kernel's form."""
    none = 0xFFFFFFFF
    entries = [(0x01, 6, none), (0x02, 4, 1), (0x04, 4, none), (0x10, 4, none), (0x20, 4, none)]
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


@operation("set an access list", "a", needs="acl")
def _(folder: str, state: dict[str, Any]) -> None:
    os.setxattr(f"{folder}/a", "system.posix_acl_access", _acl())


@operation("set a default access list", "sub", needs="acl")
def _(folder: str, state: dict[str, Any]) -> None:
    os.setxattr(f"{folder}/sub", "system.posix_acl_default", _acl())


def flags_of(path: str) -> int:
    """What chattr(1) sets. Raises OSError where there is no such thing."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        answer = array.array("l", [0])
        fcntl.ioctl(fd, 0x80086601, answer)
        return answer[0]
    finally:
        os.close(fd)


@operation("chattr", "a", needs="flags")
def _(folder: str, state: dict[str, Any]) -> None:
    fcntl.ioctl(opened(f"{folder}/a"), 0x40086602, array.array("l", [flags_of(f"{folder}/a") | 0x40]))  # no dump
