"""The format of archives: what is written can be read by others and by us, and nothing else is read."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import platform
import random
import shutil
import stat
import struct
import subprocess
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from crab.checkpoint import archive, pax, trees
from crab.checkpoint import manifest as manifests
from crab.checkpoint.archive import Header, Writer
from crab.checkpoint.archive_file import opened
from crab.checkpoint.archive_reader import Reader, check
from crab.checkpoint.manifest import Manifest
from crab.checkpoint.pax import Member
from crab.checkpoint.trees import Rule
from crab.checkpoint.unpacking import Unpacking
from crab.errors import AlreadyExists, ArchiveRefused, Damaged, Incompatible, InvalidRequest, NoSpace, NotFound
from crab.host.fingerprint import Entry, walk
from crab.model import Artefact, Checkpoint, HostPrint, Image, SandboxSpec
from crab.sandbox.images import ImageConfig, UnpackLimits

root = pytest.mark.skipif(os.geteuid() != 0, reason="owners, devices and trusted attributes need root")
FINGERPRINT = "blake3:" + "1" * 64


# ---------------------------------------------------------------- members

names = st.lists(
    st.binary(min_size=1, max_size=255).filter(lambda n: not {0, 47} & set(n) and n not in (b".", b"..")),
    min_size=1,
    max_size=20,
).map(b"/".join)
ids = st.integers(0, 2**32 - 2)
times = st.integers(-(2**62) * 10**9, 2**62 * 10**9)
xattrs = st.dictionaries(
    st.binary(min_size=1, max_size=50).filter(lambda n: 0 not in n), st.binary(max_size=200), max_size=3
)


@st.composite
def members(draw: st.DrawFn) -> Member:
    kind = draw(st.sampled_from(["file", "folder", "link", "hard", "char", "fifo", "socket"]))
    sparse = kind == "file" and draw(st.booleans())
    target = b""
    if kind == "link":
        target = draw(st.binary(min_size=1, max_size=4095).filter(lambda t: 0 not in t))
    if kind == "hard":
        target = draw(names)
    return Member(
        name=draw(names),
        kind=kind,  # type: ignore[arg-type]
        mode=draw(st.integers(0, 0o7777)),
        uid=draw(ids),
        gid=draw(ids),
        mtime=draw(times),
        atime=draw(times),
        size=draw(st.integers(0, 2**50)) if kind == "file" else 0,
        target=target,
        device=(draw(st.integers(0, 4095)), draw(st.integers(0, 2**20))) if kind == "char" else (0, 0),
        xattrs=tuple(draw(xattrs).items()),
        real_size=draw(st.integers(0, 2**60)) if sparse else None,
    )


def read(data: bytes) -> Member | None:
    stream = io.BytesIO(data)
    member = pax.decode(stream.read)
    assert member is None or not stream.read(1)
    return member


@given(members())
@settings(max_examples=300, deadline=None)
def test_every_member_comes_back_as_it_was(member: Member) -> None:
    found = read(pax.encode(member))
    assert found is not None
    if member.atime == member.mtime:
        member.atime = None
    assert found == member


@given(st.binary(min_size=512, max_size=2048), st.booleans())
@settings(max_examples=300, deadline=None)
def test_any_other_bytes_are_refused(data: bytes, extended: bool) -> None:
    if extended:
        data = pax.encode(Member(b"x" * 200, "file"))[:512] + data
    stream = io.BytesIO(data + bytes(8192))
    with contextlib.suppress(ArchiveRefused):
        assert pax.decode(stream.read) is None


@given(members(), st.data())
@settings(max_examples=200, deadline=None)
def test_a_flipped_bit_is_found_or_harmless(member: Member, data: st.DataObject) -> None:
    """Whatever is read of a damaged header, it is never something dangerous, and nothing but `ArchiveRefused` is raised."""
    block = bytearray(pax.encode(member))
    place = data.draw(st.integers(0, len(block) - 1))
    block[place] ^= 1 << data.draw(st.integers(0, 7))
    with contextlib.suppress(ArchiveRefused):
        found = pax.decode(io.BytesIO(bytes(block) + bytes(pax.EXTENDED_LIMIT)).read)
        assert found is None or pax.check_path(found.name)


@given(st.lists(members().filter(lambda m: m.size < 2000 and m.real_size is None), max_size=8))
@settings(max_examples=60, deadline=None)
def test_tarfile_reads_the_same(found: list[Member]) -> None:
    stream = io.BytesIO()
    for member in found:
        stream.write(pax.encode(member) + b"x" * member.size + bytes(pax.padding(member.size)))
    stream.write(bytes(1024))
    stream.seek(0)
    with tarfile.open(fileobj=stream, mode="r:", encoding="utf-8", errors="surrogateescape") as tar:
        read = tar.getmembers()
    assert [os.fsencode(info.name) for info in read] == [member.name for member in found]
    assert [(info.mode, info.uid, info.gid, info.size) for info in read] == [
        (member.mode, member.uid, member.gid, member.size) for member in found
    ]
    for info, member in zip(read, found, strict=True):
        assert info.mtime == pytest.approx(member.mtime / 1e9)
        assert info.isdir() == (member.kind == "folder")
        if member.kind in ("link", "hard"):
            assert os.fsencode(info.linkname) == member.target


@pytest.mark.parametrize(
    "name",
    [b"/etc/passwd", b"../x", b"a/../../x", b"a//b", b"./a", b"a/./b", b"", b"a/" + b"x" * 256, b"a\0b", b".."],
)
def test_names_that_lead_elsewhere_are_refused(name: bytes) -> None:
    with pytest.raises(ArchiveRefused):
        read(pax.encode(Member(name, "file")))
    with pytest.raises(ArchiveRefused):
        read(pax.encode(Member(b"ok", "hard", target=name)))
    with pytest.raises(ArchiveRefused):
        read(pax.encode(Member(name + b"/" + b"y" * 120, "file")))


def test_members_of_other_programs_are_refused() -> None:
    for format_ in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT):
        with pytest.raises(ArchiveRefused):
            read(tarfile.TarInfo("x").tobuf(format_))
    with pytest.raises(ArchiveRefused):
        pax.decode(io.BytesIO(tarfile.TarInfo.create_pax_global_header({"comment": "x"}) + bytes(2048)).read)


def extended(*records: tuple[bytes, bytes], text: bytes = b"", kind: bytes = b"0") -> bytes:
    text = text or b"".join(pax._record(key, value) for key, value in records)
    head = pax._block(Member(b"PaxHeader", "file", size=len(text)), b"PaxHeader", 0, b"x")
    return head + text + bytes(pax.padding(len(text))) + pax._block(Member(b"a", "file"), b"a", 0, kind)


@pytest.mark.parametrize(
    "data",
    [
        extended((b"comment", b"x")),
        extended((b"hdrcharset", b"BINARY")),
        extended((b"GNU.sparse.map", b"0,1")),
        extended((b"GNU.sparse.realsize", b"5")),
        extended((b"GNU.sparse.name", b"x"), (b"GNU.sparse.realsize", b"5")),
        extended((b"mtime", b"1e9")),
        extended((b"mtime", b"")),
        extended((b"size", b"-5")),
        extended((b"size", b"9" * 19)),
        extended((b"uid", b"0x10")),
        extended((b"gid", b"4294967295")),
        extended((b"CRAB.type", b"socket")),
        extended((b"CRAB.type", b"door"), kind=b"6"),
        extended((b"path", b"x"), (b"path", b"y")),
        extended((b"path", b"../x")),
        extended((b"path", b"x/")),
        extended((b"linkpath", b"x")),
        extended((b"size", b"5"), kind=b"6"),
        extended(text=b"11 path=x\n"),
        extended(text=b"10 path=xy\n\n"),
        extended(text=b"99 path=x\n"),
        extended(text=b"8 path=x"),
        extended(text=b"path=x\n"),
        extended(text=b" 9 path=x\n"),
        extended(text=b"5 ab\n"),
        extended((b"path", b"x" * 10), text=b"x" * (pax.EXTENDED_LIMIT + 1)),
        extended((b"path", b"x"), kind=b"x"),
        extended((b"path", b"x"), kind=b"g"),
        *(extended((b"path", b"x"), kind=kind) for kind in (b"4", b"7", b"S", b"L", b"K", b"D", b"\0")),
        pax._block(Member(b"a", "file"), b"a", 0, b"5"),
        pax._block(Member(b"a", "file"), b"a/", 0, b"0"),
        pax._block(Member(b"a", "file"), b"a", 0, b"2"),
        pax._block(Member(b"a", "file", target=b"b"), b"a", 0, b"0"),
        pax._block(Member(b"a", "file", size=1), b"a/", 0, b"5"),
        pax.encode(Member(b"a", "file")).replace(b"ustar\x0000", b"ustar  \0"),
        pax.encode(Member(b"a", "file")).replace(b"0000644", b"0000645"),
        bytes(511) + b"x",
    ],
)
def test_headers_that_are_refused(data: bytes) -> None:
    with pytest.raises(ArchiveRefused) as caught:
        pax.decode(io.BytesIO(data + bytes(2048)).read)
    assert caught.value.remedy


def test_a_path_that_no_archive_can_hold() -> None:
    assert read(pax.encode(Member(b"/".join([b"x" * 255] * 4000), "file"))) is not None
    with pytest.raises(ArchiveRefused, match="do not fit"):
        pax.encode(Member(b"/".join([b"x" * 255] * 5000), "file"))


# ---------------------------------------------------------------- trees


class Tape:
    """Members and contents in memory."""

    def __init__(self) -> None:
        self.members: list[tuple[Member, bytes]] = []

    def add(self, member: Member, content: Iterable[bytes]) -> None:
        data = b"".join(content)
        assert len(data) == member.size
        self.members.append((member, data))

    def unpack(self, target: Path, rule: Rule, top: bytes = b"files/u") -> None:
        target.mkdir()
        with contextlib.closing(Unpacking(target, rule)) as tree:
            for member, data in self.members:
                relative = member.target[len(top) + 1 :] if member.kind == "hard" else b""
                tree.add(member.name[len(top) + 1 :], member, io.BytesIO(data), relative)
            tree.finish()


@pytest.fixture(autouse=True)
def times_of_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave them alone, as the pool does, which is mounted so."""
    real = Entry.open
    monkeypatch.setattr(Entry, "open", lambda self, flags=os.O_NOATIME: real(self, flags))


