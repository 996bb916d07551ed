"""The pool: the one btrfs file system that holds images, sandboxes and checkpoints.

Knows how the pool comes to be, how it is found again after a crash, how full it is, and how things in it are thrown
away. Does not know what an image, a sandbox or a checkpoint is: it hands out folders.

The pool is mounted at STATE_DIR/pool. Below it lies, in this order of preference: the file STATE_DIR/pool.btrfs if
there is one, the file system of STATE_DIR itself if that is btrfs, a new sparse file. Choices, measured on loop over
ext4:

* Direct I/O for the loop device: 500 MB written and fsynced in 0.6 s instead of 1.1 to 2.4 s, and no second page cache.
* Data checksums stay on (crc32c, done by the CPU): a checkpoint that rots must be noticed, not restored.
* No compression: it would sit in the path of every dump and every write of a sandbox, on the CPUs that the sandbox
  uses.
* Metadata is kept twice (mkfs' default): no measurable cost per snapshot, and one bad block does not end all
  checkpoints.
* `noatime`: reading an image must not write. `discard=async`: what is deleted becomes holes in the file.
* `nosuid,nodev`: root of a sandbox is uid 0 on disk, so a setuid program that it makes would be a setuid-root program
  for every user of the host who reaches the file. An overlay with layers here is not affected: its own flags count.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Self

from crab.errors import Busy, CrabError, Damaged, HostUnsuitable, InvalidRequest, NoSpace
from crab.host import btrfs, mounts

DEFAULT_SIZE = 64 << 30
"""Bytes of a new pool file. It is sparse: it takes from the host only what is stored in it."""
SMALLEST_SIZE = 256 << 20
"""btrfs itself needs 109 MiB; less than this leaves no room for anything."""

_LOCK_WAIT = 60.0
_MOUNT_FLAGS = mounts.MS_NOATIME | mounts.MS_NOSUID | mounts.MS_NODEV
_MOUNT_DATA = "discard=async"

# Searchable by the shifted uids of sandboxes, but not listable: a path must be known. What lies in staging and trash is
# nobody's business.
_FOLDERS = {
    "images": 0o711,
    "runtime": 0o711,
    "live": 0o711,
    "checkpoints": 0o711,
    "staging": 0o700,
    "trash": 0o700,
}


class Usage(NamedTuple):
    """Bytes."""

    total: int
    used: int
    free: int
    """What can be written: also bounded by the host's file system below a sparse pool file."""


