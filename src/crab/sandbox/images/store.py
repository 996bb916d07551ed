"""The images of a pool: read-only subvolumes with a name.

Knows how an image comes to be (built in staging, sealed, published), is found and is removed. Does not know what
sandboxes or checkpoints are: who removes an image says who uses it. What the kinds of sources do is in their own
modules.

On disk: `images/NAME.json` is the image (description, start configuration, name of the folder with the content). It is
the last thing that is written and the first that is removed. `images/NAME@FINGERPRINT` is the content; a folder that no
description names is left of a crash.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from crab.errors import AlreadyExists, Busy, CrabError, Damaged, InUse, InvalidRequest, NotFound
from crab.host import btrfs
from crab.host.fingerprint import tree_summary
from crab.host.pool import Pool
from crab.model import Image
from crab.sandbox.images import seal
from crab.sandbox.images.source import ImageConfig, Progress, Recipe, UnpackLimits, Workshop, recipe

Users = Callable[[str], Iterable[str]] | Iterable[str]
"""Who builds on an image: names to show, or a function that is given the image's name and returns them."""

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_SMALLEST_ROOM = 64 << 20
_FORMAT = 1


class _Description(msgspec.Struct, frozen=True, kw_only=True):
    """What `images/NAME.json` contains."""

    format: int
    image: Image
    config: ImageConfig
    folder: str


_Images = list[Image]
_Names = list[str]
_Paths = list[Path]
# In the class below, `list` is its method.


def _silent(_: str) -> None:
    """The progress nobody wants to see."""