def look(path: Path) -> list[tuple[object, ...]]:
    """All that a tree is, but inode numbers and the times that nobody can set."""
    inodes: dict[int, bytes] = {}
    found = []
    for entry in walk(path):
        status = entry.stat
        what: tuple[object, ...] = (
            *(entry.path, status.st_mode, status.st_uid, status.st_gid, status.st_rdev, entry.target, entry.xattrs),
            status.st_mtime_ns,  # the time of access changes by looking
        )
        if not stat.S_ISDIR(status.st_mode):
            what = (*what, status.st_size, status.st_nlink, inodes.setdefault(status.st_ino, entry.path))
        found.append((*what, entry.digest() if status.st_size < 1 << 30 else ""))
    return found


def round_trip(source: Path, target: Path, rule: Rule) -> None:
    before = look(source)
    tape = Tape()
    trees.pack(source, b"files/u", rule, tape.add)
    measured = trees.measure(source)
    assert (measured.size, measured.entries) == (sum(m.size for m, _ in tape.members), len(tape.members))
    tape.unpack(target, rule)
    assert look(target) == before


@root
def test_a_tree_with_everything_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    source.mkdir()
    folder = os.open(source, os.O_RDONLY)
    monkeypatch.chdir(source)
    for name in (b"\xff\xfe", b"new\nline", b"back\\slash", b"x" * 255, "ümläut".encode(), b" ", b"-rf", b"PaxHeader"):
        Path(os.fsdecode(name)).write_bytes(name)
    deep = os.dup(folder)
    for number in range(30):  # a path of more than 4096 bytes
        name = b"%03d" % number + b"d" * 200
        os.mkdir(name, dir_fd=deep)
        below = os.open(name, os.O_RDONLY, dir_fd=deep)
        os.close(deep)
        deep = below
    os.close(os.open(b"deep", os.O_CREAT | os.O_WRONLY, dir_fd=deep))
    os.close(deep)
    Path("h").mkdir()
    Path("a").write_text("hard")
    os.link("a", "h/c")
    os.symlink("y" * 300 + "/../..", "link")
    os.link("link", "link2", follow_symlinks=False)
    os.mkfifo("fifo", 0o600)
    os.chown("fifo", 33, 44)
    os.mknod("socket", stat.S_IFSOCK | 0o711)
    for name in ("gone", "h/gone"):
        os.mknod(name, stat.S_IFCHR, 0)
    with open("sparse", "wb") as file:
        file.write(b"a" * 5000)
        file.seek(10 << 20)
        file.write(b"b" * 4096)
        file.truncate(1 << 40)
    with open("hole", "wb") as file:
        file.truncate(7 << 20)
    Path("large").write_bytes(os.urandom(3 << 20))
    Path("suid").touch()
    os.chown("suid", 1000, 2**32 - 2)
    os.chmod("suid", 0o6755)
    os.setxattr("suid", "security.capability", struct.pack("<5I", 0x02000001, 1 << 10, 0, 0, 0))
    os.setxattr("a", "user.x=y%z", b"\0\xff\n=1")
    os.setxattr("h", b"user.\xff\xfe", b"")
    os.setxattr("h", "trusted.overlay.opaque", b"y")
    os.setxattr(".", "trusted.overlay.redirect", b"/somewhere")
    os.utime("large", ns=(123456789, -1500000001))
    os.utime("h", ns=(11, 12))
    os.utime("link", ns=(1, 2), follow_symlinks=False)
    monkeypatch.undo()
    os.close(folder)
    round_trip(source, tmp_path / "target", Rule(marks=True))
    assert (tmp_path / "target" / "sparse").stat().st_blocks < 100


