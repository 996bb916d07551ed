"""Images hold exactly what their source held, exist whole or not at all, and no archive reaches beyond its own root."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import lzma
import os
import platform
import shutil
import stat
import struct
import subprocess
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from crab.errors import (
    AlreadyExists,
    ArchiveRefused,
    Busy,
    CrabError,
    Damaged,
    HostUnsuitable,
    InUse,
    InvalidRequest,
    NoSpace,
    NotFound,
)
from crab.host import btrfs, mounts
from crab.host.fingerprint import file_digest, tree_fingerprint, tree_summary, walk
from crab.host.pool import Pool
from crab.sandbox.images import ImageConfig, ImageStore, UnpackLimits, programs, seal
from crab.sandbox.images.debian import Debian, host_sources
from crab.sandbox.images.host import Host, readable_by_all

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system, sets owners"),
]

MIB = 1 << 20


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    found = Pool.open(tmp_path / "state", 512 * MIB)
    yield found
    for entry in mounts.mounts_below(tmp_path, itself=True):
        mounts.unmount(entry.target, mounts.MNT_DETACH)
    assert mounts.wait_detached(tmp_path / "state/pool.btrfs")


@pytest.fixture
def store(pool: Pool, tmp_path: Path) -> ImageStore:
    return ImageStore(pool, tmp_path / "cache")


@pytest.fixture
def nothing_left(pool: Pool) -> Iterator[None]:
    """Whatever the test does, it leaves no half-made image."""
    yield
    assert os.listdir(pool.staging) == []
    assert os.listdir(pool.trash) == []


def elf(machine: int, word: int = 2, order: int = 1) -> bytes:
    """The beginning of a program."""
    head = b"\x7fELF" + bytes([word, order, 1]) + bytes(9)
    return head + struct.pack("<HH" if order == 1 else ">HH", 2, machine) + bytes(44)


HERE = {"x86_64": 62, "aarch64": 183, "riscv64": 243}.get(platform.machine(), 62)


@pytest.fixture
def rootfs(tmp_path: Path) -> Path:
    """A small root file system with everything that is hard to copy."""
    root = tmp_path / "rootfs"
    (root / "bin").mkdir(parents=True)
    busybox = shutil.which("busybox")
    if busybox:
        shutil.copy(busybox, root / "bin/busybox")
        (root / "bin/sh").symlink_to("busybox")
    else:
        (root / "bin/sh").write_bytes(elf(HERE))
        (root / "bin/sh").chmod(0o755)
    (root / "etc").mkdir()
    (root / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\n")
    (root / "bin/su").write_bytes(b"setuid")
    os.chown(root / "bin/su", 0, 33)
    (root / "bin/su").chmod(0o4755)
    os.setxattr(root / "bin/su", "security.capability", struct.pack("<5I", 0x02000001, 1 << 13, 0, 0, 0))
    (root / "data").mkdir(mode=0o750)
    os.chown(root / "data", 1000, 1001)
    (root / "data/file").write_bytes(b"content")
    os.setxattr(root / "data/file", "user.note", b"a\0b\xff\n=")
    os.utime(root / "data/file", ns=(1, 1_234_567_890_123_456_789))
    os.link(root / "data/file", root / "data/hard")
    (root / "data/absolute").symlink_to("/etc/passwd")
    (root / "data/dangling").symlink_to("../../../../nowhere")
    (root / os.fsdecode(b"data/\xff\xfe\n")).write_bytes(b"odd name")
    (root / ("data/" + "x" * 255)).write_bytes(b"long name")
    os.mkfifo(root / "data/fifo", 0o640)
    with open(root / "data/sparse", "wb") as file:
        file.truncate(8 * MIB)
        file.seek(4 * MIB)
        file.write(b"island")
    deep = root / "data"
    for _ in range(12):
        deep = deep / ("d" * 200)
        deep.mkdir()
    (deep / "bottom").write_bytes(b"deep")
    os.utime(root / "data", ns=(1, 1_000_000_000_500_000_000))
    return root


REQUIRED = {b"proc", b"dev", b"tmp", b"root", b".crab"}


def differences(first: Path, second: Path) -> set[bytes]:
    """Paths that are not the same in two trees, times of files included."""

    def table(top: Path) -> dict[bytes, tuple[Any, ...]]:
        return {
            entry.path: (
                entry.kind,
                entry.stat.st_mode,
                entry.stat.st_uid,
                entry.stat.st_gid,
                entry.stat.st_mtime_ns if entry.path else 0,
                entry.stat.st_nlink if entry.kind != "folder" else 0,
                entry.target,
                entry.digest(),
                entry.xattrs,
            )
            for entry in walk(top)
        }

    one, other = table(first), table(second)
    return {path for path in one.keys() | other.keys() if one.get(path) != other.get(path)}


def tarball(path: Path, *members: tarfile.TarInfo | tuple[tarfile.TarInfo, bytes], **options: Any) -> str:
    """A source with an archive of exactly these members."""
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT, **options) as archive:
        for member in members:
            info, content = member if isinstance(member, tuple) else (member, b"")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return f"tar:{path}"


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, mode
    return info


# ---------------------------------------------------------------- an image's life


def test_an_image_is_made_found_and_removed(store: ImageStore, pool: Pool, rootfs: Path, nothing_left: None) -> None:
    steps: list[str] = []
    image = store.add("base", f"dir:{rootfs}", steps.append)
    assert steps
    assert (image.name, image.source, image.architecture) == ("base", f"dir:{rootfs}", platform.machine())
    assert image.size == tree_summary(rootfs).size
    assert store.list() == [image]
    assert store.get("base") == image
    path = store.path("base")
    assert btrfs.is_subvolume(path) and btrfs.is_read_only(path)
    assert store.fingerprint("base") == tree_fingerprint(path)
    store.verify("base")
    store.remove("base")
    assert store.list() == []
    assert os.listdir(pool.images) == []


def test_a_folder_becomes_an_image_exactly(store: ImageStore, rootfs: Path, nothing_left: None) -> None:
    store.add("base", f"dir:{rootfs}")
    assert differences(rootfs, store.path("base")) <= REQUIRED
    assert (store.path("base") / "data/sparse").stat().st_blocks * 512 < MIB


@pytest.mark.parametrize("compression", ["none", "gzip", "xz", "bzip2", "zstd"])
def test_an_archive_becomes_an_image_exactly(
    store: ImageStore, rootfs: Path, tmp_path: Path, compression: str, nothing_left: None
) -> None:
    if compression != "none" and not shutil.which(compression):
        pytest.skip(f"{compression} is not installed")
    archive = tmp_path / "archive"
    pack = ["tar", "--format=pax", "--xattrs", "--xattrs-include=*", "--sparse", "--numeric-owner"]
    packed = [] if compression == "none" else [f"--{compression}"]
    subprocess.run([*pack, *packed, "-C", rootfs, "-cf", archive, "."], check=True)
    store.add("base", f"tar:{archive}")
    assert differences(rootfs, store.path("base")) <= REQUIRED
    assert (store.path("base") / "data/sparse").stat().st_blocks * 512 < MIB


def test_every_image_has_the_folders_that_sandboxes_need(store: ImageStore, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir(mode=0o700)
    image = store.add("empty", f"dir:{tmp_path / 'empty'}")
    assert image.architecture == "any"
    path = store.path("empty")
    assert stat.S_IMODE(path.stat().st_mode) == 0o755
    modes = {name: stat.S_IMODE((path / name).lstat().st_mode) for name in os.listdir(path)}
    assert modes == {"proc": 0o555, "dev": 0o755, "tmp": 0o1777, "root": 0o700, ".crab": 0o755}


def test_what_the_image_says_about_its_start_is_kept_beside_it(store: ImageStore) -> None:
    config = ImageConfig(env={"A": "b"}, workdir="/srv", user="1000", command=("bash",))
    store.add_subvolume("made", "build:base", lambda root: (root / "file").write_bytes(b"x") and None, config=config)
    assert store.config("made") == config
    assert store.get("made").source == "build:base"
    assert (store.path("made") / "file").read_bytes() == b"x"


def test_the_name_must_be_one(store: ImageStore, rootfs: Path, nothing_left: None) -> None:
    for name in ("", "A", "a/b", "..", ".hidden", "-x", "a" * 64, "ä", "a b", "a\n", "x.json"):
        with pytest.raises(InvalidRequest):
            store.add(name, f"dir:{rootfs}")
        with pytest.raises(InvalidRequest):
            store.get(name)
    assert store.add("a" * 63, f"dir:{rootfs}").name == "a" * 63
    assert store.add("0.9_x-y", f"dir:{rootfs}").name == "0.9_x-y"


def test_a_name_is_taken_only_once_unless_it_is_replaced(
    store: ImageStore, pool: Pool, rootfs: Path, nothing_left: None
) -> None:
    first = store.add("base", f"dir:{rootfs}")
    (rootfs / "new").write_text("new")
    with pytest.raises(AlreadyExists):
        store.add("base", f"dir:{rootfs}")
    assert store.get("base") == first
    with pytest.raises(InUse, match="sandbox-1"):
        store.add("base", f"dir:{rootfs}", replace=True, in_use=["sandbox-1"])
    assert store.get("base") == first
    second = store.add("base", f"dir:{rootfs}", replace=True, in_use=lambda name: [])
    assert second.fingerprint != first.fingerprint
    assert (store.path("base") / "new").exists()
    assert len(os.listdir(pool.images)) == 2


def test_replacing_by_the_same_content_keeps_it(
    store: ImageStore, pool: Pool, rootfs: Path, nothing_left: None
) -> None:
    first = store.add("base", f"dir:{rootfs}")
    before = btrfs.info(store.path("base")).uuid
    second = store.add("base", f"dir:{rootfs}", replace=True)
    assert second.fingerprint == first.fingerprint
    assert btrfs.info(store.path("base")).uuid == before
    store.verify("base")


def test_a_failed_replacement_keeps_the_old_image(store: ImageStore, rootfs: Path, nothing_left: None) -> None:
    first = store.add("base", f"dir:{rootfs}")

    def fail(root: Path) -> None:
        (root / "half").write_text("x")
        raise RuntimeError("disk on fire")

    with pytest.raises(RuntimeError, match="on fire"):
        store.add_subvolume("base", "build:x", fail, replace=True)
    assert store.get("base") == first
    store.verify("base")


def test_an_image_in_use_is_not_removed(store: ImageStore, rootfs: Path) -> None:
    store.add("base", f"dir:{rootfs}")
    with pytest.raises(InUse, match="box-1, box-2"):
        store.remove("base", ["box-2", "box-1"])
    with pytest.raises(InUse, match="3 more"):
        store.remove("base", lambda name: [f"{name}-{number}" for number in range(8)])
    store.verify("base")


def test_what_does_not_exist_is_not_found_and_what_exists_is_named(store: ImageStore, rootfs: Path) -> None:
    for act in (store.get, store.path, store.config, store.fingerprint, store.verify, store.remove):
        with pytest.raises(NotFound, match="no images yet"):
            act("base")
    store.add("one", f"dir:{rootfs}")
    store.add("two", f"dir:{rootfs}")
    with pytest.raises(NotFound, match="one, two"):
        store.get("base")


def test_two_cannot_make_the_same_image_at_once(store: ImageStore) -> None:
    started, go = threading.Event(), threading.Event()

    def slow(root: Path) -> None:
        started.set()
        go.wait(10)

    thread = threading.Thread(target=lambda: store.add_subvolume("base", "build:x", slow))
    thread.start()
    try:
        assert started.wait(10)
        with pytest.raises(Busy):
            store.add_subvolume("base", "build:y", lambda root: None)
        with pytest.raises(Busy):
            store.remove("base")
        assert store.sweep() == []
    finally:
        go.set()
        thread.join()
    assert store.get("base").source == "build:x"


def test_what_a_crash_left_is_swept_and_no_image_with_it(store: ImageStore, pool: Pool, rootfs: Path) -> None:
    image = store.add("base", f"dir:{rootfs}")
    # As after a crash between the snapshot and the description, and in the middle of the build.
    btrfs.snapshot(store.path("base"), pool.images / "half@0123456789ab", read_only=True)
    btrfs.snapshot(store.path("base"), pool.images / "base@0123456789ab", read_only=True)
    (pool.images / ".base.json.new").write_text("{")
    pool.stage("image")
    assert [found.name for found in store.list()] == ["base"]
    again = ImageStore(pool, "/nonexistent")
    assert [path.name for path in again.sweep()] == ["base@0123456789ab", "half@0123456789ab"]
    assert pool.sweep() == []
    assert sorted(os.listdir(pool.images)) == ["base.json", store.path("base").name]
    assert again.get("base") == image


def test_content_of_the_same_name_that_a_crash_left_is_not_trusted(store: ImageStore, pool: Pool, rootfs: Path) -> None:
    image = store.add("base", f"dir:{rootfs}")
    path = store.path("base")
    store.remove("base")
    btrfs.create(path)  # half of an image under the name that the new one will have
    assert store.add("base", f"dir:{rootfs}").fingerprint == image.fingerprint
    store.verify("base")


def test_damage_is_found_and_can_be_removed(store: ImageStore, pool: Pool, rootfs: Path) -> None:
    store.add("base", f"dir:{rootfs}")
    path = store.path("base")
    btrfs.set_read_only(path, False)
    (path / "etc/passwd").write_text("root:x:0:0::/root:/bin/SH\n")
    with pytest.raises(Damaged, match="not what it was made as"):
        store.verify("base")
    btrfs.delete(path)
    with pytest.raises(Damaged, match="missing"):
        store.path("base")
    (pool.images / "base.json").write_text("{ torn")
    with pytest.raises(Damaged, match="cannot be read"):
        store.get("base")
    with pytest.raises(Damaged):
        store.list()
    store.remove("base")
    assert os.listdir(pool.images) == []


def test_an_image_of_a_newer_format_is_left_alone(store: ImageStore, pool: Pool, rootfs: Path) -> None:
    store.add("base", f"dir:{rootfs}")
    file = pool.images / "base.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": 99}))
    with pytest.raises(Damaged, match="newer version"):
        store.get("base")
    assert store.sweep() == []


def test_a_full_pool_is_no_space_and_leaves_nothing(store: ImageStore, pool: Pool, nothing_left: None) -> None:
    def fill(root: Path) -> None:
        with open(root / "big", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, 600 * MIB)

    with pytest.raises(NoSpace) as caught:
        store.add_subvolume("big", "build:x", fill)
    assert str(pool.root) in caught.value.message
    assert store.list() == []


# ---------------------------------------------------------------- what must not be in an image


def test_device_nodes_of_a_folder_are_removed(store: ImageStore, rootfs: Path) -> None:
    (rootfs / "dev").mkdir()
    os.mknod(rootfs / "dev/sda", stat.S_IFBLK | 0o666, os.makedev(8, 0))
    os.mknod(rootfs / "data/mem", stat.S_IFCHR | 0o666, os.makedev(1, 1))
    steps: list[str] = []
    store.add("base", f"dir:{rootfs}", steps.append)
    assert os.listdir(store.path("base") / "dev") == []
    assert not (store.path("base") / "data/mem").exists()
    assert any("2 device nodes" in step for step in steps)


def test_attributes_that_steer_overlayfs_are_removed(store: ImageStore, rootfs: Path) -> None:
    os.setxattr(rootfs / "data", "trusted.overlay.redirect", b"/etc")
    os.setxattr(rootfs / "data/absolute", "trusted.x", b"y", follow_symlinks=False)
    store.add("base", f"dir:{rootfs}")
    assert not any(name.startswith(b"trusted.") for entry in walk(store.path("base")) for name, _ in entry.xattrs)


def test_the_folder_of_crab_is_empty(store: ImageStore, rootfs: Path) -> None:
    (rootfs / ".crab/deep").mkdir(parents=True, mode=0o777)
    (rootfs / ".crab/deep/init").write_text("not Crab's")
    os.chown(rootfs / ".crab", 1000, 1000)
    store.add("base", f"dir:{rootfs}")
    folder = store.path("base") / ".crab"
    assert os.listdir(folder) == []
    assert (folder.stat().st_uid, stat.S_IMODE(folder.stat().st_mode)) == (0, 0o755)


def test_a_symlink_in_place_of_a_folder_never_leads_to_the_host(
    store: ImageStore, rootfs: Path, tmp_path: Path, nothing_left: None
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o700)
    for name in (".crab", "proc", "dev"):
        (rootfs / name).symlink_to(outside)
        with pytest.raises(InvalidRequest, match=f"/{name}.*symlink"):
            store.add("bad", f"dir:{rootfs}")
        (rootfs / name).unlink()
    (rootfs / "proc").write_text("a file")
    with pytest.raises(InvalidRequest, match="no folder"):
        store.add("bad", f"dir:{rootfs}")
    (rootfs / "proc").unlink()
    # /tmp may be a symlink, but it means a folder of the image.
    (rootfs / "tmp").symlink_to(outside)
    with pytest.raises(InvalidRequest, match="/tmp"):
        store.add("bad", f"dir:{rootfs}")
    (rootfs / "tmp").unlink()
    (rootfs / "tmp").symlink_to("/../../data/var-tmp")
    (rootfs / "data/var-tmp").mkdir()
    store.add("good", f"dir:{rootfs}")
    assert stat.S_IMODE((store.path("good") / "data/var-tmp").stat().st_mode) == 0o1777
    assert stat.S_IMODE(outside.stat().st_mode) == 0o700
    assert os.listdir(outside) == []


def test_nested_subvolumes_are_refused(store: ImageStore, nothing_left: None) -> None:
    with pytest.raises(InvalidRequest, match="subvolumes"):
        store.add_subvolume("bad", "build:x", lambda root: btrfs.create(root / "sub"))


def test_another_processor_is_refused(store: ImageStore, rootfs: Path, nothing_left: None) -> None:
    (rootfs / "bin/sh").unlink()
    (rootfs / "bin/real").write_bytes(elf(183 if HERE != 183 else 62))
    (rootfs / "bin/sh").symlink_to("/bin/real")  # absolute: must be looked up inside
    with pytest.raises(InvalidRequest, match="this machine is"):
        store.add("foreign", f"dir:{rootfs}")


@pytest.mark.parametrize(
    ("header", "name"),
    [
        (elf(62), "x86_64"),
        (elf(62, 1), "x32"),
        (elf(183), "aarch64"),
        (elf(21, 2, 2), "ppc64"),
        (elf(9999), "elf machine 9999"),
    ],
)
def test_the_processor_is_read_from_the_header(tmp_path: Path, header: bytes, name: str) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/tool").write_bytes(b"#!/bin/sh\n")
    (tmp_path / "bin/zz").write_bytes(header)
    assert seal.architecture(tmp_path) == name


# ---------------------------------------------------------------- archives that mean harm


def refused(store: ImageStore, source: str, match: str) -> None:
    with pytest.raises(ArchiveRefused, match=match):
        store.add("bad", source)
    assert store.list() == []


@pytest.mark.parametrize("name", ["../escaped", "a/../../escaped", "/etc/escaped", "./../escaped"])
def test_hazard_h05_a_path_that_leaves_the_archive_is_refused(
    store: ImageStore, tmp_path: Path, name: str, nothing_left: None
) -> None:
    refused(store, tarball(tmp_path / "t", (member(name), b"x")), "leaves the archive|absolute")


@pytest.mark.parametrize("kind", [tarfile.CHRTYPE, tarfile.BLKTYPE])
def test_hazard_h05_device_nodes_are_refused(
    store: ImageStore, tmp_path: Path, kind: bytes, nothing_left: None
) -> None:
    refused(store, tarball(tmp_path / "t", member("dev/null", kind)), "device node")


@pytest.mark.parametrize("target", ["/", "..", "../..", "/tmp"])
def test_hazard_h05_a_member_behind_a_symlink_that_leads_out_is_refused(
    store: ImageStore, tmp_path: Path, target: str, nothing_left: None
) -> None:
    link = member("link", tarfile.SYMTYPE, target)
    refused(store, tarball(tmp_path / "t", link, (member("link/escaped"), b"x")), "symlink")
    refused(store, tarball(tmp_path / "t", link, member("link/folder", tarfile.DIRTYPE)), "symlink")
    refused(store, tarball(tmp_path / "t", link, (member("link/a/b/c"), b"x")), "symlink")


@pytest.mark.parametrize("target", ["/etc/passwd", "../../etc/passwd", "link/passwd", "missing", ""])
def test_hazard_h05_a_hard_link_to_something_outside_is_refused(
    store: ImageStore, tmp_path: Path, target: str, nothing_left: None
) -> None:
    link = member("link", tarfile.SYMTYPE, "/etc")
    with pytest.raises(ArchiveRefused):
        store.add("bad", tarball(tmp_path / "t", link, member("hard", tarfile.LNKTYPE, target)))


def test_a_file_in_place_of_a_symlink_replaces_the_symlink(
    store: ImageStore, tmp_path: Path, nothing_left: None
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    source = tarball(
        tmp_path / "t",
        member("file", tarfile.SYMTYPE, str(victim)),
        (member("file"), b"from the archive"),
        member("folder", tarfile.SYMTYPE, str(tmp_path)),
        member("folder", tarfile.DIRTYPE, mode=0o777),
        (member("folder/inside"), b"x"),
        member("pipe", tarfile.SYMTYPE, str(victim)),
        member("pipe", tarfile.FIFOTYPE),
    )
    store.add("good", source)
    path = store.path("good")
    assert (path / "file").read_text() == "from the archive"
    assert not (path / "folder").is_symlink()
    assert stat.S_ISFIFO((path / "pipe").lstat().st_mode)
    assert victim.read_text() == "untouched"
    assert not (tmp_path / "inside").exists()


def test_symlinks_to_anywhere_are_kept_as_text(store: ImageStore, tmp_path: Path) -> None:
    store.add(
        "good",
        tarball(tmp_path / "t", member("a", tarfile.SYMTYPE, "/etc/shadow"), member("b", tarfile.SYMTYPE, "../..")),
    )
    assert os.readlink(store.path("good") / "a") == "/etc/shadow"
    assert os.readlink(store.path("good") / "b") == "../.."


def test_members_behind_a_symlink_that_stays_inside_are_unpacked(store: ImageStore, tmp_path: Path) -> None:
    source = tarball(
        tmp_path / "t",
        member("usr/lib", tarfile.DIRTYPE, mode=0o755),
        member("lib", tarfile.SYMTYPE, "usr/lib"),
        (member("lib/x"), b"content"),
        member("y", tarfile.LNKTYPE, "lib/x"),
    )
    store.add("good", source)
    assert (store.path("good") / "usr/lib/x").read_bytes() == b"content"
    assert (store.path("good") / "y").stat().st_nlink == 2


def test_hazard_h05_an_archive_that_unpacks_to_too_much_is_refused(
    pool: Pool, tmp_path: Path, nothing_left: None
) -> None:
    store = ImageStore(pool, tmp_path / "cache", UnpackLimits(size=MIB, entries=10))
    bomb = tmp_path / "bomb.gz"
    with gzip.open(bomb, "wb") as stream, tarfile.open(fileobj=stream, mode="w|") as archive:
        info = member("zeros")
        info.size = 50 * MIB
        archive.addfile(info, io.BytesIO(bytes(50 * MIB)))
    assert bomb.stat().st_size < MIB
    refused(store, f"tar:{bomb}", "more than 1048576 bytes")
    refused(store, tarball(tmp_path / "t", *(member(f"f{number}") for number in range(11))), "more than 10 members")
    sparse = tmp_path / "sparse"
    with open(sparse, "wb") as file:
        file.truncate(1 << 40)
    subprocess.run(["tar", "--sparse", "-C", tmp_path, "-cf", tmp_path / "s.tar", "sparse"], check=True)
    refused(store, f"tar:{tmp_path / 's.tar'}", "more than")
    store.add("good", tarball(tmp_path / "t", (member("file"), bytes(MIB - 1))))


def test_a_huge_header_is_refused(store: ImageStore, tmp_path: Path, nothing_left: None) -> None:
    info = member("x")
    info.pax_headers = {"comment": "y" * (9 * MIB)}
    refused(store, tarball(tmp_path / "t", info), "extended header")


@pytest.mark.parametrize("cut", [100, 512, 700, 1024, 1600, 5000])
def test_a_truncated_archive_is_refused(store: ImageStore, tmp_path: Path, cut: int, nothing_left: None) -> None:
    tarball(tmp_path / "t", (member("one"), b"x" * 1000), (member("two"), b"y" * 3000))
    whole = (tmp_path / "t").read_bytes()
    (tmp_path / "t").write_bytes(whole[:cut])
    refused(store, f"tar:{tmp_path / 't'}", "truncated|corrupt")


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress, "zstd"])
def test_a_compressed_archive_that_is_cut_or_altered_at_its_end_is_refused(
    store: ImageStore, tmp_path: Path, pack: Callable[[bytes], bytes] | str, nothing_left: None
) -> None:
    tarball(tmp_path / "t", (member("one"), os.urandom(20_000)))
    whole = (tmp_path / "t").read_bytes()
    if isinstance(pack, str):
        if not shutil.which(pack):
            pytest.skip(f"{pack} is not installed")
        packed = subprocess.run([pack, "--check", "-c"], input=whole, capture_output=True, check=True).stdout
    else:
        packed = pack(whole)
    for broken in (packed[:-3], packed[:-6] + bytes([packed[-6] ^ 1]) + packed[-5:]):
        (tmp_path / "p").write_bytes(broken)
        refused(store, f"tar:{tmp_path / 'p'}", "truncated|corrupt")


def test_a_damaged_header_in_the_middle_is_not_taken_for_the_end(
    store: ImageStore, tmp_path: Path, nothing_left: None
) -> None:
    tarball(tmp_path / "t", (member("one"), b"x"), (member("two"), b"y"))
    content = bytearray((tmp_path / "t").read_bytes())
    content[1024] ^= 0xFF  # first byte of the second header, so its checksum is wrong
    (tmp_path / "t").write_bytes(content)
    refused(store, f"tar:{tmp_path / 't'}", "corrupt")


@pytest.mark.parametrize("content", [b"", b"no archive at all", bytes(300), os.urandom(5000)])
def test_what_is_no_archive_is_refused(store: ImageStore, tmp_path: Path, content: bytes, nothing_left: None) -> None:
    (tmp_path / "t").write_bytes(content)
    refused(store, f"tar:{tmp_path / 't'}", "no tar archive|truncated")


def test_names_that_the_file_system_cannot_hold_are_refused(
    store: ImageStore, tmp_path: Path, nothing_left: None
) -> None:
    refused(store, tarball(tmp_path / "t", (member("x" * 256), b"")), "cannot be unpacked")
    refused(store, tarball(tmp_path / "t", member("l", tarfile.SYMTYPE, "x" * 5000)), "cannot be unpacked")


def test_impossible_numbers_are_refused(store: ImageStore, tmp_path: Path, nothing_left: None) -> None:
    owner = member("x")
    owner.uid = 2**32 - 1  # chown(-1) would mean: leave the owner as it is
    refused(store, tarball(tmp_path / "t", owner), "impossible owner")
    late = member("x")
    late.pax_headers = {"mtime": "9" * 30}
    refused(store, tarball(tmp_path / "t", late), "cannot be unpacked")


def test_privileged_attributes_of_an_archive_are_left_out(store: ImageStore, tmp_path: Path) -> None:
    info = member("x")
    names = ("trusted.overlay.opaque", "security.selinux", "security.evm", "user.kept")
    info.pax_headers = {f"SCHILY.xattr.{name}": "y" for name in names}
    store.add("good", tarball(tmp_path / "t", info))
    assert os.listxattr(store.path("good") / "x") == ["user.kept"]


def test_folders_that_an_archive_does_not_mention_are_made(store: ImageStore, tmp_path: Path) -> None:
    store.add("good", tarball(tmp_path / "t", (member("a/b/c/file"), b"x"), (member("a/b2/file"), b"y")))
    assert (store.path("good") / "a/b/c/file").read_bytes() == b"x"
    assert stat.S_IMODE((store.path("good") / "a/b").stat().st_mode) == 0o755


def test_paths_longer_than_the_kernel_takes_in_one_piece_are_unpacked(store: ImageStore, tmp_path: Path) -> None:
    parts = ["d" * 250] * 20
    store.add("good", tarball(tmp_path / "t", (member("/".join([*parts, "file"])), b"deep")))
    (found,) = [entry for entry in walk(store.path("good")) if entry.kind == "file"]
    assert len(found.path) == 20 * 251 + 4
    assert found.digest() == file_digest_of(b"deep", tmp_path)


def file_digest_of(content: bytes, folder: Path) -> str:
    (folder / "content").write_bytes(content)
    return file_digest(folder / "content")


# ---------------------------------------------------------------- sources that are wrong


@pytest.mark.parametrize(
    "source",
    [
        "",
        "debian",
        "debian:",
        "debian:Bookworm",
        "debian:bookworm+",
        "debian:bookworm+a b",
        "debian:x+--opt",
        "what:ever",
        "host:x",
    ],
)
def test_a_source_that_makes_no_sense_is_an_invalid_request(store: ImageStore, source: str, nothing_left: None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        store.add("bad", source)
    assert caught.value.remedy


@pytest.mark.parametrize("source", ["dir:/no/such", "tar:/no/such.tar", "oci:/no/such", "oci:/no/such:tag"])
def test_a_source_that_does_not_exist_is_not_found(store: ImageStore, source: str, nothing_left: None) -> None:
    with pytest.raises(NotFound) as caught:
        store.add("bad", source)
    assert caught.value.remedy


def test_relative_and_mistaken_paths_are_invalid(
    store: ImageStore, tmp_path: Path, rootfs: Path, nothing_left: None
) -> None:
    (tmp_path / "file").touch()
    for source in (
        "dir:relative",
        "tar:relative",
        "oci:relative",
        f"dir:{tmp_path / 'file'}",
        f"tar:{rootfs}",
        "oci:x://y",
    ):
        with pytest.raises(InvalidRequest):
            store.add("bad", source)
    with pytest.raises(InvalidRequest, match="neither index"):
        store.add("bad", f"oci:{rootfs}")


def test_the_pool_does_not_become_part_of_an_image(store: ImageStore, tmp_path: Path, nothing_left: None) -> None:
    for source in (tmp_path, Path("/")):
        with pytest.raises(InvalidRequest, match="Crab's own state"):
            store.add("bad", f"dir:{source}")


def test_a_missing_program_is_named_with_its_remedy(
    store: ImageStore, rootfs: Path, monkeypatch: pytest.MonkeyPatch, nothing_left: None
) -> None:
    monkeypatch.setattr(programs, "find", lambda name: None)
    for source in (f"dir:{rootfs}", "oci:docker://registry.invalid/x", "debian:bookworm"):
        with pytest.raises(HostUnsuitable) as caught:
            store.add("bad", source)
        assert "install" in caught.value.remedy


def test_a_failing_program_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(CrabError, match=r"thinking failed \(exit status 3\):\nfirst\nsecond") as caught:
        programs.run(["sh", "-c", "echo first; echo second >&2; exit 3"], "thinking", place=tmp_path, remedy="sleep")
    assert caught.value.remedy == "sleep"
    with pytest.raises(CrabError, match="signal 9"):
        programs.run(["sh", "-c", "kill -9 $$"], "thinking", place=tmp_path)
    with pytest.raises(NoSpace):
        programs.run(["sh", "-c", "echo 'cp: x: No space left on device'; exit 1"], "copying", place=tmp_path)


def test_what_a_builder_mounts_and_starts_ends_with_it(tmp_path: Path) -> None:
    (tmp_path / "root/proc").mkdir(parents=True)

    def stop(line: str) -> None:
        raise KeyboardInterrupt(line)

    script = 'mount -t tmpfs x "$0"/proc && sleep 4711 & sleep 0.2; echo ready; sleep 4711'
    with pytest.raises(KeyboardInterrupt, match="ready"):
        programs.run(
            [*programs.isolated(tmp_path / "root"), "sh", "-c", script, tmp_path / "root"],
            "building",
            place=tmp_path,
            progress=stop,
        )
    assert mounts.mounts_below(tmp_path, itself=True) == ()
    running = [Path("/proc", pid, "cmdline") for pid in os.listdir("/proc") if pid.isdigit()]
    assert not any(_read(path) == b"sleep\x004711\0" for path in running)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


# ---------------------------------------------------------------- container images


class Layout:
    """Writes an OCI layout."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.manifests: list[dict[str, Any]] = []
        (root / "blobs/sha256").mkdir(parents=True)
        (root / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')

    def blob(self, content: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        (self.root / "blobs/sha256" / digest).write_bytes(content)
        return {"digest": f"sha256:{digest}", "size": len(content)}

    def layer(self, *members: tarfile.TarInfo | tuple[tarfile.TarInfo, bytes]) -> dict[str, Any]:
        path = self.root / "layer"
        tarball(path, *members)
        content = gzip.compress(path.read_bytes())
        path.unlink()
        return {"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip", **self.blob(content)}

    def image(self, *layers: dict[str, Any], tag: str = "", machine: str = "", **config: Any) -> dict[str, Any]:
        here = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
        data = {"architecture": machine or here, "os": "linux", "config": config}
        manifest = {
            "schemaVersion": 2,
            "config": {"mediaType": "application/vnd.oci.image.config.v1+json", **self.blob(json.dumps(data).encode())},
            "layers": list(layers),
        }
        entry = {
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "platform": {"os": "linux", "architecture": machine or here},
            **self.blob(json.dumps(manifest).encode()),
        }
        if tag:
            entry["annotations"] = {"org.opencontainers.image.ref.name": tag}
        self.manifests.append(entry)
        self.write(self.manifests)
        return entry

    def write(self, manifests: list[dict[str, Any]]) -> None:
        (self.root / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": manifests}))


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "layout")


def folder(name: str, mode: int = 0o755) -> tarfile.TarInfo:
    return member(name, tarfile.DIRTYPE, mode=mode)


def test_layers_lie_over_each_other_and_whiteouts_remove(store: ImageStore, layout: Layout, nothing_left: None) -> None:
    lower = layout.layer(
        folder("keep"),
        (member("keep/a"), b"lower"),
        (member("keep/b"), b"lower"),
        folder("opaque"),
        (member("opaque/old"), b"x"),
        folder("opaque/sub"),
        (member("opaque/sub/old"), b"x"),
        folder("gone"),
        (member("gone/x"), b"x"),
        (member("file-to-folder"), b"x"),
        folder("folder-to-file"),
        (member("folder-to-file/x"), b"x"),
        member("var/run", tarfile.SYMTYPE, "/run"),
        folder("run"),
    )
    upper = layout.layer(
        (member("keep/.wh.b"), b""),
        (member("keep/a"), b"upper"),
        # The opaque marker may come after what belongs to its own layer (image-spec, layer.md).
        folder("opaque"),
        folder("opaque/sub"),
        (member("opaque/sub/new"), b"new"),
        (member("opaque/.wh..wh..opq"), b""),
        (member(".wh.gone"), b""),
        folder("file-to-folder"),
        (member("file-to-folder/x"), b"y"),
        (member("folder-to-file"), b"y"),
        (member("var/run/pid"), b"through an absolute symlink, inside the image"),
        (member(".wh..wh.plnk"), b""),
        (member("nowhere/.wh.x"), b""),
    )
    layout.image(lower, upper, tag="v1")
    store.add("made", f"oci:{layout.root}")
    path = store.path("made")
    files = {os.fsdecode(entry.path) for entry in walk(path) if entry.kind == "file"}
    assert files == {"keep/a", "opaque/sub/new", "file-to-folder/x", "folder-to-file", "run/pid"}
    assert (path / "keep/a").read_bytes() == b"upper"
    assert not (path / "gone").exists()


def test_the_start_configuration_of_a_container_image_is_kept(store: ImageStore, layout: Layout) -> None:
    layout.image(
        layout.layer((member("x"), b"x")),
        Env=["PATH=/bin", "EMPTY=", "A=b=c", "broken"],
        WorkingDir="/srv",
        User="1000:1000",
        Entrypoint=["/entry"],
        Cmd=None,
    )
    store.add("made", f"oci:{layout.root}")
    assert store.config("made") == ImageConfig(
        env={"PATH": "/bin", "EMPTY": "", "A": "b=c"}, workdir="/srv", user="1000:1000", entrypoint=("/entry",)
    )


def test_one_of_several_images_is_chosen_by_its_tag(store: ImageStore, layout: Layout, nothing_left: None) -> None:
    for tag in ("one", "two"):
        layout.image(layout.layer((member("x"), tag.encode())), tag=tag)
    store.add("two", f"oci:{layout.root}:two")
    assert (store.path("two") / "x").read_bytes() == b"two"
    with pytest.raises(NotFound, match="one, two"):
        store.add("bad", f"oci:{layout.root}:three")


def test_the_variant_for_this_machine_is_chosen(store: ImageStore, layout: Layout, nothing_left: None) -> None:
    foreign = layout.image(layout.layer((member("x"), b"foreign")), machine="mips64le")
    native = layout.image(layout.layer((member("x"), b"native")))
    index = {"mediaType": "application/vnd.oci.image.index.v1+json", "manifests": [foreign, native]}
    layout.write([{"mediaType": index["mediaType"], **layout.blob(json.dumps(index).encode())}])
    store.add("made", f"oci:{layout.root}")
    assert (store.path("made") / "x").read_bytes() == b"native"
    index["manifests"] = [foreign]
    layout.write([{"mediaType": index["mediaType"], **layout.blob(json.dumps(index).encode())}])
    with pytest.raises(InvalidRequest, match="no variant"):
        store.add("bad", f"oci:{layout.root}")
    layout.write([foreign])
    with pytest.raises(InvalidRequest, match="made for mips64le"):
        store.add("bad", f"oci:{layout.root}")


def test_an_archive_of_a_layout_is_read(store: ImageStore, layout: Layout, tmp_path: Path, nothing_left: None) -> None:
    layout.image(layout.layer((member("x"), b"content")), tag="v1")
    subprocess.run(["tar", "-C", layout.root, "-cf", tmp_path / "image.tar", "."], check=True)
    store.add("made", f"oci:{tmp_path / 'image.tar'}")
    store.add("tagged", f"oci:{tmp_path / 'image.tar'}:v1")
    assert (store.path("made") / "x").read_bytes() == b"content"


def test_an_archive_of_an_older_docker_save_is_read(store: ImageStore, tmp_path: Path, nothing_left: None) -> None:
    saved = tmp_path / "saved"
    (saved / "layer1").mkdir(parents=True)
    tarball(saved / "layer1/layer.tar", (member("x"), b"content"))
    digest = hashlib.sha256((saved / "layer1/layer.tar").read_bytes()).hexdigest()
    (saved / "config.json").write_text(
        json.dumps({"os": "linux", "config": {"User": "me"}, "rootfs": {"diff_ids": [f"sha256:{digest}"]}})
    )
    manifest = [{"Config": "config.json", "RepoTags": ["name/image:v1"], "Layers": ["layer1/layer.tar"]}]
    (saved / "manifest.json").write_text(json.dumps(manifest))
    subprocess.run(
        ["tar", "-C", saved, "-cf", tmp_path / "saved.tar", "manifest.json", "config.json", "layer1"], check=True
    )
    store.add("made", f"oci:{tmp_path / 'saved.tar'}:v1")
    assert (store.path("made") / "x").read_bytes() == b"content"
    assert store.config("made").user == "me"


def test_a_blob_that_is_not_what_its_digest_says_is_damaged(
    store: ImageStore, layout: Layout, nothing_left: None
) -> None:
    layer = layout.layer((member("x"), b"content"))
    layout.image(layer)
    path = layout.root / "blobs/sha256" / layer["digest"].removeprefix("sha256:")
    path.write_bytes(gzip.compress(b"other"))
    with pytest.raises(Damaged, match="manifest states"):
        store.add("bad", f"oci:{layout.root}")
    path.unlink()
    with pytest.raises(Damaged, match="incomplete"):
        store.add("bad", f"oci:{layout.root}")


@pytest.mark.parametrize("digest", ["../../../../etc/passwd", "sha256:../../x", "md5:" + "0" * 32, "", None, 7])
def test_hazard_h05_a_digest_that_is_a_path_is_refused(
    store: ImageStore, layout: Layout, digest: Any, nothing_left: None
) -> None:
    layout.write([{"digest": digest}])
    with pytest.raises(ArchiveRefused, match="no digest"):
        store.add("bad", f"oci:{layout.root}")


def test_hazard_h05_a_layout_that_links_out_is_refused(
    store: ImageStore, layout: Layout, tmp_path: Path, nothing_left: None
) -> None:
    layer = layout.layer((member("x"), b"content"))
    layout.image(layer)
    path = layout.root / "blobs/sha256" / layer["digest"].removeprefix("sha256:")
    path.rename(tmp_path / "outside")
    path.symlink_to(tmp_path / "outside")
    with pytest.raises(Damaged, match="incomplete"):
        store.add("bad", f"oci:{layout.root}")


@pytest.mark.parametrize(
    "members",
    [
        [member("link", tarfile.SYMTYPE, "/"), (member("link/../escaped"), b"x")],
        [(member("../.wh.victim"), b"")],
        [member("link", tarfile.SYMTYPE, "/"), member("x", tarfile.LNKTYPE, "../etc/passwd")],
        [(member(".wh."), b"")],
        [(member(".wh..."), b"")],
        [member("dev/kmem", tarfile.CHRTYPE)],
    ],
)
def test_hazard_h05_a_hostile_layer_is_refused(
    store: ImageStore, layout: Layout, members: list[Any], nothing_left: None
) -> None:
    layout.image(layout.layer(*members))
    with pytest.raises(ArchiveRefused):
        store.add("bad", f"oci:{layout.root}")


def test_hazard_h05_links_of_a_layer_lead_into_the_image_only(
    store: ImageStore, layout: Layout, tmp_path: Path, nothing_left: None
) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").write_text("untouched")
    layout.image(
        layout.layer(member("out", tarfile.SYMTYPE, str(victim)), folder(str(victim)[1:])),
        layout.layer((member("out/file"), b"inside"), (member("out/.wh.other"), b"")),
    )
    store.add("made", f"oci:{layout.root}")
    assert (victim / "file").read_text() == "untouched"
    assert (store.path("made") / str(victim)[1:] / "file").read_bytes() == b"inside"


def test_an_image_for_another_system_is_refused(store: ImageStore, layout: Layout, nothing_left: None) -> None:
    artefact = {"mediaType": "application/vnd.cyclonedx+json", **layout.blob(b"{}")}
    layout.image(artefact)
    with pytest.raises(InvalidRequest, match="no file system"):
        store.add("bad", f"oci:{layout.root}")


# ---------------------------------------------------------------- the host as an image


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """The root of a pretended host."""
    root = tmp_path / "machine"
    for name in (
        "usr/bin",
        "etc/ssl/private",
        "etc/ssl/certs",
        "etc/ssh",
        "etc/cron.d",
        "home/me",
        "opt/app",
        "var/lib/dpkg",
    ):
        (root / name).mkdir(parents=True)
    (root / "bin").symlink_to("usr/bin")
    (root / "usr/bin/tool").write_bytes(elf(HERE))
    (root / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\nme:x:1000:1000::/home/me:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\n")
    (root / "var/lib/dpkg/status").write_text("Package: x\n")
    (root / "etc/ssl/certs/ca.pem").write_text("public")
    (root / "etc/alias").symlink_to("passwd")
    for name, mode in {
        "etc/shadow": 0o640,
        "etc/shadow-": 0o600,
        "etc/gshadow": 0o644,
        "etc/ssh/ssh_host_rsa_key": 0o600,
        "etc/ssh/ssh_host_rsa_key.pub": 0o644,
        "etc/ssl/private/key.pem": 0o644,
        "etc/password-of-the-vpn": 0o600,
        "etc/machine-id": 0o444,
        "etc/krb5.keytab": 0o644,
        "etc/cron.d/job": 0o644,
        "home/me/diary": 0o644,
        "opt/app/x": 0o644,
    }.items():
        (root / name).write_text("SECRET")
        (root / name).chmod(mode)
    return root


def test_the_host_becomes_an_image_without_its_secrets(store: ImageStore, machine: Path, nothing_left: None) -> None:
    from crab.sandbox.images import source

    made = Host(machine)

    def build(root: Path) -> None:
        scratch = root.parent / "scratch"
        scratch.mkdir()
        made.build(
            root,
            source.Workshop(
                pool=Path("/"), scratch=scratch, cache=scratch, limits=UnpackLimits(), progress=lambda text: None
            ),
        )
        shutil.rmtree(scratch)

    store.add_subvolume("host", "host", build)
    path = store.path("host")
    contents = {
        entry.path: (path / os.fsdecode(entry.path)).read_bytes() for entry in walk(path) if entry.kind == "file"
    }
    assert not [name for name, content in contents.items() if b"SECRET" in content]
    assert {b"usr/bin/tool", b"etc/passwd", b"var/lib/dpkg/status", b"etc/ssl/certs/ca.pem"} <= contents.keys()
    assert os.readlink(path / "bin") == "usr/bin"
    assert os.readlink(path / "etc/alias") == "passwd"
    assert contents[b"etc/shadow"] == b"root:*:19000:0:99999:7:::\nme:*:19000:0:99999:7:::\n"
    assert stat.S_IMODE((path / "etc/shadow").stat().st_mode) == 0o640
    assert contents[b"etc/machine-id"] == b""
    assert os.listdir(path / "home") == os.listdir(path / "opt") == []


def test_no_secret_of_this_machine_is_on_the_list() -> None:
    names = set(readable_by_all(Path("/"), "etc"))
    assert "etc/passwd" in names
    for name in names:
        status = os.lstat("/" + name)
        assert stat.S_ISLNK(status.st_mode) or status.st_mode & 0o004, name
    assert not names & {"etc/shadow", "etc/gshadow", "etc/ssl/private", "etc/machine-id", "etc/sudoers"}


# ---------------------------------------------------------------- Debian


def test_a_suite_and_packages_are_understood() -> None:
    assert Debian.parse("bookworm") == Debian("bookworm")
    assert Debian.parse("trixie+jq,libstdc++6") == Debian("trixie", ("jq", "libstdc++6"))


@pytest.fixture
def release(tmp_path: Path) -> Path:
    (tmp_path / "os-release").write_text('ID=debian\nVERSION_CODENAME="bookworm"\n')
    return tmp_path / "os-release"


def test_mirrors_of_the_host_are_used_for_any_suite(tmp_path: Path, release: Path) -> None:
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list").write_text(
        "# deb http://off.invalid/debian bookworm main\n"
        "deb-src http://mirror.invalid/debian bookworm main\n"
        "deb [arch=amd64 signed-by=/keys/a.gpg] http://mirror.invalid/security bookworm-security main contrib # x\n"
        "deb http://other.invalid/apt stable main\n"
        "deb http://vendor.invalid/apt bookworm nonfree\n"
    )
    (tmp_path / "sources.list.d/debian.sources").write_text(
        "Types: deb deb-src\nURIs: http://mirror.invalid/debian\nSuites: bookworm\n bookworm-updates\n"
        "Components: main\nSigned-By: /keys/b.gpg\n\n"
        "Types: deb\nEnabled: no\nURIs: http://off.invalid/debian\nSuites: bookworm\nComponents: main\n"
    )
    assert host_sources("trixie", tmp_path, release) == [
        "deb [signed-by=/keys/b.gpg] http://mirror.invalid/debian trixie main",
        "deb [signed-by=/keys/a.gpg] http://mirror.invalid/security trixie-security main",
        "deb [signed-by=/keys/b.gpg] http://mirror.invalid/debian trixie-updates main",
    ]
    assert host_sources("sid", tmp_path, release) == [
        "deb [signed-by=/keys/b.gpg] http://mirror.invalid/debian sid main"
    ]


def test_on_another_distribution_the_builder_chooses_its_mirror(tmp_path: Path, release: Path) -> None:
    (tmp_path / "sources.list").write_text("deb http://mirror.invalid/ubuntu noble main\n")
    assert host_sources("bookworm", tmp_path, release) == []
    release.write_text("ID=ubuntu\nVERSION_CODENAME=noble\n")
    assert host_sources("noble", tmp_path, release) == []
    assert host_sources("noble", tmp_path, tmp_path / "missing") == []


# ---------------------------------------------------------------- fingerprints


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    top = tmp_path / "tree"
    (top / "folder").mkdir(parents=True)
    (top / "folder/file").write_bytes(b"content")
    (top / "same").write_bytes(b"content")
    (top / "link").symlink_to("folder")
    (top / os.fsdecode(b"\xff\n")).write_bytes(b"x")
    os.mknod(top / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.setxattr(top / "same", "user.a", b"1")
    return top


def _replace_by_hard_link(top: Path) -> None:
    (top / "second").unlink()
    os.link(top / "first", top / "second")


def _retarget(top: Path) -> None:
    (top / "link").unlink()
    (top / "link").symlink_to("same")


def _other_device(top: Path) -> None:
    (top / "null").unlink()
    os.mknod(top / "null", stat.S_IFCHR | 0o666, os.makedev(1, 5))


CHANGES: dict[str, Callable[[Path], object]] = {
    "mode": lambda top: (top / "same").chmod(0o600),
    "setuid": lambda top: (top / "same").chmod(0o4644),
    "owner": lambda top: os.chown(top / "same", 1, -1),
    "group": lambda top: os.chown(top / "same", -1, 1),
    "owner of a symlink": lambda top: os.chown(top / "link", 1, -1, follow_symlinks=False),
    "mode of the top": lambda top: top.chmod(0o700),
    "xattr": lambda top: os.setxattr(top / "same", "user.b", b"2"),
    "xattr value": lambda top: os.setxattr(top / "same", "user.a", b"2"),
    "xattr of a folder": lambda top: os.setxattr(top / "folder", "user.a", b"2"),
    "xattr gone": lambda top: os.removexattr(top / "same", "user.a"),
    "content of the same size": lambda top: (top / "same").write_bytes(b"CONTENT"),
    "content": lambda top: (top / "same").write_bytes(b""),
    "new file": lambda top: (top / "new").touch(),
    "new folder": lambda top: (top / "new").mkdir(),
    "gone": lambda top: (top / "same").unlink(),
    "renamed": lambda top: (top / "same").rename(top / "folder/same"),
    "renamed by one odd byte": lambda top: os.rename(top / os.fsdecode(b"\xff\n"), top / os.fsdecode(b"\xfe\n")),
    "link target": _retarget,
    "device": _other_device,
    "file for folder": lambda top: ((top / "folder/file").unlink(), (top / "folder").rmdir(), (top / "folder").touch()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_fingerprint_sees_a_change_of(tree: Path, change: str) -> None:
    before = tree_fingerprint(tree)
    CHANGES[change](tree)
    assert tree_fingerprint(tree) != before


def test_the_fingerprint_tells_hard_links_from_equal_files(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).write_bytes(b"equal")
    before = tree_summary(tmp_path)
    _replace_by_hard_link(tmp_path)
    after = tree_summary(tmp_path)
    assert after.fingerprint != before.fingerprint
    assert (before.size, after.size) == (10, 5)


def test_the_fingerprint_does_not_see_times_or_where_a_tree_lies(tree: Path, tmp_path: Path, pool: Pool) -> None:
    before = tree_fingerprint(tree)
    os.utime(tree / "same", ns=(5, 5))
    (tree / "passing").touch()
    (tree / "passing").unlink()
    assert tree_fingerprint(tree) == before
    # Other folder sizes and inode numbers on another file system, links of which some lie outside of the tree.
    os.link(tree / "same", tmp_path / "outside")
    subprocess.run(["cp", "-a", tree, pool.live / "copy"], check=True)
    assert tree_fingerprint(pool.live / "copy") == before == tree_fingerprint(tree)


def test_the_digest_of_a_file_is_that_of_its_content_however_large(tmp_path: Path) -> None:
    from blake3 import blake3

    for size in (0, 1, MIB - 1, MIB, 9 * MIB + 3):
        content = os.urandom(size)
        (tmp_path / "file").write_bytes(content)
        wanted = f"blake3:{blake3(content).hexdigest()}"
        assert file_digest(tmp_path / "file") == wanted
        with open(tmp_path / "file", "rb") as file:
            file.seek(size // 2)
            assert file_digest(file.fileno()) == wanted
            assert file.tell() == size // 2


def test_the_walk_goes_by_the_parts_of_paths(tmp_path: Path) -> None:
    for name in ("a/b", "a.b", "a/a/z", "B", "é"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    entries = list(walk(tmp_path))
    paths = [entry.path for entry in entries]
    assert paths == [b"", b"B", b"a", b"a/a", b"a/a/z", b"a/b", b"a.b", "é".encode()]
    assert [entry.key for entry in entries] == sorted(entry.key for entry in entries)


def test_the_walk_reaches_any_depth_with_few_descriptors(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    # deeper than pytest's own clean-up can go
    request.addfinalizer(lambda: subprocess.run(["rm", "-rf", tmp_path / "ddddd"], check=True))
    before = len(os.listdir("/proc/self/fd"))
    top = os.open(tmp_path, os.O_RDONLY)
    current = os.dup(top)
    for _ in range(1500):
        os.mkdir("d" * 5, dir_fd=current)
        below = os.open("d" * 5, os.O_RDONLY, dir_fd=current)
        os.close(current)
        current = below
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=current))
    os.close(current)
    os.close(top)
    entries = list(walk(tmp_path))
    assert len(entries) == 1502
    assert entries[-1].digest() == file_digest_of(b"", tmp_path)
    assert len(os.listdir("/proc/self/fd")) - before < 100


def test_the_walk_does_not_enter_what_is_mounted(tmp_path: Path) -> None:
    (tmp_path / "mountpoint").mkdir()
    mounts.mount("x", tmp_path / "mountpoint", "tmpfs", 0, "size=64k")
    try:
        (tmp_path / "mountpoint/file").touch()
        assert [entry.path for entry in walk(tmp_path)] == [b"", b"mountpoint"]
    finally:
        mounts.unmount(tmp_path / "mountpoint")


def test_a_digest_never_follows_a_symlink_that_took_a_folders_place(tmp_path: Path) -> None:
    (tmp_path / "tree/folder").mkdir(parents=True)
    (tmp_path / "tree/folder/passwd").write_text("inside")
    (entry,) = [entry for entry in walk(tmp_path / "tree") if entry.kind == "file"]
    shutil.rmtree(tmp_path / "tree/folder")
    (tmp_path / "tree/folder").symlink_to("/etc")
    with pytest.raises(OSError):
        entry.digest()
