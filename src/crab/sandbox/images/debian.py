"""`debian:SUITE[+PACKAGE,…]`: an image with a small Debian, built by mmdebstrap (or debootstrap) on this machine.

Uses the mirrors and keys that the host's apt uses for Debian, and its proxies, so that it works behind a company's
mirror as `apt-get` does; on another distribution, the builder's own default. Downloaded packages stay in the cache
folder.
"""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Self

import msgspec

from crab.errors import CrabError, HostUnsuitable, InvalidRequest, NotFound
from crab.sandbox.images import programs
from crab.sandbox.images.source import ImageConfig, Workshop

PACKAGES = ("bash", "coreutils", "git", "python3", "ca-certificates", "procps")
"""What an agent's shell needs beyond Debian's minimum."""

_SUITE = re.compile(r"[a-z][a-z0-9-]*")
_PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]+")
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_POCKETS = ("", "-updates", "-security")
_UNRELEASED = ("sid", "unstable", "experimental")
_HOST_OPTIONS = ("Acquire::http", "Acquire::https", "Acquire::Check-Valid-Until", "Acquire::Check-Date")
_STEPS = re.compile(r"^I: (.*)")
_NOISE = re.compile(
    r"running --|main\(\)|skipping|(Retrieving|Validating|Extracting) |(Unpacking|Configuring) (?!the base|required)"
)
"""This module's own hooks, and what debootstrap says once for each package."""


