"""`host`: an image of this machine's own programs, for trying Crab out with the tools that are installed here.

It is a copy (by reflink where the file system can), not an overlay over the host's `/`: a package upgrade on the host
would change what lies below running sandboxes and old checkpoints, silently if a file keeps its size, and a checkpoint
of a process that has such a file mapped could not be restored any more.

Only what is listed here is taken. Of /etc only what every user of the host may read (what the host hides from them is a
secret: shadow, private keys, passwords of networks), and even then not the names below. /etc/shadow is written anew
with all accounts locked. /opt, /home, /root, /srv and /var stay out, except the package database.
"""

from __future__ import annotations

import fnmatch
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import msgspec

from crab.errors import InvalidRequest
from crab.sandbox.images import programs
from crab.sandbox.images.folder import copy_tree
from crab.sandbox.images.source import ImageConfig, Workshop
from crab.sandbox.images.unpack import Budget, unpack

_COPIED = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
_COPIED_BELOW = ("var/lib/dpkg", "var/lib/rpm", "var/lib/pacman")
"""Without its database, the package manager in the sandbox would know of no package."""
_EMPTY = ("home", "opt", "srv", "mnt", "media", "run", "sys", "boot", "var/cache", "var/lib", "var/log", "var/spool")

_SECRET = (
    "etc/shadow*",
    "etc/gshadow*",
    "etc/ssh/ssh_host_*",
    "etc/ssl/private",
    "etc/*.keytab",
    "etc/machine-id",
    "etc/NetworkManager/system-connections",
    "etc/wireguard",
    "etc/openvpn",
    "etc/wpa_supplicant",
    "etc/ppp/*-secrets",
    "etc/letsencrypt",
    "etc/docker",
    "etc/containers/auth.json",
    "etc/kubernetes",
    "etc/rancher",
    "etc/crab",
    "etc/apt/auth.conf*",
    "etc/credstore*",
    "etc/security/opasswd*",
    "etc/cron*",
    "etc/.git",
)
"""Not taken even if everybody may read it: secrets, identity of the machine, jobs that a sandbox should not start."""

ROOT = Path("/")


class Host(msgspec.Struct, frozen=True):
    """This machine."""

    root: Path = ROOT

    @classmethod
    def parse(cls, rest: str) -> Self:
        """Of the part after `host`, which must be empty."""
        if rest:
            raise InvalidRequest(f"the source `host` takes nothing after it: {rest!r}", remedy="write `host`")
        return cls()

    def build(self, root: Path, workshop: Workshop) -> ImageConfig:
        """Copy the listed folders."""
        for name in (*_COPIED, *_COPIED_BELOW):
            if os.path.lexists(self.root / name):
                workshop.progress(f"copying {self.root / name}")
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                copy_tree(str(self.root / name), root / name)
        workshop.progress(f"copying {self.root / 'etc'} without secrets")
        self._copy_etc(root, workshop)
        for name in _EMPTY:
            (root / name).mkdir(parents=True, exist_ok=True)
        for name in ("tmp", "var/tmp"):
            (root / name).mkdir(exist_ok=True)
            (root / name).chmod(0o1777)
        _lock_accounts(root)
        return ImageConfig()

    def _copy_etc(self, root: Path, workshop: Workshop) -> None:
        # By tar, which takes a list of names: what is not listed is never written, not even for a moment.
        names, archive = workshop.scratch / "etc.names", workshop.scratch / "etc.tar"
        names.write_bytes(b"".join(os.fsencode(name) + b"\0" for name in readable_by_all(self.root, "etc")))
        programs.run(
            [
                *(programs.require("tar"), "--create", "--file", archive, "--directory", self.root),
                *("--null", "--no-recursion", "--verbatim-files-from", "--files-from", names),
                *("--format=pax", "--xattrs", "--warning=no-file-ignored", "--warning=no-file-changed"),
            ],
            "copying /etc",
            place=root,
        )
        unpack(archive, root, Budget(workshop.limits))


def readable_by_all(root: Path, top: str) -> Iterator[str]:
    """Relative names below `top` that every user may read and that are not on the list of secrets, folders first."""
    pending = [top]
    while pending:
        name = pending.pop()
        try:
            status = os.lstat(root / name)
        except FileNotFoundError:
            continue
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in _SECRET):
            continue
        if stat.S_ISDIR(status.st_mode):
            if status.st_mode & 0o005 == 0o005:
                yield name
                pending.extend(f"{name}/{child}" for child in sorted(os.listdir(root / name), reverse=True))
        elif stat.S_ISLNK(status.st_mode) or (stat.S_ISREG(status.st_mode) and status.st_mode & 0o004):
            yield name


def _lock_accounts(root: Path) -> None:
    """Write shadow files in which no account has a password that fits."""
    for source, target, rest in (("passwd", "shadow", "*:19000:0:99999:7:::"), ("group", "gshadow", "*::")):
        try:
            lines = (root / "etc" / source).read_text(errors="surrogateescape").splitlines()
        except FileNotFoundError:
            continue
        accounts = [line.split(":", 1)[0] for line in lines if ":" in line and not line.startswith(("#", "+", "-"))]
        descriptor = os.open(
            root / "etc" / target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o640
        )
        with open(descriptor, "w", errors="surrogateescape") as file:
            file.writelines(f"{account}:{rest}\n" for account in accounts)
    machine_id = root / "etc/machine-id"
    if (root / "etc").is_dir():
        machine_id.write_text("")  # empty: made anew by whoever needs one; two machines must not share it
