"""Differences of text: unified diffs of files in two trees that are not to be trusted."""

from __future__ import annotations

import difflib
import os
import stat
from pathlib import Path

import msgspec

from crab.host.beneath import open_beneath
from crab.model import FileChange

LARGEST = 1 << 20
"""Bytes of a file above which no diff is made: it would be read by nobody, and difflib is quadratic at worst."""


def with_diff(change: FileChange, old_root: Path, new_root: Path) -> FileChange:
    """The change with a unified diff of the content, where content changed."""
    if change.kind == "changed" and "content" not in change.what:
        return change
    old = b"" if change.kind == "added" else _content(old_root, change.before or change.path)
    new = b"" if change.kind == "removed" else _content(new_root, change.path)
    return msgspec.structs.replace(change, diff=unified(old, new, change.before or change.path, change.path))


def unified(old: bytes | None, new: bytes | None, old_name: str, new_name: str) -> str:
    """Unified diff of two contents; None stands for what is no regular file or too large."""
    if old is None or new is None:
        return ""
    if b"\0" in old or b"\0" in new:
        return "binary files differ\n" if old != new else ""
    before, after = (data.decode("utf-8", "backslashreplace").splitlines(keepends=True) for data in (old, new))
    found: list[str] = []
    for line in difflib.unified_diff(before, after, f"a/{old_name}", f"b/{new_name}"):
        found.append(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")
    return "".join(found)


def _content(root: Path, path: str) -> bytes | None:
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fd = open_beneath(folder, os.fsencode(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    finally:
        os.close(folder)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > LARGEST:
            return None
        return os.pread(fd, LARGEST, 0)
    finally:
        os.close(fd)
