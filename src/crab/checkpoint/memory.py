"""Memory pages: those in a process image against those of a process that was restored from it and has not run yet."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from crab.checkpoint import imagefiles
from crab.host import processes

PAGE = 4096
_VADDR, _COUNT, _FLAGS, _COUNT64 = 1, 2, 4, 5  # pagemap_entry
_PAGES_ID = 1  # pagemap_head
_PRESENT = 4  # PE_PRESENT: the pages are in the file
_BATCH = 256  # pages read at once
_THREAD_INFO_X86, _GPREGS, _SP = 2, 2, 20  # core_entry.thread_info, thread_info_x86.gpregs, user_x86_regs_entry.sp
_FRAME = 64 << 10
"""The most that the kernel puts below a stack for a signal: the frame, with the largest state of vector registers."""
_RSEQ_SIZE = 32
"""The kernel writes the processor's number into a thread's `struct rseq` whenever it schedules it."""


@dataclass
class PageComparison:
    """How the pages of one process compare."""

    pages: int = 0
    different: list[int] = field(default_factory=list[int])
    """Addresses of pages that differ."""


def _regions(images: Path, pid: int) -> tuple[Path, list[tuple[int, int]]]:
    """The file with the pages of a process, and (address, number of pages) of each stretch in it, in its order."""
    entries = imagefiles.messages(images / f"pagemap-{pid}.img")
    head = next(entries)
    stretches: list[tuple[int, int]] = []
    for message in entries:
        fields = {number: value for number, _, value in imagefiles.parse(message)}
        address, flags = fields.get(_VADDR, 0), fields.get(_FLAGS, _PRESENT)
        count = fields.get(_COUNT64) or fields.get(_COUNT, 0)
        assert isinstance(address, int) and isinstance(flags, int) and isinstance(count, int)
        if flags & _PRESENT:
            stretches.append((address, count))
    return images / f"pages-{imagefiles.first(head, _PAGES_ID)}.img", stretches


def stored_ranges(images: Path, pid: int) -> list[tuple[int, int]]:
    """Stretches (begin, end) of addresses whose pages are in the image of a process."""
    return [(address, address + count * PAGE) for address, count in _regions(images, pid)[1]]


def compare(images: Path, pid: int, host_pid: int) -> PageComparison:
    """Compare all pages of the process that is `pid` in the image and `host_pid` on this host. Raises OSError."""
    result = PageComparison()
    tops = _stack_pointers(images, host_pid)
    path, stretches = _regions(images, pid)
    with open(path, "rb") as stored, open(f"/proc/{host_pid}/mem", "rb", buffering=0) as memory:
        for address, count in _batches(stretches):
            expected = stored.read(count * PAGE)
            found = os.pread(memory.fileno(), count * PAGE, address)
            result.pages += count
            if expected == found:
                continue
            for number in range(count):
                a, b = (data[number * PAGE : (number + 1) * PAGE] for data in (expected, found))
                at = address + number * PAGE
                if a != b and not _only_rseq(a, b) and not _only_dead_stack(a, b, at, tops):
                    result.different.append(at)
    return result


def _batches(stretches: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for address, count in stretches:
        for at in range(0, count, _BATCH):
            yield address + at * PAGE, min(_BATCH, count - at)


def _only_rseq(a: bytes, b: bytes) -> bool:
    """Whether two pages differ in nothing but one aligned `struct rseq`."""
    if len(a) != len(b):
        return False
    places = [i for i in range(0, len(a), _RSEQ_SIZE) if a[i : i + _RSEQ_SIZE] != b[i : i + _RSEQ_SIZE]]
    return (
        len(places) == 1
        and a[places[0] + 8 : places[0] + _RSEQ_SIZE - 8] == b[places[0] + 8 : places[0] + _RSEQ_SIZE - 8]
    )


def _stack_pointers(images: Path, host_pid: int) -> list[int]:
    """Where the stacks of a process's threads end, from the image; empty on other machines than x86."""
    found: list[int] = []
    for thread in os.listdir(f"/proc/{host_pid}/task"):
        core = images / f"core-{processes.inner_pid(int(thread))}.img"
        value: int | bytes | None = next(imagefiles.messages(core), b"") if core.exists() else b""
        for number in (_THREAD_INFO_X86, _GPREGS, _SP):
            value = imagefiles.first(value, number) if isinstance(value, bytes) else None
        if isinstance(value, int):
            found.append(value)
    return found


def _only_dead_stack(a: bytes, b: bytes, address: int, tops: list[int]) -> bool:
    """Whether two pages differ below a stack pointer only, where nothing of the program lives.

    A signal that was pending at the dump is delivered before the restored process stops: the kernel writes its frame there.
    """
    for top in tops:
        if top - _FRAME <= address < top:
            cut = min(top - address, len(a))
            return a[cut:] == b[cut:]
    return False
