"""Members of a tar archive as bytes: the part of POSIX pax (IEEE 1003.1, `pax` format) that Crab's archives consist of.

Writes headers that GNU tar and Python read, and reads back only what it writes: one extended header at most per
member, no global ones, no extensions of other programs but GNU's sparse files (version 1.0) and extended attributes
(`SCHILY.xattr.NAME`). Everything else is refused, so there is nothing to interpret. Names are bytes throughout.

Why not `tarfile`: it takes a damaged header for the end of the archive, reads extended headers of any size into memory,
can neither write sparse files nor attributes whose name is not UTF-8, and takes three to four times as long for a member
(90 and 100 µs instead of 20 and 30).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from crab.errors import ArchiveRefused

BLOCK = 512
EXTENDED_LIMIT = 1 << 20
"""Bytes of one extended header: a path and all extended attributes of a file (btrfs bounds those to 64 KiB each)."""

Kind = Literal["file", "folder", "link", "hard", "char", "fifo", "socket"]

_TYPES: dict[Kind, bytes] = {
    "file": b"0",
    "hard": b"1",
    "link": b"2",
    "char": b"3",
    "folder": b"5",
    "fifo": b"6",
    "socket": b"6",  # tar has none; see `_SOCKET`
}
_KINDS: dict[bytes, Kind] = {type_: kind for kind, type_ in _TYPES.items() if kind != "socket"}
_MIDDLE = b"ustar\x0000" + bytes(64)  # magic, version; no names of users and groups
_REST = bytes(167)  # no prefix of the name
_HEADER = re.compile(
    rb"(.{100})([0-7]{7})\0([0-7]{7})\0([0-7]{7})\0([0-7]{11})\0([0-7]{11})\0([0-7]{6})\0 (.)(.{100})"
    + re.escape(_MIDDLE)
    + rb"([0-7]{7})\0([0-7]{7})\0"
    + re.escape(_REST),
    re.DOTALL,
)
_XATTR = b"SCHILY.xattr."
_SOCKET = (b"CRAB.type", b"socket")
_SPARSE = {b"GNU.sparse.major": b"1", b"GNU.sparse.minor": b"0"}
_SPARSE_NAME, _SPARSE_SIZE = b"GNU.sparse.name", b"GNU.sparse.realsize"
_KNOWN = {
    *(b"path", b"linkpath", b"size", b"uid", b"gid", b"mtime", b"atime"),
    *(_SOCKET[0], _SPARSE_NAME, _SPARSE_SIZE, *_SPARSE),
}
_LARGEST = 2**63 - 1
_LARGEST_ID = 2**32 - 2
_NUMBER = re.compile(rb"[0-9]{1,19}")
_TIME = re.compile(rb"(-?)([0-9]{1,19})(?:\.([0-9]{1,9}))?")


@dataclass(slots=True)
class Member:
    """One member of an archive, without its content."""

    name: bytes
    """Relative, without a slash at either end."""
    kind: Kind
    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    mtime: int = 0
    """Nanoseconds since the epoch, as `atime`."""
    atime: int | None = None
    """None: that of `mtime`."""
    size: int = 0
    """Bytes of content that follow the header (of a sparse file: its map and what is no hole)."""
    target: bytes = b""
    """Of a symlink what it says, of a hard link the name of the member that it is another name of."""
    device: tuple[int, int] = (0, 0)
    xattrs: tuple[tuple[bytes, bytes], ...] = ()
    real_size: int | None = None
    """Size of a sparse file; None for all that is not sparse."""


def refused(what: str) -> ArchiveRefused:
    """The error for bytes that are not what this module writes."""
    return ArchiveRefused(
        f"this is no archive of Crab, or it is damaged: {what}", remedy="copy the archive again, or export it again"
    )


def padding(size: int) -> int:
    """Bytes of zero between a content of that size and the next header."""
    return -size % BLOCK


# ---------------------------------------------------------------- writing


def encode(member: Member) -> bytes:
    """The header blocks of a member; its content follows, then `padding`."""
    records: list[tuple[bytes, bytes]] = []
    name = member.name + b"/" if member.kind == "folder" else member.name
    if member.real_size is not None:
        records += [*_SPARSE.items(), (_SPARSE_NAME, name), (_SPARSE_SIZE, b"%d" % member.real_size)]
        name = b"GNUSparseFile/" + name.rpartition(b"/")[2]  # what a program without knowledge of them calls it
    elif len(name) > 100:
        records.append((b"path", name))
    if len(member.target) > 100:
        records.append((b"linkpath", member.target))
    for key, value, largest in ((b"uid", member.uid, 8**7), (b"gid", member.gid, 8**7), (b"size", member.size, 8**11)):
        if value >= largest:
            records.append((key, b"%d" % value))
    seconds, nanoseconds = divmod(member.mtime, 10**9)
    if nanoseconds or not 0 <= seconds < 8**11:
        records.append((b"mtime", _time(member.mtime)))
        seconds = min(max(seconds, 0), 8**11 - 1)
    if member.atime is not None and member.atime != member.mtime:
        records.append((b"atime", _time(member.atime)))
    if member.kind == "socket":
        records.append(_SOCKET)
    records += [(_XATTR + _quote(key), value) for key, value in member.xattrs]
    head = b""
    if records:
        body = b"".join(_record(key, value) for key, value in records)
        if len(body) > EXTENDED_LIMIT:
            raise ArchiveRefused(
                f"the path and attributes of {member.name[:100]!r}… do not fit into an archive",
                remedy="shorten the path, or remove attributes, in the sandbox",
            )
        head = _block(Member(b"PaxHeader", "file", size=len(body)), b"PaxHeader", 0, b"x")
        head += body + bytes(padding(len(body)))
    return head + _block(member, name, seconds, _TYPES[member.kind])


def _block(member: Member, name: bytes, seconds: int, type_: bytes) -> bytes:
    uid, gid = (value if value < 8**7 else 0 for value in (member.uid, member.gid))
    size = member.size if member.size < 8**11 else 0
    front = name[:100].ljust(100, b"\0") + b"%07o\0%07o\0%07o\0%011o\0%011o\0" % (member.mode, uid, gid, size, seconds)
    back = type_ + member.target[:100].ljust(100, b"\0") + _MIDDLE + b"%07o\0%07o\0" % member.device + _REST
    return front + b"%06o\0 " % (sum(front) + sum(back) + 8 * 32) + back


def _record(key: bytes, value: bytes) -> bytes:
    """LENGTH KEY=VALUE: the length counts its own digits."""
    rest = len(key) + len(value) + 3
    length = rest + len(str(rest))
    if len(str(length)) != len(str(rest)):
        length += 1
    return b"%d %s=%s\n" % (length, key, value)


def _time(value: int) -> bytes:
    seconds, nanoseconds = divmod(abs(value), 10**9)
    text = b"%d.%09d" % (seconds, nanoseconds)
    return (b"-" if value < 0 else b"") + text.rstrip(b"0").rstrip(b".")


def _quote(name: bytes) -> bytes:
    """The name of an attribute as a key: GNU tar's way with the sign that ends a key."""
    return name.replace(b"%", b"%25").replace(b"=", b"%3D")


