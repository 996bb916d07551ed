"""`tar:/FILE`: an image from a tar archive of a root file system, plain or compressed (gzip, bzip2, xz, zstd)."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import msgspec

from crab.errors import InvalidRequest, NotFound
from crab.sandbox.images.source import ImageConfig, Workshop, absolute
from crab.sandbox.images.unpack import Budget, unpack


class Tar(msgspec.Struct, frozen=True):
    """One archive. It is not trusted: see `unpack` for what is refused."""

    file: Path

    @classmethod
    def parse(cls, rest: str) -> Self:
        """Of the part after `tar:`."""
        file = absolute(rest, "tar:/FILE")
        if not file.exists():
            raise NotFound(
                f"there is no file {file}", remedy="give the path of a tar archive on the machine that Crab runs on"
            )
        if not file.is_file():
            raise InvalidRequest(f"{file} is not a file", remedy="for a folder write dir:/FOLDER")
        return cls(file)

    def build(self, root: Path, workshop: Workshop) -> ImageConfig:
        """Unpack it."""
        workshop.progress(f"unpacking {self.file}")
        budget = Budget(workshop.limits)
        unpack(self.file, root, budget)
        if budget.lost_acls:
            workshop.progress(f"{budget.lost_acls} access lists left out: they name users in text form")
        return ImageConfig()
