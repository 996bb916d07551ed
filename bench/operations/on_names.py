"""Operations on names: create, remove, rename, link."""

from __future__ import annotations

import os
import socket
from typing import Any

from bench.operations.on_content import other_b
from bench.operations.operation import (
    SIZE,
    checked,
    libc,
    opened,
    operation,
)


@operation("create an empty file", "new")
def _(folder: str, state: dict[str, Any]) -> None:
    opened(f"{folder}/new", os.O_CREAT | os.O_EXCL)


@operation("create a file with content", "new")
def _(folder: str, state: dict[str, Any]) -> None:
    os.write(opened(f"{folder}/new", os.O_CREAT | os.O_WRONLY), b"new")


@operation("create a sparse file", "new")
def _(folder: str, state: dict[str, Any]) -> None:
    os.pwrite(opened(f"{folder}/new", os.O_CREAT | os.O_WRONLY), b"end", 1 << 24)


@operation("create a file and delete it", changes=False)
def _(folder: str, state: dict[str, Any]) -> None:
    os.write(opened(f"{folder}/new", os.O_CREAT | os.O_WRONLY), b"new")
    os.unlink(f"{folder}/new")


@operation("make a nameless file", changes=False, needs="tmpfile")
def _(folder: str, state: dict[str, Any]) -> None:
    os.write(opened(folder, os.O_TMPFILE | os.O_RDWR), b"1")


@operation("give a nameless file a name", "new", needs="tmpfile")
def _(folder: str, state: dict[str, Any]) -> None:
    fd = opened(folder, os.O_TMPFILE | os.O_RDWR)
    os.write(fd, b"1")
    source, target = f"/proc/self/fd/{fd}".encode(), f"{folder}/new".encode()
    checked(libc.linkat(-100, source, -100, target, 0x400), "linkat")


@operation("mkdir", "new")
def _(folder: str, state: dict[str, Any]) -> None:
    os.mkdir(f"{folder}/new")


@operation("rmdir", "empty")
def _(folder: str, state: dict[str, Any]) -> None:
    os.rmdir(f"{folder}/empty")


@operation("mkdir and rmdir", changes=False)
def _(folder: str, state: dict[str, Any]) -> None:
    os.mkdir(f"{folder}/new")
    os.rmdir(f"{folder}/new")


@operation("make a tree", "new", *(f"new/{n}" for n in range(20)))
def _(folder: str, state: dict[str, Any]) -> None:
    os.mkdir(f"{folder}/new")
    for n in range(20):
        opened(f"{folder}/new/{n}", os.O_CREAT)


@operation("remove a tree", "sub", "sub/deep", "sub/file")
def _(folder: str, state: dict[str, Any]) -> None:
    os.unlink(f"{folder}/sub/file")
    os.rmdir(f"{folder}/sub/deep")
    os.rmdir(f"{folder}/sub")


@operation("unlink", "b")
def _(folder: str, state: dict[str, Any]) -> None:
    os.unlink(f"{folder}/b")


@operation("unlink and make the same again", changes=False)
def _(folder: str, state: dict[str, Any]) -> None:
    mode = os.stat(f"{folder}/b").st_mode & 0o777
    os.unlink(f"{folder}/b")
    os.write(os.open(f"{folder}/b", os.O_CREAT | os.O_WRONLY, mode), b"x" * SIZE)


@operation("rename", "b", "b2")
def _(folder: str, state: dict[str, Any]) -> None:
    os.rename(f"{folder}/b", f"{folder}/b2")


@operation("rename over another", "b", "c", prepare=other_b)
def _(folder: str, state: dict[str, Any]) -> None:
    os.rename(f"{folder}/b", f"{folder}/c")


def renameat2(old: str, new: str, flags: int) -> None:
    """renameat2(2)."""
    checked(libc.renameat2(-100, old.encode(), -100, new.encode(), flags), "renameat2")


@operation("exchange two files", "a", "b", prepare=other_b)
def _(folder: str, state: dict[str, Any]) -> None:
    renameat2(f"{folder}/a", f"{folder}/b", 2)


