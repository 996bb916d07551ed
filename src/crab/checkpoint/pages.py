"""Memory in CRIU's images: which pages are those of the checkpoint before, and which are new.

A page is looked for where it would be: at the same address of the same process one checkpoint earlier, and at the same address
of the parent process in the same one (after a fork they share what neither wrote to). Both are comparisons of bytes, no digest
is made for them. In dumps of real programs (python, node, redis; docs/store.md) that finds all that there is: of 7,226 pages
that differ there 5 were anywhere else in the dump before. Pages of zeros cost nothing. What is left goes in groups of 64
into blobs, which have digests.

Knows the files `pagemap-*.img` and `pages-*.img`; what the store does with blobs it does not know.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from crab.checkpoint.extents import Extent, Extents, joined
from crab.checkpoint.imagenames import read_all

PAGE = 4096
PREFIX = "pages-"
_PRESENT = 4  # PE_PRESENT: the pages are in the file
_ZEROS = bytes(PAGE)
_WINDOW = 64
_THIN = 8
"""A blob of which less than one in so many pages is still needed is not read for them: what is needed is written anew. So a
restore reads at most that many times what it needs, however long the line of checkpoints is."""


class Stretch(NamedTuple):
    """Pages of one address space that lie together in a file."""

    space: str
    address: int
    pages: int
    offset: int


class Layout:
    """Where the pages of one dump lie."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError, or ValueError for images that are none."""
        self.folder = folder
        self.files: dict[str, list[Stretch]] = {}
        """By name of the file, in the order of the file."""
        self.spaces: dict[str, dict[int, tuple[str, int]]] = {}
        """File and offset of the page at an address, by address space."""
        self.parents: dict[str, str] = {}
        try:
            for path in sorted(folder.glob("pagemap-*.img")):
                self._read(path)
            for entry in read_all(folder / "pstree.img", "pstree"):
                self.parents[str(entry["pid"])] = str(entry.get("parent", 0))
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"the images in {folder} cannot be read: {error}") from error

    def _read(self, path: Path) -> None:
        entries = read_all(path, "pagemap")
        head = next(entries, None)
        if head is None:
            return
        space, name = path.stem.removeprefix("pagemap-"), f"{PREFIX}{head['address']}.img"  # field 1 of the head
        stretches, places = self.files.setdefault(name, []), self.spaces.setdefault(space, {})
        offset = stretches[-1].offset + stretches[-1].pages * PAGE if stretches else 0
        size = (self.folder / name).stat().st_size
        for entry in entries:
            if entry.get("flags", _PRESENT) & _PRESENT:
                count = entry.get("count64") or entry.get("count", 0)
                if not 0 <= count <= (size - offset) // PAGE:  # before it is believed: every page takes memory here
                    raise ValueError(f"{path} speaks of more pages than there are")
                stretches.append(Stretch(space, entry["address"], count, offset))
                places.update(
                    (entry["address"] + number * PAGE, (name, offset + number * PAGE)) for number in range(count)
                )
                offset += count * PAGE

    def in_order(self) -> list[str]:
        """Names of the files, parents before their children."""
        owners = {stretches[0].space: name for name, stretches in self.files.items() if stretches}
        found: dict[str, None] = {}
        for space, name in owners.items():
            line: list[str] = []
            while space in owners and space not in line:
                line.append(space)
                space = self.parents.get(space, "")
            found.update((owners[one], None) for one in reversed(line))
            found.setdefault(name)
        return [*found, *(name for name in self.files if name not in found)]


class Earlier(NamedTuple):
    """A dump whose pages are in the store."""

    layout: Layout
    contents: dict[str, Extents]
    """By name of the file."""


def contents_of(
    now: Layout,
    before: Earlier | None,
    put: Callable[[bytes], bytes],
    size_of: Callable[[bytes], int],
    group: int = _WINDOW,
    *,
    least: int = 1,
    look: Callable[[], object] = lambda: None,
) -> Iterator[tuple[str, list[Extent]]]:
    """What every file of pages consists of. `put` stores a blob and names it; `size_of` is the size of one that is stored. New
    pages go into blobs of `group` pages. What is there already in fewer than `least` pages in a row is written anew. Every few
    hundred KiB it has a `look`, which ends it by raising something.

    Raises OSError.
    """
    done: dict[str, Extents] = {}
    with ExitStack() as stack:
        files = _Files(stack)
        sources = [before] if before else []
        for name in now.in_order():
            match = _Match(now, [*sources, Earlier(now, done)], files, name, look)
            plan = _without_crumbs(match.plan(size_of), least * PAGE)
            content = joined(_written(plan, files.of(now.folder / name), put, group))
            done[name] = Extents(content)
            yield name, content


