"""Subvolumes, snapshots, durable commits and quotas of btrfs, by direct ioctls.

Knows the kernel's interface (linux/btrfs.h) and nothing of what Crab stores there. No `btrfs` program is started: a
snapshot takes 1 ms, less than the start of a program, and errors keep their number. All calls need root.

A full file system or an exceeded quota is `NoSpace`; a path that is not on btrfs is `HostUnsuitable`; everything else
is the kernel's OSError with the path in it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
import struct
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from crab.errors import HostUnsuitable, NoSpace
from crab.host.mounts import mounts_below

AnyPath = str | os.PathLike[str]
QuotaMode = Literal["none", "simple", "full"]

_libc = ctypes.CDLL(None, use_errno=True)
_MAGIC = 0x94
_WRITE, _READ = 1, 2


def _ioc(direction: int, number: int, size: int) -> int:
    """Number of an ioctl (asm-generic/ioctl.h: x86, arm, riscv, s390)."""
    return direction << 30 | size << 16 | _MAGIC << 8 | number


_SYNC = _ioc(0, 8, 0)
_RESIZE = _ioc(_WRITE, 3, 4096)
_TREE_SEARCH = _ioc(_WRITE | _READ, 17, 4096)
_TREE_SEARCH_V2 = _ioc(_WRITE | _READ, 17, 112)
_SNAP_DESTROY = _ioc(_WRITE, 15, 4096)
_WAIT_SYNC = _ioc(_WRITE, 22, 8)
_SNAP_CREATE_V2 = _ioc(_WRITE, 23, 4096)
_SUBVOL_CREATE_V2 = _ioc(_WRITE, 24, 4096)
_START_SYNC = _ioc(_READ, 24, 8)
_GET_FLAGS = _ioc(_READ, 25, 8)
_SET_FLAGS = _ioc(_WRITE, 26, 8)
_FS_INFO = _ioc(_READ, 31, 1024)
_INO_PATHS = _ioc(_WRITE | _READ, 35, 56)
_CLONE_RANGE = _ioc(_WRITE, 13, 32)
_QUOTA_CTL = _ioc(_WRITE | _READ, 40, 16)
_QGROUP_LIMIT = _ioc(_READ, 43, 48)
_GET_SUBVOL_INFO = _ioc(_READ, 60, 504)
_GET_SUBVOL_ROOTREF = _ioc(_WRITE | _READ, 61, 4096)
_INO_LOOKUP_USER = _ioc(_WRITE | _READ, 62, 4096)

_RDONLY = 2
_ROOT_TREE = 1
_ORPHANS = 2**64 - 5
_ORPHAN_ITEM = 48
_SUBVOLUME_INODE = 256
"""Inode number of the top folder of every subvolume (BTRFS_FIRST_FREE_OBJECTID)."""
_NAME_MAX = 255
_QUOTA_ENABLE_SIMPLE = 4
_LIMIT_MAX_REFERENCED = 1
_NO_LIMIT = 2**64 - 1


class Subvolume(msgspec.Struct, frozen=True, kw_only=True):
    """What the kernel knows of one subvolume."""

    id: int
    uuid: str
    parent_uuid: str
    """Of a snapshot: the uuid of the subvolume that it was taken of; else empty."""
    generation: int
    """Transaction of the last change to its tree."""
    made_in: int
    """Transaction that it was made in: of a snapshot, what it has was written in that one or before."""
    read_only: bool


# ---------------------------------------------------------------- errors


def no_space(path: AnyPath, number: int = errno.ENOSPC) -> NoSpace:
    """The error for a full file system or an exceeded quota at `path`; says which file system it is."""
    place = _existing(path)
    try:
        status = os.statvfs(place)
        free = f", {status.f_bavail * status.f_frsize} bytes free of {status.f_blocks * status.f_frsize}"
    except OSError:
        free = ""
    if number == errno.EDQUOT:
        return NoSpace(
            f"the disk quota at {os.fspath(path)} is reached (file system of {place})",
            remedy="remove files there, or give the sandbox a larger disk limit",
            path=os.fspath(path),
        )
    return NoSpace(
        f"the file system of {place} is full{free}",
        remedy="remove checkpoints, sandboxes or images that are no longer needed, or make the file system larger",
        path=os.fspath(path),
    )


def _existing(path: AnyPath) -> str:
    place = os.path.abspath(path)
    while not os.path.lexists(place) and place != "/":
        place = os.path.dirname(place)
    return place


@contextlib.contextmanager
def checked(path: AnyPath) -> Iterator[None]:
    """Turn a full file system or an exceeded quota in what happens at `path` into NoSpace."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise no_space(path, error.errno) from error
        raise


