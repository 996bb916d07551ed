"""Make a filled folder fit to be an image: the folders that every sandbox needs, nothing that opens a way to the host.

Knows what every image must and must not contain, and how to tell its processor architecture. Does not know where the
content came from or where it goes. All paths are resolved inside the tree; symlinks in it never lead outside.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from crab.errors import InvalidRequest
from crab.host import btrfs
from crab.host.beneath import Links, open_beneath
from crab.host.fingerprint import Entry, walk

ANY = "any"
"""Architecture of an image without a single program."""

_FOLDERS = {b"proc": 0o555, b"dev": 0o755, b"tmp": 0o1777, b"root": 0o700, b".crab": 0o755}
"""Folders that are made if they are missing, and their modes."""
_MOUNTED_ON = (b"proc", b"dev", b".crab")
"""Crab mounts here or puts its own files here, so these must be folders themselves and not symlinks."""
_LARGEST_ID = 65535

# ELF header (elf.h): class, data encoding and machine say what a program runs on.
_MACHINES = {
    3: "i386",
    21: "ppc64le",
    22: "s390x",
    40: "arm",
    62: "x86_64",
    183: "aarch64",
    243: "riscv64",
    258: "loongarch64",
}
_OCI_NAMES = {"amd64": "x86_64", "arm64": "aarch64", "386": "i386", "loong64": "loongarch64"}
_PROGRAMS = (b"bin/sh", b"usr/bin/sh", b"bin/busybox", b"usr/bin/env", b"sbin/init", b"usr/lib/systemd/systemd")
_PROGRAM_FOLDERS = (b"bin", b"usr/bin", b"usr/local/bin", b"sbin", b"usr/sbin", b"app", b".")
_LOOKED_AT = 500


class Removed(NamedTuple):
    """What `prepare` took out or noticed."""

    devices: int
    attributes: int
    foreign_owners: int
    """Files of owners above 65535, which a sandbox shows as nobody's."""

    def __str__(self) -> str:
        parts = [
            f"{self.devices} device nodes removed" if self.devices else "",
            f"{self.attributes} trusted attributes removed" if self.attributes else "",
            f"{self.foreign_owners} files have owners above {_LARGEST_ID}" if self.foreign_owners else "",
        ]
        return ", ".join(part for part in parts if part)


def prepare(root: Path) -> Removed:
    """Bring the tree of a new image into form. InvalidRequest if it cannot be one.

    Device nodes are removed: the owner of the image's files is root in the sandbox, so a node for a disk of the host
    would be a way to it. So are trusted.* attributes, by which a lower layer steers overlayfs. `/.crab` is emptied.
    """
    below = btrfs.nested(root)
    if below:
        raise InvalidRequest(
            f"there are btrfs subvolumes in the new image ({below[0]}); a snapshot would not contain them",
            remedy="copy their content into ordinary folders",
        )
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Made by mkdtemp, say, it would be 0700: then nobody but root finds anything in the sandbox.
        os.fchmod(descriptor, stat.S_IMODE(os.fstat(descriptor).st_mode) | 0o555)
        removed = _clean(descriptor, root)
        for name, mode in _FOLDERS.items():
            _folder(descriptor, name, mode)
        _empty(root / ".crab", _FOLDERS[b".crab"])
    finally:
        os.close(descriptor)
    return removed


def _clean(root: int, path: Path) -> Removed:
    devices = attributes = foreign = 0
    for entry in walk(path):
        status = entry.stat
        foreign += status.st_uid > _LARGEST_ID or status.st_gid > _LARGEST_ID
        trusted = [name for name, _ in entry.xattrs if name.startswith(b"trusted.")]
        if entry.kind in ("block", "char"):
            with _opened_parent(root, entry) as (parent, name):
                os.unlink(name, dir_fd=parent)
            devices += 1
        elif trusted:
            with _opened_parent(root, entry) as (parent, name):
                place = b"/proc/self/fd/%d/%s" % (parent, name)
                for attribute in trusted:
                    os.removexattr(place, attribute, follow_symlinks=not entry.path)
            attributes += len(trusted)
    return Removed(devices, attributes, foreign)