class Pool:
    """An open pool. It holds no descriptor: any number of processes may have the same pool open."""

    def __init__(self, state_dir: Path, *, file: Path | None) -> None:
        """Use `Pool.open`."""
        self.state_dir = state_dir
        self.file = file
        """The file that holds the file system; None if the state directory itself is on btrfs."""
        self.root = state_dir / "pool"

    @property
    def device(self) -> int:
        """Number of the file system as the kernel has it (`s_dev`: every subvolume shows another to stat(2))."""
        path = os.path.realpath(self.root)
        found = [entry for entry in mounts.mounts() if Path(path).is_relative_to(entry.target)]
        major, minor = max(found, key=lambda entry: len(entry.target)).device.split(":")
        return int(major) << 20 | int(minor)

    # ------------------------------------------------------------ open and close

    @classmethod
    def open(cls, state_dir: str | os.PathLike[str], size: int | None = None) -> Self:
        """The pool of `state_dir`, made on the first call, found again on every later one (also after a crash or
        reboot).

        `size` is that of a new pool file (64 GiB if None); an existing smaller one grows to it. The mount is made in
        the mount namespace of the caller, which should be the host's: in a private one, others would not see it.

        Raises HostUnsuitable (no root, no btrfs, no mkfs.btrfs, no loop device, state directory not writable), NoSpace,
        Busy (another process is opening it for too long), Damaged (the file is no mountable btrfs; it is left as it
        is).
        """
        if size is not None and size < SMALLEST_SIZE:
            raise InvalidRequest(
                f"a pool of {size} bytes is too small", remedy=f"give it at least {SMALLEST_SIZE >> 20} MiB"
            )
        state = Path(os.path.realpath(state_dir))
        _make_state_dir(state)
        file, root = state / "pool.btrfs", state / "pool"
        with _locked(state):
            present = mounts.mount_at(root)
            # An existing file wins over a native btrfs: a state directory that was copied there keeps its checkpoints.
            native = not file.exists() and btrfs.is_btrfs(state)
            if native:
                _open_native(state, root, present)
            else:
                _open_file(file, root, present, size)
            pool = cls(state, file=None if native else file)
            pool._check_writable()
            for name, mode in _FOLDERS.items():
                _make_folder(root / name, mode)
        return pool

    def close(self, *, unmount: bool = False) -> None:
        """End the use of the pool. With `unmount` also take it off the machine: Busy if anything still uses it."""
        if not unmount:
            return
        with _locked(self.state_dir):
            if mounts.mount_at(self.root) is None:
                return
            below = mounts.mounts_below(self.root)
            if below:
                raise Busy(
                    f"the pool at {self.root} is in use: {len(below)} mounts, one at {below[0].target}",
                    remedy="stop all sandboxes first",
                )
            try:
                mounts.unmount(self.root)
            except OSError as error:
                if error.errno != errno.EBUSY:
                    raise
                raise Busy(
                    f"the pool at {self.root} is in use by a process",
                    remedy=f"stop all sandboxes first; `fuser -vm {self.root}` shows who uses it",
                ) from error
            if self.file is not None:
                mounts.wait_detached(self.file)

    def _check_writable(self) -> None:
        entry = mounts.mount_at(self.root)
        if entry is not None and entry.read_only:
            raise Damaged(
                f"the pool at {self.root} is mounted read-only; btrfs does that to itself after an I/O error",
                remedy="look for the cause with `dmesg | grep -i btrfs`, then stop the sandboxes, "
                f"`umount {self.root}` and start again; nothing was deleted",
            )

    # ------------------------------------------------------------ folders

    @property
    def images(self) -> Path:
        """Read-only subvolumes of images, and their descriptions."""
        return self.root / "images"

    @property
    def runtime(self) -> Path:
        """What exists only while a sandbox runs: mount points, sockets."""
        return self.root / "runtime"

    @property
    def live(self) -> Path:
        """One subvolume for each sandbox: what it wrote."""
        return self.root / "live"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def staging(self) -> Path:
        """What is being built and not published yet. Its content is worthless after a crash: see `sweep`."""
        return self.root / "staging"

    @property
    def trash(self) -> Path:
        return self.root / "trash"

    def stage(self, purpose: str) -> Path:
        """A new, empty subvolume in staging; the caller publishes a snapshot of it and discards it."""
        path = self.staging / f"{purpose}-{uuid.uuid4().hex[:12]}"
        btrfs.create(path)
        return path

    # ------------------------------------------------------------ removal

    def discard(self, path: str | os.PathLike[str], *, wait: bool = True) -> None:
        """Remove a file, folder or subvolume of the pool: its name is gone at once, whatever happens then.

        It is renamed into the trash and deleted there (at the next `empty_trash` with `wait=False`). What cannot be
        deleted now stays in the trash for the sweep. Nothing happens if `path` does not exist. Busy if something is
        mounted in it.
        """
        place = Path(os.path.abspath(path))
        inside = place.is_relative_to(self.root)
        if not inside or place == self.root or (place.parent == self.root and place.name in _FOLDERS):
            raise InvalidRequest(f"{place} is not something in the pool {self.root}")
        if not os.path.lexists(place):
            return
        if not place.is_symlink():
            busy = mounts.mounts_below(place, itself=True)
            if busy:
                raise Busy(f"{place} cannot be removed: mounted at {busy[0].target}", remedy="stop the sandbox first")
        if btrfs.is_subvolume(place):
            # The kernel refuses to move a read-only subvolume into another folder (it would have to change its "..").
            btrfs.set_read_only(place, False)
        target = self.trash / f"{time.time_ns():x}-{uuid.uuid4().hex[:8]}"
        try:
            with btrfs.checked(place):
                os.rename(place, target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            # Something inside a subvolume cannot leave it by a rename.
            btrfs.remove_tree(place)
            return
        if wait:
            self._delete(target)

    def empty_trash(self) -> list[Path]:
        """Delete what lies in the trash; returns what could not be deleted (in use, I/O error) and stays there."""
        return [path for path in sorted(self.trash.iterdir()) if not self._delete(path)]

    def sweep(self) -> list[Path]:
        """After a crash: throw away what was being built, then empty the trash. Only for the owner of the state
        directory.

        Returns what could not be deleted.
        """
        stuck = []
        for path in sorted(self.staging.iterdir()):
            try:
                self.discard(path, wait=False)
            except (Busy, OSError):
                stuck.append(path)
        return stuck + self.empty_trash()

    def _delete(self, path: Path) -> bool:
        try:
            btrfs.remove_tree(path)
        except (OSError, NoSpace):
            return False  # its old name is free, which is what was promised; the sweep tries again
        return True

    # ------------------------------------------------------------ space

    def usage(self) -> Usage:
        """Size and use of the pool. btrfs counts what was deleted as used until its cleaner is done."""
        status = os.statvfs(self.root)
        total, left = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
        used = (status.f_blocks - status.f_bfree) * status.f_frsize
        return Usage(total, used, min(left, self._left_below(used)))

    def _left_below(self, used: int) -> int:
        """What the host's file system has for the pool file: its free space, and what the file holds beyond its use."""
        if self.file is None:
            return 1 << 63
        status = os.statvfs(self.state_dir)
        return status.f_bavail * status.f_frsize + max(0, os.stat(self.file).st_blocks * 512 - used)

    def require(self, size: int, purpose: str = "") -> None:
        """Raise NoSpace unless `size` more bytes can be written; the message names the file system that is full."""
        usage = self.usage()
        if size > usage.free:
            btrfs.reclaim(self.root)  # what was deleted a moment ago is still counted
            usage = self.usage()
        if size <= usage.free:
            return
        remedy = "remove checkpoints, sandboxes or images that are no longer needed"
        if usage.free == self._left_below(usage.used):
            place = f"the file system below the pool ({self.state_dir})"
            remedy += ", or make room there"
        else:
            place = f"the pool ({self.root})"
            remedy += ", or make the pool larger"
        needed = f"{size >> 20} MiB are needed" + (f" for {purpose}" if purpose else "")
        raise NoSpace(f"{place} has {usage.free >> 20} MiB left, {needed}", remedy=remedy, needed=size, free=usage.free)

    def grow(self, size: int) -> None:
        """Make the pool file `size` bytes large, while it is in use. No-op if it is that large; InvalidRequest if
        native.
        """
        if self.file is None:
            raise InvalidRequest(
                f"the pool {self.root} lies natively on the host's btrfs", remedy="enlarge that file system"
            )
        with _locked(self.state_dir):
            _grow(self.file, self.root, size)


# ---------------------------------------------------------------- the state directory


def _make_state_dir(state: Path) -> None:
    if os.geteuid() != 0:
        raise HostUnsuitable(
            f"opening the pool of {state} needs root: it mounts a file system",
            remedy="run the crab daemon as root and use `crab` as an ordinary user, or run `sudo crab …`",
        )
    try:
        # The last folder only is ours to choose; 0711 since sandboxes with shifted uids must find their way through.
        state.parent.mkdir(parents=True, exist_ok=True)
        state.mkdir(mode=0o711, exist_ok=True)
        (state / "pool").mkdir(mode=0o711, exist_ok=True)
    except OSError as error:
        raise _unwritable(state, error) from error


def _unwritable(state: Path, error: OSError) -> HostUnsuitable | NoSpace:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return btrfs.no_space(state, error.errno or errno.ENOSPC)
    return HostUnsuitable(
        f"the state directory {state} cannot be used: {error.strerror}",
        remedy="choose a folder on a writable disk as state directory",
    )


@contextlib.contextmanager
def _locked(state: Path) -> Iterator[None]:
    """One process at a time makes, mounts or unmounts the pool. flock: the kernel drops it with the process."""
    try:
        descriptor = os.open(state / "pool.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise _unwritable(state, error) from error
    try:
        end = time.monotonic() + _LOCK_WAIT
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise Busy(
                        f"another process has been opening the pool of {state} for {_LOCK_WAIT:.0f} s",
                        remedy=f"`fuser -v {state}/pool.lock` shows which one",
                    ) from None
                time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)


def _make_folder(path: Path, mode: int) -> None:
    with btrfs.checked(path):
        path.mkdir(exist_ok=True)
        if path.stat().st_mode & 0o7777 != mode:
            path.chmod(mode)


# ---------------------------------------------------------------- natively on btrfs


def _open_native(state: Path, root: Path, present: mounts.MountEntry | None) -> None:
    """Mount the folder on itself, for `nosuid,nodev` (see above)."""
    if present is not None:
        if (root.stat().st_dev, present.fs_type) != (state.stat().st_dev, "btrfs"):
            raise _foreign(root, present)
        return
    try:
        mounts.mount(root, root, flags=mounts.MS_BIND)
    except PermissionError as error:
        raise _not_permitted(root, error) from error
    try:
        shared = any(option.startswith("shared:") for option in _entry(root).propagation)
        # The copy belongs to the peer group of the mount below it: every overlay that is mounted in the pool would
        # appear there a second time. A group of its own keeps it visible for other namespaces, once.
        mounts.mount(None, root, flags=mounts.MS_PRIVATE)
        mounts.mount(None, root, flags=mounts.MS_BIND | mounts.MS_REMOUNT | _MOUNT_FLAGS)
        if shared:
            mounts.mount(None, root, flags=mounts.MS_SHARED)
    except BaseException:
        mounts.unmount(root)
        raise


def _entry(root: Path) -> mounts.MountEntry:
    entry = mounts.mount_at(root)
    if entry is None:
        raise HostUnsuitable(f"{root} was unmounted by another process while it was being opened", remedy="try again")
    return entry


def _foreign(root: Path, present: mounts.MountEntry) -> Damaged:
    return Damaged(
        f"{root} is a mount of something else than the pool: {present.fs_type} from {present.source}",
        remedy=f"`umount {root}` if it is not wanted, or choose another state directory; nothing was changed",
    )


# ---------------------------------------------------------------- in a file


def _open_file(file: Path, root: Path, present: mounts.MountEntry | None, size: int | None) -> None:
    if present is not None:
        if not file.exists() or present.source not in mounts.loops_of(file):
            raise _foreign(root, present)
    else:
        if os.listdir(root):
            raise Damaged(
                f"{root} is not mounted, but there are files in it, which a mount would hide",
                remedy=f"move the content of {root} away; nothing was changed",
            )
        if not file.exists():
            _make_file(file, size or DEFAULT_SIZE)
        _mount_file(file, root)
    if size is not None:
        _grow(file, root, size)


def _make_file(file: Path, size: int) -> None:
    program = shutil.which("mkfs.btrfs", path=_program_path())
    if program is None:
        raise HostUnsuitable("mkfs.btrfs is not installed", remedy="`crab doctor --fix`, or install btrfs-progs")
    _require_btrfs()
    # Under another name until it is complete: whatever ends this process, there is no half a file system called the
    # pool. A name of its own for each attempt: the mkfs of one that was killed may still be about to open its file.
    for left in file.parent.glob(f"{file.name}.new*"):
        left.unlink(missing_ok=True)
    new = file.with_name(f"{file.name}.new-{uuid.uuid4().hex[:12]}")
    try:
        descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _unwritable(file.parent, error) from error
    try:
        try:
            os.ftruncate(descriptor, size)
        except OSError as error:
            if error.errno in (errno.EFBIG, errno.EINVAL):
                raise InvalidRequest(
                    f"the file system of {file.parent} cannot hold a file of {size >> 20} MiB",
                    remedy="choose a smaller pool or another state directory",
                ) from error
            raise _unwritable(file.parent, error) from error
        made = subprocess.run(
            [program, "-q", "-L", "crab", new],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if made.returncode != 0:
            reason = made.stderr.strip() or made.stdout.strip() or f"exit status {made.returncode}"
            if "No space left" in reason:
                raise btrfs.no_space(new)
            raise HostUnsuitable(f"mkfs.btrfs failed: {reason}", remedy="`crab doctor` checks what the pool needs")
        with btrfs.checked(new):
            os.fsync(descriptor)
            os.rename(new, file)
        _sync_folder(file.parent)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _require_btrfs() -> None:
    if _has_btrfs():
        return
    modprobe = shutil.which("modprobe", path=_program_path())
    if modprobe is not None:
        subprocess.run([modprobe, "btrfs"], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if not _has_btrfs():
        raise HostUnsuitable("this kernel has no btrfs", remedy="use a kernel with btrfs, or load its module")


def _has_btrfs() -> bool:
    return any(line.split()[-1] == "btrfs" for line in Path("/proc/filesystems").read_text().splitlines())


def _program_path() -> str:
    """Programs for root are not in every daemon's PATH."""
    return os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"


_DETACHING = (errno.ENXIO, errno.ENOENT, errno.EBUSY)
"""What opening or mounting says of a loop device that was found and is just being detached after an unmount."""


def _mount_file(file: Path, root: Path) -> None:
    end = time.monotonic() + 5.0
    while True:
        try:
            with mounts.attached(file) as device:
                mounts.mount(device, root, "btrfs", _MOUNT_FLAGS, _MOUNT_DATA)
            return
        except OSError as error:
            if error.errno not in _DETACHING or time.monotonic() >= end:
                raise _not_mounted(file, root, error) from error
        time.sleep(0.01)


def _not_mounted(file: Path, root: Path, error: OSError) -> CrabError:
    if error.errno == errno.ENODEV:
        return HostUnsuitable("this kernel has no btrfs", remedy="use a kernel with btrfs, or load its module")
    if error.errno in (errno.EPERM, errno.EACCES):
        return _not_permitted(root, error)
    if error.errno in _DETACHING:
        return Busy(f"the loop device of {file} is in use: {error}", remedy="`losetup -a` shows it; end what uses it")
    if error.errno == errno.ENOMEM:
        return HostUnsuitable(f"mounting {file} failed: {error.strerror}", remedy="free some memory and try again")
    return Damaged(
        f"the pool file {file} cannot be mounted: {error.strerror}; {_condition(file)}",
        remedy=f"see `dmesg | grep -i btrfs` and `btrfs check --readonly {file}`; it was left as it is. To start with "
        "an empty pool, move it away",
    )


def _not_permitted(root: Path, error: OSError) -> HostUnsuitable:
    return HostUnsuitable(
        f"mounting the pool at {root} is not permitted: {error.strerror}",
        remedy="run Crab with CAP_SYS_ADMIN and, in a container, access to loop devices",
    )


def _condition(file: Path) -> str:
    """What a look at the file tells: the magic number of btrfs stands at 64 KiB + 64."""
    with open(file, "rb") as content:
        content.seek(0x10040)
        magic = content.read(8)
    if magic != b"_BHRfS_M":
        return f"it does not contain a btrfs file system (size {file.stat().st_size} bytes)"
    return "it contains a btrfs file system, which is damaged or was made for another kernel"


def _grow(file: Path, root: Path, size: int) -> None:
    if size <= file.stat().st_size:
        return
    with btrfs.checked(file):
        os.truncate(file, size)
        for device in mounts.loops_of(file):
            mounts.grow_loop(device)
        btrfs.resize_to_device(root)