@contextlib.contextmanager
def _calling(path: AnyPath) -> Iterator[None]:
    """As `checked`, for the calls of this module: their errors get a path, and no btrfs is an error of its own."""
    with checked(path):
        try:
            yield
        except OSError as error:
            if error.errno == errno.ENOTTY:
                raise HostUnsuitable(
                    f"{os.fspath(path)} is not on a btrfs file system",
                    remedy="keep Crab's state on btrfs, or let it make its own btrfs in a file (the default)",
                ) from error
            if error.filename is None and error.errno is not None:
                raise OSError(error.errno, error.strerror, os.fspath(path)) from error
            raise


def _ioctl(descriptor: int, number: int, arguments: bytearray) -> None:
    """As fcntl.ioctl, which keeps the interpreter's lock while the kernel works on more than 1024 bytes that may change
    (Modules/fcntlmodule.c): a snapshot that has much to flush would stop every thread of a daemon."""
    if _libc.ioctl(descriptor, ctypes.c_ulong(number), (ctypes.c_char * len(arguments)).from_buffer(arguments)) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


@contextlib.contextmanager
def _opened(path: AnyPath | bytes, parent: int | None = None) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _name(path: AnyPath) -> bytes:
    name = os.fsencode(os.path.basename(os.path.abspath(path)))
    if len(name) > _NAME_MAX:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), os.fspath(path))
    return name


def _parent(path: AnyPath) -> str:
    return os.path.dirname(os.path.abspath(path))


# ---------------------------------------------------------------- subvolumes


def is_btrfs(path: AnyPath) -> bool:
    """Whether `path` (a folder) lies on btrfs itself, not on an overlay above it."""
    with _opened(path) as descriptor:
        try:
            fcntl.ioctl(descriptor, _FS_INFO, bytearray(1024))
        except OSError as error:
            if error.errno in (errno.ENOTTY, errno.EINVAL, errno.EOPNOTSUPP):
                return False
            raise OSError(error.errno, error.strerror, os.fspath(path)) from error
    return True


def filesystem_uuid(path: AnyPath) -> str:
    """The uuid of the btrfs that `path` lies on."""
    answer = bytearray(1024)
    with _calling(path), _opened(path) as descriptor:
        fcntl.ioctl(descriptor, _FS_INFO, answer)
    return str(uuid.UUID(bytes=bytes(answer[16:32])))


def is_subvolume(path: AnyPath) -> bool:
    """Whether `path` is the top folder of a subvolume; False if it does not exist or is a symlink."""
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_ino == _SUBVOLUME_INODE and is_btrfs(path)


def _volume_arguments(name: bytes, descriptor: int = 0, flags: int = 0) -> bytearray:
    """A struct btrfs_ioctl_vol_args_v2: fd, transid, flags, unused[4], name[4040]."""
    return bytearray(struct.pack("=qQQ32x4040s", descriptor, 0, flags, name))


def create(path: AnyPath) -> None:
    """Make an empty subvolume, owned by root with mode 0755. FileExistsError if there is something already."""
    with _calling(path), _opened(_parent(path)) as parent:
        _ioctl(parent, _SUBVOL_CREATE_V2, _volume_arguments(_name(path)))


def snapshot(source: AnyPath, target: AnyPath, *, read_only: bool) -> None:
    """Make `target` a snapshot of the subvolume `source`; both on the same file system.

    Data that was written to `source` before is flushed and part of it, and the snapshot is durable on return (the
    ioctl ends with a commit of the transaction). Subvolumes nested in `source` are not: they appear as empty folders.
    """
    with _calling(target), _opened(source) as origin, _opened(_parent(target)) as parent:
        _ioctl(parent, _SNAP_CREATE_V2, _volume_arguments(_name(target), origin, _RDONLY if read_only else 0))


def delete(path: AnyPath) -> None:
    """Delete a subvolume and those nested in it. The names are gone on return, the space comes back later (cleaner)."""
    with _calling(path), _opened(_parent(path)) as parent:
        _delete(parent, _name(path))