class Debian(msgspec.Struct, frozen=True):
    """One suite with extra packages."""

    suite: str
    packages: tuple[str, ...] = ()

    @classmethod
    def parse(cls, rest: str) -> Self:
        """Of the part after `debian:`."""
        suite, plus, extra = rest.partition("+")
        packages = tuple(extra.split(",")) if plus else ()
        if not _SUITE.fullmatch(suite):
            raise InvalidRequest(f"{suite!r} is no suite of Debian", remedy="write debian:bookworm or debian:trixie")
        for package in packages:
            if not _PACKAGE.fullmatch(package):
                raise InvalidRequest(
                    f"{package!r} is no name of a package", remedy="write debian:SUITE+PACKAGE,PACKAGE without spaces"
                )
        return cls(suite, packages)

    def build(self, root: Path, workshop: Workshop) -> ImageConfig:
        """Install the packages into `root`; takes half a minute and a network."""
        packages = tuple(dict.fromkeys(PACKAGES + self.packages))
        sources = host_sources(self.suite)
        if not sources and not _KEYRING.exists():
            raise HostUnsuitable(
                "the keys of Debian's archive are not installed", remedy="install the package debian-archive-keyring"
            )
        cache = workshop.cache / "debs"
        (cache / "partial").mkdir(parents=True, exist_ok=True)
        # apt locks its archive folder and fails if another holds the lock; wait here instead.
        with open(workshop.cache / "debs.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if programs.find("mmdebstrap"):
                self._mmdebstrap(root, packages, sources, cache, workshop)
            elif programs.find("debootstrap"):
                self._debootstrap(root, packages, sources, cache, workshop)
            else:
                raise HostUnsuitable(
                    "neither mmdebstrap nor debootstrap is installed",
                    remedy="`crab doctor --fix`, or install mmdebstrap",
                )
        return ImageConfig()

    def _remedy(self) -> str:
        return (
            f"check that the suite {self.suite} and all packages exist and that `apt-get update` works on this "
            "machine; a root file system that you have already can be used with dir:/FOLDER or tar:/FILE"
        )

    def _explain(self, output: str) -> CrabError | None:
        package = re.search(r"Unable to locate package (\S+)|Couldn't find these debs: (.+)", output)
        if package is not None:
            name = package[1] or package[2]
            return NotFound(
                f"there is no package {name} in debian:{self.suite}", remedy="`apt-cache search` finds names"
            )
        if re.search(r"does not have a Release file|No such script|Failed getting release file", output):
            return NotFound(
                f"there is no suite {self.suite} on the mirrors of this machine, or they cannot be reached",
                remedy="check the name, and that `apt-get update` works on this machine",
            )
        return None

    def _mmdebstrap(
        self, root: Path, packages: tuple[str, ...], sources: list[str], cache: Path, workshop: Workshop
    ) -> None:
        # The options of the host's apt and dpkg's force-unsafe-io are for the build only. Without fsync after every
        # file the build is twice as fast; the image is made durable as a whole when it is published.
        options = workshop.scratch / "apt.conf"
        options.write_text("".join(line + "\n" for line in host_options()))
        archives = '"$1"/var/cache/apt/archives'
        setup = (
            f'mkdir -p {archives} "$1"/etc/apt/apt.conf.d "$1"/etc/dpkg/dpkg.cfg.d && '
            f'mount --bind "$CRAB_CACHE" {archives} && cp "$CRAB_OPTIONS" "$1"/etc/apt/apt.conf.d/99build && '
            'echo force-unsafe-io > "$1"/etc/dpkg/dpkg.cfg.d/99build'
        )
        finish = f'umount {archives} && rm "$1"/etc/apt/apt.conf.d/99build "$1"/etc/dpkg/dpkg.cfg.d/99build'
        programs.run(
            [
                *(*programs.isolated(root), programs.require("mmdebstrap")),
                *("--mode=root", "--format=directory", "--variant=minbase", f"--include={','.join(packages)}"),
                *("--skip=essential/unlink", f"--setup-hook={setup}", f"--customize-hook={finish}"),
                *(self.suite, root, *sources),
            ],
            f"building {self._shown()} with mmdebstrap",
            place=root,
            remedy=self._remedy(),
            progress=lambda line: _step(line, workshop),
            explain=self._explain,
            env={"CRAB_CACHE": str(cache), "CRAB_OPTIONS": str(options)},
        )

    def _debootstrap(
        self, root: Path, packages: tuple[str, ...], sources: list[str], cache: Path, workshop: Workshop
    ) -> None:
        parsed = [_Line.parse(line) for line in sources]
        keyring = [f"--keyring={parsed[0].keyring}"] if parsed and parsed[0].keyring else []
        programs.run(
            [
                *(*programs.isolated(root), programs.require("debootstrap"), "--variant=minbase", *keyring),
                *(f"--include={','.join(packages)}", f"--cache-dir={cache}"),
                *(self.suite, root, *(line.uri for line in parsed[:1])),
            ],
            f"building {self._shown()} with debootstrap",
            place=root,
            remedy=self._remedy(),
            progress=lambda line: _step(line, workshop),
            explain=self._explain,
        )
        if sources:
            (root / "etc/apt/sources.list").write_text("".join(line + "\n" for line in sources))
        for folder in ("var/cache/apt/archives", "var/lib/apt/lists"):
            for path in (root / folder).iterdir():
                if path.is_file():
                    path.unlink()

    def _shown(self) -> str:
        return f"debian:{self.suite}"


def _step(line: str, workshop: Workshop) -> None:
    step = _STEPS.match(line)
    if step and not _NOISE.match(step[1]):
        workshop.progress(step[1].rstrip("."))


# ---------------------------------------------------------------- what the host's apt knows


class _Line(NamedTuple):
    """One source of packages."""

    keyring: str
    uri: str
    suite: str
    components: tuple[str, ...]

    @classmethod
    def parse(cls, line: str) -> Self:
        """Of the one-line form (sources.list(5)); ValueError if it is none for binary packages."""
        match = re.fullmatch(r"deb\s+(?:\[([^]]*)\]\s+)?(\S+)\s+(\S+)((?:\s+\S+)+)", line.split("#", 1)[0].strip())
        if match is None:
            raise ValueError(line)
        options = _settings((match[1] or "").split())
        return cls(options.get("signed-by", ""), match[2], match[3], tuple(match[4].split()))

    def __str__(self) -> str:
        options = f"[signed-by={self.keyring}] " if self.keyring else ""
        return f"deb {options}{self.uri} {self.suite} main"


def _settings(lines: Iterable[str]) -> dict[str, str]:
    """Of lines KEY=VALUE."""
    return {key: value for key, _, value in (line.partition("=") for line in lines)}


def host_sources(suite: str, apt: Path = Path("/etc/apt"), release: Path = Path("/etc/os-release")) -> list[str]:
    """Lines of sources.list for `suite` on the mirrors of the host, its updates and security updates included.

    Empty if the host is no Debian, or if its sources cannot be understood.
    """
    codename = _codename(release)
    if not codename:
        return []
    found = []
    for line in _lines(apt):
        rest = line.suite.removeprefix(codename)
        if not line.suite.startswith(codename) or rest not in _POCKETS or "main" not in line.components:
            continue
        if suite not in _UNRELEASED or not rest:
            found.append(line._replace(suite=suite + rest))
    # The suite itself comes first: debootstrap uses that mirror.
    ordered = sorted(dict.fromkeys(found), key=lambda line: line.suite != suite)
    return [str(line) for line in ordered] if ordered and ordered[0].suite == suite else []


def _codename(release: Path) -> str:
    try:
        fields = _settings(release.read_text().splitlines())
    except OSError:
        return ""
    return fields.get("VERSION_CODENAME", "").strip('"') if fields.get("ID", "").strip('"') == "debian" else ""


def _lines(apt: Path) -> Iterator[_Line]:
    for file in (apt / "sources.list", *sorted((apt / "sources.list.d").glob("*"))):
        try:
            text = file.read_text(errors="replace")
        except OSError:
            continue
        if file.suffix == ".sources":
            for stanza in re.split(r"\n\s*\n", text):
                yield from _deb822(stanza)
        elif file.suffix == ".list":
            for line in text.splitlines():
                try:
                    yield _Line.parse(line)
                except ValueError:
                    continue


def _deb822(stanza: str) -> Iterator[_Line]:
    fields: dict[str, str] = {}
    key = ""
    for line in stanza.splitlines():
        if line.startswith("#"):
            continue
        if line[:1] in (" ", "\t") and key:
            fields[key] += "\n" + line.strip()
        elif ":" in line:
            key, _, value = line.partition(":")
            key = key.strip().lower()
            fields[key] = value.strip()
    if "deb" not in fields.get("types", "").split() or fields.get("enabled", "yes").lower() in ("no", "false"):
        return
    keyring = fields.get("signed-by", "")
    if not keyring.startswith("/") or "\n" in keyring:
        keyring = ""  # a key in the file itself: the host's trusted keys must do
    for uri in fields.get("uris", "").split():
        for suite in fields.get("suites", "").split():
            yield _Line(keyring, uri, suite, tuple(fields.get("components", "").split()))


def host_options() -> list[str]:
    """Lines of apt.conf with the host's proxies and its tolerance for old mirrors."""
    program = programs.find("apt-config")
    if program is None:
        return []
    dump = subprocess.run(
        [program, "dump"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        errors="replace",
        env={**os.environ, "LC_ALL": "C.UTF-8"},
    ).stdout
    return [line for line in dump.splitlines() if line.startswith(_HOST_OPTIONS) and not line.endswith(' "";')]
