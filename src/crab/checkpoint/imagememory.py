"""Memory of two process images: where the layout differs, and which words of the pages do.

An image has the pages that were written; one that it does not have is what the mapping has below: zeros, or the file. So a
page that only one image has is compared with that. Masked is, with the reason why it is no state:
- each thread's `struct rseq`: the kernel's own, see `threads`;
- what lies below a stack pointer and its red zone, on the main stack and on a stack that glibc or musl made: by the ABI of
  the machine no program may expect to find it again, as any signal overwrites it. What is no such stack (a coroutine's, on
  the heap) is compared;
- the time that is left of a relative sleep in progress (`Thread.sleep`): it passes by itself, and every freeze interrupts the
  sleep, at which the kernel writes it back. It is masked in the memory that the call names;
- the lower end of the main stack, which the kernel moves on demand;
- vvar and vdso, which are the kernel's.
"""

from __future__ import annotations

import bisect
import itertools
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from crab.checkpoint.imagefacts import INIT, Image, Process
from crab.checkpoint.imagenames import Record, read_all, several
from crab.checkpoint.threads import RED_ZONE, Thread

PAGE = 4096
WORD = 8
_PRESENT = 4  # PE_PRESENT: the pages are in the file
_BATCH = 256
_TIME = 16  # struct timespec, struct timeval
_GROWS_DOWN = 0x100  # MAP_GROWSDOWN
_VDSO, _FILE_PRIVATE, _FILE_SHARED, _ANON_SHARED, _SYSV, _VVAR, _MEMFD = (
    1 << 3,
    1 << 6,
    1 << 7,
    1 << 8,
    1 << 10,
    1 << 12,
    1 << 14,
)
_WORDS = struct.Struct(f"<{PAGE // WORD}Q")
_ZEROS = bytes(PAGE)
Beneath = Callable[[str, int], bytes | None]
"""The page of a file, by path and offset; None if it cannot be read."""


@dataclass(frozen=True)
class Mapping:
    """One mapping of a process, in terms that two images share."""

    start: int
    end: int
    what: str
    """File, shared memory (by its first mapping) or nothing."""
    offset: int
    attributes: tuple[tuple[str, int], ...]
    status: int
    flags: int
    prot: int

    @property
    def is_stack(self) -> bool:
        return bool(self.flags & _GROWS_DOWN)

    @property
    def is_kernels(self) -> bool:
        return bool(self.status & (_VDSO | _VVAR))


@dataclass
class Pages:
    """The stored pages of one address space or shared memory."""

    path: Path | None = None
    stretches: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    """Address, number of pages and offset in the file, by address."""


@dataclass(frozen=True)
class Words:
    """Words (of 8 bytes, by address) that differ in one address space."""

    space: str
    before: dict[int, int]
    after: dict[int, int]

    def __len__(self) -> int:
        return len(self.after)