def _delete(parent: int, name: bytes) -> None:
    with _opened(name, parent) as descriptor:
        for relative in _nested(descriptor):
            with _opened(_within(descriptor, relative.parent)) as folder:
                _destroy(folder, os.fsencode(relative.name))
    _destroy(parent, name)


def _destroy(parent: int, name: bytes) -> None:
    # struct btrfs_ioctl_vol_args: fd, name[4088]
    _ioctl(parent, _SNAP_DESTROY, bytearray(struct.pack("=q4088s", 0, name)))


def nested(path: AnyPath) -> list[Path]:
    """Relative paths of all subvolumes below the subvolume `path`, deepest first: the order to delete them in."""
    with _calling(path), _opened(path) as descriptor:
        return _nested(descriptor)


def _nested(descriptor: int) -> list[Path]:
    found: list[Path] = []
    for child in _children(descriptor):
        with _opened(_within(descriptor, child)) as inner:
            found.extend(child / below for below in _nested(inner))
        found.append(child)
    return found


def _within(descriptor: int, relative: Path) -> str:
    """A path for what lies below an open folder, however long the path of that folder itself is."""
    return f"/proc/self/fd/{descriptor}/{relative}"


def _children(descriptor: int) -> list[Path]:
    children: list[Path] = []
    smallest = 0
    while True:
        # struct btrfs_ioctl_get_subvol_rootref_args: min_treeid, {treeid, dirid}[255], num_items, align[7]
        refs = bytearray(struct.pack("=Q", smallest)).ljust(4096, b"\0")
        more = False
        try:
            _ioctl(descriptor, _GET_SUBVOL_ROOTREF, refs)
        except OSError as error:
            if error.errno != errno.EOVERFLOW:  # 255 were returned, and there are others
                raise
            more = True
        for index in range(refs[4088]):
            tree, folder = struct.unpack_from("=QQ", refs, 8 + 16 * index)
            # struct btrfs_ioctl_ino_lookup_user_args: dirid, treeid, name[256], path[3824]
            names = bytearray(struct.pack("=QQ", folder, tree)).ljust(4096, b"\0")
            _ioctl(descriptor, _INO_LOOKUP_USER, names)
            name = bytes(names[16:272]).split(b"\0", 1)[0]
            prefix = bytes(names[272:]).split(b"\0", 1)[0]  # with a slash at its end, or empty
            children.append(Path(os.fsdecode(prefix + name)))
            smallest = tree + 1
        if not more:
            return children


def remove_tree(path: AnyPath) -> None:
    """Delete whatever is at `path`: a file, a symlink, a subvolume, or a folder with files and subvolumes in it.

    Symlinks are not followed. What does not exist is no error. Subvolumes are dropped without a walk through them.
    Refused (EBUSY, before anything is deleted) if something is mounted there: it could be a folder of the host.
    """
    busy = () if os.path.islink(path) else mounts_below(path, itself=True)
    if busy:
        raise OSError(errno.EBUSY, f"not removed: mounted at {busy[0].target}", os.fspath(path))
    with _calling(path):
        try:
            with _opened(_parent(path)) as parent:
                _remove(parent, _name(path), os.fstat(parent).st_dev)
        except FileNotFoundError:
            return


def _remove(parent: int, name: bytes, device: int) -> None:
    status = os.lstat(name, dir_fd=parent)
    if not stat.S_ISDIR(status.st_mode):
        os.unlink(name, dir_fd=parent)
        return
    if status.st_ino == _SUBVOLUME_INODE:
        _delete(parent, name)
        return
    if status.st_dev != device:  # a mount that came after the look into the mount table
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), os.fsdecode(name))
    with _opened(name, parent) as folder:
        for child in os.listdir(folder):
            _remove(folder, os.fsencode(child), device)
    os.rmdir(name, dir_fd=parent)


