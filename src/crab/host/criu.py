"""Which CRIU this machine uses and how it is started.

Knows which versions are recent enough for a kernel, where a system-wide CRIU may lie, and the layout of the private one
that `crab.host.provision` makes. Does not know how to get one, nor anything of dumps and restores.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from crab import native
from crab.errors import HostUnsuitable

REMEDY = "crab doctor --fix"

PACKAGE_VERSION = "4.1.1-1"
"""The Debian package that the private CRIU is made of; `criu_pins.json` holds its digest. Each has a folder of its own."""

_ALWAYS = ("--no-default-config",)
"""The host's /etc/criu/default.conf and ~/.criu/default.conf may hold options for other programs that use CRIU."""

_SBIN = "/usr/local/sbin:/usr/sbin:/sbin"
"""Searched after $PATH, which often lacks them for others than root."""


@dataclass(frozen=True, slots=True)
class Criu:
    """A CRIU that works here: `[*criu.argv, "dump", …]` starts it.

    The arguments are a plain list without a shell, so they pass through nsenter and setns. All files of a private one may
    be read by everybody: a restore runs as uid 0 of a user namespace, which is nobody special outside.
    """

    argv: tuple[str, ...]
    version: str
    """As CRIU itself says it: `4.1.1`."""
    source: Literal["system", "private"]
    program: Path
    """The executable of CRIU itself (of a private one, `argv[0]` is its dynamic loader)."""

    @property
    def environment(self) -> dict[str, str]:
        """What must be added to the environment of a dump (`native/criu.c`). Raises HostUnsuitable if it was not built."""
        return {"LD_PRELOAD": str(native.program("crab-criu.so"))}


def default_private_dir() -> Path:
    """`$CRAB_PRIVATE`, or /var/lib/crab/private: one for all state directories, as it depends on the host only."""
    return Path(os.environ.get("CRAB_PRIVATE") or "/var/lib/crab/private")


def parse_version(text: str) -> tuple[int, ...]:
    """The first dotted number in a text: `6.18.44-fc` is (6, 18, 44), `Version: 4.1.1` is (4, 1, 1); () if none."""
    found = re.search(r"\d+(?:\.\d+)+", text)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def minimum_criu(kernel: tuple[int, ...]) -> tuple[int, ...]:
    """The oldest CRIU that Crab can use on a kernel.

    4.1 from Linux 6.13 on: that kernel moved the virtual clock pages of the vDSO to a mapping of their own (kernel
    commit e93d2521b27f), which older ones meet with "Unexpected rt vDSO area bounds" (criu commit 8ee2eba47, in 4.1).
    3.19 before that: the first with `--network-lock skip` (criu commit c97cc6a6c); `--unprivileged` came with 3.18.
    """
    return (4, 1) if kernel >= (6, 13) else (3, 19)


def running_kernel() -> tuple[int, ...]:
    return parse_version(os.uname().release)


def find_criu(private_dir: Path) -> Criu:
    """The distribution's CRIU if it is recent enough for the running kernel, else the private one in `private_dir`.

    Takes 0.1 ms without a system-wide CRIU, else the 5 ms in which that one tells its version.

    Raises:
        HostUnsuitable: there is none, or only one that is too old.
    """
    minimum = minimum_criu(running_kernel())
    system = system_criu()
    if system and parse_version(system.version) >= minimum:
        return system
    private = private_criu(private_dir)
    if private and parse_version(private.version) >= minimum:
        return private
    needed = ".".join(map(str, minimum))
    found = f"{system.program} is {system.version}" if system else "none is installed"
    raise HostUnsuitable(
        f"CRIU {needed} or newer is needed on Linux {os.uname().release}, but {found} and there is no private one in "
        f"{private_dir}",
        remedy=REMEDY,
    )


def system_criu() -> Criu | None:
    """The CRIU that is installed system-wide, of whatever version; None if there is none or it does not even start."""
    path = shutil.which("criu", path=f"{os.environ.get('PATH', '')}:{_SBIN}")
    if path is None:
        return None
    version = stated_version((path,))
    return Criu((path, *_ALWAYS), version, "system", Path(path)) if version else None


def private_folder(private_dir: Path) -> Path:
    """Where the private CRIU of this version of Crab lies."""
    return private_dir / f"criu-{PACKAGE_VERSION}"


def private_criu(private_dir: Path) -> Criu | None:
    """The private CRIU; None if it was not provisioned or is not whole. It was proven to work when it was put there."""
    folder = private_folder(private_dir)
    try:
        version = json.loads((folder / "stamp.json").read_text())["version"]
    except (OSError, ValueError, KeyError):
        return None
    criu = at_folder(folder, str(version))
    return criu if criu.program.exists() and Path(criu.argv[0]).exists() else None


def at_folder(folder: Path, version: str) -> Criu:
    """The private CRIU in a folder as `crab.host.provision` makes it: `criu`, `lib/` with the loader, `plugins/` (empty).

    It runs on the loader and the C library that it was built with. `--inhibit-cache` keeps out the host's
    /etc/ld.so.cache, `--libdir` the host's /usr/lib/criu, whose plug-ins belong to another CRIU.
    """
    folder = folder.absolute()
    program, lib = folder / "criu", folder / "lib"
    loader = (str(lib / "ld-linux-x86-64.so.2"), "--inhibit-cache", "--library-path", str(lib))
    argv = (*loader, str(program), *_ALWAYS, "--libdir", str(folder / "plugins"))
    return Criu(argv, version, "private", program)


def stated_version(argv: tuple[str, ...]) -> str:
    """What `criu --version` says (`4.1.1`); empty if it cannot be started."""
    try:
        done = subprocess.run([*argv, "--version"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(r"^Version:\s*(\S+)", done.stdout, re.MULTILINE)
    return found[1] if done.returncode == 0 and found else ""


def check(criu: Criu) -> str:
    """What `criu check` complains of; empty if the kernel has all that dumps and restores need. As root; 60 to 130 ms."""
    try:
        done = subprocess.run([*criu.argv, "check"], capture_output=True, text=True, timeout=60, cwd="/")
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return ""
    said = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    errors = [line for line in said if line.startswith("Error")]
    return "; ".join((errors or said)[:3]) or f"criu check ended with {done.returncode}"