@root
def test_marks_of_another_file_system_stay_behind(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "h").mkdir(parents=True)
    for name in (b"trusted.overlay.origin", b"trusted.overlay.impure", b"trusted.overlay.opaque", b"security.selinux"):
        with contextlib.suppress(OSError):
            os.setxattr(source / "h", name, b"y")
    tape = Tape()
    trees.pack(source, b"files/u", Rule(marks=True), tape.add)
    assert [member.xattrs for member, _ in tape.members] == [(), ((b"trusted.overlay.opaque", b"y"),)]
    with pytest.raises(InvalidRequest, match=r"trusted\.overlay"):
        trees.pack(source, b"image", Rule(strict=True), tape.add)


@pytest.mark.parametrize("seed", range(12))
@root
def test_random_trees(tmp_path: Path, seed: int) -> None:
    source = tmp_path / "source"
    source.mkdir()
    dice = random.Random(seed)
    folders, files = [source], []
    for number in range(60):
        parent = dice.choice(folders)
        path = parent / f"{number}-{'n' * dice.randrange(1, 120)}"
        match dice.randrange(8):
            case 0 | 1:
                path.mkdir(mode=dice.choice((0o700, 0o1777, 0o2755)))
                folders.append(path)
                continue
            case 2:
                path.symlink_to("t" * dice.randrange(1, 200))
            case 3 if files:
                os.link(dice.choice(files), path)
            case 4:
                os.mkfifo(path)
            case 5:
                with open(path, "wb") as file:
                    for _ in range(dice.randrange(4)):
                        file.seek(dice.randrange(1 << 22))
                        file.write(dice.randbytes(dice.randrange(1, 9000)))
                    file.truncate(dice.randrange(1 << 22))
                files.append(path)
            case _:
                path.write_bytes(dice.randbytes(dice.choice((0, 1, 511, 512, 513, 70000))))
                path.chmod(dice.randrange(0o10000))
                files.append(path)
        os.chown(path, dice.randrange(70000), dice.randrange(70000), follow_symlinks=False)
        os.utime(path, ns=(dice.randrange(2**61), dice.randrange(2**61)), follow_symlinks=False)
    round_trip(source, tmp_path / "target", Rule())


