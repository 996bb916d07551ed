"""A checkpoint out of an archive or a store: unpacked in staging, compared with its manifest, ready to be published.

What is unpacked here is rubbish after a crash (`Pool.sweep`), and of a failure nothing is left. An image that is on this
host already, under whatever name, is not unpacked again. What Crab adds to an image is made by this Crab if the archive
has the same version of it, so an archive can never put other files in its place; that of another version gets a name made
of its content.
"""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import msgspec
from blake3 import blake3

from crab.checkpoint import archive, unpacking
from crab.checkpoint.archive import RULES, Header
from crab.checkpoint.archive_file import opened
from crab.checkpoint.archive_reader import Reader, check
from crab.checkpoint.ground import Ground
from crab.checkpoint.manifest import Manifest
from crab.checkpoint.pax import Member, refused
from crab.checkpoint.unpacking import Unpacking
from crab.errors import Damaged, Incompatible, NoSpace
from crab.host import btrfs
from crab.model import Image
from crab.sandbox import runtime
from crab.sandbox.images import ImageStore, UnpackLimits
from crab.store.local import Staging

_PER_ENTRY = 1 << 10
"""Bytes that a file takes beside its content, about."""

Accept = Callable[[Header, Manifest], None]
"""Raises if the archive is not wanted, before anything is unpacked."""


class Unpacked(msgspec.Struct, kw_only=True):
    """A whole archive in staging, every byte of it checked."""

    header: Header
    manifest: Manifest
    """As it was exported: the ids, the name of the image and that of the ground are those of there."""
    staging: Staging
    """The checkpoint, all but its manifest."""
    known: Image | None
    """The image, if it was here before."""
    image: Path
    """The image's content: that of `known`, or a new subvolume in staging."""
    ground: str
    """Name of what the sandbox will stand on."""
    made: tuple[Path, Path] | None
    """That and its blank layers, if they are not in the pool yet."""


class Source(Protocol):
    """Where members come from: an archive, a store. Checked as far as that can be without them."""

    header: Header
    manifest: Manifest

    def members(self) -> Iterator[tuple[bytes, Member, Content]]:
        """Section, member and content of everything, in the order of an archive; all of it was compared with its digests
        when the end is reached."""
        ...


class Content(unpacking.Content, Protocol):
    """The content of one member."""

    def skip(self) -> None:
        """Nobody needs the rest of it."""
        ...

    def digest(self) -> str:
        """BLAKE3 of the whole content, hexadecimal. Called after it was read or skipped."""
        ...


@contextlib.contextmanager
def unpacked(
    path: Path, ground: Ground, images: ImageStore, identity: str, limits: UnpackLimits, accept: Accept
) -> Iterator[Unpacked]:
    """The archive at `path`, unpacked for the length of the block; see `unpacked_from`."""
    with opened(path) as stream, contextlib.closing(Reader(stream, limits)) as reader:
        with unpacked_from(reader, str(path), ground, images, identity, accept) as found:
            yield found


@contextlib.contextmanager
def unpacked_from(
    source: Source, place: str, ground: Ground, images: ImageStore, identity: str, accept: Accept
) -> Iterator[Unpacked]:
    """A checkpoint from anywhere, unpacked for the length of the block; what the block does not move away is removed.

    `identity` will be the checkpoint's id. Raises `ArchiveRefused`, `Damaged`, `Incompatible`, `NoSpace`, `NotFound`,
    `InvalidRequest`, or what `accept` raises.
    """
    pool = ground.pool
    scratch = pool.staging / f"import-{uuid.uuid4().hex[:12]}"
    with contextlib.ExitStack() as stack:
        try:
            check(source.header, source.manifest)
            accept(source.header, source.manifest)
            with btrfs.checked(pool.root):
                staging = stack.enter_context(ground.store.staging(identity))
                stack.callback(pool.discard, scratch)
                scratch.mkdir(mode=0o700)
                with contextlib.closing(_Unpacker(ground, images, source, staging, scratch)) as unpacker:
                    found = unpacker.run()
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            raise Damaged(f"the disk failed while {place} was read: {error}", remedy="see dmesg") from error
        yield found


