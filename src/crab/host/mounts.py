"""Mounts and loop devices of this machine: what the kernel says is there, and the calls that change it.

Knows /proc/self/mountinfo, mount(2), umount2(2) and the loop driver. Does not know what Crab mounts or why.
Everything is looked up in the kernel's own tables, never remembered: a daemon that was killed finds its mounts again.
`os.path.ismount` is not used, since it is blind to bind mounts within one file system.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from crab.errors import HostUnsuitable

_libc = ctypes.CDLL(None, use_errno=True)

# linux/mount.h
MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_REMOUNT = 0x20
MS_NOATIME = 0x400
MS_BIND = 0x1000
MS_MOVE = 0x2000
MS_REC = 0x4000
MS_UNBINDABLE = 0x20000
MS_PRIVATE = 0x40000
MS_SLAVE = 0x80000
MS_SHARED = 0x100000

MNT_FORCE = 0x1
MNT_DETACH = 0x2
UMOUNT_NOFOLLOW = 0x8


class MountEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One line of /proc/self/mountinfo (proc_pid_mountinfo(5)). Undecodable bytes are surrogate-escaped."""

    id: int
    parent: int
    device: str
    """`major:minor` as the kernel prints it."""
    root: str
    """The folder of the file system that is mounted; not `/` for bind mounts and btrfs subvolumes."""
    target: str
    options: tuple[str, ...]
    """Options of this mount (`ro`, `nosuid`, `noatime`)."""
    propagation: tuple[str, ...]
    """`shared:N`, `master:N`, `propagate_from:N`, `unbindable`; empty is private."""
    fs_type: str
    source: str
    super_options: tuple[str, ...]
    """Options of the file system, common to all its mounts."""

    @property
    def read_only(self) -> bool:
        return "ro" in self.options or "ro" in self.super_options


# ---------------------------------------------------------------- the mount table

_ESCAPE = re.compile(rb"\\([0-7]{3})")
_SPECIAL = re.compile(rb"[ \t\n\\]")


def _unescape(field: bytes) -> str:
    """Space, tab, newline and backslash stand as octal escapes in mountinfo; no other byte does."""
    return os.fsdecode(_ESCAPE.sub(lambda match: bytes([int(match[1], 8) & 0xFF]), field))


def parse_mountinfo(text: bytes) -> tuple[MountEntry, ...]:
    """The entries in the kernel's order: a later mount on the same folder hides the earlier ones."""
    return tuple(_parse_line(line) for line in text.split(b"\n") if line)


def _parse_line(line: bytes) -> MountEntry:
    fields = line.split(b" ")
    # The optional fields, none or several, end at a lone hyphen.
    end = fields.index(b"-", 6)
    return MountEntry(
        id=int(fields[0]),
        parent=int(fields[1]),
        device=fields[2].decode(),
        root=_unescape(fields[3]),
        target=_unescape(fields[4]),
        options=tuple(_unescape(fields[5]).split(",")),
        propagation=tuple(field.decode() for field in fields[6:end]),
        fs_type=_unescape(fields[end + 1]),
        source=_unescape(fields[end + 2]),
        super_options=tuple(_unescape(fields[end + 3]).split(",")) if len(fields) > end + 3 else (),
    )


def mounts(pid: int | str = "self") -> tuple[MountEntry, ...]:
    """All mounts in the mount namespace of `pid`, as seen from that process's root."""
    return parse_mountinfo(_table(pid))


def _table(pid: int | str = "self") -> bytes:
    # Few large reads: the table can change between two, and then lines are missing or come twice.
    with open(f"/proc/{pid}/mountinfo", "rb", buffering=1 << 20) as file:
        return file.read()


def _mounts_mentioning(target: str) -> list[MountEntry]:
    """Entries whose line contains a path: with hundreds of sandboxes, parsing every line is what would take time."""
    needle = _SPECIAL.sub(lambda match: b"\\%03o" % match[0][0], os.fsencode(target))
    return [_parse_line(line) for line in _table().split(b"\n") if line and needle in line]


