"""Checkpoints leave a host in an archive and come to life on another, or nothing of them is left there."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec
import pytest
from e2e.box import Box
from e2e.leaks import clear, left_of
from e2e.roots import lean_root

from crab.checkpoint import archive, trees
from crab.checkpoint import manifest as manifests
from crab.checkpoint.archive_file import opened
from crab.checkpoint.archive_reader import Reader
from crab.checkpoint.manifest import Manifest
from crab.checkpoint.pax import Member
from crab.daemon import archiving
from crab.daemon import requests as ask
from crab.daemon.service import Service
from crab.errors import AlreadyExists, ArchiveRefused, Damaged, Incompatible, InvalidRequest, NoSpace, NotFound
from crab.host import mounts
from crab.host.pool import Pool
from crab.model import Limits, Mount, State
from crab.sandbox import runtime
from crab.sandbox.images import UnpackLimits

pytestmark = [pytest.mark.kernel, pytest.mark.criu, pytest.mark.slow]

WORKLOADS = ("counters", "inotify_watches", "unix_sockets", "many_threads", "named_pipes")

MAKE = r"""
import os, socket, struct, subprocess
os.umask(0); os.mkdir("/root/w"); os.chdir("/root/w")
for n in (b"\xff\xfe", b"new\nline", b"back\\slash", b"x"*255, "\u00fc".encode()):
    open(n, "wb").write(n); os.mkdir(n[:250] + b".d")
d = os.open(".", os.O_RDONLY)
for i in range(30):
    os.mkdir(b"%03d" % i + b"d"*200, dir_fd=d); e = os.open(b"%03d" % i + b"d"*200, os.O_RDONLY, dir_fd=d); os.close(d); d = e
os.close(os.open(b"deep", os.O_CREAT | os.O_WRONLY, dir_fd=d))
open("a", "w").write("hard"); os.link("a", "b"); os.mkdir("h"); os.link("a", "h/c")
os.symlink("x"*200 + "/../..", "l"); os.link("l", "l2", follow_symlinks=False)
os.mkfifo("fifo", 0o620); os.chown("fifo", 33, 44)
s = socket.socket(socket.AF_UNIX); s.bind("sock"); os.chmod("sock", 0o711)
with open("sparse", "wb") as f:
    f.write(b"a"*5000); f.seek(10 << 20); f.write(b"b"*4096); f.truncate(1 << 40)
with open("hole", "wb") as f: f.truncate(7 << 20)
with open("big", "wb") as f: f.write(os.urandom(3 << 20))
open("suid", "w").close(); os.chown("suid", 1000, 2000); os.chmod("suid", 0o6755)
os.setxattr("a", "user.x=y%z", b"\0\xff\n=1"); os.setxattr("h", b"user.\xff\xfe", b"bin")
os.setxattr("suid", "security.capability", struct.pack("<5I", 0x02000001, 1 << 10, 0, 0, 0))
acl = ((1, 7, 0xffffffff), (2, 4, 33), (4, 5, 0xffffffff), (16, 7, 0xffffffff), (32, 1, 0xffffffff))
acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *e) for e in acl)
os.setxattr("big", "system.posix_acl_access", acl); os.setxattr("h", "system.posix_acl_default", acl)
os.utime("big", ns=(123456789, -1500000001)); os.utime("hole", ns=(5, 2**35 * 10**9 + 7))
os.makedirs("sticky/x"); os.chmod("sticky", 0o1777); os.utime("sticky", ns=(11, 12))
# what hides and moves the image's own: whiteouts, opaque folders, redirects
subprocess.run('''rm -rf /usr/share/perl5; mkdir /usr/share/perl5; echo n > /usr/share/perl5/only
mv /usr/share/zoneinfo /usr/share/zi; mv /etc/apt /etc/apt.moved; mkdir /etc/apt; rm /etc/issue /etc/motd
echo x >> /etc/profile; chmod 600 /etc/fstab; chown 5:6 /etc/shells; mv /usr/share/man /usr/share/zi/man
rm -r /usr/share/zi/Europe; touch /usr/share/zi/Asia/new; rm -rf /var/cache; ln -s /nonexistent /var/cache''',
shell=True)
"""

LOOK = r"""
import os, stat, hashlib, sys
HIDDEN = {b"/proc", b"/dev", b"/sys", b"/.crab", b"/tmp", b"/opt/workloads", b"/run"}
seen = {}
def look(folder, path):
    for name in sorted(os.listdir(b"/proc/self/fd/%d" % folder)):
        whole = path + b"/" + name
        if whole in HIDDEN: continue
        st = os.lstat(name, dir_fd=folder); place = b"/proc/self/fd/%d/%s" % (folder, name)
        try: xattrs = [(x, os.getxattr(place, x, follow_symlinks=False)) for x in sorted(os.listxattr(place, follow_symlinks=False))]
        except OSError as error: xattrs = error.errno
        content = b""
        if stat.S_ISREG(st.st_mode) and st.st_size < 1 << 30:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NOATIME, dir_fd=folder); digest = hashlib.sha256()
            while block := os.read(fd, 1 << 20): digest.update(block)
            content = digest.hexdigest(); os.close(fd)
        elif stat.S_ISLNK(st.st_mode): content = os.readlink(name, dir_fd=folder)
        folders = stat.S_ISDIR(st.st_mode)
        first = b"" if folders else seen.setdefault((st.st_dev, st.st_ino), whole)[-300:]
        read_at = st.st_atime_ns if stat.S_ISREG(st.st_mode) and path == b"/root/w" else 0
        holes = not folders and st.st_blocks * 512 < st.st_size
        print((whole[-900:], oct(st.st_mode), st.st_uid, st.st_gid, 0 if folders else (st.st_size, st.st_nlink), st.st_mtime_ns,
               read_at, xattrs, content, first, holes))
        if folders:
            below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder); look(below, whole); os.close(below)