@contextlib.contextmanager
def _opened_parent(root: int, entry: Entry) -> Iterator[tuple[int, bytes]]:
    """The folder that an entry lies in, and its name there (`.` for the top itself)."""
    folder, _, name = entry.path.rpartition(b"/")
    parent = open_beneath(root, folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield parent, name or b"."
    finally:
        os.close(parent)


def _folder(root: int, name: bytes, mode: int) -> None:
    try:
        os.mkdir(name, dir_fd=root)
        os.chmod(name, mode, dir_fd=root)
        return
    except FileExistsError:
        pass
    shown = "/" + name.decode()
    try:
        # As a program in the sandbox would resolve it; a folder of the host can never be meant.
        links: Links = "none" if name in _MOUNTED_ON else "in-root"
        descriptor = open_beneath(root, name, os.O_RDONLY | os.O_DIRECTORY, links=links)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR, errno.ENOENT):
            raise
        raise InvalidRequest(
            f"{shown} in the new image is {'a symlink' if error.errno != errno.ENOTDIR else 'no folder'}",
            remedy=f"make {shown} an ordinary folder in the source of the image",
        ) from error
    try:
        if name == b"tmp":
            os.fchmod(descriptor, mode)
    finally:
        os.close(descriptor)


def _empty(folder: Path, mode: int) -> None:
    """Of a folder that is known to be none but itself: nobody else can reach into staging."""
    os.chown(folder, 0, 0)
    folder.chmod(mode)
    for child in folder.iterdir():
        btrfs.remove_tree(child)


# ---------------------------------------------------------------- architecture


def host_architecture() -> str:
    machine = platform.machine()
    if machine.startswith("armv"):
        return "arm"
    return {"i686": "i386", "i586": "i386", "arm64": "aarch64", "amd64": "x86_64"}.get(machine, machine)


def oci_architecture(name: str) -> str:
    """Crab's (the kernel's) word for an architecture of an OCI image."""
    return _OCI_NAMES.get(name, name)


def require_architecture(found: str, what: str) -> None:
    """InvalidRequest if programs for `found` do not run here."""
    host = host_architecture()
    if found not in (ANY, host):
        raise InvalidRequest(f"{what} is made for {found}; this machine is {host}", remedy=f"use an image for {host}")


def architecture(root: Path) -> str:
    """What the programs in the tree are made for, from the ELF header of `bin/sh` or another program."""
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for path in _candidates(descriptor):
            found = _machine(descriptor, path)
            if found:
                return found
    finally:
        os.close(descriptor)
    return ANY


def _candidates(root: int) -> Iterator[bytes]:
    yield from _PROGRAMS
    for folder in _PROGRAM_FOLDERS:
        try:
            descriptor = open_beneath(root, folder, os.O_RDONLY | os.O_DIRECTORY, links="in-root")
        except OSError:
            continue
        try:
            names = sorted(map(os.fsencode, os.listdir(descriptor)))[:_LOOKED_AT]
        finally:
            os.close(descriptor)
        yield from (folder + b"/" + name for name in names)


def _machine(root: int, path: bytes) -> str:
    try:
        descriptor = open_beneath(root, path, os.O_RDONLY | os.O_NONBLOCK, links="in-root")
    except OSError:
        return ""
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return ""
        header = os.read(descriptor, 20)
    finally:
        os.close(descriptor)
    if len(header) < 20 or header[:4] != b"\x7fELF":
        return ""
    order = "big" if header[5] == 2 else "little"
    number = int.from_bytes(header[18:20], order)
    name = _MACHINES.get(number, f"elf machine {number}")
    if name == "ppc64le" and order == "big":
        return "ppc64"
    if name == "x86_64" and header[4] == 1:
        return "x32"
    return name