def unpack(tmp_path: Path, *found: Member, rule: Rule | None = None) -> None:
    tape = Tape()
    tape.members = [(Member(b"files/u", "folder", mode=0o755), b""), *((member, b"") for member in found)]
    shutil.rmtree(tmp_path / "t", ignore_errors=True)
    tape.unpack(tmp_path / "t", rule or Rule(marks=True))


@root
@pytest.mark.parametrize(
    "found",
    [
        [Member(b"files/u/l", "link", target=b"/etc"), Member(b"files/u/l/x", "file")],
        [Member(b"files/u/l", "link", target=b".."), Member(b"files/u/l/x", "folder")],
        [Member(b"files/u/l", "link", target=b"/etc"), Member(b"files/u/h", "hard", target=b"files/u/l/passwd")],
        [Member(b"files/u/a/b", "file")],
        [Member(b"files/u/a", "file"), Member(b"files/u/a/b", "file")],
        [Member(b"files/u/a", "file"), Member(b"files/u/a", "file")],
        [Member(b"files/u/a", "link", target=b"x"), Member(b"files/u/a", "file")],
        [Member(b"files/u/a", "folder"), Member(b"files/u/a", "folder")],
        [Member(b"files/u/a", "folder"), Member(b"files/u/b", "file"), Member(b"files/u/a/c", "file")],
        [Member(b"files/u/a", "folder"), Member(b"files/u/b", "hard", target=b"files/u/a")],
        [Member(b"files/u/b", "hard", target=b"files/u/missing")],
        [Member(b"files/u", "folder")],
        [Member(b"files/u/d", "char", device=(1, 3))],
        [Member(b"files/u/d", "char", device=(8, 0))],
        [Member(b"files/u/x", "file", xattrs=((b"trusted.overlay.metacopy", b""),))],
        [Member(b"files/u/x", "file", xattrs=((b"trusted.overlay.origin", b"x"),))],
        [Member(b"files/u/x", "file", xattrs=((b"security.selinux", b"x"),))],
        [Member(b"files/u/x", "file", xattrs=((b"security.capability", b"nonsense"),))],
        [Member(b"files/u/x", "link", target=b"y", xattrs=((b"user.x", b"y"),))],
    ],
)
def test_members_that_must_not_be(tmp_path: Path, found: list[Member]) -> None:
    with pytest.raises(ArchiveRefused) as caught:
        unpack(tmp_path, *found)
    assert caught.value.remedy
    assert sorted(os.listdir(tmp_path)) == ["t"]


