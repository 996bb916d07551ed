"""Archives read back: checked from the first byte to the last before anything of them can be seen.

An archive is not trusted. Its digests show damage; that it does no harm is shown by what is refused here, in `pax` and in
`trees`: other formats and newer versions, names that lead elsewhere, device nodes, more content than stated or allowed,
words of the manifest that would become paths. Knows nothing of where the members go.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import platform
import re
import tempfile
from collections.abc import Callable, Iterator
from typing import IO, TypeVar

import msgspec
from blake3 import blake3

from crab.checkpoint import archive, pax, refs, trees
from crab.checkpoint import manifest as manifests
from crab.checkpoint.archive import DIGESTS, END, FORMAT, HEADER, MANIFEST, SECTIONS, VERSION, End, Header
from crab.checkpoint.manifest import Manifest
from crab.checkpoint.pax import Member, refused
from crab.errors import ArchiveRefused, CrabError, Damaged, Incompatible, InvalidRequest
from crab.host.zstd import zstd
from crab.model import Struct
from crab.sandbox.images import UnpackLimits
from crab.sandbox.incarnation import EXEC_PREFIX

S = TypeVar("S", bound=Struct)
_TEXT_LIMITS = {HEADER: 1 << 20, MANIFEST: 64 << 20, END: 1 << 16}
_PER_MEMBER = 64 << 10
"""Bytes of an archive that a member may take beside its content, on average: long paths, attributes."""
_TRAILER_LIMIT = 1 << 20
_LARGEST = 2**63 - 1
_AGAIN = "copy the archive again, or export it again"
_GROUP = re.compile(re.escape(EXEC_PREFIX) + r"[0-9]{1,9}")
_ARTEFACT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}")
_FINGERPRINT = re.compile(r"blake3:[0-9a-f]{64}")


# ---------------------------------------------------------------- the stream


class Reader:
    """An archive on its way in: counts and digests every byte, and knows the order that members come in."""

    def __init__(self, stream: IO[bytes], limits: UnpackLimits) -> None:
        self._stream = stream
        self._block = b""
        """What was read last; `_at` and `_digested` are how far it was taken and digested."""
        self._at = self._digested = 0
        self._digest = blake3()
        self._length = 0
        self._most = sum(_TEXT_LIMITS.values())
        self._members = 0
        self._list: IO[bytes] = tempfile.SpooledTemporaryFile(8 << 20)  # noqa: SIM115  closed by `close`
        self._content: Content | None = None
        self._broken: tuple[type[BaseException], ...] = (EOFError,)
        with contextlib.suppress(CrabError):
            self._broken = (EOFError, zstd().ZstdError)
        self.header = self._header()
        self._most += check_size(self.header, limits) + self.header.entries * _PER_MEMBER
        data = self._text(MANIFEST)
        try:
            self.manifest = manifests.decode(data)
        except Damaged as error:
            raise refused(error.message) from error

    def close(self) -> None:
        """Let go of what was noted."""
        self._list.close()

    # ---- bytes

    def _take(self, size: int) -> bytes:
        """Exactly so many bytes."""
        data = self._block[self._at : self._at + size]
        self._at += len(data)
        if len(data) < size:
            parts, missing = [data], size - len(data)
            while missing:
                self._digest_block()
                self._block, self._at, self._digested = self._read(), 0, 0
                if not self._block:
                    raise refused("it ends in the middle")
                parts.append(self._block[:missing])
                self._at = len(parts[-1])
                missing -= self._at
            data = b"".join(parts)
        self._length += size
        if self._length > self._most:
            raise ArchiveRefused(
                f"the archive has more than {self._most} bytes", remedy="if that is meant, allow a larger size"
            )
        return data

    def _digest_block(self) -> None:
        """Bring the digest up to what was taken."""
        self._digest.update(self._block[self._digested : self._at])
        self._digested = self._at

    def _read(self) -> bytes:
        try:
            return self._stream.read(trees.PIECE) or b""
        except self._broken as error:
            raise refused(f"it is cut short or cannot be decompressed ({error})") from error

    def _next(self) -> Member:
        if self._content is not None:
            self._content.skip()
            self._content = None
        member = pax.decode(self._take)
        if member is None:
            raise refused("it ends without its last member")
        self._content = Content(self._take, member.size)
        return member

    def _listed(self, member: Member, content: Content) -> None:
        self._members += 1
        if member.kind == "file":
            self._list.write(archive.listed(member.name, content.digest()))

    # ---- the small members

    def _text(self, name: bytes) -> bytes:
        member = self._next()
        assert self._content is not None
        if member.name != name or member.kind != "file" or member.size > _TEXT_LIMITS[name]:
            raise refused(f"{name.decode()} is not where it should be")
        data = self._content.read(member.size)
        self._listed(member, self._content)
        return data

    def _header(self) -> Header:
        data = self._text(HEADER)
        try:
            known = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
            kind = msgspec.json.decode(known.get("format", msgspec.Raw(b"null")))
            version = msgspec.json.decode(known.get("version", msgspec.Raw(b"null")))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise refused(f"its first member cannot be read: {error}") from error
        if kind != FORMAT or not isinstance(version, int) or version < 1:
            raise refused("its first member is of something else")
        if version > VERSION:
            raise Incompatible(
                f"the archive has version {version} of the format, this Crab reads up to {VERSION}",
                remedy="upgrade Crab",
            )
        header = _decoded(data, Header, "its first member")
        check_header(header)
        return header

    # ---- the large ones

    def members(self) -> Iterator[tuple[bytes, Member, Content]]:
        """Section, member and content of everything up to the digests. Raises as soon as more comes than was stated."""
        tally = Tally(self.header)
        while True:
            member = self._next()
            content = self._content
            assert content is not None
            if member.name == DIGESTS:
                break
            yield tally.take(member), member, content
            content.skip()
            self._listed(member, content)
        tally.end()
        self._check_digests(member, content)

    def _check_digests(self, member: Member, content: Content) -> None:
        self._list.seek(0)
        for line in self._list:
            if content.read(len(line)) != line:
                name = os.fsdecode(line.strip().partition(b"  ")[2]).encode(errors="backslashreplace").decode()
                raise Damaged(f"the archive is damaged: {name} is not what was written", remedy=_AGAIN)
        if member.kind != "file" or content.read(1):
            raise refused("the list of digests is longer than it should be")
        content.skip()
        self._members += 1
        # of the bytes before the last member, so before its header is taken
        self._digest_block()
        length, digest = self._length, f"blake3:{self._digest.hexdigest()}"
        end = _decoded(self._text(END), End, "its last member")
        if (end.members, end.length, end.digest) != (self._members - 1, length, digest):
            raise Damaged("the archive is damaged: its bytes are not those that were written", remedy=_AGAIN)
        self._check_end()

    def _check_end(self) -> None:
        assert self._content is not None
        self._content.skip()
        rest = 0
        if pax.decode(self._take) is not None:
            raise refused("it goes on after its last member")
        data = self._block[self._at :]
        while data:
            rest += len(data)
            if any(data) or rest > _TRAILER_LIMIT:
                raise refused("it goes on after its last member")
            data = self._read()
        if not rest:
            raise refused("it ends in the middle")


class Content:
    """The content of one member, and its digest."""

    def __init__(self, take: Callable[[int], bytes], size: int) -> None:
        self._take = take
        self._size = size
        self._left = size
        self._hasher = blake3()
        self._padded = False

    def read(self, size: int, /) -> bytes:
        """See `trees.Content`."""
        size = min(size, self._left)
        data = self._take(size) if size else b""
        self._left -= size
        self._hasher.update(data)
        return data

    def skip(self) -> None:
        """Read what is left, and what fills up the last block."""
        while self._left:
            self.read(trees.PIECE)
        if not self._padded:
            self._padded = True
            if any(self._take(pax.padding(self._size))):
                raise refused("there is something between two members")

    def digest(self) -> str:
        """Of all that was read."""
        return self._hasher.hexdigest()


class Tally:
    """Counts what comes, against what was stated."""

    def __init__(self, header: Header) -> None:
        self._header = header
        self._sizes = dict.fromkeys(header.sizes, 0)
        self._entries = self._section = 0

    def take(self, member: Member) -> bytes:
        """The section of the next member. Raises `ArchiveRefused` if it must not come now, or is more than was stated."""
        name = member.name.partition(b"/")[0]
        section = name.decode(errors="replace")
        if name not in SECTIONS[self._section :] or section not in self._sizes:
            raise refused(f"{os.fsdecode(member.name[:200])!r} is not where it should be")
        self._section = SECTIONS.index(name)
        self._entries += 1
        self._sizes[section] += member.size
        if self._entries > self._header.entries or self._sizes[section] > self._header.sizes[section]:
            raise refused("it contains more than it states")
        return name

    def end(self) -> None:
        """All came. Raises `ArchiveRefused` if something is missing."""
        if self._entries != self._header.entries or self._sizes != self._header.sizes:
            raise refused("it contains less than it states")


def _decoded(data: bytes, kind: type[S], what: str) -> S:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise refused(f"{what} cannot be read: {error}") from error


# ---------------------------------------------------------------- what the manifest says


def check_header(header: Header) -> None:
    """Raise `ArchiveRefused` for a header that no Crab writes."""
    if not header.sizes.keys() <= {name.decode() for name in SECTIONS} or min(
        0, header.entries, *header.sizes.values(), header.image.size
    ):
        raise refused("its first member states impossible sizes")
    if not _FINGERPRINT.fullmatch(header.image.fingerprint):
        raise refused("its first member states no fingerprint of an image")


def check_size(header: Header, limits: UnpackLimits) -> int:
    """How many bytes it unpacks to. Raises `ArchiveRefused` if that is more than is allowed."""
    size = sum(header.sizes.values())
    if "image" in header.sizes:
        # its fingerprint is made of every byte, holes too
        size = max(size, header.image.size)
    if size > limits.size or header.entries > limits.entries:
        raise ArchiveRefused(
            f"the archive unpacks to {size} bytes in {header.entries} files; {limits.size} bytes in "
            f"{limits.entries} files are allowed",
            remedy="if that is meant, allow a larger size (--limit)",
        )
    return size


def check(header: Header, manifest: Manifest) -> None:
    """Raise `Incompatible` for another architecture, and `ArchiveRefused` for words that no Crab writes: some become names
    of folders, or are shown to users."""
    for made in (header.architecture, manifest.host.architecture):
        if made != platform.machine():
            raise Incompatible(
                f"the archive was made on {made}, this host is {platform.machine()}",
                remedy="import it on a host of that architecture",
                made=made,
                here=platform.machine(),
            )
    checkpoint = manifest.checkpoint
    try:
        refs.check_name(manifest.sandbox_name)
        refs.check_label(checkpoint.label)
    except InvalidRequest as error:
        raise refused(error.message) from error
    names = [artefact.name for artefact in manifest.artefacts]
    if not all(_GROUP.fullmatch(name) for name in manifest.groups):
        raise refused("its manifest has impossible names of cgroups")
    if len(set(names)) != len(names) or not all(_ARTEFACT.fullmatch(name) for name in names):
        raise refused("its manifest has impossible names of process images")
    try:
        for address in manifest.addresses:
            ipaddress.IPv4Address(address)
    except ValueError as error:
        raise refused("its manifest has impossible addresses") from error
    if not 0 <= checkpoint.turn <= _LARGEST or not 0 <= checkpoint.created < 1e12:
        raise refused("its manifest has impossible numbers")
    if checkpoint.image_fingerprint != header.image.fingerprint or manifest.runtime != header.ground:
        raise refused("its first member is not that of its manifest")
    if (checkpoint.processes_from is None) != ("process" not in header.sizes):
        raise refused("its manifest and its first member differ about processes")
    if not {"files", "ground"} <= header.sizes.keys():
        raise refused("parts of it are missing")
