"""The matrix of operations is right about what each changes, on every file system: told by a walk of its own."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench import operations
from bench.filesystems import ALL, FileSystem, filesystems
from bench.operations import MACHINE, OPERATIONS, Operation, Runner, flags_of, lay_out

pytestmark = pytest.mark.kernel
IN_FOLDER = [
    one for one in OPERATIONS if not one.needs & MACHINE - {"uring"} and (one.kind == "files" or one.look is None)
]
NAMES = [one.name for one in OPERATIONS]


def named(name: str) -> Operation:
    return next(one for one in OPERATIONS if one.name == name)


@pytest.fixture(scope="module")
def mounted() -> Iterator[dict[str, FileSystem]]:
    if os.geteuid() != 0:
        pytest.skip("file systems are made by root")
    with filesystems() as made:
        yield made


@pytest.fixture
def file_system(mounted: dict[str, FileSystem], request: pytest.FixtureRequest) -> FileSystem:
    if request.param not in mounted:
        pytest.skip(f"{request.param} cannot be made here")
    return mounted[request.param]


@contextlib.contextmanager
def folder_on(path: Path) -> Iterator[str]:
    folder = path / "work"
    folder.mkdir()
    try:
        lay_out(str(folder))
        yield str(folder)
    finally:
        shutil.rmtree(folder)


def described(path: str) -> tuple[object, ...]:
    """All of one name that counts."""
    status = os.lstat(path)
    kind = stat.S_IFMT(status.st_mode)
    content: object = None
    flags: object = None
    if kind == stat.S_IFREG:
        content = hashlib.blake2b(Path(path).read_bytes()).hexdigest()
    elif kind == stat.S_IFLNK:
        content = os.readlink(path)
    if kind in (stat.S_IFREG, stat.S_IFDIR):
        flags = flags_of(path) & ~0x80000  # extents: how ext4 stores it
    attributes = {
        name: os.getxattr(path, name, follow_symlinks=False) for name in os.listxattr(path, follow_symlinks=False)
    }
    links = status.st_nlink if kind == stat.S_IFREG else 0
    size = status.st_size if kind == stat.S_IFREG else 0
    return (
        status.st_mode,
        status.st_uid,
        status.st_gid,
        status.st_rdev,
        links,
        size,
        content,
        flags,
        tuple(sorted(attributes.items())),
    )


def state_of(folder: str) -> dict[str, tuple[object, ...]]:
    found = {}
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = f"{place}/{name}"
            found[os.path.relpath(path, folder)] = described(path)
    return found


def changed(before: dict[str, tuple[object, ...]], after: dict[str, tuple[object, ...]]) -> set[str]:
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def own_mounts() -> None:
    """Leave the host's mount namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    operations.checked(libc.unshare(0x20000), "unshare")
    operations.checked(libc.mount(None, b"/", None, 16384 | 1 << 18, None), "mount")


def test_the_matrix_is_as_large_as_it_says() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert sum(one.changes for one in OPERATIONS) >= 70
    assert sum(not one.changes for one in OPERATIONS) >= 12
    for one in OPERATIONS:
        assert one.changes or not one.target, one.name
        assert one.look or one.kind == "files", one.name
        assert bool(one.target or one.look) or not one.changes, one.name


@pytest.mark.parametrize("name", [one.name for one in OPERATIONS if one.kind == "files"])
@pytest.mark.parametrize("file_system", ALL, indirect=True)
def test_what_an_operation_on_files_changes(file_system: FileSystem, name: str) -> None:
    one = named(name)
    if lacks := one.needs - MACHINE - file_system.offers:
        pytest.skip(f"{file_system.name} has no {', '.join(lacks)}")
    with folder_on(file_system.path) as folder, Runner(one, folder) as runner:
        runner.prepare()
        before, outside = state_of(folder), runner.look()
        runner.act()
        after = state_of(folder)
        assert changed(before, after) == {path for path in one.target if not path.startswith("/")}
        assert (runner.look() != outside) == any(path.startswith("/") for path in one.target)
        assert one.changes == bool(one.target)


@pytest.mark.parametrize("name", [one.name for one in OPERATIONS if one.kind == "processes"])
def test_what_an_operation_on_processes_changes(tmp_path: Path, name: str) -> None:
    one = named(name)
    if "processors" in one.needs and len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one processor")
    enter = own_mounts if "mount" in one.needs else lambda: None
    with folder_on(tmp_path) as folder, Runner(one, folder, enter) as runner:
        runner.prepare()
        before, files = runner.look(), state_of(folder)
        assert runner.look() == before  # looking changes nothing
        runner.act()
        assert (runner.look() != before) == one.changes
        assert changed(files, state_of(folder)) == set()


def test_nothing_is_left_of_an_operation(tmp_path: Path) -> None:
    one = named("stop a process")
    with folder_on(tmp_path) as folder, Runner(one, folder) as runner:
        runner.prepare()
        runner.act()
        (pid,) = runner.state["sleepers"]
        assert os.path.exists(f"/proc/{pid}")
    assert not os.path.exists(f"/proc/{pid}/exe") or not Path(f"/proc/{pid}/cmdline").read_bytes()


def test_a_caller_says_where_the_processes_run(tmp_path: Path) -> None:
    mark = tmp_path / "entered"
    with folder_on(tmp_path) as folder, Runner(named("write"), folder, mark.touch) as runner:
        runner.act()
    assert mark.exists()


def test_an_operation_that_cannot_be_done_says_so(tmp_path: Path) -> None:
    def fail(folder: str, state: dict[str, object]) -> None:
        os.unlink(f"{folder}/nothing")

    with (
        folder_on(tmp_path) as folder,
        Runner(Operation(name="x", act=fail), folder) as runner,
        pytest.raises(FileNotFoundError),
    ):
        runner.act()
