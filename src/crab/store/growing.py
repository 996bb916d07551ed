"""Digests of files while another process writes them, so that little is left to read when it has ended."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from blake3 import blake3

_PIECE = 1 << 20
"""Below that a file is not worth it: whoever needs its digest reads it in a millisecond."""
_PAUSE = 0.005


class Growing:
    """Files of a folder whose names begin with a prefix, and that are only ever appended to. A context manager: they are
    written in the block and have to be whole at its end; from then on `digests` has their sizes and digests."""

    def __init__(self, folder: Path, prefix: str) -> None:
        self.digests: dict[str, tuple[int, str]] = {}
        self._folder = folder
        self._prefix = prefix
        self._whole = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="crab-digests")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._whole.set()
        self._thread.join()

    def _follow(self) -> None:
        read: dict[str, tuple[int, blake3]] = {}
        piece = memoryview(bytearray(_PIECE))
        whole = False
        try:
            while not whole:
                whole = self._whole.wait(_PAUSE)
                for name in os.listdir(self._folder):
                    if name.startswith(self._prefix):
                        offset, hasher = read.get(name, (0, blake3()))
                        read[name] = (self._read(name, offset, hasher, piece, whole), hasher)
        except OSError:
            return  # whoever needs the digest meets the same, and can say what it means
        self.digests = {name: (size, f"blake3:{hasher.hexdigest()}") for name, (size, hasher) in read.items() if size}

    def _read(self, name: str, offset: int, hasher: blake3, piece: memoryview, whole: bool) -> int:
        """Take in what is there from `offset` on (all of it if the file is `whole`, else whole pieces); returns its end."""
        descriptor = os.open(self._folder / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(descriptor).st_size
            while size - offset >= _PIECE or (whole and 0 < offset < size):
                count = os.preadv(descriptor, [piece], offset)
                hasher.update(piece[:count])
                offset += count
        finally:
            os.close(descriptor)
        return offset