class Memory:
    """Memory of one image."""

    def __init__(self, image: Image) -> None:
        self.image = image
        self._shared = self._names_of_shared()

    def _names_of_shared(self) -> dict[tuple[str, int], str]:
        """Shared memory by kind and CRIU's number: named after the first process that maps it."""
        found: dict[tuple[str, int], str] = {}
        for pid, process in sorted(self.image.processes.items()):
            for vma in several(process.mm.get("vmas")):
                if vma["status"] & _ANON_SHARED and not vma["status"] & _SYSV:
                    found.setdefault(
                        ("anonymous", vma["backing"]), f"shared memory of process {pid} at {vma['start']:#x}"
                    )
        return found

    def mappings(self, process: Process) -> list[Mapping]:
        """By address, without the kernel's own."""
        made = [self._mapping(vma) for vma in several(process.mm.get("vmas")) if vma["start"] >= 0]
        return [mapping for mapping in made if not mapping.is_kernels]

    def _mapping(self, vma: Record) -> Mapping:
        status = vma["status"]
        if status & (_MEMFD | _FILE_PRIVATE | _FILE_SHARED):
            what = self.image.file_name(vma["backing"])
        elif status & _SYSV:
            what = f"System V {vma['backing']}"
        elif status & _ANON_SHARED:
            what = self._shared.get(("anonymous", vma["backing"]), "?")
        else:
            what = ""
        kept = ("prot", "flags", "advice", "fdflags")
        return Mapping(
            start=vma["start"],
            end=vma["end"],
            what=what,
            offset=vma["offset"],
            attributes=tuple((name, vma[name]) for name in kept if name in vma),
            status=status,
            flags=vma["flags"],
            prot=vma["prot"],
        )

    def private(self, pid: int) -> Pages:
        """The pages of a process."""
        return self._pages(f"pagemap-{pid}.img")

    def shared(self) -> dict[str, Pages]:
        """The pages of shared memory, memory files and System V segments."""
        names = {number: name for (_, number), name in self._shared.items()}
        for entry in read_all(self.image.folder / "memfd.img", "memfd_inode"):
            names[entry["pages"]] = self.image.object_name("memfd", entry["inode"])
        for path in sorted(self.image.folder.glob("ipcns-shm-*.img")):
            for entry in read_all(path, "shm"):
                identity = entry["key"].get("id", 0)
                names.setdefault(identity, f"System V {identity}")
        found: dict[str, Pages] = {}
        for path in self.image.folder.glob("pagemap-shmem-*.img"):
            number = int(path.stem.rpartition("-")[2])
            found[names.get(number, f"shared memory {number}")] = self._pages(path.name)
        return found

    def _pages(self, name: str) -> Pages:
        entries = read_all(self.image.folder / name, "pagemap")
        head = next(entries, None)
        if head is None:
            return Pages()
        found = Pages(self.image.folder / f"pages-{head['address']}.img")  # field 1 of the head is the file's number
        offset = 0
        for entry in entries:
            count = entry.get("count64") or entry.get("count", 0)
            if entry.get("flags", _PRESENT) & _PRESENT:
                found.stretches.append((entry["address"], count, offset))
                offset += count * PAGE
        found.stretches.sort()
        return found


def compare(before: Memory, after: Memory, below_before: Beneath, below_after: Beneath) -> Iterator[Words]:
    """Words that differ, for every address space that both images have."""
    for pid in sorted(before.image.processes.keys() & after.image.processes.keys() - {INIT}):
        old, new = (memory.image.processes[pid] for memory in (before, after))
        if not old.mm or not new.mm:
            continue  # a zombie has none
        sides = [
            _Side(memory.private(pid), memory.mappings(process), beneath)
            for memory, process, beneath in ((before, old, below_before), (after, new, below_after))
        ]
        words = _differing(*sides)
        dead = [*_dead(old, before.mappings(old)), *_dead(new, after.mappings(new)), *_both_sleep(old, new)]
        yield Words(f"process {pid}", *(_without(part, dead) for part in words))
    old_shared, new_shared = before.shared(), after.shared()
    for name in sorted(old_shared.keys() | new_shared.keys()):
        words = _differing(
            _Side(old_shared.get(name, Pages()), [], below_before),
            _Side(new_shared.get(name, Pages()), [], below_after),
        )
        yield Words(name, *words)


