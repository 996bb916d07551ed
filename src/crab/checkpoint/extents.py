"""What a file consists of in a store: stretches of blobs, one after the other. A pure calculation.

A stretch is a name of a blob (empty: zeros), an offset in it, and a length, in bytes. So a page of memory that did not change
is the same stretch of the same blob as in the checkpoint before, and a thousand of them in a row are one entry.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Extent(NamedTuple):
    """See the module."""

    blob: bytes
    offset: int
    size: int


class Extents:
    """A content that parts can be taken of."""

    def __init__(self, extents: Sequence[Extent]) -> None:
        self.extents = extents
        self._starts = [0]
        for extent in extents:
            self._starts.append(self._starts[-1] + extent.size)

    @property
    def size(self) -> int:
        return self._starts[-1]

    def part(self, offset: int, size: int) -> list[Extent]:
        """What lies there. It must lie inside."""
        found: list[Extent] = []
        at = bisect.bisect_right(self._starts, offset) - 1
        while size > 0:
            extent, skip = self.extents[at], offset - self._starts[at]
            taken = min(size, extent.size - skip)
            found.append(Extent(extent.blob, extent.offset + skip if extent.blob else 0, taken))
            offset, size, at = offset + taken, size - taken, at + 1
        return found


def joined(extents: Iterable[Extent]) -> list[Extent]:
    """The same content in as few stretches as possible."""
    found: list[Extent] = []
    for extent in extents:
        if found and extent.blob == found[-1].blob:
            last = found[-1]
            if not extent.blob or last.offset + last.size == extent.offset:
                found[-1] = last._replace(size=last.size + extent.size)
                continue
        if extent.size:
            found.append(extent)
    return found


def flat(extents: Iterable[Extent], links: dict[bytes, int]) -> list[int]:
    """As numbers: which blob (its place in `links`, which grows; -1 for zeros), offset, length, and so on."""
    found: list[int] = []
    for blob, offset, size in extents:
        found += (links.setdefault(blob, len(links)) if blob else -1, offset, size)
    return found


def unflat(numbers: Sequence[int], links: Sequence[bytes]) -> list[Extent]:
    """Inverse of `flat`. Raises ValueError for numbers that it does not make."""
    if len(numbers) % 3:
        raise ValueError("a content is cut short")
    found: list[Extent] = []
    for link, offset, size in zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True):
        if not -1 <= link < len(links) or offset < 0 or size < 0:
            raise ValueError("a content has impossible numbers")
        found.append(Extent(links[link] if link >= 0 else b"", offset, size))
    return found
