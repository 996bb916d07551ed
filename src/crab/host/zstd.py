"""zstd, wherever this Python has it."""

from __future__ import annotations

from functools import cache
from typing import Any

from crab.errors import HostUnsuitable


@cache  # a module that is not there is looked for anew at every import: 54 µs
def zstd() -> Any:
    """The module for zstd: of Python itself from 3.14 on. Raises `HostUnsuitable` if there is none."""
    try:
        from compression import zstd as module  # type: ignore[import-not-found]
    except ImportError:
        try:
            from backports import zstd as module  # type: ignore[import-not-found,no-redef]
        except ImportError:
            raise HostUnsuitable(
                "this Python cannot compress with zstd",
                remedy="`pip install backports.zstd`, or use an archive without compression (a name without .zst)",
            ) from None
    return module