@dataclass
class _Side:
    """One address space of one image, to be read page by page."""

    pages: Pages
    mappings: list[Mapping]
    beneath: Beneath

    def __post_init__(self) -> None:
        self._starts = [mapping.start for mapping in self.mappings]
        self._file: BinaryIO | None = self.pages.path.open("rb") if self.pages.path else None

    def close(self) -> None:
        if self._file:
            self._file.close()

    def stored(self, offset: int, count: int) -> bytes:
        assert self._file
        self._file.seek(offset)
        return self._file.read(count * PAGE)

    def word(self, address: int) -> int | None:
        """One stored word; None if its page is not stored."""
        for start, count, offset in self.pages.stretches:
            if start <= address < start + count * PAGE:
                page = self.stored(offset + (address - start) // PAGE * PAGE, 1)
                return _WORDS.unpack(page)[address % PAGE // WORD]
        return None

    def absent(self, address: int) -> bytes | None:
        """A page that is not stored: what the mapping has there; None where it cannot be told."""
        at = bisect.bisect_right(self._starts, address) - 1
        mapping = self.mappings[at] if at >= 0 and address < self.mappings[at].end else None
        if mapping is None or not mapping.status & _FILE_PRIVATE:
            return _ZEROS
        return self.beneath(mapping.what, mapping.offset + address - mapping.start)


def _differing(old: _Side, new: _Side) -> tuple[dict[int, int], dict[int, int]]:
    before: dict[int, int] = {}
    after: dict[int, int] = {}
    try:
        for address, count, at_old, at_new in _together(old.pages.stretches, new.pages.stretches):
            a = old.stored(at_old, count) if at_old is not None else None
            b = new.stored(at_new, count) if at_new is not None else None
            if a == b:
                continue
            for number in range(count):
                place = address + number * PAGE
                page_a = a[number * PAGE : (number + 1) * PAGE] if a is not None else old.absent(place)
                page_b = b[number * PAGE : (number + 1) * PAGE] if b is not None else new.absent(place)
                if page_a != page_b:
                    _note(place, page_a, page_b, before, after)
    finally:
        old.close()
        new.close()
    return before, after


def _note(place: int, a: bytes | None, b: bytes | None, before: dict[int, int], after: dict[int, int]) -> None:
    if a is None or b is None:  # what lies below is unknown: count it as different
        before[place], after[place] = 0, 1
        return
    for number, (x, y) in enumerate(zip(_WORDS.unpack(a), _WORDS.unpack(b), strict=True)):
        if x != y:
            before[place + number * WORD], after[place + number * WORD] = x, y


def _together(
    old: list[tuple[int, int, int]], new: list[tuple[int, int, int]]
) -> Iterator[tuple[int, int, int | None, int | None]]:
    """Pieces of at most `_BATCH` pages that one or both have: address, pages, and where they are stored."""
    cuts = sorted({edge for start, count, _ in (*old, *new) for edge in (start, start + count * PAGE)})
    at = [0, 0]
    for begin, end in itertools.pairwise(cuts):
        offsets: list[int | None] = []
        for side, stretches in enumerate((old, new)):
            while at[side] < len(stretches) and stretches[at[side]][0] + stretches[at[side]][1] * PAGE <= begin:
                at[side] += 1
            found = at[side] < len(stretches) and stretches[at[side]][0] <= begin
            offsets.append(stretches[at[side]][2] + begin - stretches[at[side]][0] if found else None)
        if offsets == [None, None]:
            continue
        for place in range(begin, end, _BATCH * PAGE):
            moved = [None if offset is None else offset + place - begin for offset in offsets]
            yield place, min(_BATCH, (end - place) // PAGE), moved[0], moved[1]


# ---------------------------------------------------------------- what is no state


def _dead(process: Process, mappings: list[Mapping]) -> Iterator[tuple[int, int]]:
    """Addresses (begin, end) where nothing of the program lives."""
    for one in process.threads:
        if one.rseq:
            yield one.rseq
        if one.stack_pointer is not None and (bottom := stack_bottom(one, mappings)) is not None:
            yield bottom, one.stack_pointer - RED_ZONE


def _both_sleep(old: Process, new: Process) -> Iterator[tuple[int, int]]:
    """Where the time that is left of a sleep lies, of threads that sleep in the same call in both."""
    calls = {one.tid: one for one in old.threads}
    for one in new.threads:
        before = calls.get(one.tid)
        if before and before.sleep == one.sleep and before.registers.get("ip") == one.registers.get("ip"):
            for address in one.sleep:
                yield address, address + _TIME


def times_left(memory: Memory, pid: int, one: Thread) -> set[int]:
    """The numbers that say how long a thread will still sleep: registers may hold copies of them."""
    found: set[int] = set()
    side = _Side(memory.private(pid), memory.mappings(memory.image.processes[pid]), lambda path, offset: None)
    try:
        for address in one.sleep:
            found |= {value for at in range(address, address + _TIME, WORD) if (value := side.word(at)) is not None}
    finally:
        side.close()
    return found


def stack_bottom(one: Thread, mappings: list[Mapping]) -> int | None:
    """Where the stack of a thread ends; None if it does not run on one whose end is known.

    glibc and musl map the stack of a thread with its thread-local storage on top and a page without rights below.
    """
    pointer = one.stack_pointer
    if pointer is None:
        return None
    at = next((n for n, mapping in enumerate(mappings) if mapping.start <= pointer < mapping.end), None)
    if at is None:
        return None
    mapping = mappings[at]
    if mapping.is_stack:
        return 0 if at == 0 else mappings[at - 1].end
    guarded = at > 0 and mappings[at - 1].end == mapping.start and mappings[at - 1].prot == 0
    storage_on_top = one.storage is not None and pointer < one.storage < mapping.end
    return mapping.start if guarded and storage_on_top else None


def _without(words: dict[int, int], ranges: list[tuple[int, int]]) -> dict[int, int]:
    return {at: value for at, value in words.items() if not any(a < at + WORD and at < b for a, b in ranges)}
