"""`dir:/FOLDER`: an image from a root file system that lies in a folder of this machine (debootstrap, an unpacked
image).

The folder is copied, sharing blocks where the file system can (reflink); later changes of it do not reach the image. It
is trusted as its owner, root of the host, is; device nodes are removed all the same when the image is sealed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

import msgspec

from crab.errors import InvalidRequest, NotFound
from crab.sandbox.images import programs
from crab.sandbox.images.source import ImageConfig, Workshop, absolute


class Folder(msgspec.Struct, frozen=True):
    """One folder."""

    path: Path

    @classmethod
    def parse(cls, rest: str) -> Self:
        """Of the part after `dir:`."""
        path = absolute(rest, "dir:/FOLDER")
        if not path.exists():
            raise NotFound(f"there is no folder {path}", remedy="give a folder on the machine that Crab runs on")
        if not path.is_dir():
            raise InvalidRequest(f"{path} is not a folder", remedy="for an archive write tar:/FILE")
        return cls(path)

    def build(self, root: Path, workshop: Workshop) -> ImageConfig:
        """Copy it with owners, modes, times, links and extended attributes."""
        origin = self.path.resolve()
        if workshop.pool.is_relative_to(origin):
            raise InvalidRequest(
                f"{origin} contains Crab's own state ({workshop.pool})",
                remedy="for an image of this machine use the source `host`",
            )
        workshop.progress(f"copying {origin}")
        copy_tree(f"{origin}/.", root)
        return ImageConfig()


def copy_tree(source: str, target: Path) -> None:
    """`cp -a` of a file or folder; what is mounted in it stays out."""
    cp = programs.require("cp", "coreutils")
    options = ["--archive", "--reflink=auto", "--sparse=auto", "--one-file-system"]
    programs.run(
        [cp, *options, "--", source, target],
        f"copying {source}",
        place=target,
        remedy="do not change the folder while it is copied",
    )
