"""What differs between two states of a sandbox: its files as seen from inside, and its processes.

Both states lie on the same image, so a file that neither has in its writable layer, that is the same inode of a lower layer
in both and that has no other name is the same; every other pair is compared by attributes and content.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from crab.checkpoint import textual
from crab.checkpoint.evidence import Evidence
from crab.checkpoint.view import Tree, seen
from crab.host.fingerprint import Entry, walk
from crab.host.pool import Pool
from crab.model import FileChange, ProcessChange

HIDDEN = (b".crab", b"dev", b"proc", b"sys")
"""Made by Crab or by the kernel, the same in every sandbox; but for what programs keep in /dev/shm."""
_SHARED = b"dev/shm/"
_REMAP = re.compile(rb"(^|/)link_remap\.\d+$")
"""Names that CRIU gives, for the time of a snapshot, to open files that have none."""
_OWN_XATTRS = (b"trusted.overlay.", b"security.selinux")


def compare(
    pool: Pool, before: Tree, after: Tree, hidden: Sequence[bytes] = HIDDEN, content: bool = False
) -> tuple[FileChange, ...]:
    """What one must do to `before` to get `after`, in the order of the paths (renamed files under their new one).

    `hidden` are names at the top that are left out; `content` asks for a unified diff of text files.
    """
    written = names(before) | names(after)
    changes: list[FileChange] = []
    removed: list[Entry] = []
    added: list[Entry] = []
    with seen(pool, before) as old_root, seen(pool, after) as new_root:
        for old, new in _paired(_shown(old_root, hidden), _shown(new_root, hidden)):
            if old is None and new is not None:
                added.append(new)
            elif new is None and old is not None:
                removed.append(old)
            elif old is not None and new is not None and (what := _changes(old, new, written)):
                changes.append(FileChange(path=os.fsdecode(new.path), kind="changed", what=what, size=_size(new)))
        changes += _moved(removed, added)
        if content:
            changes = [textual.with_diff(change, old_root, new_root) for change in changes]
    return tuple(sorted(changes, key=lambda change: os.fsencode(change.path)))


def names(tree: Tree) -> set[bytes]:
    """Paths of everything in the writable layer of a tree."""
    return {entry.path for entry in walk(tree.upper, xattrs=False)} if tree.upper else set()


def _shown(root: Path, hidden: Sequence[bytes]) -> Iterator[Entry]:
    for entry in walk(root):
        is_hidden = entry.path.split(b"/", 1)[0] in hidden and not entry.path.startswith(_SHARED)
        if not is_hidden and not _REMAP.search(entry.path):
            yield entry


def _paired(old: Iterator[Entry], new: Iterator[Entry]) -> Iterator[tuple[Entry | None, Entry | None]]:
    """Entries of the same path together; both come in the order of `Entry.key`."""
    a, b = next(old, None), next(new, None)
    while a is not None or b is not None:
        if b is None or (a is not None and a.key < b.key):
            yield a, None
            a = next(old, None)
        elif a is None or b.key < a.key:
            yield None, b
            b = next(new, None)
        else:
            yield a, b
            a, b = next(old, None), next(new, None)


def _changes(old: Entry, new: Entry, written: set[bytes]) -> tuple[str, ...]:
    a, b = old.stat, new.stat
    if old.path not in written and a.st_ino == b.st_ino and a.st_nlink == b.st_nlink == 1:
        return ()
    if stat.S_IFMT(a.st_mode) != stat.S_IFMT(b.st_mode):
        return ("type",)
    found: list[str] = []
    if old.kind == "file" and (a.st_size != b.st_size or old.digest() != new.digest()):
        found.append("content")
    if old.target != new.target:
        found.append("target")
    if a.st_mode != b.st_mode:
        found.append("mode")
    if (a.st_uid, a.st_gid) != (b.st_uid, b.st_gid):
        found.append("owner")
    if a.st_rdev != b.st_rdev:
        found.append("type")
    if _xattrs(old) != _xattrs(new):
        found.append("xattr")
    if not found and old.kind == "file" and a.st_mtime_ns != b.st_mtime_ns:
        found.append("times")
    return tuple(found)


def _xattrs(entry: Entry) -> list[tuple[bytes, bytes]]:
    return [pair for pair in entry.xattrs if not pair[0].startswith(_OWN_XATTRS)]


def _size(entry: Entry) -> int:
    return entry.stat.st_size if entry.kind == "file" else 0


def _moved(removed: Sequence[Entry], added: Sequence[Entry]) -> list[FileChange]:
    """A file that is gone here and there with the same content elsewhere was renamed."""
    gone: dict[tuple[int, str], list[Entry]] = {}
    sizes = {_size(entry) for entry in added if _size(entry)}
    for entry in removed:
        if _size(entry) in sizes:
            gone.setdefault((_size(entry), entry.digest()), []).append(entry)
    changes: list[FileChange] = []
    renamed: set[bytes] = set()
    for entry in added:
        same = gone.get((_size(entry), entry.digest()), []) if _size(entry) and gone else []
        if same:
            old = same.pop(0)
            renamed.add(old.path)
            changes.append(
                FileChange(
                    path=os.fsdecode(entry.path), kind="renamed", before=os.fsdecode(old.path), size=_size(entry)
                )
            )
        else:
            changes.append(FileChange(path=os.fsdecode(entry.path), kind="added", size=_size(entry)))
    changes += [
        FileChange(path=os.fsdecode(entry.path), kind="removed", size=_size(entry))
        for entry in removed
        if entry.path not in renamed
    ]
    return changes


def compare_processes(before: Evidence, after: Evidence) -> tuple[ProcessChange, ...]:
    """Processes that came, went, or run another program, by pid inside the sandbox."""
    old, new = ({p.pid: p for p in evidence.processes} for evidence in (before, after))
    found: list[ProcessChange] = []
    for pid in sorted(old.keys() | new.keys()):
        if pid not in new:
            found.append(ProcessChange(pid=pid, kind="ended", argv=old[pid].argv))
        elif pid not in old:
            found.append(ProcessChange(pid=pid, kind="started", argv=new[pid].argv))
        elif old[pid].argv != new[pid].argv:
            found.append(ProcessChange(pid=pid, kind="changed", argv=new[pid].argv))
    return tuple(found)
