"""How the content of a file is cut into blobs: whole if it is small, else where its bytes say so (FastCDC).

Pieces do not move when something is inserted before them, so a file of which little changed is mostly found again. Where they
are cut matters to writers only: whoever reads a file reads a list of blobs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from crab.errors import HostUnsuitable
from crab.store.objects import EXTRA
from crab.store.plan import Cut

_AT_ONCE = 16 << 20
"""Bytes that are looked at together: a multiple of the largest piece."""


def pieces(content: Iterable[bytes], cut: Cut, seed: int = 0) -> Iterator[bytes]:
    """The content, in pieces. `seed` is what the places depend on; 0 is that of every store without a key."""
    buffer = bytearray()
    cutter: Any = None
    for block in content:
        buffer += block
        if len(buffer) < _AT_ONCE:
            continue
        cutter = cutter or _cutter(cut, seed)
        *whole, last = [(chunk.offset, chunk.length) for chunk in cutter.cut_buf(bytes(buffer))]
        for offset, length in whole:
            yield bytes(buffer[offset : offset + length])
        del buffer[: last[0]]  # it ends where the buffer does, not where the content says
    if len(buffer) <= cut.least:
        if buffer:
            yield bytes(buffer)
        return
    data = bytes(buffer)
    for chunk in (cutter or _cutter(cut, seed)).cut_buf(data):
        yield data[chunk.offset : chunk.offset + chunk.length]


def _cutter(cut: Cut, seed: int) -> Any:
    try:
        from pyfastcdc import FastCDC
    except ImportError as error:
        raise HostUnsuitable(f"a store needs pyfastcdc ({error})", remedy=EXTRA) from error
    return FastCDC(cut.average, min_size=cut.least, max_size=cut.most, seed=seed)