@operation("exchange a file and a folder", "b", "empty")
def _(folder: str, state: dict[str, Any]) -> None:
    renameat2(f"{folder}/b", f"{folder}/empty", 2)


@operation("exchange two equal files", changes=False)
def _(folder: str, state: dict[str, Any]) -> None:
    renameat2(f"{folder}/a", f"{folder}/b", 2)


@operation("rename with RENAME_NOREPLACE", "b", "b2")
def _(folder: str, state: dict[str, Any]) -> None:
    renameat2(f"{folder}/b", f"{folder}/b2", 1)


@operation("rename a folder", "sub", "sub/deep", "sub/file", "sub2", "sub2/deep", "sub2/file")
def _(folder: str, state: dict[str, Any]) -> None:
    os.rename(f"{folder}/sub", f"{folder}/sub2")


@operation("rename a folder over an empty one", "sub", "sub/deep", "sub/file", "empty/deep", "empty/file")
def _(folder: str, state: dict[str, Any]) -> None:
    os.rename(f"{folder}/sub", f"{folder}/empty")


@operation("rename into another folder", "b", "sub/b")
def _(folder: str, state: dict[str, Any]) -> None:
    os.rename(f"{folder}/b", f"{folder}/sub/b")


@operation("rename there and back", changes=False)
def _(folder: str, state: dict[str, Any]) -> None:
    os.rename(f"{folder}/b", f"{folder}/sub/b")
    os.rename(f"{folder}/sub/b", f"{folder}/b")


@operation("save by a rename over", "a")
def _(folder: str, state: dict[str, Any]) -> None:
    os.write(os.open(f"{folder}/a.new", os.O_CREAT | os.O_WRONLY, os.stat(f"{folder}/a").st_mode & 0o777), b"saved")
    os.rename(f"{folder}/a.new", f"{folder}/a")


@operation("save what was there by a rename over", changes=False)
def _(folder: str, state: dict[str, Any]) -> None:
    os.write(os.open(f"{folder}/a.new", os.O_CREAT | os.O_WRONLY, os.stat(f"{folder}/a").st_mode & 0o777), b"x" * SIZE)
    os.rename(f"{folder}/a.new", f"{folder}/a")


def _alias(folder: str, state: dict[str, Any]) -> None:
    os.link(f"{folder}/a", f"{folder}/alias")


@operation("link", "a", "alias")
def _(folder: str, state: dict[str, Any]) -> None:
    _alias(folder, state)


@operation("unlink one name of two", "a", "alias", prepare=_alias)
def _(folder: str, state: dict[str, Any]) -> None:
    os.unlink(f"{folder}/alias")


@operation("write through the other name", "a", "alias", prepare=_alias)
def _(folder: str, state: dict[str, Any]) -> None:
    os.write(opened(f"{folder}/alias"), b"y")


@operation("rename one name of a file over its other", changes=False, prepare=_alias)
def _(folder: str, state: dict[str, Any]) -> None:
    os.rename(f"{folder}/alias", f"{folder}/a")  # does nothing: rename(2)


@operation("symlink", "new")
def _(folder: str, state: dict[str, Any]) -> None:
    os.symlink("a", f"{folder}/new")


@operation("replace a symlink", "ln")
def _(folder: str, state: dict[str, Any]) -> None:
    os.symlink("b", f"{folder}/new")
    os.rename(f"{folder}/new", f"{folder}/ln")


@operation("mkfifo", "new")
def _(folder: str, state: dict[str, Any]) -> None:
    os.mkfifo(f"{folder}/new")


@operation("mknod of a character device", "new")
def _(folder: str, state: dict[str, Any]) -> None:
    os.mknod(f"{folder}/new", 0o20600, os.makedev(1, 3))


@operation("bind a unix socket", "s")
def _(folder: str, state: dict[str, Any]) -> None:
    os.chdir(folder)  # a path of a socket has at most 107 bytes
    socket.socket(socket.AF_UNIX).bind("s")