look(os.open("/", os.O_RDONLY), b"")
"""


class Host:
    """A second host, as far as state is concerned: a service with a state directory of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        clear(folder)
        self.service = Service.open(folder)

    def ask(self, request: ask.Request) -> object:
        return self.service.handle(request)

    def box(self, name: str) -> Box:
        return Box(self.service, name)

    def state(self) -> dict[str, list[str]]:
        """All that is stored here, by name."""
        root = self.service._core.pool.root
        places = ("images", "runtime", "live", "checkpoints", "staging")
        found = {place: sorted(os.listdir(root / place)) for place in places}
        found["process"] = sorted(os.listdir(self.folder / "process"))
        found["sandboxes"] = [sandbox.id for sandbox in self.service.handle(ask.SandboxList())]
        found["indexed"] = [checkpoint.id for checkpoint in self.service._core.registry.checkpoints()]
        return found

    def empty(self) -> None:
        """Remove every sandbox."""
        for sandbox in self.service.handle(ask.SandboxList()):
            self.service.handle(ask.Remove(sandbox=sandbox.name, force=True))

    def close(self) -> None:
        self.empty()
        for image in self.service.handle(ask.ImageList()):
            self.service.handle(ask.ImageRemove(name=image.name))
        owner = self.service._core.cgroups.owner
        left = self.state()
        self.service.close_down()
        shutil.rmtree(self.folder)
        assert not any(left.values()), left
        assert not left_of(self.folder, owner)


@pytest.fixture(scope="module")
def beside(state_dir: Path) -> Iterator[Callable[[str], Path]]:
    """Makes paths beside the state directory; what is there at the end is removed."""
    made: list[Path] = []

    def path(name: str) -> Path:
        made.append(state_dir.with_name(f"{state_dir.name}-{name}"))
        return made[-1]

    yield path
    for one in made:
        one.unlink(missing_ok=True) if not one.is_dir() else clear(one)


@pytest.fixture(scope="module")
def host(beside: Callable[[str], Path]) -> Iterator[Host]:
    host = Host(beside("second"))
    yield host
    host.close()


@pytest.fixture(autouse=True)
def nothing_left(host: Host) -> Iterator[None]:
    yield
    host.empty()
    state = host.state()
    assert not any(state[place] for place in ("live", "checkpoints", "staging", "process", "sandboxes", "indexed")), (
        state
    )