def _unquote(key: bytes) -> bytes:
    return key.replace(b"%3D", b"=").replace(b"%25", b"%")


# ---------------------------------------------------------------- reading


def decode(take: Callable[[int], bytes]) -> Member | None:
    """The next member; None at the first of the two blocks of zeros that end an archive.

    `take` returns exactly so many bytes or raises. Raises `ArchiveRefused` for everything that `encode` does not write.
    """
    records: dict[bytes, bytes] = {}
    block = take(BLOCK)
    if not any(block):
        return None
    if block[156:157] == b"x":
        size = _parse(block).size
        if size > EXTENDED_LIMIT:
            raise refused(f"an extended header has {size} bytes")
        records = _records(take(size + padding(size))[:size])
        block = take(BLOCK)
    member = _parse(block)
    kind = _KINDS.get(block[156:157])
    if kind is None:
        raise refused(f"a member has the unknown type {block[156:157]!r}")
    member.kind = kind
    _apply(member, records)
    if (kind == "folder") != member.name.endswith(b"/"):
        raise refused(f"the name {_shown(member.name)} does not fit its type")
    member.name = check_path(member.name.removesuffix(b"/"))
    if kind not in ("file",) and member.size:
        raise refused(f"{_shown(member.name)} has content and is no file")
    if kind == "hard":
        check_path(member.target)
    elif b"\0" in member.target or (kind == "link") != bool(member.target):
        raise refused(f"{_shown(member.name)} has an impossible target")
    return member


