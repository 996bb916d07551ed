"""Archives: one checkpoint with all that it stands on, in one file. The format, and how it is written.

A tar file (docs/archive-format.md describes it for users), its members in this order:

    crab-archive.json     what this is: format, version, how much comes (`Header`)
    manifest.json         the checkpoint's manifest; its processes are always in the same archive
    image/…               the image, if wanted
    ground/…              what Crab added to the image: init, devices, mount points (`crab.sandbox.runtime.OWN`)
    files/u/…             the writable layer; files/mN/u/… those of copy-on-write mounts
    process/…             CRIU's images
    digests.b3            digest of the content of every file above, as b3sum writes them
    end.json              digest and length of everything above (`End`)

The end comes last, so an archive that was cut short has none. A reader that knows version N reads all up to N and
refuses what is newer; members and fields are only added with a new version.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO

import msgspec
from blake3 import blake3

from crab import __version__
from crab.checkpoint import archive_file, pax, trees
from crab.checkpoint.manifest import Manifest
from crab.checkpoint.pax import Member
from crab.checkpoint.trees import Rule, Size
from crab.errors import Damaged
from crab.model import Image, Struct
from crab.sandbox import runtime
from crab.sandbox.images import ImageConfig

FORMAT = "crab-archive"
VERSION = 1
HEADER, MANIFEST, DIGESTS, END = b"crab-archive.json", b"manifest.json", b"digests.b3", b"end.json"
SECTIONS = (b"image", b"ground", b"files", b"process")

RULES: dict[bytes, Rule] = {
    b"image": Rule(strict=True),
    b"ground": Rule(devices=frozenset(runtime.DEVICES.values())),
    b"files": Rule(marks=True),
    b"process": Rule(),
}
_BUFFER = 1 << 20
_IN_MEMORY = 8 << 20
_PER_MEMBER = 1 << 10  # header and padding of one member, about
_RECORD = 20 * pax.BLOCK  # tar programs fill up to this


class Header(Struct, kw_only=True):
    """The first member."""

    format: str = FORMAT
    version: int = VERSION
    written_by: str = f"crab {__version__}"
    created: float
    architecture: str
    checkpoint: str
    """Id of the checkpoint where it was exported."""
    sandbox: str
    """Name of the sandbox there."""
    image: Image
    """What the checkpoint was taken on; its content is in the archive if `sizes` has `image`."""
    config: ImageConfig
    ground: str
    """Name of what the sandbox stood on there."""
    sizes: dict[str, int]
    """Bytes of content in each section."""
    entries: int
    """Members in all sections together."""


class End(Struct, kw_only=True):
    """The last member."""

    members: int
    """All members before this one."""
    length: int
    """Bytes of the (uncompressed) archive before this member."""
    digest: str
    """`blake3:…` of those bytes."""


class Parts(msgspec.Struct, kw_only=True):
    """Where the parts of a checkpoint are while it is exported; nothing in there may change."""

    manifest: Manifest
    image: Image
    config: ImageConfig
    image_folder: Path | None
    """None: the image is not to be in the archive."""
    ground: Path
    files: Path
    process: Path | None


def layers(manifest: Manifest) -> list[str]:
    """Folders below `files` that hold the writable layers."""
    mounts = enumerate(manifest.spec.mounts)
    return ["u", *(f"m{number}/u" for number, mount in mounts if mount.kind == "copy")]


# ---------------------------------------------------------------- writing


def write(parts: Parts, path: Path) -> Header:
    """Write an archive to `path`, which must not exist. It appears there when it is complete and on the disk.

    Raises `AlreadyExists`, `NoSpace`, `Damaged` (a process image is not what was captured), `NotFound` (no such folder) or
    `InvalidRequest`; then nothing is left.
    """
    archive_file.check_target(path)
    trees_of = tops(parts)
    measured = [(name, trees.measure(root)) for name, root in trees_of]
    header = header_of(parts, measured)
    sizes, entries = header.sizes, header.entries
    compressed = path.name.endswith(".zst")
    if not compressed:
        archive_file.check_room(path, sum(sizes.values()) + entries * _PER_MEMBER)
    try:
        with (
            archive_file.new_file(path) as file,
            archive_file.compressing(file) if compressed else contextlib.nullcontext(file) as out,
        ):
            with Writer(out) as writer:
                writer.text(HEADER, _json(header))
                writer.text(MANIFEST, _json(parts.manifest))
                for name, root in trees_of:
                    trees.pack(root, name, RULES[name.split(b"/")[0]], writer.add)
                _check_processes(parts.manifest, writer.processes)
    except OSError as error:
        raise archive_file.explained(path, error) from error
    return header


def header_of(parts: Parts, measured: Iterable[tuple[bytes, Size]]) -> Header:
    """What is said of a checkpoint whose trees are that large."""
    sizes: dict[str, int] = {}
    entries = 0
    for name, size in measured:
        section = name.split(b"/")[0].decode()
        sizes[section] = sizes.get(section, 0) + size.size
        entries += size.entries
    return Header(
        created=time.time(),
        architecture=parts.manifest.host.architecture,
        checkpoint=parts.manifest.checkpoint.id,
        sandbox=parts.manifest.sandbox_name,
        image=parts.image,
        config=parts.config,
        ground=parts.manifest.runtime,
        sizes=sizes,
        entries=entries,
    )


def tops(parts: Parts) -> list[tuple[bytes, Path]]:
    """Name in the archive and place of every tree."""
    found = [(b"image", parts.image_folder)] if parts.image_folder else []
    found += [(b"ground/" + name.encode(), parts.ground / name) for name in runtime.OWN]
    found += [(b"files/" + name.encode(), parts.files / name) for name in layers(parts.manifest)]
    return [*found, (b"process", parts.process)] if parts.process else found


def _json(value: Struct) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def _check_processes(manifest: Manifest, found: dict[str, str]) -> None:
    for artefact in manifest.artefacts:
        if found.get(artefact.name) != artefact.digest:
            raise Damaged(
                f"checkpoint {manifest.checkpoint.id}: {artefact.name} is not what was written",
                remedy="export another checkpoint (`crab turns`)",
            )


class Writer:
    """The tar stream: keeps count and digests of what goes through, and writes the two members at the end."""

    def __init__(self, out: IO[bytes]) -> None:
        self.processes: dict[str, str] = {}
        """Digests of the process images."""
        self._out = out
        self._buffer = bytearray()
        self._stream = blake3()
        self._length = 0
        self._members = 0
        self._list: IO[bytes] = tempfile.SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115  closed at the end of the block

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._list:
            if kind is None:
                self._finish()

    def text(self, name: bytes, data: bytes) -> None:
        """Add a small file."""
        self.add(Member(name, "file", mtime=int(time.time()) * 10**9, size=len(data)), (data,))

    def add(self, member: Member, content: Iterable[bytes] = ()) -> None:
        """Add a member."""
        self._put(pax.encode(member))
        hasher, size = blake3(), 0
        for block in content:
            hasher.update(block)
            size += len(block)
            self._put(block)
        if size != member.size:
            raise Damaged(f"{os.fsdecode(member.name)} changed while it was read", remedy="try again")
        self._put(bytes(pax.padding(size)))
        self._members += 1
        if member.kind == "file":
            digest = hasher.hexdigest()
            self._list.write(listed(member.name, digest))
            if member.name.startswith(b"process/"):
                self.processes[os.fsdecode(member.name[8:])] = f"blake3:{digest}"

    def _put(self, data: bytes) -> None:
        self._buffer += data
        if len(self._buffer) >= _BUFFER:
            self._flush()

    def _flush(self) -> None:
        self._stream.update(self._buffer)
        self._length += len(self._buffer)
        self._out.write(self._buffer)
        self._buffer = bytearray()

    def _finish(self) -> None:
        size = self._list.tell()
        self._list.seek(0)
        blocks = iter(lambda: self._list.read(_BUFFER), b"")
        self._put(pax.encode(Member(DIGESTS, "file", mtime=int(time.time()) * 10**9, size=size)))
        for block in blocks:
            self._put(block)
        self._put(bytes(pax.padding(size)))
        self._flush()
        end = End(members=self._members + 1, length=self._length, digest=f"blake3:{self._stream.hexdigest()}")
        data = _json(end)
        self._put(pax.encode(Member(END, "file", mtime=int(time.time()) * 10**9, size=len(data))))
        self._put(data + bytes(pax.padding(len(data)) + 2 * pax.BLOCK))
        self._put(bytes(-(self._length + len(self._buffer)) % _RECORD))
        self._flush()


def listed(name: bytes, digest: str) -> bytes:
    """One line of the list of digests, with b3sum's way to write names."""
    if b"\n" in name or b"\\" in name:
        return b"\\%s  %s\n" % (digest.encode(), name.replace(b"\\", b"\\\\").replace(b"\n", b"\\n"))
    return b"%s  %s\n" % (digest.encode(), name)