def mount_at(path: str | os.PathLike[str]) -> MountEntry | None:
    """The topmost mount whose mount point is exactly `path` (symlinks resolved), None if nothing is mounted there."""
    target = os.path.realpath(path)
    found = [entry for entry in _mounts_mentioning(target) if entry.target == target]
    # Of several mounts on one folder, the topmost is the one that is no other's parent there; the order of lines alone
    # is not enough, since a mount can be slid beneath another (move_mount with MOVE_MOUNT_BENEATH, Linux 6.5).
    parents = {entry.parent for entry in found}
    top = [entry for entry in found if entry.id not in parents]
    return top[-1] if top else None


def mounts_below(path: str | os.PathLike[str], *, itself: bool = False) -> tuple[MountEntry, ...]:
    """Mounts on folders strictly below `path` (and on `path` with `itself`), in an order to unmount them in."""
    target = os.path.realpath(path).rstrip("/")
    found = {
        entry.id: entry
        for entry in _mounts_mentioning(target)
        if (entry.target.startswith(target + "/") and entry.target != "/")
        or (itself and entry.target == (target or "/"))
    }

    def depth(entry: MountEntry) -> int:
        above, count = entry, 0
        while above.parent in found and above.parent != above.id:
            above, count = found[above.parent], count + 1
        return count

    # What is mounted on another one goes before it; the order of lines says nothing about that after a pivot_root.
    return tuple(sorted(found.values(), key=depth, reverse=True))


# ---------------------------------------------------------------- mount and umount


def _encode(text: str | os.PathLike[str] | None) -> bytes | None:
    return None if text is None else os.fsencode(text)


def mount(
    source: str | os.PathLike[str] | None,
    target: str | os.PathLike[str],
    fs_type: str | None = None,
    flags: int = 0,
    data: str | None = None,
) -> None:
    """mount(2). Raises OSError with the target's path (ENOENT can mean the source: both names are in the error)."""
    code = _libc.mount(_encode(source), _encode(target), _encode(fs_type), ctypes.c_ulong(flags), _encode(data))
    if code != 0:
        number = ctypes.get_errno()
        first = os.fspath(target) if source is None else os.fspath(source)
        raise OSError(number, os.strerror(number), first, None, os.fspath(target))


def unmount(target: str | os.PathLike[str], flags: int = UMOUNT_NOFOLLOW) -> None:
    """umount2(2); never follows a symlink at the end of the path unless told so."""
    if _libc.umount2(_encode(target), ctypes.c_int(flags)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), os.fspath(target))


# ---------------------------------------------------------------- loop devices

# linux/loop.h
_LOOP_SET_CAPACITY = 0x4C07
_LOOP_CLR_FD = 0x4C01
_LOOP_CONFIGURE = 0x4C0A
_LOOP_CTL_GET_FREE = 0x4C82
_LO_FLAGS_AUTOCLEAR = 4
_LO_FLAGS_DIRECT_IO = 16
_LOOP_MAJOR = 7
_LOOP_BLOCK = 4096
_CONFIGURE_TRIES = 16


def loops() -> Iterator[tuple[str, str]]:
    """(device path, backing file) of every attached loop device."""
    for file in sorted(Path("/sys/block").glob("loop*/loop/backing_file")):
        try:
            # Not strip(): a name may end in a space. The kernel appends exactly one newline.
            backing = os.fsdecode(file.read_bytes()).removesuffix("\n")
        except OSError:
            continue  # detached since the listing
        if backing:
            yield f"/dev/{file.parent.parent.name}", backing


def loops_of(file: str | os.PathLike[str]) -> tuple[str, ...]:
    """Loop devices that `file` is attached to, compared by inode: by which name it was attached does not matter."""
    wanted = os.stat(file)
    found = []
    for device, backing in loops():
        try:
            status = os.stat(backing)
        except OSError:
            continue  # deleted, or visible in another mount namespace only
        if (status.st_dev, status.st_ino) == (wanted.st_dev, wanted.st_ino):
            found.append(device)
    return tuple(found)