@root
def test_whiteouts_are_for_writable_layers_only(tmp_path: Path) -> None:
    gone = Member(b"files/u/gone", "char")
    unpack(tmp_path, gone)
    with pytest.raises(ArchiveRefused, match="device"):
        unpack(tmp_path, gone, rule=Rule())
    with pytest.raises(ArchiveRefused, match="attribute"):
        opaque = Member(b"files/u/a", "folder", xattrs=((b"trusted.overlay.opaque", b"y"),))
        unpack(tmp_path, opaque, rule=Rule(strict=True))


@root
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"x\n",
        b"1\n0\n",
        b"2\n0\n5\n3\n5\n",  # they overlap
        b"1\n90\n20\n",  # outside
        b"1\n0\n600\n",  # more than there is
        b"0\nrest",
        b"99999999999\n",
        b"1\n-1\n5\n",
        b"1\n0\n99999999999999999999\n",
    ],
)
def test_maps_of_sparse_files_that_make_no_sense(tmp_path: Path, content: bytes) -> None:
    data = content.ljust(512, b"\0") + b"x" * 10
    tape = Tape()
    tape.members = [
        (Member(b"files/u", "folder"), b""),
        (Member(b"files/u/s", "file", size=len(data), real_size=100), data),
    ]
    with pytest.raises(ArchiveRefused):
        tape.unpack(tmp_path / "t", Rule())


# ---------------------------------------------------------------- whole archives


def manifest(**fields: object) -> Manifest:
    checkpoint = Checkpoint(
        id="c1",
        sandbox="s1",
        turn=3,
        kind="full",
        created=1.0,
        processes_from="c1",
        image="i",
        image_fingerprint=FINGERPRINT,
    )
    digest = f"blake3:{blake3(b'pages').hexdigest()}"
    made = Manifest(
        checkpoint=checkpoint,
        sandbox_name="one",
        spec=SandboxSpec(image="i"),
        runtime="ground-1",
        host=HostPrint(kernel="k", architecture=platform.machine(), cpu="c", criu="4"),
        artefacts=(Artefact(name="pages-1.img", size=5, digest=digest),),
    )
    return msgspec.structs.replace(made, **fields)


def header(**fields: object) -> Header:
    made = Header(
        created=1.0,
        architecture=platform.machine(),
        checkpoint="c1",
        sandbox="one",
        image=Image(name="i", source="dir:/", fingerprint=FINGERPRINT, architecture="any", size=0, created=1.0),
        config=ImageConfig(),
        ground="ground-1",
        sizes={"ground": 0, "files": 3, "process": 5},
        entries=5,
    )
    return msgspec.structs.replace(made, **fields)