@pytest.fixture(scope="module")
def image(service: Service, image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An image of thousands of small files and no large programs: how large it is, is no concern of these tests."""
    root = tmp_path_factory.mktemp("light") / "root"
    lean_root(service._core.images.path(image), root, "usr/share/doc", "usr/share/man")
    yield service.handle(ask.ImageAdd(name="light", source=f"dir:{root}", replace=True)).name
    service.handle(ask.ImageRemove(name="light"))


@pytest.fixture(scope="module")
def source(service: Service, image: str) -> Iterator[Box]:
    """A sandbox with files of every kind and programs that run."""
    sandbox = service.handle(ask.Create(name="archived", image=image, limits=Limits(memory=2 << 30)))
    box = Box(service, sandbox.name)
    try:
        box.run("echo services > /etc/services")
        box.python(MAKE)
        box.begin(WORKLOADS)
        yield box
    finally:
        service.handle(ask.Remove(sandbox=sandbox.name, force=True))


@pytest.fixture(scope="module")
def exported(source: Box, beside: Callable[[str], Path]) -> Path:
    """The archive of a checkpoint of it, image included."""
    source.beats_then = source.beats(WORKLOADS)  # type: ignore[attr-defined]
    source.checkpoint("kept")
    path = beside("whole.crab")
    path.unlink(missing_ok=True)
    source.ask(ask.Export, ref="kept", path=str(path))
    return path


@pytest.fixture(scope="module")
def slim(source: Box, exported: Path, beside: Callable[[str], Path]) -> Path:
    """The same without the image."""
    path = beside("slim.crab")
    path.unlink(missing_ok=True)
    source.ask(ask.Export, ref="kept", path=str(path), with_image=False)
    return path


def test_it_goes_on_elsewhere(source: Box, exported: Path, host: Host, figures) -> None:
    begin = time.perf_counter()
    made = host.ask(ask.Import(path=str(exported)))
    figures(f"archive of {exported.stat().st_size >> 20} MiB imported in {time.perf_counter() - begin:.1f} s")
    original = source.look()
    assert (made.name, made.state, made.turn) == ("archived", State.STOPPED, 1)
    assert made.id != original.id
    assert made.spec == original.spec
    (checkpoint,) = host.ask(ask.Turns(sandbox="archived"))
    assert (checkpoint.label, checkpoint.turn, checkpoint.parent, checkpoint.sandbox) == ("kept", 1, None, made.id)
    with pytest.raises(NotFound, match="files"):
        host.ask(ask.Start(sandbox="archived"))
    host.ask(ask.Recover(sandbox="archived"))
    box = host.box("archived")
    box.healthy(WORKLOADS)
    beats = box.beats(WORKLOADS)
    assert all(beats[name].counter >= source.beats_then[name].counter for name in WORKLOADS)  # type: ignore[attr-defined]
    # and everything that can be done with a sandbox can be done with this one
    taken = box.checkpoint()
    assert (taken.turn, taken.parent) == (2, checkpoint.id)
    box.rewind("kept")
    (clone,) = box.fork(1, "kept")
    for one in (box, clone):
        one.healthy(WORKLOADS)


def test_the_files_are_the_same(
    service: Service, image: str, exported: Path, host: Host, beside: Callable[[str], Path]
) -> None:
    if not host.ask(ask.ImageList()):
        host.ask(ask.Import(path=str(exported)))
    path = beside("files.crab")
    path.unlink(missing_ok=True)
    box = Box(service, service.handle(ask.Create(image=image, name="still")).name)
    try:
        box.python(MAKE)
        box.checkpoint()
        box.rewind()
        before = box.python(LOOK).splitlines()
        box.ask(ask.Export, ref="head", path=str(path), with_image=False)
    finally:
        box.ask(ask.Remove, force=True)
    host.ask(ask.Import(path=str(path)))
    host.ask(ask.Recover(sandbox="still"))
    files = host.box("still").python(LOOK).splitlines()
    assert len(files) > 5000
    assert files == before


def test_imported_twice(slim: Path, exported: Path, host: Host) -> None:
    first = host.ask(ask.Import(path=str(exported)))
    second = host.ask(ask.Import(path=str(slim)))
    third = host.ask(ask.Import(path=str(slim), name="mine"))
    assert (first.name, second.name, third.name) == ("archived", "archived-2", "mine")
    assert len({sandbox.id for sandbox in (first, second, third)}) == 3
    assert len(host.ask(ask.ImageList())) == 1
    for name in ("archived-2", "mine", "archived"):
        host.ask(ask.Recover(sandbox=name))
        host.box(name).healthy(("counters",))
    before = host.state()
    with pytest.raises(AlreadyExists):
        host.ask(ask.Import(path=str(slim), name="mine"))
    with pytest.raises(InvalidRequest):
        host.ask(ask.Import(path=str(slim), name="Not A Name"))
    assert host.state() == before


def test_compressed(source: Box, exported: Path, host: Host, beside: Callable[[str], Path]) -> None:
    path = beside("small.crab.zst")
    path.unlink(missing_ok=True)
    source.ask(ask.Export, ref="kept", path=str(path))
    assert path.stat().st_size < exported.stat().st_size / 2
    host.ask(ask.Import(path=str(path)))
    host.ask(ask.Recover(sandbox="archived"))
    host.box("archived").healthy(("counters",))
    cut = path.read_bytes()
    host.empty()
    before = host.state()
    path.write_bytes(cut[: len(cut) - 100])
    with pytest.raises(ArchiveRefused):
        host.ask(ask.Import(path=str(path)))
    assert host.state() == before


def test_the_image_has_another_name_there(slim: Path, exported: Path, host: Host) -> None:
    host.ask(ask.Import(path=str(exported)))
    (image,) = host.ask(ask.ImageList())
    host.empty()
    host.ask(ask.ImageRemove(name=image.name))
    before = host.state()
    with pytest.raises(Incompatible, match="neither"):
        host.ask(ask.Import(path=str(slim)))
    assert host.state() == before
    # something else has its name
    other = host.folder / "other"
    (other / "etc").mkdir(parents=True)
    host.ask(ask.ImageAdd(name=image.name, source=f"dir:{other}"))
    made = host.ask(ask.Import(path=str(exported)))
    assert made.spec.image == f"{image.name}-2"
    host.ask(ask.Recover(sandbox=made.name))
    host.box(made.name).healthy(("counters",))
    again = host.ask(ask.Import(path=str(slim)))
    assert again.spec.image == f"{image.name}-2"
    host.empty()
    host.ask(ask.ImageRemove(name=image.name))


def test_on_a_host_of_another_kind(exported: Path, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.ask(ask.Import(path=str(exported)))
    ground = host.service._core.ground
    monkeypatch.setattr(ground, "host", msgspec.structs.replace(ground.host, kernel="5.4.0-old"))
    with pytest.raises(Incompatible, match="kernel"):
        host.ask(ask.Recover(sandbox="archived"))
    host.ask(ask.Rewind(sandbox="archived", ref="head", files_only=True))
    box = host.box("archived")
    assert box.read("/root/w/h/c") == "hard"
    assert len(box.host_pids()) == 1


def test_after_an_upgrade_of_crab(
    service: Service, image: str, host: Host, beside: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An archive brings the files along that its Crab added to the image."""
    path = beside("old.crab")
    path.unlink(missing_ok=True)
    with monkeypatch.context() as older:
        older.setattr(runtime, "LAYOUT", b"older")
        older.setattr(runtime, "DEVICES", {"null": (1, 3), "zero": (1, 5), "urandom": (1, 9), "tty": (5, 0)})
        box = Box(service, service.handle(ask.Create(image=image)).name)
    try:
        box.background("i=0; while :; do i=$((i+1)); echo $i > /tmp/n; sleep 0.05; done")
        box.checkpoint()
        box.ask(ask.Export, ref="head", path=str(path))
        ground = service._core.registry.find(box.name).runtime
    finally:
        box.ask(ask.Remove, force=True)
    made = host.ask(ask.Import(path=str(path)))
    host.ask(ask.Recover(sandbox=made.name))
    new = host.box(made.name)
    assert not new.result("test -e /dev/full").ok
    assert new.run("stat -c '%t:%T %a' /dev/null") == "1:3 666\n"
    before = new.read("/tmp/n")
    assert before
    while new.read("/tmp/n") == before:
        time.sleep(0.05)
    runtimes = {host.service._core.registry.find(host.ask(ask.Import(path=str(path))).id).runtime for _ in range(2)}
    assert len(runtimes) == 1
    assert not runtimes & {ground, runtime.name_for(made.image_fingerprint)}
    service._core.pool.discard(service._core.pool.runtime / ground)
    service._core.pool.discard(runtime.blank(service._core.pool, ground))


def test_processes_of_an_earlier_checkpoint(
    service: Service, image: str, host: Host, beside: Callable[[str], Path]
) -> None:
    path = beside("later.crab")
    path.unlink(missing_ok=True)
    box = Box(service, service.handle(ask.Create(image=image, name="later")).name)
    try:
        box.background("exec sleep 100000")
        first = box.checkpoint()
        box.run("echo later > /root/later")
        second = box.checkpoint(policy="files")
        service._core.change_checkpoint(second.id, processes_from=first.id)
        box.ask(ask.Export, ref="head", path=str(path), with_image=False)
    finally:
        box.ask(ask.Remove, force=True)
    if not host.ask(ask.ImageList()):
        pytest.skip("the image is not there")
    host.ask(ask.Import(path=str(path)))
    host.ask(ask.Recover(sandbox="later"))
    new = host.box("later")
    assert new.read("/root/later") == "later\n"
    assert any("100000" in info.argv for info in new.ask(ask.ProcessList))
    assert new.look().turn == 2


def test_files_alone(service: Service, image: str, host: Host, exported: Path, beside: Callable[[str], Path]) -> None:
    path = beside("files.crab")
    path.unlink(missing_ok=True)
    box = Box(service, service.handle(ask.Create(image=image, name="files")).name)
    try:
        box.run("echo x > /root/x")
        box.checkpoint(policy="files")
        box.ask(ask.Export, ref="head", path=str(path))
    finally:
        box.ask(ask.Remove, force=True)
    host.ask(ask.Import(path=str(path)))
    host.ask(ask.Recover(sandbox="files"))
    assert host.box("files").read("/root/x") == "x\n"


def test_folders_of_the_host(
    service: Service, image: str, host: Host, exported: Path, beside: Callable[[str], Path], tmp_path: Path
) -> None:
    path = beside("mounts.crab")
    path.unlink(missing_ok=True)
    tmp_path.chmod(0o755)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "old").write_text("old")
    (tmp_path / "shared").mkdir()
    folders = (
        Mount(source=str(tmp_path / "shared"), target="/mnt", kind="bind"),
        Mount(source=str(tmp_path / "work"), target="/srv", kind="copy"),
    )
    box = Box(service, service.handle(ask.Create(image=image, name="mounts", mounts=folders)).name)
    try:
        box.run("rm /srv/old; echo new > /srv/new; exec 7</srv/new; sleep 100000 >/dev/null 2>&1 &")
        box.checkpoint()
        box.ask(ask.Export, ref="head", path=str(path), with_image=True)
    finally:
        box.ask(ask.Remove, force=True)
    before = host.state()
    with pytest.raises(ArchiveRefused, match="work"):
        host.ask(ask.Import(path=str(path)))
    (tmp_path / "work").rename(tmp_path / "elsewhere")
    with pytest.raises(NotFound):
        host.ask(ask.Import(path=str(path), allow_host=True))
    (tmp_path / "elsewhere").rename(tmp_path / "work")
    assert host.state() == before
    host.ask(ask.Import(path=str(path), allow_host=True))
    host.ask(ask.Recover(sandbox="mounts"))
    new = host.box("mounts")
    assert new.run("ls /srv; cat /srv/new") == "new\nnew\n"
    assert any("100000" in info.argv for info in new.ask(ask.ProcessList))


