"""The local tier: two folders for each checkpoint, published by one rename.

    pool/checkpoints/ID/manifest.json   what it is; written before the rename, with the digests of the rest
    pool/checkpoints/ID/files/          read-only subvolume: the writable layers of the sandbox
    process/ID/                         CRIU's images (kind `full` only), on the state directory's own file system,
    pool/checkpoints/ID/process/        or here, once they were made compact (`checkpoint/compact.py`)

A checkpoint is made in the pool's `staging/` and renamed into `checkpoints/` as the last step, so whatever lies there is
whole; what lies in `staging/` after a crash is rubbish, and so is a folder in `process/` without a checkpoint (law 4), or with
one that has images in the pool.

Why the process images lie outside the pool first: they are written while the sandbox is frozen, need nothing that btrfs has,
and a btrfs on a loop device takes them 1.4 times as long as the file system below it (100 MB: 120 against 82 ms). They
move later, while readers read on: who reads some says so (`images`), and the first ones go when nobody does.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from crab.errors import Damaged, NotFound
from crab.host import btrfs, ext4
from crab.host.fingerprint import file_digest
from crab.host.pool import Pool
from crab.model import Artefact
from crab.store.commits import Commits
from crab.store.growing import Growing

MANIFEST = "manifest.json"
FILES = "files"
PROCESS = "process"
PAGES = "pages-"  # of CRIU: contents of memory, written from the beginning to the end
UNLISTED = ("dump.log", "stats-dump")  # of CRIU: about the dump, not needed to restore


class Staging:
    """The folder of a checkpoint that is being made."""

    def __init__(self, path: Path, process: Path) -> None:
        self.path = path
        self.files = path / FILES
        self.process = process
        self._hashed: dict[str, tuple[int, str]] = {}

    @contextlib.contextmanager
    def hashing(self) -> Iterator[None]:
        """A block in which CRIU writes the process images: those of memory are hashed as they grow.

        For 100 MB a checkpoint is ready 27 of 105 ms earlier; the dump takes 10 ms longer, of some 60.
        """
        with Growing(self.process, PAGES) as growing:
            yield
        self._hashed = growing.digests

    def artefacts(self) -> tuple[Artefact, ...]:
        """Name, size and digest of every process image."""
        if not self.process.is_dir():
            return ()
        found: list[Artefact] = []
        for name in sorted(os.listdir(self.process)):
            if name not in UNLISTED:
                size, (read, digest) = (self.process / name).stat().st_size, self._hashed.get(name, (-1, ""))
                found.append(
                    Artefact(name=name, size=size, digest=digest if read == size else file_digest(self.process / name))
                )
        return tuple(found)


class LocalStore:
    """The checkpoints on one pool."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._folder = pool.checkpoints
        self._process = pool.state_dir / PROCESS
        self._commits = Commits(self._commit)
        self._readers: Counter[Path] = Counter()
        self._lock = threading.Lock()
        self._process.mkdir(mode=0o711, exist_ok=True)
        ext4.spread(self._process)  # CRIU makes its files while a sandbox stands still

    @contextlib.contextmanager
    def staging(self, identity: str) -> Iterator[Staging]:
        """A folder to make a checkpoint in; removed at the end of the block unless it was published."""
        staging = Staging(self._pool.staging / identity, self._process / identity)
        staging.path.mkdir()
        try:
            yield staging
        finally:
            if staging.path.exists():
                self._pool.discard(staging.path)
                shutil.rmtree(staging.process, ignore_errors=True)

    def publish(self, staging: Staging, manifest: bytes) -> Path:
        """Write the manifest and make the checkpoint exist, by one rename. It survives the death of every process from
        then on, and that of the host from the next `commit` on."""
        _write(staging.path / MANIFEST, manifest)
        target = self._folder / staging.path.name
        staging.path.rename(target)
        return target

    def commit(self, identity: str) -> None:
        """Make a published checkpoint (and all before it) survive a crash of the host. Several at once share the work."""
        self._commits.join(identity)

    def _commit(self, identities: Sequence[str]) -> None:
        for folder in (self._process / identity for identity in identities):
            with contextlib.suppress(FileNotFoundError):  # one of files alone, or compact, which is durable
                for path in (*folder.iterdir(), folder):
                    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                    try:
                        os.fsync(fd)
                    finally:
                        os.close(fd)
        btrfs.commit(self._pool.root)

    # ---- process images

    def _images(self, identity: str) -> Path:
        compact = self._folder / identity / PROCESS
        return compact if compact.is_dir() else self._process / identity

    @contextlib.contextmanager
    def images(self, identity: str) -> Iterator[Path]:
        """Folder of a checkpoint's process images (there is none for one of files alone); they stay there for the length of the
        block, unless the checkpoint is removed."""
        with self._lock:
            folder = self._images(identity)
            self._readers[folder] += 1
        try:
            yield folder
        finally:
            with self._lock:
                self._readers[folder] -= 1
                if not self._readers[folder]:
                    del self._readers[folder]

    def scratch(self, name: str) -> Path:
        """A place beside the process images for what has no checkpoint of that name: swept with them."""
        return self._process / name

    def link(self, identity: str, names: Iterable[str], staging: Path) -> Path:
        """Hard links to images of a checkpoint, so that they outlive it, in a new folder that belongs to one of the pool's
        `staging`; the caller removes both. Raises FileNotFoundError."""
        with self.images(identity) as source:
            inside = source.is_relative_to(self._folder)
            linked = staging / PROCESS if inside else self.scratch(staging.name)
            linked.mkdir(mode=source.stat().st_mode & 0o777)
            for name in names:
                os.link(source / name, linked / name)
        return linked

    def inherit(self, old: str, new: str) -> None:
        """Give the images of one checkpoint to another, too. May be done again if it was interrupted."""
        with self.images(old) as source:
            inside = source.is_relative_to(self._folder)
            target = self._folder / new / PROCESS if inside else self._process / new
            target.mkdir(mode=source.stat().st_mode & 0o777, exist_ok=True)
            for name in os.listdir(source):
                with contextlib.suppress(FileExistsError):
                    os.link(source / name, target / name)

    def loose(self) -> list[str]:
        """Ids of checkpoints whose images are not compact (or not only)."""
        return sorted(entry for entry in os.listdir(self._process) if (self._folder / entry / MANIFEST).is_file())

    def is_compact(self, identity: str) -> bool:
        """Whether a checkpoint has images of its own in the pool."""
        return (self._folder / identity / PROCESS).is_dir()

    def adopt(self, identity: str, folder: Path, artefacts: tuple[Artefact, ...]) -> None:
        """Let a copy of a checkpoint's images, which is on disk, stand for them from now on. Raises `Damaged` if it is not
        equal to what was captured, FileNotFoundError if the checkpoint is gone; then nothing has changed."""
        assert artefacts, f"checkpoint {identity} has no images of its own"
        self._check(identity, folder, artefacts)
        with self._lock:
            folder.rename(self._folder / identity / PROCESS)

    def retire(self, identity: str) -> bool:
        """Remove the first images of a checkpoint that has compact ones; False if somebody reads them. Raises OSError."""
        first = self._process / identity
        btrfs.commit(self._pool.root)
        with self._lock:
            if self._readers[first]:
                return False
            gone = self.scratch(f"gone-{identity}")
            with contextlib.suppress(FileNotFoundError):
                first.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
        return True

    def rewrite_manifest(self, identity: str, manifest: bytes) -> None:
        """Replace the manifest of a published checkpoint (its label or proof changed), atomically."""
        path = self.path(identity) / MANIFEST
        new = path.with_suffix(".new")
        with btrfs.checked(path):
            _write(new, manifest)
            new.rename(path)

    def path(self, identity: str) -> Path:
        """Folder of a published checkpoint. Raises `NotFound`."""
        path = self._folder / identity
        if not (path / MANIFEST).is_file():
            raise NotFound(f"there is no checkpoint {identity}", remedy="`crab turns SANDBOX` lists those that exist")
        return path

    def manifest(self, identity: str) -> bytes:
        return (self.path(identity) / MANIFEST).read_bytes()

    def identities(self) -> list[str]:
        """Ids of all published checkpoints."""
        return sorted(entry.name for entry in self._folder.iterdir() if (entry / MANIFEST).is_file())

    def discard(self, identity: str) -> None:
        """Remove a checkpoint: gone at once, its space a little later. The caller knows that nothing builds on it."""
        self._pool.discard(self._folder / identity, wait=False)  # also if its manifest is gone
        shutil.rmtree(self._process / identity, ignore_errors=True)

    def sweep(self) -> None:
        """Remove process images that no checkpoint has, or has twice. Nobody reads any."""
        published = set(self.identities())
        twice = [identity for identity in self.loose() if self.is_compact(identity)]
        if twice:
            btrfs.commit(self._pool.root)
        for folder in self._process.iterdir():
            if folder.name not in published or folder.name in twice:
                shutil.rmtree(folder, ignore_errors=True)

    def check(self, identity: str, artefacts: tuple[Artefact, ...]) -> None:
        """Compare every process image with its recorded size and digest. Raises `Damaged` naming the first that differs.

        The files are checked by btrfs itself, block by block as they are read.
        """
        with self.images(identity) as folder:
            self._check(identity, folder, artefacts)

    def _check(self, identity: str, folder: Path, artefacts: tuple[Artefact, ...]) -> None:
        for artefact in artefacts:
            path = folder / artefact.name
            if not path.is_file():
                raise Damaged(
                    f"checkpoint {identity}: {artefact.name} is missing",
                    remedy="restore another checkpoint (`crab turns`)",
                )
            size = path.stat().st_size
            if size != artefact.size:
                raise Damaged(
                    f"checkpoint {identity}: {artefact.name} has {size} bytes instead of {artefact.size}",
                    remedy="restore another checkpoint (`crab turns`)",
                )
            if file_digest(path) != artefact.digest:
                raise Damaged(
                    f"checkpoint {identity}: {artefact.name} is not what was written",
                    remedy="restore another checkpoint (`crab turns`)",
                )


def _write(path: Path, data: bytes) -> None:
    with open(path, "wb") as f:
        f.write(data)