def body() -> list[tuple[Member, bytes]]:
    return [
        (Member(b"ground/dev", "folder"), b""),
        (Member(b"files/u", "folder"), b""),
        (Member(b"files/u/a\n\\", "file", size=3), b"abc"),
        (Member(b"process", "folder"), b""),
        (Member(b"process/pages-1.img", "file", size=5), b"pages"),
    ]


def written(
    head: Header | None = None,
    about: Manifest | None = None,
    found: list[tuple[Member, bytes]] | None = None,
    first: bytes | None = None,
) -> bytes:
    stream = io.BytesIO()
    with Writer(stream) as writer:
        writer.text(archive.HEADER, msgspec.json.encode(head or header()) if first is None else first)
        writer.text(archive.MANIFEST, manifests.encode(about or manifest()))
        for member, content in body() if found is None else found:
            writer.add(member, (content,))
    return stream.getvalue()


def consume(data: bytes, limits: UnpackLimits | None = None) -> list[bytes]:
    with contextlib.closing(Reader(io.BytesIO(data), limits or UnpackLimits())) as reader:
        check(reader.header, reader.manifest)
        return [member.name for _, member, _ in reader.members()]


def test_an_archive_is_read_back() -> None:
    assert consume(written()) == [member.name for member, _ in body()]


def test_the_end_says_what_was_written() -> None:
    data = written()
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        infos = tar.getmembers()
        assert [infos[0].name, infos[1].name] == ["crab-archive.json", "manifest.json"]
        assert [infos[-2].name, infos[-1].name] == ["digests.b3", "end.json"]
        digests = tar.extractfile(infos[-2]).read()  # type: ignore[union-attr]
        end = msgspec.json.decode(tar.extractfile(infos[-1]).read())  # type: ignore[union-attr]
    assert f"\\{blake3(b'abc').hexdigest()}  files/u/a\\n\\\\\n".encode() in digests
    assert end["members"] == len(infos) - 1
    assert end["length"] == infos[-1].offset
    assert end["digest"] == f"blake3:{blake3(data[: infos[-1].offset]).hexdigest()}"
    assert len(data) % 10240 == 0


def test_every_truncation_is_found() -> None:
    data = written()
    end = len(data.rstrip(b"\0"))
    for size in {*range(0, end, 97), *range(0, end, 512), end - 1, end}:
        with pytest.raises(ArchiveRefused):
            consume(data[:size])


def test_every_damage_is_found() -> None:
    data = written()
    end = len(data.rstrip(b"\0"))
    dice = random.Random(7)
    for place in {*range(0, end, 61), *(dice.randrange(len(data)) for _ in range(300))}:
        changed = bytearray(data)
        changed[place] ^= 1 << dice.randrange(8)
        with pytest.raises((Damaged, Incompatible)):
            consume(bytes(changed))


