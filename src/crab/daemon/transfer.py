"""Files in and out of sandboxes: copies, the result of copy-on-write mounts, images of a sandbox's files."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from crab.checkpoint import difference
from crab.checkpoint.view import Tree, seen
from crab.daemon import requests as ask
from crab.daemon.core import Core, new_id
from crab.daemon.dispatch import answers
from crab.daemon.registry import Record
from crab.errors import InvalidRequest, LaunchFailed, NoSpace, NotFound
from crab.host import btrfs
from crab.model import Difference, FileChange, Image
from crab.sandbox import copying, inside, runtime
from crab.sandbox.images import ImageConfig

T = TypeVar("T")


@answers(ask.CopyIn)
def copy_in(core: Core, request: ask.CopyIn) -> ask.Copied:
    """From the host into a running sandbox; what is written belongs to the sandbox's root."""
    record = core.registry.find(request.sandbox)
    life = core.running(record, "cp")

    def work() -> copying.Tally:
        with inside.root_of(life.pid) as root:
            return copying.copy_in(Path(request.source), root, request.target)

    what = f"{request.source} was copied to {request.target}"
    core.inspector.wrote(life.key, what)
    try:
        return _copied(_clear(record, lambda: inside.as_owner(life.enclave.first_id, work)))
    finally:
        core.inspector.wrote(
            life.key, what
        )  # a checkpoint in between may have part of it, and covers what was said before


@answers(ask.CopyOut)
def copy_out(core: Core, request: ask.CopyOut) -> ask.Copied:
    """From a running sandbox to the host; what is written belongs to the caller of the daemon (root)."""
    record = core.registry.find(request.sandbox)
    life = core.running(record, "cp")

    def work() -> copying.Tally:
        with inside.root_of(life.pid) as root:
            return copying.copy_out(root, request.source, Path(request.target))

    return _copied(_clear(record, work))


def _copied(tally: copying.Tally) -> ask.Copied:
    return ask.Copied(files=tally.files, size=tally.size, skipped=tuple(tally.skipped))


def _clear(record: Record, work: Callable[[], T]) -> T:
    """Run a copy; what the system says of a failure becomes an error of ours."""
    try:
        return work()
    except OSError as error:
        if error.errno in (28, 122):
            raise NoSpace(
                f"no space left while copying {os.fsdecode(error.filename or b'')} with sandbox {record.name}",
                remedy="free space, or raise the sandbox's disk limit",
            ) from error
        raise InvalidRequest(
            f"copying with sandbox {record.name}: {error}", remedy="check the paths and their rights"
        ) from error


# ---- the sandbox's files as the host's own


@contextlib.contextmanager
def _standing(core: Core, record: Record) -> Iterator[Path]:
    """A read-only snapshot of the sandbox's writable layers, for as long as the block."""
    life = core.life(record)
    if not life.files.is_dir():
        raise NotFound(
            f"the files of sandbox {record.name} are not on this host",
            remedy=f"`crab recover {record.name}` brings it back",
        )
    snapshot = core.pool.staging / new_id("t")
    btrfs.snapshot(life.files, snapshot, read_only=True)
    try:
        yield snapshot
    finally:
        core.discard_later(snapshot)


@answers(ask.Commit)
def commit(core: Core, request: ask.Commit) -> Image:
    """Make an image of a sandbox's files."""
    with core.operation(request.sandbox, "commit") as record:
        return commit_files(core, record, request.name, f"sandbox:{record.name}")


def commit_files(core: Core, record: Record, name: str, source: str) -> Image:
    """The same for a caller that holds the sandbox's operation. Times are kept; Crab's own folders are left out."""
    base = runtime.path(core.pool, record.runtime)
    config = ImageConfig(env=record.spec.env, workdir=record.spec.workdir, user=record.spec.user)
    with _standing(core, record) as snapshot, seen(core.pool, Tree((base,), snapshot)) as root:

        def build(target: Path) -> None:
            words = ["cp", "--archive", "--reflink=auto", "--no-target-directory", f"{root}/.", str(target)]
            done = subprocess.run(words, capture_output=True, text=True, pass_fds=(int(root.name),))
            if done.returncode:
                if "No space" in done.stderr or "quota" in done.stderr:
                    raise NoSpace(f"no space for image {name}", remedy="free space in the state directory")
                raise LaunchFailed(
                    f"the files of {record.name} could not be copied: {done.stderr.strip()[-300:]}",
                    remedy="see `crab doctor`",
                )
            for own in (".crab", "dev"):
                shutil.rmtree(target / own, ignore_errors=True)

        return core.images.add_subvolume(name, source, build, config=config)


# ---- copy-on-write mounts


@answers(ask.Apply)
def apply(core: Core, request: ask.Apply) -> Difference:
    """Copy what a sandbox changed in a copy-on-write mount back to the host's folder; only say it with `dry_run`."""
    with core.operation(request.sandbox, "apply") as record:
        wanted = request.target.rstrip("/")
        found = [
            (n, m) for n, m in enumerate(record.spec.mounts) if m.target.rstrip("/") == wanted and m.kind == "copy"
        ]
        if not found:
            mounts = ", ".join(m.target for m in record.spec.mounts if m.kind == "copy") or "none"
            raise NotFound(
                f"sandbox {record.name} has no copy-on-write mount at {request.target}", remedy=f"such mounts: {mounts}"
            )
        number, mount = found[0]
        source = Path(mount.source)
        with _standing(core, record) as snapshot:
            changed = Tree((source,), snapshot, f"m{number}")
            changes = difference.compare(core.pool, Tree((source,)), changed, hidden=())
            if not request.dry_run:
                with seen(core.pool, changed) as view:
                    _apply(changes, view, source)
        return Difference(files=changes)


def _apply(changes: tuple[FileChange, ...], view: Path, target: Path) -> None:
    """Make a folder of the host equal to the view. What is gone goes first, deepest first; then folders before files."""
    gone = [
        change.path if change.kind == "removed" else change.before
        for change in changes
        if change.kind in ("removed", "renamed")
    ]
    try:
        for path in sorted(gone, key=lambda p: p.count("/"), reverse=True):
            _remove(target / path)
        for change in changes:
            if change.kind != "removed":
                _renew(change, view / change.path, target / change.path)
    except OSError as error:
        raise InvalidRequest(
            f"the changes could not be applied to {target}: {error}",
            remedy="what was applied so far stays; the sandbox still has all of it",
        ) from error


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


def _renew(change: FileChange, source: Path, target: Path) -> None:
    status = source.lstat()
    if stat.S_ISDIR(status.st_mode):
        target.mkdir(exist_ok=True)
    else:
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        if change.kind != "changed" or {"content", "target", "type"} & set(change.what):
            folders = [os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) for path in (source, target)]
            try:
                copying.copy(
                    folders[0], os.fsencode(source.name), folders[1], os.fsencode(target.name), copying.Tally()
                )
            finally:
                for folder in folders:
                    os.close(folder)
    os.chown(target, status.st_uid, status.st_gid, follow_symlinks=False)
    if not stat.S_ISLNK(status.st_mode):
        target.chmod(stat.S_IMODE(status.st_mode))
        os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
