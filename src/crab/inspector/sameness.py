"""Is a process that ran still what was captured? Proof by comparison with its image, and none without.

Whoever stands still during a capture has to run a little to do so, and again to go on; many programs wake up now and then,
look, and sleep again. Activity alone would take all of them for changed. Here a process is the same if all its threads
stand where they stood, with the same registers, every byte of its memory is that of the image, and so is what the kernel
keeps for it: mappings, descriptors with their positions, identity, signals. Anything else is a change.

What the kernel may write into memory without the program: `struct rseq` (the number of the processor), told apart in
`crab.checkpoint.memory`.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import stat
import struct
import termios
from collections.abc import Iterable, Iterator
from pathlib import Path

from blake3 import blake3

from crab.checkpoint import evidence, memory
from crab.host import namespaces
from crab.inspector.baseline import Holdings
from crab.inspector.task import Task

PAGE = 4096
MOST_AT_ONCE = 64 << 20
"""Bytes of memory that are compared while somebody waits for the decision."""

_VOLATILE_FDINFO = re.compile(rb"^(it_value|ticks): .*$|^mnt_id:.*$", re.MULTILINE)
"""Time that goes by, and an expiry that nobody has read yet (which a restore brings back by the clock)."""
_STATUS = re.compile(rb"^(?:Umask|Groups|SigBlk|SigIgn|SigCgt|CapInh|CapPrm|CapEff|CapBnd|CapAmb|NoNewPrivs|Seccomp\w*|Uid|Gid"
                     rb"|Threads|PPid):.*$", re.MULTILINE)  # fmt: skip
_RESTART_SYSCALL = {"x86_64": 219, "aarch64": 128}


def outside(process: int, memory: bool = True) -> bytes:
    """Digest of what the kernel tells of a process apart from its memory: equal if nothing of it changed.

    Descriptors with their positions, settings of terminals, folder, identity, signals; with `memory` its mappings, too.
    Raises ProcessLookupError or FileNotFoundError if it is gone, or opens and closes files while it is read.
    """
    folder = f"/proc/{process}"
    digest = blake3()
    for name in ("maps", "cmdline", "environ") if memory else ():
        digest.update(Path(folder, name).read_bytes())
        digest.update(b"\0\0")
    for line in _STATUS.findall(Path(folder, "status").read_bytes()):
        digest.update(line + b"\n")
    for name in ("cwd", "root", "exe"):
        digest.update(os.fsencode(os.readlink(f"{folder}/{name}")) + b"\n")
    for fd in sorted(os.listdir(f"{folder}/fd"), key=int):
        info = _VOLATILE_FDINFO.sub(b"", Path(folder, "fdinfo", fd).read_bytes())
        target = os.readlink(f"{folder}/fd/{fd}")
        digest.update(os.fsencode(f"{fd} {target} ") + info)
        if target.startswith("/dev/pts/"):
            with namespaces.borrowed(process, int(fd)) as ours:
                digest.update(_terminal(ours))
    return digest.digest()


def _terminal(fd: int) -> bytes:
    """Settings and size of a terminal. One that was hung up has none, and says so by an error."""
    try:
        return repr(termios.tcgetattr(fd)).encode() + fcntl.ioctl(fd, termios.TIOCGWINSZ, bytes(8))
    except (OSError, termios.error) as error:
        return repr(error.args).encode()


def shares_memory(process: int) -> bool:
    """Whether it can write memory that others may have, too: an image of the process alone proves nothing about that."""
    return any(" rw-s " in line or "-w-s " in line for line in Path(f"/proc/{process}/maps").read_text().splitlines())


def holdings(process: int) -> Holdings:
    """What a process has open. Raises OSError if it is gone."""
    folder = f"/proc/{process}"
    fifos: set[int] = set()
    paths = {os.readlink(f"{folder}/{name}") for name in ("cwd", "root", "exe")}
    sockets: set[str] = set()
    watches = False
    for fd in os.listdir(f"{folder}/fd"):
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISFIFO((status := os.stat(f"{folder}/fd/{fd}")).st_mode):
                fifos.add(status.st_ino)
            target = os.readlink(f"{folder}/fd/{fd}")
            paths.add(target)
            watches |= target == "anon_inode:inotify"
            if target.startswith("socket:["):
                sockets.add(target[8:-1])
    for line in os.fsdecode(Path(folder, "maps").read_bytes()).splitlines():
        fields = line.split(None, 5)
        if len(fields) == 6:
            paths.add(fields[5])
    named = {
        f[6] for f in map(str.split, Path(folder, "net/unix").read_text().splitlines()) if len(f) > 7 and f[7][0] == "/"
    }
    by_name = watches or bool(sockets & named)
    return Holdings(
        frozenset(fifos), frozenset(p.removesuffix(evidence.DELETED) for p in paths if p.startswith("/")), by_name
    )


def queued(process: int) -> dict[int, int]:
    """Bytes that wait in the pipes and fifos that a process holds, by inode. Raises OSError if it is gone."""
    found: dict[int, int] = {}
    names = {fd: os.readlink(f"/proc/{process}/fd/{fd}") for fd in os.listdir(f"/proc/{process}/fd")}
    for fd in [fd for fd, name in names.items() if name.startswith(("/", "pipe:"))]:
        status = os.stat(f"/proc/{process}/fd/{fd}")
        if stat.S_ISFIFO(status.st_mode):
            with namespaces.borrowed(process, int(fd)) as ours:
                found[status.st_ino] = struct.unpack("i", fcntl.ioctl(ours, termios.FIONREAD, bytes(4)))[0]
    return found


def size(process: int) -> int:
    """Bytes of memory that would have to be compared."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0