def test_damage_names_the_member() -> None:
    data = written()
    with pytest.raises(Damaged, match="pages-1"):
        consume(data.replace(b"pages\0", b"pagex\0"))


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", ArchiveRefused),
        (b"hello", ArchiveRefused),
        (b"x" * 100_000, ArchiveRefused),
        (bytes(100_000), ArchiveRefused),
        (b"\x1f\x8b" + bytes(1000), ArchiveRefused),
        (written(first=b"{}"), ArchiveRefused),
        (written(first=b"[1]"), ArchiveRefused),
        (written(first=b"[" * 100_000), ArchiveRefused),
        (written(first=b'{"format": "crab-archive", "version": 0}'), ArchiveRefused),
        (written(first=b'{"format": "other", "version": 1}'), ArchiveRefused),
        (written(first=b'{"format": "crab-archive", "version": 2, "new": []}'), Incompatible),
        (written(first=b'{"format": "crab-archive", "version": 1}'), ArchiveRefused),
        (written(header(entries=-1)), ArchiveRefused),
        (written(header(sizes={"files": -5})), ArchiveRefused),
        (written(header(sizes={"other": 5})), ArchiveRefused),
        (written(header(entries=6)), ArchiveRefused),
        (written(header(entries=4)), ArchiveRefused),
        (written(header(sizes={"ground": 0, "files": 2, "process": 5})), ArchiveRefused),
        (written(header(sizes={"ground": 0, "files": 4, "process": 5})), ArchiveRefused),
        (written(header(sizes={"ground": 0, "files": 4})), ArchiveRefused),
        (written(header(sizes={"process": 5, "files": 3})), ArchiveRefused),
        (written(header(ground="other")), ArchiveRefused),
        (written(header(architecture="pdp11")), Incompatible),
        (written(about=manifest(schema=99)), Incompatible),
        (written(about=manifest(sandbox_name="../x")), ArchiveRefused),
        (written(about=manifest(groups={"../../x": (1,)})), ArchiveRefused),
        (written(about=manifest(groups={"x1/../..": (1,)})), ArchiveRefused),
        (written(about=manifest(addresses=("no address",))), ArchiveRefused),
        (written(about=manifest(artefacts=(Artefact(name="../x", size=1, digest=""),))), ArchiveRefused),
        (written(about=manifest(artefacts=(Artefact(name="a/b", size=1, digest=""),))), ArchiveRefused),
        (written(about=manifest(artefacts=(Artefact(name="a", size=1, digest=""),) * 2)), ArchiveRefused),
        (written(found=body()[1:]), ArchiveRefused),
        (written(found=[*body()[1:], body()[0]]), ArchiveRefused),
        (written(found=[*body(), (Member(b"etc/passwd", "file"), b"")]), ArchiveRefused),
        (written() + b"more", ArchiveRefused),
        (written() + written(), ArchiveRefused),
    ],
)
def test_what_is_refused(data: bytes, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        consume(data)
    assert type(caught.value) is error
    assert caught.value.remedy  # type: ignore[attr-defined]


def test_more_than_is_allowed_is_refused() -> None:
    with pytest.raises(ArchiveRefused, match="allowed"):
        consume(written(), UnpackLimits(size=7))
    with pytest.raises(ArchiveRefused, match="allowed"):
        consume(written(), UnpackLimits(entries=4))
    image = msgspec.structs.replace(header().image, size=1 << 40)
    with pytest.raises(ArchiveRefused, match="allowed"):  # its holes would be read for the fingerprint
        consume(written(header(image=image, sizes={**header().sizes, "image": 0})))


def test_a_bomb_of_headers_is_refused() -> None:
    """An archive may not be much longer than it states, however little its members contain."""
    long = b"/".join([b"d" * 250] * 300)
    found = [*body()[:3], *((Member(b"files/u/%d/" % number + long, "file"), b"") for number in range(20_000))]
    stream = io.BytesIO()
    with Writer(stream) as writer:
        writer.text(archive.HEADER, msgspec.json.encode(header(entries=10)))
        writer.text(archive.MANIFEST, manifests.encode(manifest()))
        for member, content in found[:200]:
            writer.add(member, (content,))
    with pytest.raises(ArchiveRefused, match="more than"):
        consume(stream.getvalue())


# ---------------------------------------------------------------- files


def parts(tmp_path: Path) -> archive.Parts:
    for name in ("ground/dev", "ground/.crab", "ground/proc", "ground/sys", "files/u", "process", "image"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "files/u/a").write_text("abc")
    (tmp_path / "process/pages-1.img").write_text("pages")
    (tmp_path / "image/b").write_bytes(b"z" * 100_000)
    return archive.Parts(
        manifest=manifest(),
        image=header().image,
        config=ImageConfig(),
        image_folder=tmp_path / "image",
        ground=tmp_path / "ground",
        files=tmp_path / "files",
        process=tmp_path / "process",
    )


@pytest.mark.parametrize("name", ["x.crab", "x.crab.zst"])
def test_written_to_a_file_and_read_back(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    archive.write(parts(tmp_path / "parts"), path)
    assert sorted(os.listdir(tmp_path)) == ["parts", name]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with opened(path) as stream, contextlib.closing(Reader(stream, UnpackLimits())) as reader:
        found = [member.name for _, member, _ in reader.members()]
    assert found[0] == b"image"
    assert found[-1] == b"process/pages-1.img"
    if name.endswith(".zst"):
        assert path.stat().st_size < 50_000
        cut = path.read_bytes()
        for damaged in (cut[:-1], cut[: len(cut) // 2], cut + b"x", cut[:500] + b"\xff" + cut[501:]):
            path.write_bytes(damaged)
            with pytest.raises(ArchiveRefused), opened(path) as stream:
                list(Reader(stream, UnpackLimits()).members())


@pytest.mark.skipif(shutil.which("tar") is None, reason="needs tar")
def test_gnu_tar_lists_it_without_complaint(tmp_path: Path) -> None:
    archive.write(parts(tmp_path / "parts"), tmp_path / "x.crab")
    listed = subprocess.run(["tar", "-tvf", tmp_path / "x.crab"], capture_output=True, text=True, check=True)
    assert listed.stderr == ""
    assert "files/u/a" in listed.stdout


def test_nothing_is_overwritten_and_nothing_left(tmp_path: Path) -> None:
    made = parts(tmp_path / "parts")
    path = tmp_path / "out" / "x.crab"
    with pytest.raises(NotFound):
        archive.write(made, path)
    path.parent.mkdir()
    with pytest.raises(InvalidRequest):
        archive.write(made, Path("x.crab"))
    path.write_text("mine")
    with pytest.raises(AlreadyExists):
        archive.write(made, path)
    assert path.read_text() == "mine"
    path.unlink()
    (tmp_path / "parts/process/pages-1.img").write_text("PAGES")
    with pytest.raises(Damaged, match="pages-1"):
        archive.write(made, path)
    assert os.listdir(path.parent) == []


def test_who_comes_first_keeps_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = parts(tmp_path / "parts")
    path = tmp_path / "out" / "x.crab"
    path.parent.mkdir()
    monkeypatch.setattr(archive, "_check_processes", lambda *_: path.write_text("mine"))
    with pytest.raises(AlreadyExists):
        archive.write(made, path)
    assert path.read_text() == "mine"
    assert os.listdir(path.parent) == ["x.crab"]


def without(monkeypatch: pytest.MonkeyPatch, *, links: bool) -> None:
    """A file system without nameless files, and without links."""
    real_open, real_link = os.open, os.link

    def open_(path: str, flags: int, *arguments: int, **fields: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not here")
        return real_open(path, flags, *arguments, **fields)

    def link(*arguments: str, **fields: int) -> None:
        if not links:
            raise OSError(errno.EPERM, "not here")
        real_link(*arguments, **fields)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "link", link)


@pytest.mark.parametrize("links", [True, False])
def test_file_systems_that_lack_something(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    made = parts(tmp_path / "parts")
    without(monkeypatch, links=links)
    path = tmp_path / "out" / "x.crab"
    path.parent.mkdir()
    archive.write(made, path)
    assert os.listdir(path.parent) == ["x.crab"]
    path.unlink()
    monkeypatch.setattr(archive, "_check_processes", lambda *_: path.write_text("mine"))
    with pytest.raises(AlreadyExists):
        archive.write(made, path)
    assert path.read_text() == "mine"
    assert os.listdir(path.parent) == ["x.crab"]


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = parts(tmp_path / "parts")
    path = tmp_path / "out" / "x.crab"
    path.parent.mkdir()

    def fail(number: int) -> Callable[..., None]:
        def raising(*_: object) -> None:
            raise OSError(number, os.strerror(number))

        return raising

    for number, error in (
        (errno.ENOSPC, NoSpace),
        (errno.EDQUOT, NoSpace),
        (errno.EFBIG, NoSpace),
        (errno.EIO, Damaged),
    ):
        for target in ("pack", "fsync"):
            with monkeypatch.context() as patch:
                patch.setattr(trees if target == "pack" else os, target, fail(number))
                with pytest.raises(error) as caught:
                    archive.write(made, path)
                assert caught.value.remedy
            assert os.listdir(path.parent) == []
    monkeypatch.setattr(os, "statvfs", lambda *_: os.statvfs_result((4096, 4096, 100, 1, 1, 1, 1, 1, 0, 255)))
    with pytest.raises(NoSpace, match="MiB left"):
        archive.write(made, path)


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path, error in (
        (Path("relative"), InvalidRequest),
        (tmp_path / "missing", NotFound),
        (tmp_path, InvalidRequest),
        (tmp_path / "fifo", InvalidRequest),
        (Path("/dev/zero"), InvalidRequest),
    ):
        with pytest.raises(error), opened(path):
            pass
