"""Small experiments that show what the kernel really does here, not what its version or configuration promise.

Each works in namespaces of its own that end with it, so nothing is left behind, whatever happens in between: mounts are
made by a thread in a mount namespace that ends with the thread, a loop device detaches itself with its last user. Does
not know what the results are good for; that is `crab.host.doctor`'s business.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from crab.errors import HostUnsuitable
from crab.host import bpf, mounts
from crab.native import bpf as bpf_packs

T = TypeVar("T")

_libc = ctypes.CDLL(None, use_errno=True)

# System calls without a wrapper in all C libraries; these numbers are the same on all architectures but alpha.
_SYS_OPEN_TREE, _SYS_MOVE_MOUNT, _SYS_MOUNT_SETATTR = 428, 429, 442
_SYS_BPF = {"x86_64": 321, "aarch64": 280, "riscv64": 280, "ppc64le": 361, "s390x": 351}
_SYS_USERFAULTFD = {"x86_64": 323, "aarch64": 282, "riscv64": 282, "ppc64le": 364, "s390x": 355}

_CLONE_NEWNS, _CLONE_NEWTIME = 0x00020000, 0x00000080
_AT_FDCWD, _AT_EMPTY_PATH = -100, 0x1000
_OPEN_TREE_CLONE, _MOVE_MOUNT_F_EMPTY_PATH, _MOUNT_ATTR_IDMAP = 1, 4, 0x00100000

SHIFT = 100_000
"""First host uid of the user namespace that is tried, as of those of sandboxes."""


def _call(number: int, *arguments: object) -> int:
    result = _libc.syscall(number, *arguments)
    if result < 0:
        raise _last_error()
    return int(result)


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def _why(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno is not None:
        return errno.errorcode.get(error.errno, str(error.errno))
    return str(error).splitlines()[0] if str(error) else type(error).__name__


# ---------------------------------------------------------------- namespaces


def in_private_mounts(work: Callable[[], T]) -> T:
    """Run something in a thread with a mount namespace of its own; its mounts vanish with the thread.

    unshare(2) with CLONE_NEWNS is for the calling thread alone (and gives it its own working directory), so the rest of
    the process never sees the mounts, and no fork of a process with threads is needed.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            if _libc.unshare(_CLONE_NEWNS) != 0:
                raise _last_error()
            mounts.mount(None, "/", flags=mounts.MS_REC | mounts.MS_PRIVATE)
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="crab-kernel-trial")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