class _Files:
    """The open files."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._open: dict[Path, int] = {}

    def of(self, path: Path) -> int:
        if path not in self._open:
            self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._stack.callback(os.close, self._open[path])
        return self._open[path]


class _Match:
    """Finds the pages of one file in what is stored."""

    def __init__(
        self, now: Layout, sources: list[Earlier], files: _Files, name: str, look: Callable[[], object]
    ) -> None:
        self._now = now
        self._sources = sources
        self._files = files
        self._name = name
        self._look = look

    def plan(self, size_of: Callable[[bytes], int]) -> list[Extent | tuple[int, int]]:
        """The content: extents of what is stored, and (offset, size) in the file of what is not."""
        plan = list(self._found())
        used: Counter[bytes] = Counter()
        for part in plan:
            if isinstance(part, Extent) and part.blob:
                used[part.blob] += part.size
        thin = {blob for blob, size in used.items() if size * _THIN < size_of(blob)}
        offset = 0
        for number, part in enumerate(plan):
            size = part.size if isinstance(part, Extent) else part[1]
            if isinstance(part, Extent) and part.blob in thin:
                plan[number] = (offset, size)
            offset += size
        return plan

    def _found(self) -> Iterator[Extent | tuple[int, int]]:
        file = self._files.of(self._now.folder / self._name)
        end = 0
        for stretch in self._now.files[self._name]:
            for first in range(0, stretch.pages, _WINDOW):
                count = min(_WINDOW, stretch.pages - first)
                self._look()
                data = os.pread(file, count * PAGE, stretch.offset + first * PAGE)
                yield from self._window(
                    stretch.space, stretch.address + first * PAGE, stretch.offset + first * PAGE, data
                )
            end = stretch.offset + stretch.pages * PAGE
        size = os.fstat(file).st_size
        if end < size:
            yield (end, size - end)

    def _window(self, space: str, address: int, offset: int, data: bytes) -> Iterator[Extent | tuple[int, int]]:
        pages = len(data) // PAGE
        known: list[list[Extent] | None] = [None] * pages
        for source in self._sources:
            if None in known:
                same = source.layout is self._now
                where = source.layout.spaces.get(self._now.parents.get(space, "") if same else space)
                if where:
                    self._compare(source, where, address, data, known)
        at = 0
        while at < pages:
            found = known[at]
            if found is not None:
                yield from found
                at += max(1, sum(extent.size for extent in found) // PAGE)
                continue
            first = at
            while at < pages and known[at] is None and data[at * PAGE : (at + 1) * PAGE] != _ZEROS:
                at += 1
            if at > first:
                yield (offset + first * PAGE, (at - first) * PAGE)
            first = at
            while at < pages and known[at] is None and data[at * PAGE : (at + 1) * PAGE] == _ZEROS:
                at += 1
            if at > first:
                yield Extent(b"", 0, (at - first) * PAGE)
        if len(data) % PAGE:
            yield (offset + pages * PAGE, len(data) % PAGE)

    def _compare(
        self,
        source: Earlier,
        where: dict[int, tuple[str, int]],
        address: int,
        data: bytes,
        known: list[list[Extent] | None],
    ) -> None:
        """Note what of the window a source has, in runs of pages that lie together there."""
        at, pages = 0, len(known)
        while at < pages:
            place = where.get(address + at * PAGE)
            if known[at] is not None or place is None or place[0] not in source.contents:
                at += 1
                continue
            count = 1
            while (
                at + count < pages
                and known[at + count] is None
                and where.get(address + (at + count) * PAGE) == (place[0], place[1] + count * PAGE)
            ):
                count += 1
            self._note(source, place, at, count, data, known)
            at += count

    def _note(
        self,
        source: Earlier,
        place: tuple[str, int],
        first: int,
        count: int,
        data: bytes,
        known: list[list[Extent] | None],
    ) -> None:
        name, offset = place
        content = source.contents[name]
        try:
            old = os.pread(self._files.of(source.layout.folder / name), count * PAGE, offset)
        except FileNotFoundError:  # that checkpoint was removed a moment ago
            return
        if len(old) != count * PAGE or offset + len(old) > content.size:
            return
        if old == data[first * PAGE : (first + count) * PAGE]:
            equal = [(0, count)]
        else:
            equal = []
            for number in range(count):
                here = (first + number) * PAGE
                if old[number * PAGE : (number + 1) * PAGE] == data[here : here + PAGE]:
                    if equal and equal[-1][0] + equal[-1][1] == number:
                        equal[-1] = (equal[-1][0], equal[-1][1] + 1)
                    else:
                        equal.append((number, 1))
        for start, length in equal:
            # the run stands at its first page, the others are only marked as found
            known[first + start] = content.part(offset + start * PAGE, length * PAGE)
            for number in range(first + start + 1, first + start + length):
                known[number] = []


def _without_crumbs(plan: list[Extent | tuple[int, int]], least: int) -> list[Extent | tuple[int, int]]:
    """The plan, but for stretches of what is there that are shorter than that, with those that they continue."""
    found: list[Extent | tuple[int, int]] = []
    offset = 0
    for _, group in itertools.groupby(plan, type):
        parts = list(group)
        extents = joined(part for part in parts if isinstance(part, Extent))
        for part in extents or parts:
            size = part.size if isinstance(part, Extent) else part[1]
            crumb = isinstance(part, Extent) and size < least
            found.append((offset, size) if crumb else part)
            offset += size
    return found


def _written(
    plan: list[Extent | tuple[int, int]], file: int, put: Callable[[bytes], bytes], group: int
) -> Iterator[Extent]:
    """Store what is new, and say where all is. New pages are packed closely, wherever they come from."""
    extents: list[Extent] = []
    waiting = bytearray()
    open_: list[int] = []
    for part in plan:
        if isinstance(part, Extent):
            extents.append(part)
            continue
        offset, size = part
        while size:
            taken = min(size, group * PAGE - len(waiting))
            data = os.pread(file, taken, offset)
            if len(data) != taken:
                raise OSError(f"a process image became shorter while it was read at {offset}")
            open_.append(len(extents))
            extents.append(Extent(b"", len(waiting), taken))
            waiting += data
            offset, size = offset + taken, size - taken
            if len(waiting) == group * PAGE:
                _close(extents, open_, put(bytes(waiting)))
                waiting.clear()
    if waiting:
        _close(extents, open_, put(bytes(waiting)))
    return iter(extents)


def _close(extents: list[Extent], open_: list[int], blob: bytes) -> None:
    for number in open_:
        extents[number] = extents[number]._replace(blob=blob)
    open_.clear()