@contextlib.contextmanager
def attached(file: str | os.PathLike[str]) -> Iterator[str]:
    """A loop device for `file`: the one that it is attached to already, else a new one.

    Attaching a file twice would let two file system instances write to it, so callers hold a lock around this. The
    device detaches itself (autoclear) when its last user closes it, which is after the `with` block unless it was
    mounted in it: no crash leaves a device behind that is not in use.
    """
    with contextlib.ExitStack() as stack:
        existing = loops_of(file)
        if existing:
            descriptor = os.open(existing[0], os.O_RDWR | os.O_CLOEXEC)
            device = existing[0]
        else:
            device, descriptor = _attach(file)
        stack.callback(os.close, descriptor)
        yield device


def _attach(file: str | os.PathLike[str]) -> tuple[str, int]:
    backing = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    try:
        for _ in range(_CONFIGURE_TRIES):
            device = _free_loop()
            descriptor = os.open(device, os.O_RDWR | os.O_CLOEXEC)
            # struct loop_config (Linux 5.8): fd, block size, struct loop_info64, reserved. Direct I/O avoids a second
            # copy of every block in the page cache; the driver falls back to buffered I/O by itself where the file
            # system below cannot. 4096 is btrfs' smallest unit, and aligned for every disk's direct I/O.
            flags = _LO_FLAGS_AUTOCLEAR | _LO_FLAGS_DIRECT_IO
            info = struct.pack("=5Q4I64s64s32s2Q", 0, 0, 0, 0, 0, 0, 0, 0, flags, _short_name(file), b"", b"", 0, 0)
            config = bytearray(struct.pack("=2I", backing, _LOOP_BLOCK) + info + bytes(64))
            try:
                fcntl.ioctl(descriptor, _LOOP_CONFIGURE, config)
            except OSError as error:
                os.close(descriptor)
                if error.errno == errno.EBUSY:
                    continue  # another process took the free device between the two calls
                raise OSError(error.errno, error.strerror, os.fspath(file), None, device) from error
            return device, descriptor
    finally:
        os.close(backing)
    raise OSError(errno.EBUSY, "every free loop device was taken by another process", os.fspath(file))


def _short_name(file: str | os.PathLike[str]) -> bytes:
    """What `losetup` shows for kernels without sysfs; informational, cut to the 63 bytes that fit."""
    return os.fsencode(file)[:63]


def _free_loop() -> str:
    remedy = "load the loop driver (`modprobe loop`); in a container, give it /dev/loop-control and the loop devices"
    try:
        control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise HostUnsuitable(f"no loop devices: /dev/loop-control: {error.strerror}", remedy=remedy) from error
    try:
        number = fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
    except OSError as error:
        raise HostUnsuitable(f"no free loop device: {error.strerror}", remedy=remedy) from error
    finally:
        os.close(control)
    device = f"/dev/loop{number}"
    if not os.path.exists(device):
        # A /dev without devtmpfs or udev (containers) does not get the node of a new device by itself.
        try:
            os.mknod(device, stat.S_IFBLK | 0o600, os.makedev(_LOOP_MAJOR, number))
        except FileExistsError:
            pass  # udev was faster
        except OSError as error:
            raise HostUnsuitable(
                f"no free loop device: cannot make {device}: {error.strerror}", remedy=remedy
            ) from error
    return device


def detach(device: str) -> None:
    """Detach a loop device (at its last close, if something still uses it)."""
    descriptor = os.open(device, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(descriptor, _LOOP_CLR_FD)
    except OSError as error:
        if error.errno != errno.ENXIO:  # ENXIO: already detached
            raise OSError(error.errno, error.strerror, device) from error
    finally:
        os.close(descriptor)


def wait_detached(file: str | os.PathLike[str], seconds: float = 5.0) -> bool:
    """Wait until no loop device backs `file`; autoclear happens in the kernel's own time after the last unmount."""
    end = time.monotonic() + seconds
    while loops_of(file):
        if time.monotonic() >= end:
            return False
        time.sleep(0.005)
    return True


def grow_loop(device: str) -> None:
    """Tell a loop device that its file has become larger."""
    descriptor = os.open(device, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(descriptor, _LOOP_SET_CAPACITY, 0)
    except OSError as error:
        raise OSError(error.errno, error.strerror, device) from error
    finally:
        os.close(descriptor)