# ---------------------------------------------------------------- export


def test_a_checkpoint_is_removed_while_it_is_exported(
    service: Service,
    image: str,
    host: Host,
    exported: Path,
    beside: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = beside("removed.crab")
    path.unlink(missing_ok=True)
    box = Box(service, service.handle(ask.Create(image=image, name="removed")).name)
    box.background("exec sleep 100000")
    box.checkpoint()
    write = archive.write

    def later(parts: archive.Parts, target: Path) -> object:
        box.ask(ask.Remove, force=True)
        service._core.pool.empty_trash()
        return write(parts, target)

    monkeypatch.setattr(archiving.archive, "write", later)
    box.ask(ask.Export, ref="head", path=str(path))
    monkeypatch.undo()
    assert os.listdir(service._core.pool.staging) == []
    host.ask(ask.Import(path=str(path)))
    host.ask(ask.Recover(sandbox="removed"))
    assert any("100000" in info.argv for info in host.box("removed").ask(ask.ProcessList))


def test_exports_that_fail_leave_nothing(source: Box, exported: Path, tmp_path: Path) -> None:
    content = exported.stat()
    with pytest.raises(AlreadyExists):
        source.ask(ask.Export, ref="kept", path=str(exported))
    assert exported.stat() == content
    with pytest.raises(NotFound):
        source.ask(ask.Export, ref="missing", path=str(tmp_path / "x"))
    with pytest.raises(NotFound):
        source.ask(ask.Export, ref="kept", path=str(tmp_path / "missing" / "x"))
    small = tmp_path / "small"
    small.mkdir()
    mounts.mount("tmpfs", small, "tmpfs", 0, "size=1m")
    try:
        for name in ("x.crab", "x.crab.zst"):  # the one is refused at once, the other when the disk is full
            with pytest.raises(NoSpace):
                source.ask(ask.Export, ref="kept", path=str(small / name))
            assert os.listdir(small) == []
            assert os.statvfs(small).f_bfree > 250
    finally:
        mounts.unmount(small)
    core = source.service._core
    assert os.listdir(core.pool.staging) == []
    assert all(name.startswith("c") for name in os.listdir(core.state_dir / "process"))


# ---------------------------------------------------------------- refusals

Change = Callable[[Member, bytes], Iterable[tuple[Member, bytes]]]


def forged(
    path: Path,
    target: Path,
    change: Change,
    about: Callable[[Manifest], Manifest] = lambda manifest: manifest,
    **head: object,
) -> Path:
    """An archive with other content and digests that are right, as somebody with bad intent would make it."""
    with opened(path) as stream, contextlib.closing(Reader(stream, UnpackLimits())) as reader:
        found: list[tuple[Member, bytes]] = []
        for _, member, content in reader.members():
            data = b""
            while block := content.read(1 << 20):
                data += block
            found += change(member, data)
        sizes: dict[str, int] = {}
        for member, data in found:
            member.size = len(data)
            section = member.name.split(b"/")[0].decode()
            sizes[section] = sizes.get(section, 0) + len(data)
        header = msgspec.structs.replace(reader.header, sizes=sizes, entries=len(found), **head)
        with open(target, "wb") as out, archive.Writer(out) as writer:
            writer.text(archive.HEADER, msgspec.json.encode(header))
            writer.text(archive.MANIFEST, manifests.encode(about(reader.manifest)))
            for member, data in found:
                writer.add(member, (data,))
    return target


def after(name: bytes, *new: Member) -> Change:
    """Put members behind the one of that name."""

    def change(member: Member, data: bytes) -> Iterator[tuple[Member, bytes]]:
        yield member, data
        if member.name == name:
            yield from ((one, b"") for one in new)

    return change


def same(member: Member, data: bytes) -> Iterator[tuple[Member, bytes]]:
    yield member, data


def without(*names: bytes) -> Change:
    return lambda member, data: [] if member.name in names else [(member, data)]


def other(name: bytes, text: bytes) -> Change:
    return lambda member, data: [(member, text if member.name == name else data)]


def with_spec(**fields: object) -> Callable[[Manifest], Manifest]:
    return lambda manifest: msgspec.structs.replace(manifest, spec=msgspec.structs.replace(manifest.spec, **fields))


REFUSED: dict[str, tuple[Change, Callable[[Manifest], Manifest] | None, type[Exception]]] = {
    "device": (after(b"files/u", Member(b"files/u/!disk", "char", device=(8, 0))), None, ArchiveRefused),
    "null device": (after(b"files/u", Member(b"files/u/!null", "char", device=(1, 3))), None, ArchiveRefused),
    "disk in /dev": (after(b"ground/dev", Member(b"ground/dev/!", "char", device=(259, 0))), None, ArchiveRefused),
    "link away": (
        after(b"files/u", Member(b"files/u/!l", "link", target=b"/etc"), Member(b"files/u/!l/cron.d", "folder")),
        None,
        ArchiveRefused,
    ),
    "hard link away": (
        after(b"files/u", Member(b"files/u/!h", "hard", target=b"ground/.crab/bin/crab-init")),
        None,
        ArchiveRefused,
    ),
    "hard link up": (after(b"files/u", Member(b"files/u/!h", "hard", target=b"files/u/../x")), None, ArchiveRefused),
    "traversal": (after(b"files/u", Member(b"files/u/../../../x", "file")), None, ArchiveRefused),
    "absolute": (after(b"files/u", Member(b"/etc/cron.d/x", "file")), None, ArchiveRefused),
    "beside": (after(b"files/u", Member(b"files/x", "folder")), None, ArchiveRefused),
    "twice": (after(b"files/u/root", Member(b"files/u/root", "folder")), None, ArchiveRefused),
    "metacopy": (
        after(b"files/u", Member(b"files/u/!m", "file", xattrs=((b"trusted.overlay.metacopy", b""),))),
        None,
        ArchiveRefused,
    ),
    "no files": (without(b"files/u"), None, ArchiveRefused),
    "no ground": (without(b"ground/proc"), None, ArchiveRefused),
    "no process image": (without(b"process/pstree.img"), None, ArchiveRefused),
    "another process image": (after(b"process", Member(b"process/!x.img", "file")), None, Damaged),
    "changed process image": (other(b"process/pstree.img", b"x"), None, Damaged),
    "process image elsewhere": (
        after(b"process", Member(b"process/!x.img", "link", target=b"/")),
        None,
        ArchiveRefused,
    ),
    "bind mount": (same, with_spec(mounts=(Mount(source="/", target="/host", kind="bind"),)), ArchiveRefused),
    "host network": (same, with_spec(network="host"), ArchiveRefused),
    "groups": (same, lambda made: msgspec.structs.replace(made, groups={"../../../x": (1,)}), ArchiveRefused),
    "name": (same, lambda made: msgspec.structs.replace(made, sandbox_name="a/b"), ArchiveRefused),
    "newer manifest": (same, lambda made: msgspec.structs.replace(made, schema=99), Incompatible),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_leaves_nothing(
    slim: Path, exported: Path, host: Host, beside: Callable[[str], Path], case: str
) -> None:
    if not host.ask(ask.ImageList()):
        host.ask(ask.Import(path=str(exported)))
        host.empty()
    change, about, error = REFUSED[case]
    path = forged(slim, beside("forged.crab"), change, about or (lambda manifest: manifest))
    before = host.state()
    with pytest.raises(error) as caught:
        host.ask(ask.Import(path=str(path)))
    assert type(caught.value) is error
    assert caught.value.remedy  # type: ignore[attr-defined]
    assert host.state() == before


def test_the_forger_would_have_made_a_good_one(
    slim: Path, exported: Path, host: Host, beside: Callable[[str], Path]
) -> None:
    """So the refusals above are for the reasons that they name."""
    if not host.ask(ask.ImageList()):
        host.ask(ask.Import(path=str(exported)))
        host.empty()
    setuid = Member(b"files/u/!setuid", "file", mode=0o4755)
    made = host.ask(ask.Import(path=str(forged(slim, beside("forged.crab"), after(b"files/u", setuid)))))
    host.ask(ask.Recover(sandbox=made.name))
    assert host.box(made.name).run("stat -c %a '/!setuid'") == "4755\n"


def test_an_image_that_is_not_what_it_says(exported: Path, host: Host, beside: Callable[[str], Path]) -> None:
    host.empty()
    for image in host.ask(ask.ImageList()):
        host.ask(ask.ImageRemove(name=image.name))
    before = host.state()
    cases: list[tuple[Change, type[Exception]]] = [
        (after(b"image", Member(b"image/!new", "file")), Damaged),
        (after(b"image", Member(b"image/!disk", "char", device=(8, 0))), ArchiveRefused),
        (after(b"image", Member(b"image/!gone", "char")), ArchiveRefused),
        (
            after(b"image", Member(b"image/!m", "folder", xattrs=((b"trusted.overlay.opaque", b"y"),))),
            ArchiveRefused,
        ),
    ]
    for change, error in cases:
        path = forged(exported, beside("forged.crab"), change)
        with pytest.raises(error) as caught:
            host.ask(ask.Import(path=str(path)))
        assert type(caught.value) is error
        assert host.state() == before
    with pytest.raises(ArchiveRefused, match="allowed"):
        host.ask(ask.Import(path=str(exported), limit=1 << 20))
    with pytest.raises(InvalidRequest):
        host.ask(ask.Import(path=str(exported), limit=-1))
    assert host.state() == before


def test_damage_and_foreign_files(slim: Path, exported: Path, host: Host, tmp_path: Path) -> None:
    if not host.ask(ask.ImageList()):
        host.ask(ask.Import(path=str(exported)))
        host.empty()
    data = slim.read_bytes()
    before = host.state()
    path = tmp_path / "x.crab"
    middle = data.index(b"hard")
    for damaged in (
        *(data[:size] for size in (0, 511, 5000, len(data) // 2, len(data) - 10240)),
        data[:middle] + b"HARD" + data[middle + 4 :],
        data + data,
        b"PK\3\4" + data,
    ):
        path.write_bytes(damaged)
        with pytest.raises(Damaged):
            host.ask(ask.Import(path=str(path)))
        assert host.state() == before
    subprocess.run(
        ["tar", "-cf", path, "--transform=s,.*,crab-archive.json,", "/etc/hostname"], check=True, capture_output=True
    )
    for foreign in (path, Path("/usr/bin/env"), Path("/etc/hostname")):
        with pytest.raises(ArchiveRefused):
            host.ask(ask.Import(path=str(foreign)))
    for wrong in ("relative", str(tmp_path), "/dev/zero"):
        with pytest.raises(InvalidRequest):
            host.ask(ask.Import(path=wrong))
    with pytest.raises(NotFound):
        host.ask(ask.Import(path=str(tmp_path / "missing")))
    assert host.state() == before


@pytest.mark.skipif(platform.machine() == "pdp11", reason="it is one")
def test_another_architecture(slim: Path, exported: Path, host: Host, beside: Callable[[str], Path]) -> None:
    before = host.state()
    with pytest.raises(Incompatible, match="pdp11"):
        host.ask(ask.Import(path=str(forged(slim, beside("forged.crab"), same, architecture="pdp11"))))
    assert host.state() == before


def test_no_room(exported: Path, beside: Callable[[str], Path]) -> None:
    folder = beside("tiny")
    clear(folder)
    Pool.open(folder, size=256 << 20).close()
    service = Service.open(folder)
    pool = service._core.pool
    with open(pool.root / "ballast", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, pool.usage().free - exported.stat().st_size // 2))
    try:
        with pytest.raises(NoSpace):
            service.handle(ask.Import(path=str(exported)))
        for place in ("images", "runtime", "staging", "checkpoints"):
            assert os.listdir(pool.root / place) == []
        assert service.handle(ask.SandboxList()) == ()
    finally:
        service.close_down()


# ---------------------------------------------------------------- killed in the middle

WORK = """
import sys, time
from pathlib import Path
from crab.checkpoint import {module}
from crab.daemon import requests as ask
from crab.daemon.service import Service
service = Service.open(Path(sys.argv[1]))
real = {target}
count = 0
def slow(*arguments, **fields):
    global count
    count += 1
    if count == 300:
        print("now", flush=True)
        time.sleep(1000)
    return real(*arguments, **fields)
{target} = slow
service.handle({request})
"""


def killed(folder: Path, **words: str) -> None:
    command = [sys.executable, "-c", WORK.format(**words), folder]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout and process.stderr
        line = process.stdout.readline()
        process.kill()
        assert line == b"now\n", process.stderr.read().decode()


def test_killed_in_the_middle(exported: Path, beside: Callable[[str], Path], tmp_path: Path) -> None:
    folder = beside("killed")
    clear(folder)
    killed(folder, module="unpacking", target="unpacking.Unpacking.add", request=f"ask.Import(path={str(exported)!r})")
    host = Host.__new__(Host)
    host.folder, host.service = folder, Service.open(folder)
    try:
        assert not any(host.state().values()), host.state()
        host.ask(ask.Import(path=str(exported)))
        before = host.state()
        host.service.close()
        target = tmp_path / "out"
        target.mkdir()
        request = f"ask.Export(sandbox='archived', ref='head', path={str(target / 'x.crab')!r})"
        killed(folder, module="archive", target="archive.Writer.add", request=request)
        assert os.listdir(target) == []
        host.service = Service.open(folder)
        assert host.state() == before
        host.ask(ask.Recover(sandbox="archived"))
        host.box("archived").healthy(("counters",))
    finally:
        host.service.close()  # wherever it failed, nothing of it stays on the machine
        host.service = Service.open(folder)
        host.close()


def test_the_tree_rules_are_those_of_the_format() -> None:
    assert archive.RULES[b"image"].strict
    assert not any(archive.RULES[name].marks for name in (b"image", b"ground", b"process"))
    assert trees.Rule().keeps(b"user.x")