def info(path: AnyPath) -> Subvolume:
    """Id, uuids and generation of the subvolume that `path` lies in."""
    answer = bytearray(504)
    with _calling(path), _opened(path) as descriptor:
        fcntl.ioctl(descriptor, _GET_SUBVOL_INFO, answer)
    # struct btrfs_ioctl_get_subvol_info_args: treeid, name[256], parent_id, dirid, generation, flags, uuid,
    # parent_uuid, …
    (number,) = struct.unpack_from("=Q", answer, 0)
    generation, flags = struct.unpack_from("=QQ", answer, 280)
    own, parent = bytes(answer[296:312]), bytes(answer[312:328])
    # … received_uuid, ctransid, otransid
    (made_in,) = struct.unpack_from("=Q", answer, 352)
    return Subvolume(
        id=number,
        uuid=str(uuid.UUID(bytes=own)),
        parent_uuid=str(uuid.UUID(bytes=parent)) if any(parent) else "",
        generation=generation,
        made_in=made_in,
        read_only=bool(flags & 1),  # BTRFS_ROOT_SUBVOL_RDONLY, the on-disk bit
    )


class InodePaths:
    """Paths of inodes of one subvolume, by their numbers: every name that a hard-linked file has there.

    A context manager: holds the subvolume open. Finds what was made or renamed a moment ago, too (no commit is needed).
    """

    _SIZE = 4096  # the kernel takes no larger buffer

    def __init__(self, subvolume: AnyPath) -> None:
        """Raises OSError."""
        self.fd = os.open(subvolume, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._buffer = ctypes.create_string_buffer(self._SIZE)
        self._arguments = bytearray(56)
        self._offsets = ctypes.addressof(self._buffer) + 16  # of struct btrfs_data_container.val

    def __enter__(self) -> InodePaths:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)

    def __call__(self, number: int) -> list[bytes] | None:
        """All paths, relative to the subvolume; none for an inode that is not there, None if they are too many to tell.

        Raises OSError.
        """
        struct.pack_into("<QQ32xQ", self._arguments, 0, number, self._SIZE, self._offsets - 16)
        try:
            fcntl.ioctl(self.fd, _INO_PATHS, self._arguments)
        except FileNotFoundError:
            return []
        _, missing, count, missed = struct.unpack_from("<4I", self._buffer, 0)
        if missing or missed:
            return None
        places = struct.unpack_from(f"<{count}Q", self._buffer, 16)
        return [ctypes.string_at(self._offsets + place) for place in places]


def is_read_only(path: AnyPath) -> bool:
    """Whether the subvolume `path` is read-only."""
    answer = bytearray(8)
    with _calling(path), _opened(path) as descriptor:
        fcntl.ioctl(descriptor, _GET_FLAGS, answer)
    return bool(struct.unpack("=Q", answer)[0] & _RDONLY)


def set_read_only(path: AnyPath, read_only: bool) -> None:
    """Make a subvolume read-only or writable. Fails with ETXTBSY while a file in it is open for writing."""
    flags = bytearray(8)
    with _calling(path), _opened(path) as descriptor:
        fcntl.ioctl(descriptor, _GET_FLAGS, flags)
        (value,) = struct.unpack("=Q", flags)
        wanted = value | _RDONLY if read_only else value & ~_RDONLY
        if wanted != value:
            fcntl.ioctl(descriptor, _SET_FLAGS, struct.pack("=Q", wanted))


# ---------------------------------------------------------------- durability


def commit(path: AnyPath) -> None:
    """Make all that btrfs has in its running transaction durable: subvolumes, renames, deletions, fsynced files.

    File data that is only in the page cache is not part of it; `sync` writes that too.
    """
    transaction = bytearray(8)
    with _calling(path), _opened(path) as descriptor:
        fcntl.ioctl(descriptor, _START_SYNC, transaction)
        fcntl.ioctl(descriptor, _WAIT_SYNC, bytes(transaction))


def sync(path: AnyPath) -> None:
    """Write all dirty data of the whole file system of `path`, other sandboxes' too, and commit it durably."""
    with _calling(path), _opened(path) as descriptor:
        fcntl.ioctl(descriptor, _SYNC)


def clone(source: int, target: int, offset: int, size: int, at: int) -> None:
    """Let the file `target` have at `at` what `source` has at `offset`: one copy on disk, until either is written to.

    All in bytes, whole blocks of 4096 (also the end of `source`, if that is one). What is not on disk yet of `source` is
    written there first. Both are descriptors of files on one file system.
    """
    try:
        fcntl.ioctl(target, _CLONE_RANGE, struct.pack("=qQQQ", source, offset, size, at))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise no_space(f"/proc/self/fd/{target}", error.errno) from error
        raise


