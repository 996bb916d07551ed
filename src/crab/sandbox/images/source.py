"""What an image can be made from: the words all kinds of sources share, and which module knows which kind.

A source is a text `KIND:REST` (`debian:bookworm`, `dir:/srv/root`, `host`). Its module turns it into a `Recipe`, which
fills an empty folder. Knows nothing of names, storage or sealing of images.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from crab.errors import InvalidRequest

Progress = Callable[[str], None]
"""Is told in a few words what happens now."""

KINDS = {
    "debian": "debian:Debian",
    "dir": "folder:Folder",
    "host": "host:Host",
    "oci": "oci:Oci",
    "tar": "tar:Tar",
}
"""Kind of source: module of this package, and class in it. Loaded only when used."""

FORMS = (
    "debian:SUITE[+PACKAGE,…]",
    "oci:LAYOUT[:TAG]",
    "oci:ARCHIVE.tar",
    "oci:docker://REGISTRY/NAME",
    "dir:/FOLDER",
    "tar:/FILE",
    "host",
)


class ImageConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What an image says about how programs in it want to be started. Kept beside the image, not in it."""

    env: dict[str, str] = {}
    workdir: str = ""
    """Empty: not stated."""
    user: str = ""
    """Name or number; empty: not stated."""
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()


class UnpackLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds for what an archive may turn into; beyond them it is refused."""

    size: int = 32 << 30
    """Bytes in all files together."""
    entries: int = 5_000_000


class Workshop(msgspec.Struct, frozen=True, kw_only=True):
    """What a recipe is given besides the folder to fill."""

    pool: Path
    """Root of the pool, which must not become part of an image."""
    scratch: Path
    """An empty folder that is deleted afterwards."""
    cache: Path
    """A folder that is kept: downloads."""
    limits: UnpackLimits
    progress: Progress


class Recipe(Protocol):
    """One source of one kind."""

    def build(self, root: Path, workshop: Workshop) -> ImageConfig:
        """Fill the empty folder `root`. What is left of a failure is thrown away by the caller."""
        ...


def recipe(source: str) -> Recipe:
    """The recipe for a source. InvalidRequest or NotFound if the text is wrong or what it names does not exist."""
    kind, _, rest = source.partition(":")
    if kind not in KINDS:
        raise InvalidRequest(f"unknown kind of image source: {source!r}", remedy="use one of " + ", ".join(FORMS))
    module, name = KINDS[kind].split(":")
    made: Recipe = getattr(importlib.import_module(f"{__package__}.{module}"), name).parse(rest)
    return made


def absolute(path: str, form: str) -> Path:
    """The path of a source; it must be absolute, since the daemon does not run where the user is."""
    if not path.startswith("/"):
        raise InvalidRequest(f"the path of an image source must be absolute: {path!r}", remedy=f"write it as {form}")
    return Path(path)