class ImageStore:
    """The images of one pool. Threads may use it at the same time; processes may not (the daemon owns the pool)."""

    def __init__(self, pool: Pool, cache_dir: str | os.PathLike[str], limits: UnpackLimits | None = None) -> None:
        """`cache_dir` keeps downloads and may be emptied at any time; `limits` bound what archives unpack to."""
        self._pool = pool
        self._cache = Path(cache_dir)
        self._limits = limits or UnpackLimits()
        self._busy: set[str] = set()
        self._lock = threading.Lock()

    # ------------------------------------------------------------ reading

    def list(self) -> _Images:
        """All images, by name. Damaged if one's description cannot be read."""
        return [self._description(name).image for name in self._names()]

    def get(self, name: str) -> Image:
        """One image. NotFound says which there are."""
        return self._description(name).image

    def config(self, name: str) -> ImageConfig:
        """How the image wants its programs started (environment, work directory, user)."""
        return self._description(name).config

    def path(self, name: str) -> Path:
        """The read-only subvolume with the image's content. Damaged if it is gone."""
        description = self._description(name)
        path = self._pool.images / description.folder
        if not btrfs.is_subvolume(path):
            raise Damaged(
                f"the content of the image {name} is missing ({path})",
                remedy=f"add it again: `crab image add --replace {name} {description.image.source}`",
            )
        return path

    def fingerprint(self, name: str) -> str:
        """`blake3:…` of the image's content, as it was when it was made."""
        return self.get(name).fingerprint

    def verify(self, name: str) -> None:
        """Read the whole image and compare it with its fingerprint; Damaged if it is another."""
        wanted = self.fingerprint(name)
        found = tree_summary(self.path(name)).fingerprint
        if found != wanted:
            raise Damaged(f"the image {name} is not what it was made as: {found}, not {wanted}", remedy="add it again")

    def _names(self) -> _Names:
        found = (path.name.removesuffix(".json") for path in self._pool.images.glob("*.json"))
        return sorted(name for name in found if _NAME.fullmatch(name))

    def _file(self, name: str) -> Path:
        return self._pool.images / f"{name}.json"

    def _description(self, name: str) -> _Description:
        _check_name(name)
        try:
            content = self._file(name).read_bytes()
        except FileNotFoundError:
            there = ", ".join(self._names())
            raise NotFound(
                f"there is no image {name!r}; " + (f"there are: {there}" if there else "there are no images yet"),
                remedy="" if there else "add one: `crab image add default debian:bookworm`",
            ) from None
        try:
            description = msgspec.json.decode(content, type=_Description)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Damaged(
                f"the description of the image {name} cannot be read: {error}",
                remedy=f"remove the image (`crab image rm {name}`) and add it again",
            ) from error
        if description.format > _FORMAT:
            raise Damaged(
                f"the image {name} was made by a newer version of Crab (format {description.format})",
                remedy="use that version",
            )
        return description

    # ------------------------------------------------------------ making

    def add(
        self,
        name: str,
        source: str,
        progress: Progress | None = None,
        *,
        replace: bool = False,
        in_use: Users = (),
    ) -> Image:
        """Make an image of a source (see `source.FORMS`).

        AlreadyExists if the name is taken, unless `replace`; then InUse if `in_use` names anyone, and the old image
        stays until the new one is complete. ArchiveRefused for archives that are malicious, damaged or too large;
        InvalidRequest and NotFound for wrong sources; HostUnsuitable if a program is missing; NoSpace. Nothing is left
        of a failure.
        """
        made: Recipe = recipe(source)

        def build(root: Path) -> ImageConfig:
            scratch = self._pool.staging / f"scratch-{uuid.uuid4().hex[:12]}"
            scratch.mkdir(mode=0o700)
            try:
                self._cache.mkdir(parents=True, exist_ok=True, mode=0o700)
                workshop = Workshop(
                    pool=self._pool.root,
                    scratch=scratch,
                    cache=self._cache,
                    limits=self._limits,
                    progress=progress or _silent,
                )
                return made.build(root, workshop)
            finally:
                self._pool.discard(scratch)

        return self._make(name, source, build, progress or _silent, replace, in_use)

    def add_subvolume(
        self,
        name: str,
        source: str,
        build: Callable[[Path], None],
        *,
        config: ImageConfig | None = None,
        progress: Progress | None = None,
        replace: bool = False,
        in_use: Users = (),
        fingerprint: str = "",
    ) -> Image:
        """Make an image of what `build` puts into the empty subvolume that it is given.

        `source` is the text to record (`sandbox:NAME`, `build:IMAGE`). Errors of `build` pass through; Damaged if the
        content turns out to have another fingerprint than the one that is given; else as `add`.
        """

        def filled(root: Path) -> ImageConfig:
            build(root)
            return config or ImageConfig()

        return self._make(name, source, filled, progress or _silent, replace, in_use, fingerprint)

    def _make(
        self,
        name: str,
        source: str,
        build: Callable[[Path], ImageConfig],
        progress: Progress,
        replace: bool,
        in_use: Users,
        fingerprint: str = "",
    ) -> Image:
        with self._reserved(name):
            self._check_free(name, replace, in_use)
            self._pool.require(_SMALLEST_ROOM, "a new image")
            root = self._pool.stage("image")
            try:
                with btrfs.checked(root):
                    config = build(root)
                    progress("sealing")
                    removed = str(seal.prepare(root))
                    if removed:
                        progress(removed)
                    architecture = seal.architecture(root)
                    seal.require_architecture(architecture, f"the image from {source}")
                    summary = tree_summary(root)
                    if fingerprint and summary.fingerprint != fingerprint:
                        raise Damaged(
                            f"the content for the image {name} has the fingerprint {summary.fingerprint}, not {fingerprint}",
                            remedy="get it again from where it came",
                        )
                    # Again: building takes minutes, and somebody may have started to use the old one.
                    self._check_free(name, replace, in_use)
                    image = Image(
                        name=name,
                        source=source,
                        fingerprint=summary.fingerprint,
                        architecture=architecture,
                        size=summary.size,
                        created=time.time(),
                    )
                    self._publish(root, image, config)
            finally:
                with contextlib.suppress(CrabError, OSError):  # what is stuck in staging is left to the sweep
                    self._pool.discard(root)
            return image

    def _publish(self, root: Path, image: Image, config: ImageConfig) -> None:
        folder = f"{image.name}@{image.fingerprint.removeprefix('blake3:')[:12]}"
        old = self._folders(image.name)
        target = self._pool.images / folder
        if target in old and not _holds(target, image.fingerprint):
            self._pool.discard(target)  # left of a crash between two steps of this
        if not target.exists():  # else: replaced by the same content
            btrfs.snapshot(root, target, read_only=True)
        description = _Description(format=_FORMAT, image=image, config=config, folder=folder)
        _write(self._file(image.name), msgspec.json.format(msgspec.json.encode(description), indent=2))
        for path in old:
            if path != target:
                self._pool.discard(path)

    def _folders(self, name: str) -> _Paths:
        return sorted(self._pool.images.glob(f"{name}@*"))

    def _check_free(self, name: str, replace: bool, in_use: Users) -> None:
        if not self._file(name).exists():
            return
        if not replace:
            raise AlreadyExists(
                f"there is an image {name} already",
                remedy="choose another name, remove it, or replace it (`--replace`)",
            )
        _check_unused(name, in_use, "replaced")

    @contextlib.contextmanager
    def _reserved(self, name: str) -> Iterator[None]:
        _check_name(name)
        with self._lock:
            if name in self._busy:
                raise Busy(f"the image {name} is being made or removed right now", remedy="try again when that is done")
            self._busy.add(name)
        try:
            yield
        finally:
            with self._lock:
                self._busy.discard(name)

    # ------------------------------------------------------------ removing

    def remove(self, name: str, in_use: Users = ()) -> None:
        """Remove an image. InUse if `in_use` names anyone who builds on it; NotFound if there is none."""
        with self._reserved(name):
            if not self._file(name).exists():
                self._description(name)
            _check_unused(name, in_use, "removed")
            self._file(name).unlink()
            for path in self._folders(name):
                self._pool.discard(path)

    def sweep(self) -> _Paths:
        """After a crash: throw away contents that no image names. Returns them."""
        known = set()
        for name in self._names():
            try:
                known.add(self._description(name).folder)
            except Damaged:
                known.update(path.name for path in self._folders(name))  # doubt: keep
        with self._lock:
            making = set(self._busy)
        left = [
            path
            for path in sorted(self._pool.images.iterdir())
            if path.name not in known and "@" in path.name and path.name.partition("@")[0] not in making
        ]
        for path in left:
            self._pool.discard(path)
        for path in self._pool.images.glob(".*.new"):
            path.unlink(missing_ok=True)
        return left


def _holds(path: Path, fingerprint: str) -> bool:
    return btrfs.is_subvolume(path) and btrfs.is_read_only(path) and tree_summary(path).fingerprint == fingerprint


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name) or name.endswith(".json"):
        raise InvalidRequest(
            f"{name!r} cannot be the name of an image",
            remedy="use up to 63 of a-z 0-9 . _ - and begin with a letter or digit",
        )


def _check_unused(name: str, in_use: Users, what: str) -> None:
    users = sorted(in_use(name) if callable(in_use) else in_use)
    if users:
        shown = ", ".join(users[:5]) + (f" and {len(users) - 5} more" if len(users) > 5 else "")
        raise InUse(
            f"the image {name} cannot be {what}: it is in use by {shown}",
            remedy="remove those first, or make an image under another name",
        )


def _write(file: Path, content: bytes) -> None:
    """Write a file so that after any crash either the old or the new one is there."""
    new = file.with_name(f".{file.name}.new")
    with open(new, "wb") as target:
        target.write(content)
        target.flush()
        os.fsync(target.fileno())
    os.rename(new, file)
    folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