def compress(folder: AnyPath) -> None:
    """Have the kernel compress what is written into files that are made in this folder from now on, where it can."""
    with contextlib.suppress(OSError):  # a kernel without zstd, a file system without copy-on-write
        os.setxattr(folder, "btrfs.compression", b"zstd")


class Piece(NamedTuple):
    """A part of a file's data. Bytes."""

    address: int
    """Of the extent that it lies in."""
    stored: int
    """What that takes on disk, all of it: it stays as long as anybody needs a part."""
    used: float
    """The part of that which this file needs."""


_EXTENT_DATA, _INLINE = 108, 0
_FILE_EXTENT = struct.Struct("=QQBBHBQQQQ")
"""struct btrfs_file_extent_item: transaction, size in memory, compression, 2 × unused, kind; of one that is not inline address,
size on disk, offset, size of the part."""


def pieces(path: AnyPath) -> list[Piece]:
    """The parts that a file's data lies in, as far as it is on disk and not in the metadata."""
    found: list[Piece] = []
    for kind, item in items(path):
        if kind == _EXTENT_DATA and len(item) >= _FILE_EXTENT.size:
            _, memory, _, _, _, where, address, stored, _, size = _FILE_EXTENT.unpack_from(item)
            if where != _INLINE and address:  # 0 is a hole
                found.append(Piece(address, stored, stored * size / memory))
    return found