@contextlib.contextmanager
def shifted_user_namespace() -> Generator[int]:
    """A descriptor of a user namespace in which uid 0 is `SHIFT` outside, made with the other namespaces of a sandbox.

    Raises:
        OSError: the kernel refuses one of them, or the map.
    """
    kinds = ["--user", "--pid", "--net", "--ipc", "--uts", "--cgroup", "--mount"]
    command = ["unshare", *kinds, "sh", "-c", "echo; read end"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as holder:
        try:
            assert holder.stdout and holder.stderr
            if holder.stdout.readline() != "\n":  # the shell says so once it is in there
                raise OSError(errno.EPERM, holder.stderr.read().strip() or "unshare failed")
            for kind in ("uid", "gid"):
                Path(f"/proc/{holder.pid}/{kind}_map").write_text(f"0 {SHIFT} 65536\n")
            descriptor = os.open(f"/proc/{holder.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
            try:
                yield descriptor
            finally:
                os.close(descriptor)
        finally:
            holder.kill()


def time_namespace() -> str:
    """Empty if a time namespace can be made, else why not."""
    why: list[str] = []

    def run() -> None:
        if _libc.unshare(_CLONE_NEWTIME) != 0:
            why.append(_why(_last_error()))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return "".join(why)


# ---------------------------------------------------------------- file systems


@dataclass(slots=True)
class FileTrials:
    """Empty text: it works. Else: why it does not."""

    loop: str = "not tried"
    btrfs: str = "not tried"
    overlay: str = "not tried"
    idmapped: str = "not tried"
    on: str = "tmpfs"
    """File system that overlay and idmapped mounts were tried on."""


OVERLAY_OPTIONS = "index=on,nfs_export=on,redirect_dir=on"


def file_systems(user_namespace: int | None) -> FileTrials:
    """Try a btrfs in a loop file, and on it an overlay and idmapped layers, as a sandbox has them (about 20 ms).

    `user_namespace` is a descriptor with a shifted map; without it idmapped mounts are not tried. If there can be no
    btrfs, the rest is tried on a tmpfs (which can be idmapped from Linux 6.3 on).

    Raises:
        OSError: not even a mount namespace can be made.
    """
    return in_private_mounts(lambda: _file_systems(user_namespace))


def _file_systems(user_namespace: int | None) -> FileTrials:
    result = FileTrials()
    # Hides that folder of the host from this thread only, so no path is created on the host. Not /tmp if it can be
    # avoided: programs and modules may lie there.
    base = next(folder for folder in (Path("/mnt"), Path(tempfile.gettempdir())) if folder.is_dir())
    mounts.mount("crab-trial", base, "tmpfs", data="mode=0700,size=64m")
    with contextlib.ExitStack() as stack:
        stack.callback(mounts.unmount, base, mounts.MNT_DETACH)
        place = base / "plain"
        place.mkdir()
        try:
            _mount_btrfs(base, result)
            stack.callback(mounts.unmount, base / "btrfs", mounts.MNT_DETACH)
            place, result.on = base / "btrfs", "btrfs"
        except Exception as error:
            why = _why(error)
            if result.loop:
                result.loop = why
                result.btrfs = "not tried, as there is no loop device"
            else:
                result.btrfs = why
        for name in ("lower", "shifted", "upper", "work", "merged", "upper2", "work2", "merged2"):
            (place / name).mkdir()
        (place / "lower" / "folder").mkdir()
        try:
            _mount_overlay(place, "lower", "upper", "work", "merged", OVERLAY_OPTIONS, stack)
            # Only redirect_dir lets a folder of a lower layer be renamed (else EXDEV).
            (place / "merged" / "folder").rename(place / "merged" / "renamed")
            result.overlay = ""
        except Exception as error:
            result.overlay = _why(error)
        if user_namespace is not None:
            try:
                _mount_idmapped(place / "lower", place / "shifted", user_namespace)
                stack.callback(mounts.unmount, place / "shifted", mounts.MNT_DETACH)
                seen = (place / "shifted" / "folder").stat().st_uid
                if seen != SHIFT:
                    raise OSError(errno.EINVAL, f"uid 0 is shown as {seen}")
                _mount_overlay(place, "shifted", "upper2", "work2", "merged2", OVERLAY_OPTIONS, stack)
                result.idmapped = ""
            except Exception as error:
                result.idmapped = _why(error)
    return result


def _mount_btrfs(base: Path, result: FileTrials) -> None:
    image = base / "image"
    with image.open("wb") as file:
        file.truncate(128 << 20)  # sparse; mkfs.btrfs refuses less than 109 MiB
    with mounts.attached(image) as device:
        result.loop = ""
        # On the file, not the device: it needs no flush of the device then.
        made = subprocess.run(["mkfs.btrfs", "-q", "-K", str(image)], capture_output=True, text=True)
        if made.returncode != 0:
            raise OSError(errno.EIO, made.stderr.strip() or "mkfs.btrfs failed")
        (base / "btrfs").mkdir()
        mounts.mount(device, base / "btrfs", "btrfs")
    result.btrfs = ""


def _mount_overlay(
    place: Path, lower: str, upper: str, work: str, merged: str, options: str, stack: contextlib.ExitStack
) -> None:
    layers = f"lowerdir={place / lower},upperdir={place / upper},workdir={place / work}"
    mounts.mount("crab-trial", place / merged, "overlay", data=f"{layers},{options}")
    stack.callback(mounts.unmount, place / merged, mounts.MNT_DETACH)


def _mount_idmapped(source: Path, target: Path, user_namespace: int) -> None:
    tree = _call(
        _SYS_OPEN_TREE, ctypes.c_int(_AT_FDCWD), os.fsencode(source), ctypes.c_uint(_OPEN_TREE_CLONE | os.O_CLOEXEC)
    )
    try:
        # struct mount_attr: set, clear, propagation, user namespace
        attributes = struct.pack("=4Q", _MOUNT_ATTR_IDMAP, 0, 0, user_namespace)
        size = ctypes.c_size_t(len(attributes))
        _call(_SYS_MOUNT_SETATTR, ctypes.c_int(tree), b"", ctypes.c_uint(_AT_EMPTY_PATH), attributes, size)
        to = os.fsencode(target)
        flags = ctypes.c_uint(_MOVE_MOUNT_F_EMPTY_PATH)
        _call(_SYS_MOVE_MOUNT, ctypes.c_int(tree), b"", ctypes.c_int(_AT_FDCWD), to, flags)
    finally:
        os.close(tree)


# ---------------------------------------------------------------- eBPF

BTF = Path("/sys/kernel/btf/vmlinux")

# linux/bpf.h: (program type, attach type, (BTF kind, name of the target)). Kinds of linux/btf.h: 8 typedef, 12 function.
_PROGRAMS: dict[str, tuple[int, int, tuple[int, str] | None]] = {
    "tracepoint": (5, 0, None),
    "raw_tracepoint": (17, 0, None),
    "tp_btf": (26, 23, (8, "btf_trace_sched_process_fork")),
    "iter": (26, 28, (12, "bpf_iter_task")),
    "fentry": (26, 24, (12, "vfs_fallocate")),
    "lsm": (29, 27, (12, "bpf_lsm_file_open")),
}


def bpf_programs() -> dict[str, str]:
    """For each type of program: empty if the kernel loads one that does nothing, else why not. Attaches none.

    Takes about 0.1 s, in which the targets' numbers are looked up in the kernel's type information.
    """
    number = _SYS_BPF.get(os.uname().machine)
    if number is None:
        return dict.fromkeys(_PROGRAMS, "unknown architecture")
    ids: dict[tuple[int, str], int] = {}
    with contextlib.suppress(OSError, struct.error):
        ids = btf_ids(BTF.read_bytes(), [target for _, _, target in _PROGRAMS.values() if target])
    results: dict[str, str] = {}
    for name, (kind, attach, target) in _PROGRAMS.items():
        if target and target not in ids:
            results[name] = f"no {target[1]} in {BTF}"
            continue
        try:
            _load_program(number, kind, attach, ids[target] if target else 0)
            results[name] = ""
        except OSError as error:
            results[name] = _why(error)
    return results


def inspector_tiers() -> dict[str, str]:
    """For each tier of the inspector, best first: empty if its programs load here, else why not. Attaches none (30 ms).

    Those below the best are not tried.
    """
    found: dict[str, str] = {}
    for name, tier in bpf_packs.TIERS.items():
        try:
            pack = bpf_packs.read(name)
            try:
                with bpf.load(pack):
                    found[tier] = ""
                    break
            except OSError as error:
                why = bpf.why_refused(error, pack)
        except HostUnsuitable as error:
            why = error.message
        if why not in found.get(tier, ""):
            found[tier] = "; ".join(filter(None, (found.get(tier), why)))
    return found


def _load_program(number: int, kind: int, attach: int, target: int) -> None:
    instructions = ctypes.create_string_buffer(bytes.fromhex("b700000000000000 9500000000000000"))  # r0 = 0; exit
    license_ = ctypes.create_string_buffer(b"GPL")
    # union bpf_attr for BPF_PROG_LOAD (5), up to attach_prog_fd
    attr = struct.pack(
        "=2I2Q2IQ2I16s4IQ2IQ3I",
        *(kind, 2, ctypes.addressof(instructions), ctypes.addressof(license_)),
        *(0, 0, 0, 0, 0, b"crab_trial", 0, attach, 0, 0, 0, 0, 0, 0, 0, target, 0),
    )
    os.close(_call(number, 5, attr, ctypes.c_uint(len(attr))))


def btf_ids(data: bytes, wanted: list[tuple[int, str]]) -> dict[tuple[int, str], int]:
    """Numbers of types in BTF data (Documentation/bpf/btf.rst), by kind and name; those that it lacks are left out."""
    magic, _, _, header, types, types_size, strings, strings_size = struct.unpack_from("=HBB5I", data)
    if magic != 0xEB9F:
        return {}
    names = data[header + strings : header + strings + strings_size]
    sought: dict[tuple[int, int], tuple[int, str]] = {}
    for kind, name in wanted:
        position = names.find(b"\0" + name.encode() + b"\0")
        if position >= 0:
            sought[kind, position + 1] = (kind, name)
    # Bytes after the 12 of each type: fixed ones, and ones for each of its members.
    fixed = {1: 4, 3: 12, 14: 4, 17: 4}
    each = {4: 12, 5: 12, 6: 8, 13: 8, 15: 12, 19: 12}
    found: dict[tuple[int, str], int] = {}
    position, end = header + types, header + types + types_size
    unpack = struct.Struct("=II").unpack_from
    number = 0
    while position < end and len(found) < len(sought):
        number += 1
        name_at, info = unpack(data, position)
        kind = info >> 24 & 0x1F
        key = sought.get((kind, name_at))
        if key:
            found[key] = number
        position += 12 + fixed.get(kind, 0) + each.get(kind, 0) * (info & 0xFFFF)
    return found


# ---------------------------------------------------------------- others


def userfaultfd() -> str:
    """Empty if userfaultfd(2) gives a descriptor, else why not."""
    number = _SYS_USERFAULTFD.get(os.uname().machine)
    if number is None:
        return "unknown architecture"
    try:
        os.close(_call(number, ctypes.c_int(os.O_CLOEXEC | os.O_NONBLOCK)))
    except OSError as error:
        return _why(error)
    return ""


def cgroup_files(root: Path) -> frozenset[str]:
    """Names of the files that a new cgroup below `root` has; it is removed again at once.

    Raises:
        OSError: none can be made.
    """
    folder = Path(tempfile.mkdtemp(prefix="crab-trial-", dir=root))
    try:
        return frozenset(path.name for path in folder.iterdir())
    finally:
        folder.rmdir()