def same_threads(old: Iterable[Task], new: Iterable[Task]) -> bool:
    """Whether the same threads stand at the same place with the same registers, all asleep.

    `old` may have been read while they were frozen: a system call that was interrupted for that begins again, by the same
    number or by restart_syscall(2).
    """
    before, after = ({(task.thread, task.start): task for task in tasks} for tasks in (old, new))
    if before.keys() != after.keys():
        return False
    return all(
        not after[key].runs
        and before[key].fpu == after[key].fpu
        and same_place(before[key].registers, after[key].registers)
        for key in before
    )


def same_place(old: bytes, new: bytes) -> bool:
    """Whether registers say the same, apart from what the restart of an interrupted system call changes."""
    machine = os.uname().machine
    if old == new:
        return True
    if machine != "x86_64" or len(old) != len(new):
        return False
    a, b = struct.unpack("21Q", old), struct.unpack("21Q", new)
    # struct pt_regs: r15 r14 r13 r12 bp bx | r11 r10 r9 r8 ax cx dx si di orig_ax ip cs flags sp ss
    result, number, place = 10, 15, 16
    for index, (x, y) in enumerate(zip(a, b, strict=True)):
        if x == y or index == result:
            continue
        if index == number and _RESTART_SYSCALL[machine] in (x, y):
            continue
        if index == place and y - x in (2, -2):  # back to the instruction that calls the kernel
            continue
        return False
    in_call = (1 << 64) - 1 not in (a[number], b[number])
    return in_call or a[result] == b[result]


def same_memory(images: Path, inner: int, process: int) -> bool:
    """Whether every page of a process is that of its image, and it has no others. Raises OSError."""
    if memory.compare(images, inner, process).different:
        return False
    known = memory.stored_ranges(images, inner)
    with open(f"/proc/{process}/mem", "rb", buffering=0) as f:
        for begin, end in _without(private_pages(process), known):
            for at in range(begin, end, 256 * PAGE):
                piece = os.pread(f.fileno(), min(256 * PAGE, end - at), at)
                if piece.count(0) != len(piece):
                    return False
    return True


# ---------------------------------------------------------------- which pages a process has of its own

_PAGEMAP_SCAN = 0xC0606610  # _IOWR('f', 16, struct pm_scan_arg), Linux 6.7
_IS_FILE, _IS_PRESENT, _IS_SWAPPED, _IS_ZERO = 1 << 2, 1 << 3, 1 << 4, 1 << 5
_RANGES = 1024


def private_pages(process: int) -> list[tuple[int, int]]:
    """Stretches (begin, end) of memory that belongs to this process alone, by address. Raises OSError."""
    with open(f"/proc/{process}/pagemap", "rb", buffering=0) as pagemap:
        try:
            return list(_scanned(pagemap.fileno()))
        except OSError:
            return list(_walked(process, pagemap.fileno()))


def _scanned(fd: int) -> Iterator[tuple[int, int]]:
    regions = ctypes.create_string_buffer(24 * _RANGES)
    begin, top = 0, (1 << 47) - PAGE
    while begin < top:
        request = bytearray(96)
        # size flags start end walk_end vec vec_len max_pages inverted mask anyof return
        struct.pack_into("<12Q", request, 0, 96, 0, begin, top, 0, ctypes.addressof(regions), _RANGES, 0,
                         _IS_FILE | _IS_ZERO, _IS_FILE | _IS_ZERO, _IS_PRESENT | _IS_SWAPPED, 0)  # fmt: skip
        count = fcntl.ioctl(fd, _PAGEMAP_SCAN, request)
        for index in range(count):
            first, end, _ = struct.unpack_from("<3Q", regions, 24 * index)
            yield first, end
        walked = struct.unpack_from("<Q", request, 32)[0]
        if count < _RANGES or walked <= begin:
            return
        begin = walked


def _walked(process: int, fd: int) -> Iterator[tuple[int, int]]:
    """The same by reading an entry for each page (before Linux 6.7)."""
    for line in Path(f"/proc/{process}/maps").read_text().splitlines():
        span, rights = line.split()[:2]
        begin, end = (int(word, 16) for word in span.split("-"))
        if "s" in rights or begin >= 1 << 63:
            continue
        entries = os.pread(fd, (end - begin) // PAGE * 8, begin // PAGE * 8)
        for index, (entry,) in enumerate(struct.iter_unpack("<Q", entries)):
            if entry >> 62 and not entry >> 61 & 1:
                yield begin + index * PAGE, begin + (index + 1) * PAGE


def _without(ranges: list[tuple[int, int]], known: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The parts of sorted stretches that no known one covers."""
    known = sorted(known)
    at = 0
    for begin, end in sorted(ranges):
        while at < len(known) and known[at][1] <= begin:
            at += 1
        index = at
        while begin < end:
            if index >= len(known) or known[index][0] >= end:
                yield begin, end
                break
            if known[index][0] > begin:
                yield begin, known[index][0]
            begin = max(begin, known[index][1])
            index += 1