def check_path(path: bytes) -> bytes:
    """The path, if it cannot lead out of the folder that it is relative to. Raises `ArchiveRefused`."""
    parts = path.split(b"/")
    if b"\0" in path or any(part in (b"", b".", b"..") or len(part) > 255 for part in parts):
        raise ArchiveRefused(
            f"the archive has a member whose name is not allowed: {_shown(path)}",
            remedy="do not use it: names like that are only made to write outside of the folder it is unpacked in",
        )
    return path


def _shown(name: bytes) -> str:
    return repr(name if len(name) <= 200 else name[:200] + b"...")[1:]


def _parse(block: bytes) -> Member:
    match = _HEADER.fullmatch(block)
    if match is None:
        raise refused("the header of a member is not one")
    name, mode, uid, gid, size, mtime, checksum, _, target, major, minor = match.groups()
    if int(checksum, 8) != sum(block) - sum(block[148:156]) + 8 * 32:
        raise refused("the checksum of a header is wrong")
    return Member(
        name=name.rstrip(b"\0"),
        kind="file",
        mode=int(mode, 8) & 0o7777,
        uid=int(uid, 8),
        gid=int(gid, 8),
        size=int(size, 8),
        mtime=int(mtime, 8) * 10**9,
        target=target.rstrip(b"\0"),
        device=(int(major, 8), int(minor, 8)),
    )


def _records(data: bytes) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    at = 0
    while at < len(data):
        digits, space, _ = data[at : at + 20].partition(b" ")
        length = int(digits) if space and _NUMBER.fullmatch(digits) else 0
        record = data[at : at + length]
        key, sign, value = record[len(digits) + 1 : -1].partition(b"=")
        if length <= len(digits) + 2 or len(record) != length or record[-1:] != b"\n" or not sign:
            raise refused("an extended header cannot be read")
        if key in found or not (key in _KNOWN or key.startswith(_XATTR)):
            raise refused(f"an extended header has the unknown word {_shown(key)}")
        found[key] = value
        at += length
    return found


def _apply(member: Member, records: dict[bytes, bytes]) -> None:
    member.name = records.get(b"path", member.name)
    member.target = records.get(b"linkpath", member.target)
    member.size = _number(records, b"size", member.size)
    member.uid = _number(records, b"uid", member.uid, _LARGEST_ID)
    member.gid = _number(records, b"gid", member.gid, _LARGEST_ID)
    if b"mtime" in records:
        member.mtime = _nanoseconds(records[b"mtime"])
    if b"atime" in records:
        member.atime = _nanoseconds(records[b"atime"])
    if _SOCKET[0] in records:
        if member.kind != "fifo" or records[_SOCKET[0]] != _SOCKET[1]:
            raise refused(f"{_shown(member.name)} has an unknown type")
        member.kind = "socket"
    if _SPARSE_NAME in records:
        if member.kind != "file" or any(records.get(key) != value for key, value in _SPARSE.items()):
            raise refused(f"{_shown(member.name)} is sparse in an unknown way")
        member.name = records[_SPARSE_NAME]
        member.real_size = _number(records, _SPARSE_SIZE, -1)
        if member.real_size < 0:
            raise refused(f"{_shown(member.name)} is sparse and has no size")
    elif records.keys() & {*_SPARSE, _SPARSE_SIZE}:
        raise refused(f"{_shown(member.name)} is sparse in an unknown way")
    member.xattrs = tuple(
        (_unquote(key.removeprefix(_XATTR)), value) for key, value in records.items() if key.startswith(_XATTR)
    )


def _number(records: dict[bytes, bytes], key: bytes, otherwise: int, largest: int = _LARGEST) -> int:
    if key not in records:
        return otherwise
    value = int(records[key]) if _NUMBER.fullmatch(records[key]) else -1
    if not 0 <= value <= largest:
        raise refused(f"an extended header has {_shown(records[key])} for a number")
    return value


def _nanoseconds(text: bytes) -> int:
    match = _TIME.fullmatch(text)
    if match is None:
        raise refused(f"an extended header has {_shown(text)} for a time")
    sign, seconds, fraction = match.groups()
    value = int(seconds) * 10**9 + int((fraction or b"").ljust(9, b"0"))
    return -value if sign else value