class _Unpacker:
    """Puts members where they belong, one tree after the other."""

    def __init__(self, ground: Ground, images: ImageStore, source: Source, staging: Staging, scratch: Path) -> None:
        self._pool = ground.pool
        self._source = source
        self._staging = staging
        header = source.header
        self._known = _known_image(images, header)
        self._image = images.path(self._known.name) if self._known else scratch / "image"
        self._own_ground = header.ground == runtime.name_for(header.image.fingerprint)
        """Whether this Crab adds the same files to an image."""
        self._ground = header.ground if self._own_ground else ""
        self._made = (scratch / "ground", scratch / "blank")
        self._new_ground = False
        self._parts = blake3()
        """Of the content of a ground of another version."""
        self._tree: Unpacking | None = None
        self._artefacts = {artefact.name: artefact for artefact in source.manifest.artefacts}

    def close(self) -> None:
        """Let go of what is open."""
        if self._tree is not None:
            self._tree.close()
            self._tree = None

    def run(self) -> Unpacked:
        """Unpack all."""
        header, manifest = self._source.header, self._source.manifest
        needed = sum(size for name, size in header.sizes.items() if name != "image" or self._known is None)
        self._pool.require(needed + header.entries * _PER_ENTRY, "the archive")
        _require_room(self._staging.process.parent, header.sizes.get("process", 0))
        tops = [b"image"] if "image" in header.sizes else []
        tops += [b"ground/" + name.encode() for name in runtime.OWN]
        tops += [b"files/" + name.encode() for name in archive.layers(manifest)]
        tops += [b"process"] if "process" in header.sizes else []
        top = b""
        for section, member, content in self._source.members():
            if not top or not member.name.startswith(top + b"/"):
                self._end_tree()
                if not tops or member.name != tops[0]:
                    raise refused(f"{os.fsdecode(member.name[:200])!r} is not where it should be")
                top = tops.pop(0)
                self._begin_tree(section, top)
            self._add(section, member.name[len(top) + 1 :], member, content, top)
        self._end_tree()
        if tops or self._artefacts:
            raise refused(f"parts of it are missing ({len(tops)} folders, {len(self._artefacts)} process images)")
        btrfs.set_read_only(self._staging.files, True)
        return Unpacked(
            header=header,
            manifest=manifest,
            staging=self._staging,
            known=self._known,
            image=self._image,
            ground=self._ground,
            made=self._made if self._new_ground else None,
        )

    # ---- trees

    def _begin_tree(self, section: bytes, top: bytes) -> None:
        """Make the folder that the next tree grows in; none if it is here already."""
        name = os.fsdecode(top.partition(b"/")[2])
        match section:
            case b"image" if self._known is not None:
                return
            case b"image":
                root = self._image
                btrfs.create(root)
            case b"ground" if self._own_ground:
                return
            case b"ground":
                if not self._made[0].exists():
                    btrfs.snapshot(self._image, self._made[0], read_only=False)
                    runtime.strip(self._made[0])
                root = self._made[0] / name
                root.mkdir()
            case b"files":
                if not self._staging.files.exists():
                    self._make_ground()
                root = self._staging.files / name
                if name != "u":
                    root.mkdir(parents=True)
                    (root.parent / "k").mkdir()
            case _:
                root = self._staging.process
                root.mkdir()
        self._tree = Unpacking(root, RULES[section])

    def _end_tree(self) -> None:
        if self._tree is None:
            return
        self._tree.finish()
        self.close()

    def _add(self, section: bytes, path: bytes, member: Member, content: Content, top: bytes) -> None:
        target = b""
        if member.kind == "hard":
            if not member.target.startswith(top + b"/"):
                raise refused(f"{os.fsdecode(member.name[:200])!r} is another name of a file elsewhere")
            target = member.target[len(top) + 1 :]
        if section == b"process" and (member.real_size is not None or member.kind != ("file" if path else "folder")):
            raise refused(f"{os.fsdecode(member.name[:200])!r} is no process image")
        if self._tree is None:  # it is here already, but what must not be is not passed over in silence
            RULES[section].check(member)
        else:
            with btrfs.checked(self._staging.process) if section == b"process" else contextlib.nullcontext():
                self._tree.add(path, member, content, target)
        if member.kind == "file":
            content.skip()
        if section == b"process" and path:
            artefact = self._artefacts.pop(os.fsdecode(path), None)
            if artefact is None or (artefact.size, artefact.digest) != (member.size, f"blake3:{content.digest()}"):
                raise Damaged(
                    f"the archive is damaged: the process image {os.fsdecode(path[:200])!r} is not what its manifest states",
                    remedy="copy the archive again, or export it again",
                )
        if section == b"ground" and not self._own_ground:
            what = (member.name, member.kind, member.mode, member.uid, member.gid, member.target, member.device)
            self._parts.update(msgspec.msgpack.encode((*what, member.xattrs, content.digest())))

    # ---- what the layers stand on

    def _make_ground(self) -> None:
        """Have the ground and its blank layers, and begin the writable layers as a snapshot of those."""
        ground, empty = self._made
        if not self._own_ground:
            fingerprint = self._source.header.image.fingerprint
            self._ground = runtime.name_of(fingerprint, self._parts.hexdigest()[:12])
        if (self._pool.runtime / self._ground).is_dir():
            empty = runtime.blank(self._pool, self._ground)
        else:
            self._new_ground = True
            if self._own_ground:
                runtime.lay(self._image, ground)
            runtime.clear(ground, empty)
        btrfs.snapshot(empty, self._staging.files, read_only=False)


def _require_room(folder: Path, size: int) -> None:
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    if free < size:
        raise NoSpace(
            f"the file system of {folder} has {free >> 20} MiB left, the process images take {size >> 20} MiB",
            remedy="make room there, or remove checkpoints that are no longer needed",
        )


def _known_image(images: ImageStore, header: Header) -> Image | None:
    """The image of that fingerprint on this host, one of the same name first. Raises `Incompatible` if there is none and
    the archive has none either."""
    known = [image for image in images.list() if image.fingerprint == header.image.fingerprint]
    if not known and "image" not in header.sizes:
        raise Incompatible(
            f"the checkpoint was made on the image {header.image.name} ({header.image.fingerprint}), which is neither in "
            "the archive nor on this host",
            remedy="add the same image here, or export the checkpoint together with its image",
        )
    return next((image for image in known if image.name == header.image.name), known[0] if known else None)