def items(path: AnyPath) -> Iterator[tuple[int, bytes]]:
    """Type and content of every item of a file or folder in the tree of its subvolume (linux/btrfs_tree.h)."""
    with _calling(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            inode = os.fstat(descriptor).st_ino
            for _, kind, item in _searched(descriptor, inode, inode, 0):
                yield kind, item
        finally:
            os.close(descriptor)


_INODE_ITEM = 1
_SEARCH_ITEM = struct.Struct("=QQQII")  # struct btrfs_ioctl_search_header: transid, objectid, offset, type, len


def changed_inodes(path: AnyPath, since: int) -> set[int]:
    """Numbers of the inodes of the subvolume at `path` that were made or changed in any way after transaction `since`.

    Asks for the parts of the tree that are newer, as `btrfs subvolume find-new` does: it costs what was changed, not what is
    there, and depends on no clock (btrfs stamps every inode with the transaction of its last change).
    """
    with _calling(path), _opened(path) as descriptor:
        return {
            number
            for number, kind, item in _searched(descriptor, _SUBVOLUME_INODE, 2**64 - 1, since + 1)
            # struct btrfs_inode_item: generation, transid, …
            if kind == _INODE_ITEM and struct.unpack_from("=Q", item, 8)[0] > since
        }


def _searched(descriptor: int, first: int, last: int, since: int) -> Iterator[tuple[int, int, bytes]]:
    """Number, type and content of every item of the inodes from `first` to `last`, in the tree of the subvolume that is opened,
    as far as it lies in nodes of transaction `since` or later."""
    most, room = 2**64 - 1, 1 << 18
    kind, offset = 0, 0
    while first <= last:
        # struct btrfs_ioctl_search_args_v2: the key as in `deletions_pending`, size of the buffer, the buffer. The bounds
        # are of keys as a whole, so items of other kinds come, too.
        key = struct.pack("=7Q4I", 0, first, last, offset, most, since, most, kind, 255, 1 << 31, 0)
        search = bytearray(key.ljust(104, b"\0") + struct.pack("=Q", room) + bytes(room))
        _ioctl(descriptor, _TREE_SEARCH_V2, search)
        (count,) = struct.unpack_from("=I", search, 64)
        if not count:
            return
        at = 112
        for _ in range(count):
            _, first, offset, kind, length = _SEARCH_ITEM.unpack_from(search, at)
            at += _SEARCH_ITEM.size
            yield first, kind, bytes(search[at : at + length])
            at += length
        if offset < most:
            offset += 1
        else:
            kind, offset = kind + 1, 0
        if kind > 255:
            first, kind = first + 1, 0


def deletions_pending(path: AnyPath) -> int:
    """How many deleted subvolumes wait for the cleaner, so that their space is not free yet (at most 256 are seen)."""
    # Each has an orphan item in the tree of roots. struct btrfs_ioctl_search_key: tree_id, min and max of objectid,
    # offset and transid, min and max of type, nr_items (in: at most; out: found), then the items themselves.
    most = 2**64 - 1
    key = struct.pack("=7Q4I", _ROOT_TREE, _ORPHANS, _ORPHANS, 0, most, 0, most, _ORPHAN_ITEM, _ORPHAN_ITEM, 256, 0)
    search = bytearray(key.ljust(4096, b"\0"))
    with _calling(path), _opened(path) as descriptor:
        _ioctl(descriptor, _TREE_SEARCH, search)
    (found,) = struct.unpack_from("=I", search, 64)
    return int(found)


def reclaim(path: AnyPath, seconds: float = 30.0) -> bool:
    """Get the space of deleted subvolumes back now, instead of after the next periodic commit (30 s) and at leisure.

    Returns whether all is done within `seconds`.
    """
    end = time.monotonic() + seconds
    sync(path)  # wakes the cleaner
    while deletions_pending(path):
        if time.monotonic() >= end:
            return False
        time.sleep(0.02)
    sync(path)  # what was cleaned becomes free with the commit
    return True


def resize_to_device(path: AnyPath) -> None:
    """Let the (single-device) file system use all of its device after that has become larger."""
    with _calling(path), _opened(path) as descriptor:
        _ioctl(descriptor, _RESIZE, bytearray(struct.pack("=q4088s", 0, b"max")))


# ---------------------------------------------------------------- quotas


def quota_supported() -> bool:
    """Whether the kernel has simple quotas (Linux 6.7): limits without the cost of full accounting at each snapshot."""
    return os.path.exists("/sys/fs/btrfs/features/simple_quota")


def quota_mode(path: AnyPath) -> QuotaMode:
    """What quota accounting the file system of `path` does now."""
    try:
        text = Path(f"/sys/fs/btrfs/{filesystem_uuid(path)}/qgroups/mode").read_text().strip()
    except FileNotFoundError:
        return "none"
    return {"squota": "simple", "qgroup": "full"}.get(text, "none")  # type: ignore[return-value]


def enable_quota(path: AnyPath) -> None:
    """Turn simple quotas on, unless the file system accounts already (then that stays as it is).

    Only what is written from now on counts. It sets an incompatible feature bit: kernels before 6.7 will not mount this
    file system any more, which is why nothing turns it on before a limit is asked for.
    """
    if quota_mode(path) != "none":
        return
    if not quota_supported():
        raise HostUnsuitable(
            "this kernel has no simple quotas of btrfs, so a sandbox's disk space cannot be limited",
            remedy="use Linux 6.7 or newer, or run the sandbox without a disk limit",
        )
    with _calling(path), _opened(path) as descriptor:
        fcntl.ioctl(descriptor, _QUOTA_CTL, bytearray(struct.pack("=QQ", _QUOTA_ENABLE_SIMPLE, 0)))


def set_limit(path: AnyPath, limit: int | None) -> None:
    """Let the subvolume `path` own at most `limit` bytes (EDQUOT beyond); None lifts the limit. Enables quotas.

    With simple quotas an extent belongs to the subvolume that wrote it, for as long as any snapshot refers to it: a
    fresh snapshot owns nothing, and a subvolume whose data lives on in snapshots stays charged for it.
    """
    if limit is None and quota_mode(path) == "none":
        return
    enable_quota(path)
    value = _NO_LIMIT if limit is None else limit
    # struct btrfs_ioctl_qgroup_limit_args: qgroupid (0: that of the subvolume of the descriptor), flags, max_rfer,
    # max_excl, rsv_rfer, rsv_excl
    argument = bytearray(struct.pack("=6Q", 0, _LIMIT_MAX_REFERENCED, value, 0, 0, 0))
    with _calling(path), _opened(path) as descriptor:
        fcntl.ioctl(descriptor, _QGROUP_LIMIT, argument)


def quota_usage(path: AnyPath) -> int | None:
    """Bytes that count against the limit of the subvolume `path`; None if the file system does no accounting.

    As of the last commit of the transaction (every 30 s, each snapshot, `commit`).
    """
    folder = f"/sys/fs/btrfs/{filesystem_uuid(path)}/qgroups/0_{info(path).id}"
    try:
        return int(Path(folder, "referenced").read_text())
    except FileNotFoundError:
        return None
