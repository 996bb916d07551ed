"""Getting what the host lacks: a private CRIU, and the distribution's packages that Crab needs.

The private CRIU is Debian's, unpacked into a folder together with the libraries that it links: the host's apt, its
package database and its files stay as they are. Knows apt, dpkg and dnf. Does not know how CRIU is used, nor what else
may be wrong with a host: that is `crab.host.doctor`'s business. `python -m crab.host.provision` brings all of it
(`make setup`).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from crab.errors import CrabError, Damaged, HostUnsuitable
from crab.host import criu as crius
from crab.host.criu import Criu
from crab.native import bpf as bpf_packs

Progress = Callable[[str], None]
"""Gets one line for each step that takes longer than a moment."""

PINS = Path(__file__).with_name("criu_pins.json")
MIRROR = "CRAB_DEBIAN_MIRROR"
"""Environment variable: the Debian mirror to use in place of the one in the host's apt sources."""

_DEBIAN_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_DEBIAN_SUITES = frozenset(
    (
        "oldoldstable",
        "oldstable",
        "stable",
        "testing",
        "unstable",
        "sid",
        "bullseye",
        "bookworm",
        "trixie",
        "forky",
        "duke",
    )
)
_OWN_CRIU = "or install CRIU yourself (`criu --version` must say {minimum} or newer)"


def _silent(_line: str) -> None:
    pass


# ---------------------------------------------------------------- the private CRIU


@dataclass(frozen=True, slots=True)
class Package:
    """One Debian package that the private CRIU was made of."""

    name: str
    version: str
    sha256: str
    pinned: bool
    """It has the digest in Crab's pins. Else Debian has replaced the pinned version, and its signature vouches for it."""


@dataclass(frozen=True, slots=True)
class Provisioning:
    """What `provision_criu` did."""

    criu: Criu
    packages: tuple[Package, ...]
    fresh: bool
    """False: a good one was there already."""

    @property
    def replaced(self) -> tuple[Package, ...]:
        """Libraries in another version than the pinned one, vouched for by the signature of Debian's archive only."""
        return tuple(package for package in self.packages if not package.pinned)

    def summary(self) -> str:
        """One line for people, which names the packages that are not pinned."""
        text = f"CRIU {self.criu.version} in {self.criu.program.parent}"
        if not self.fresh:
            return f"{text}, already there"
        text += f", {len(self.packages) - len(self.replaced)} of {len(self.packages)} packages as pinned"
        if self.replaced:
            newer = ", ".join(f"{package.name} {package.version}" for package in self.replaced)
            text += f"; newer in Debian by now, their signature was verified: {newer}"
        return text


def ensure_criu(private_dir: Path, progress: Progress = _silent) -> Criu:
    """The CRIU of `find_criu`, made or installed first if there is none: the private one, else the distribution's.

    Raises:
        HostUnsuitable: neither can be had. The remedy says what would help.
    """
    with contextlib.suppress(HostUnsuitable):
        return crius.find_criu(private_dir)
    try:
        return provision_criu(private_dir, progress).criu
    except HostUnsuitable as refusal:
        _install_distribution_criu(progress, refusal)
        return crius.find_criu(private_dir)


def provision_criu(private_dir: Path, progress: Progress = _silent) -> Provisioning:
    """Put Debian's CRIU and its libraries into `private_dir`; return at once if a good one is there.

    Takes about 5 s and 18 MB of download, half of it the package index. It is proven by `criu --version` and `criu check`
    before it is renamed into place, so what lies there is whole. Several processes may call it at once.

    Raises:
        HostUnsuitable: not root, no apt or dpkg, another architecture, no Debian mirror known, no network, an index or
            package without a valid signature, or a kernel that this CRIU cannot work on.
        Damaged: a package is not the one that is pinned.
    """
    if existing := _existing(private_dir):
        return existing
    pins = read_pins()
    source = _require_debian(pins)
    _make_searchable(private_dir)
    with _locked(private_dir):
        if existing := _existing(private_dir):  # another process was faster
            return existing
        for stale in private_dir.glob(".staging-*"):  # of one that was killed; the lock says that nobody uses it
            shutil.rmtree(stale, ignore_errors=True)
        staging = Path(tempfile.mkdtemp(prefix=".staging-", dir=private_dir))
        try:
            debs = _download(staging, source, pins, progress)
            packages = check_pins(debs, pins["packages"])
            progress("unpacking CRIU and trying it")
            folder = _lay_out(staging, debs)
            proven = _prove(folder)
            stamp = {"version": proven.version, "packages": [asdict(package) for package in packages]}
            _write_file(folder / "stamp.json", json.dumps(stamp, indent=2).encode() + b"\n")
            final = crius.private_folder(private_dir)
            if final.exists():  # not whole, else it would have been found above
                final.rename(staging / "broken")
            folder.rename(final)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    result = Provisioning(crius.at_folder(final, proven.version), packages, fresh=True)
    progress(result.summary())
    return result


def read_pins() -> Mapping[str, Any]:
    """`criu_pins.json`: the suite, the architecture, and version and SHA-256 of each package."""
    return json.loads(PINS.read_text())


def _existing(private_dir: Path) -> Provisioning | None:
    criu = crius.private_criu(private_dir)
    if criu is None:
        return None
    stamp = json.loads((criu.program.parent / "stamp.json").read_text())
    return Provisioning(criu, tuple(Package(**package) for package in stamp["packages"]), fresh=False)


def _require_debian(pins: Mapping[str, Any]) -> DebianSource:
    own = _OWN_CRIU.format(minimum=".".join(map(str, crius.minimum_criu(crius.running_kernel()))))
    if os.geteuid() != 0:
        raise HostUnsuitable("a private CRIU can be made by root only", remedy="run it with sudo")
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise HostUnsuitable(
            "the private CRIU is made of Debian packages, but there is no apt-get or no dpkg-deb here",
            remedy=f"install CRIU from your distribution, {own}",
        )
    machine = os.uname().machine
    if machine != "x86_64":
        raise HostUnsuitable(
            f"Crab has the digests of CRIU's packages for {pins['architecture']} only, this machine is {machine}",
            remedy=f"install CRIU from your distribution, {own}",
        )
    source = debian_source(Path("/etc/apt"), os.environ.get(MIRROR, ""))
    if source is None:
        raise HostUnsuitable(
            "no source of Debian packages in /etc/apt (this is another distribution), so no private CRIU can be made",
            remedy=f"install the package debian-archive-keyring and set {MIRROR} to the URI of a Debian mirror, {own}",
        )
    return source


def _make_searchable(private_dir: Path) -> None:
    """Make the folder, and what leads to it, for all uids; what exists already keeps its mode."""
    missing = [folder for folder in (private_dir, *private_dir.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        folder.chmod(0o755)  # whatever the umask is


@contextlib.contextmanager
def _locked(private_dir: Path) -> Generator[None]:
    descriptor = os.open(private_dir / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------- Debian's archive, through an apt state of our own


@dataclass(frozen=True, slots=True)
class DebianSource:
    """Where Debian packages come from."""

    uri: str
    signed_by: str
    """Path of a keyring, or a key as in deb822 files; empty: apt's trusted keys."""

    def stanza(self, suite: str) -> str:
        """A deb822 source of one suite. `Trusted: yes` of the host is never taken over: the signature must be checked."""
        lines = ["Types: deb", f"URIs: {self.uri}", f"Suites: {suite}", "Components: main"]
        if self.signed_by:
            lines.append(f"Signed-By: {self.signed_by}")
        return "\n".join(lines) + "\n"


def debian_source(etc_apt: Path, mirror: str = "", keyring: Path = _DEBIAN_KEYRING) -> DebianSource | None:
    """The Debian mirror and keyring of the host's apt (`*.sources`, `*.list`, `sources.list`); None if it uses none.

    A source counts as Debian's if one of its suites is named like a release of Debian. `mirror`, if given, is used in
    place of all that. `keyring` is what a source without `Signed-By` is checked with, if that file exists.
    """
    default = str(keyring) if keyring.exists() else ""
    if mirror:
        return DebianSource(mirror, default) if default else None
    parts = etc_apt / "sources.list.d"
    modern = [path.read_text(errors="replace") for path in sorted(parts.glob("*.sources"))]
    classic = [
        path.read_text(errors="replace")
        for path in [etc_apt / "sources.list", *sorted(parts.glob("*.list"))]
        if path.is_file()
    ]
    stanzas = [stanza for text in modern for stanza in _deb822(text)]
    stanzas += [stanza for text in classic for stanza in _one_line(text)]
    for stanza in stanzas:
        enabled = stanza.get("enabled", "yes").lower() not in ("no", "false", "0")
        uri = next((uri for uri in stanza.get("uris", "").split() if not uri.startswith("cdrom:")), "")
        is_debian = bool(_DEBIAN_SUITES & set(stanza.get("suites", "").split()))
        if enabled and uri and is_debian and "deb" in stanza.get("types", "").split():
            return DebianSource(uri, stanza.get("signed-by", "") or default)
    return None


def _deb822(text: str) -> Iterator[dict[str, str]]:
    """The stanzas of a `*.sources` file; names in lower case, continuation lines kept (a key may stand in the file)."""
    text = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    for block in re.split(r"\n\s*\n", text):
        stanza: dict[str, str] = {}
        name = ""
        for line in block.splitlines():
            if line[:1] in (" ", "\t") and name:
                stanza[name] += "\n" + line
            elif ":" in line:
                name, value = line.split(":", 1)
                name = name.strip().lower()
                stanza[name] = value.strip()
        if stanza:
            yield stanza


def _one_line(text: str) -> Iterator[dict[str, str]]:
    """The lines of a classic `sources.list`, in the form of `_deb822`."""
    for line in text.splitlines():
        found = re.match(r"\s*(deb)\s+(?:\[([^]]*)\]\s+)?(\S+)\s+(\S+)", line)
        if found:
            types, options, uri, suite = found.groups()
            stanza = {"types": types, "uris": uri, "suites": suite}
            for option in (options or "").split():
                name, _, value = option.partition("=")
                stanza[name.lower()] = value
            yield stanza


_APT_CONF = """\
// The host's apt.conf.d stays in force (proxies and the like), but not its hooks: they would act on the host's own apt.
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
Dir::Etc::sourcelist "/dev/null";
Dir::Etc::sourceparts "{apt}/sources";
Dir::Etc::preferences "/dev/null";
Dir::Etc::preferencesparts "/dev/null";
Dir::State "{apt}/state";
Dir::State::status "{apt}/status";
Dir::Cache "{apt}/cache";
APT::Architecture "{architecture}";
APT::Architectures {{ "{architecture}"; }};
// _apt cannot enter the staging folder.
APT::Sandbox::User "root";
// Without it a failed download of the index is only a warning.
APT::Update::Error-Mode "any";
Acquire::Languages "none";
Acquire::Retries "2";
Acquire::http::Timeout "30";
Acquire::https::Timeout "30";
Acquire::AllowInsecureRepositories "false";
Acquire::AllowWeakRepositories "false";
Acquire::AllowDowngradeToInsecureRepositories "false";
APT::Get::AllowUnauthenticated "false";
"""


def _download(staging: Path, source: DebianSource, pins: Mapping[str, Any], progress: Progress) -> list[Path]:
    """The packages as files. apt has verified them against the index, and that one's signature."""
    apt = staging / "apt"
    for folder in ("sources", "state/lists/partial", "cache/archives/partial", "debs"):
        (apt / folder).mkdir(parents=True)
    (apt / "status").touch()
    (apt / "sources" / "debian.sources").write_text(source.stanza(pins["suite"]))
    (apt / "apt.conf").write_text(_APT_CONF.format(apt=apt, architecture=pins["architecture"]))
    command = ["apt-get", "-c", str(apt / "apt.conf"), "-q"]
    pinned_criu = pins["packages"]["criu"]["version"]
    libraries = [name for name in pins["packages"] if name != "criu"]

    progress(f"fetching the package index of Debian {pins['suite']}")
    _apt([*command, "update"], source, apt)
    progress(f"fetching CRIU {pinned_criu} and {len(libraries)} libraries")
    _apt([*command, "download", f"criu={pinned_criu}", *libraries], source, apt / "debs")
    return sorted((apt / "debs").glob("*.deb"))


def _apt(command: list[str], source: DebianSource, folder: Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=_c_locale())
    if done.returncode == 0:
        return
    said = done.stderr.strip()
    lines = [line for line in said.splitlines() if line.startswith(("E:", "W:", "Err"))] or said.splitlines()
    cause = "\n  ".join(lines[:4])
    own = _OWN_CRIU.format(minimum=".".join(map(str, crius.minimum_criu(crius.running_kernel()))))
    if re.search(r"resolv|connect|timed out|unreachable|network|proxy", said, re.IGNORECASE):
        raise HostUnsuitable(
            f"no connection to the Debian mirror {source.uri}:\n  {cause}",
            remedy=f"check the network and the proxy of apt, set {MIRROR} to another mirror, {own}",
        )
    if re.search(r"NO_PUBKEY|not signed|signature|OpenPGP|sqv|have a Release file", said, re.IGNORECASE):
        raise HostUnsuitable(
            f"the Debian mirror {source.uri} has no valid signature of Debian's:\n  {cause}",
            remedy="bring the package debian-archive-keyring up to date, or use another mirror",
        )
    if re.search(r"Version '.*' for 'criu' was not found|Unable to locate package", said):
        raise HostUnsuitable(
            f"the Debian mirror {source.uri} no longer has a package that this version of Crab needs:\n  {cause}",
            remedy=f"use a newer version of Crab, {own}",
        )
    raise HostUnsuitable(f"apt-get failed with the Debian mirror {source.uri}:\n  {cause}", remedy=f"try again, {own}")


def check_pins(debs: Iterable[Path], pins: Mapping[str, Mapping[str, str]]) -> tuple[Package, ...]:
    """Compare downloaded packages with their pins.

    CRIU itself must be the pinned one. So must be a library of the pinned version; one of another version was put in
    its place by a point release of Debian, and what vouches for it is the signature that apt verified.

    Raises:
        Damaged: another content under the pinned version, or not exactly the packages that are pinned.
    """
    packages: dict[str, Package] = {}
    for deb in debs:
        name, version = _name_and_version(deb)
        if name not in pins:
            raise Damaged(f"{deb.name} is not one of the pinned packages", remedy="try another Debian mirror")
        pin = pins[name]
        digest = hashlib.sha256(deb.read_bytes()).hexdigest()
        pinned = digest == pin["sha256"]
        if not pinned and (name == "criu" or version == pin["version"]):
            raise Damaged(
                f"package {name} {version} has SHA-256 {digest}, but {pin['sha256']} is pinned for {pin['version']}",
                remedy="do not use it: the mirror hands out something else than Debian does; try another mirror",
            )
        packages[name] = Package(name, version, digest, pinned)
    if missing := sorted(set(pins) - set(packages)):
        raise Damaged(f"the packages {', '.join(missing)} did not arrive", remedy="try again, or another Debian mirror")
    return tuple(packages[name] for name in pins)


def _name_and_version(deb: Path) -> tuple[str, str]:
    show = ["dpkg-deb", "--show", "--showformat", "${Package} ${Version}", str(deb)]
    done = subprocess.run(show, capture_output=True, text=True)
    if done.returncode != 0:
        raise Damaged(f"{deb.name} is no Debian package: {done.stderr.strip()}", remedy="try another Debian mirror")
    name, _, version = done.stdout.partition(" ")
    return name, version


def pins_of_today() -> dict[str, Any]:
    """What `criu_pins.json` would be if it were written from the mirror as it is now: for maintainers."""
    pins = read_pins()
    with tempfile.TemporaryDirectory() as staging:
        found: dict[str, dict[str, str]] = {}
        for deb in _download(Path(staging), _require_debian(pins), pins, _silent):
            name, version = _name_and_version(deb)
            found[name] = {"version": version, "sha256": hashlib.sha256(deb.read_bytes()).hexdigest()}
    return {**pins, "packages": {name: found[name] for name in pins["packages"]}}


# ---------------------------------------------------------------- from packages to a folder that works


def _lay_out(staging: Path, debs: list[Path]) -> Path:
    """Unpack, and copy the program and exactly those libraries that its loader resolves into a folder of their own."""
    unpacked, folder = staging / "unpacked", staging / "criu"
    for deb in debs:
        done = subprocess.run(["dpkg-deb", "--extract", str(deb), str(unpacked)], capture_output=True, text=True)
        if done.returncode != 0:
            raise Damaged(f"cannot unpack {deb.name}: {done.stderr.strip()}", remedy="check the free space, try again")
    for made in (folder, folder / "lib", folder / "plugins"):
        made.mkdir()
        made.chmod(0o755)
    libraries = unpacked / "usr/lib/x86_64-linux-gnu"
    program = unpacked / "usr/sbin/criu"
    _write_file(folder / "criu", program.read_bytes(), 0o755)
    loader = libraries / "ld-linux-x86-64.so.2"
    for name in (loader.name, *_linked(loader, libraries, program), "libgcc_s.so.1"):
        # libgcc_s is not linked: backtrace(3) loads it when CRIU reports a bug of its own.
        _write_file(folder / "lib" / name, (libraries / name).read_bytes(), 0o755)
    return folder


def _linked(loader: Path, libraries: Path, program: Path) -> list[str]:
    """Names of the libraries that a program needs, itself and through others, all of them in `libraries`."""
    listing = subprocess.run(
        [str(loader), "--inhibit-cache", "--library-path", str(libraries), "--list", str(program)],
        capture_output=True,
        text=True,
    )
    found = re.findall(r"^\s*(\S+) => (.+?)(?: \(0x[0-9a-f]+\))?$", listing.stdout, re.MULTILINE)
    outside = [name for name, path in found if not path.startswith(f"{libraries}/")]
    if listing.returncode != 0 or not found or outside:
        raise HostUnsuitable(
            f"the pinned packages do not hold all libraries of CRIU: {', '.join(outside) or listing.stderr.strip()}",
            remedy="use a newer version of Crab",
        )
    return [Path(path).name for _, path in found if Path(path).name != loader.name]


def _prove(folder: Path) -> Criu:
    version = crius.stated_version(crius.at_folder(folder, "").argv)
    if not version or not crius.PACKAGE_VERSION.startswith(version):
        raise HostUnsuitable(
            f"the private CRIU says {version or 'nothing'} when it is asked for its version",
            remedy="check that programs may be executed on that file system (mount option noexec)",
        )
    criu = crius.at_folder(folder, version)
    if complaint := crius.check(criu):
        raise HostUnsuitable(
            f"CRIU {version} cannot work on this kernel ({os.uname().release}): {complaint}",
            remedy="use a kernel with CONFIG_CHECKPOINT_RESTORE, and as root with all capabilities",
        )
    return criu


def _write_file(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write and sync: what is renamed into place must not be empty after a power cut."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fchmod(file.fileno(), mode)  # whatever the umask is
        os.fsync(file.fileno())


def _c_locale() -> dict[str, str]:
    """The environment with messages in English, as they are looked at, and without questions."""
    return {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}


# ---------------------------------------------------------------- packages of the distribution


@dataclass(frozen=True, slots=True)
class Need:
    """Something that a package of the distribution brings."""

    name: str
    apt: str
    dnf: str
    present: Callable[[], bool]
    required: bool = True


def has_program(*names: str) -> bool:
    """One of these programs is installed, in $PATH or in a folder of system programs."""
    path = f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin"
    return any(shutil.which(name, path=path) for name in names)


def has_static_libc() -> bool:
    """A C program can be linked statically."""
    archives = ("/usr/lib/*-linux-gnu/libc.a", "/usr/lib64/libc.a", "/usr/lib/libc.a")
    return any(next(Path("/").glob(pattern[1:]), None) for pattern in archives)


def _has_headers() -> bool:
    return Path("/usr/include/stdio.h").exists() and Path("/usr/include/linux/limits.h").exists()


def _has_kernel_programs() -> bool:
    """They are built, or what builds them is here. (A wheel has them built.)"""
    headers = Path("/usr/include/bpf/bpf_helpers.h").exists()
    return (bpf_packs.is_built() and bool(bpf_packs.built())) or (bpf_packs.compiler() is not None and headers)


NEEDS = (
    Need("btrfs", "btrfs-progs", "btrfs-progs", lambda: has_program("mkfs.btrfs")),
    Need("Debian images", "mmdebstrap", "debootstrap", lambda: has_program("mmdebstrap", "debootstrap")),
    Need("C compiler", "gcc", "gcc", lambda: has_program("gcc", "cc", "clang")),
    Need("C library", "libc6-dev", "glibc-devel", _has_headers),
    Need("static C library", "libc6-dev", "glibc-static", has_static_libc),
    Need("programs for the kernel", "clang", "clang", _has_kernel_programs),
    Need("programs for the kernel", "llvm", "llvm", _has_kernel_programs),
    Need("programs for the kernel", "libbpf-dev", "libbpf-devel", _has_kernel_programs),
    Need("network set-up", "iproute2", "iproute", lambda: has_program("ip")),
    Need("network address translation", "nftables", "nftables", lambda: has_program("nft")),
    Need("namespaces", "util-linux", "util-linux", lambda: has_program("unshare") and has_program("nsenter")),
    Need("images of registries", "skopeo", "skopeo", lambda: has_program("skopeo"), required=False),
    Need("layers of OCI images", "umoci", "umoci", lambda: has_program("umoci"), required=False),
)


def install_packages(progress: Progress = _silent, needs: tuple[Need, ...] = NEEDS) -> tuple[str, ...]:
    """Install the distribution's packages for those needs that are not met yet; names of what was installed.

    Takes 1 ms if nothing is missing. An optional package that the distribution does not have is passed over.

    Raises:
        HostUnsuitable: not root, neither apt nor dnf, or a required package cannot be installed.
    """
    missing = [need for need in needs if not need.present()]
    if not missing:
        return ()
    manager = "apt" if shutil.which("apt-get") else "dnf" if shutil.which("dnf") else ""
    if not manager:
        raise HostUnsuitable(
            f"neither apt-get nor dnf is here to install what is missing: {', '.join(need.name for need in missing)}",
            remedy=f"install what your distribution calls {', '.join(need.apt for need in missing)}",
        )
    installed: list[str] = []
    for required in (True, False):
        packages = list(dict.fromkeys(getattr(need, manager) for need in missing if need.required is required))
        if not packages:
            continue
        progress(f"installing {', '.join(packages)}")
        try:
            _install(manager, packages)
            installed += packages
        except HostUnsuitable as error:
            if required:
                raise
            progress(f"going on without {', '.join(packages)}: {error.message.splitlines()[-1].strip()}")
    return tuple(installed)


def _install(manager: str, packages: list[str]) -> None:
    if os.geteuid() != 0:
        raise HostUnsuitable(f"{', '.join(packages)} can be installed by root only", remedy="run it with sudo")
    if manager == "apt":
        install = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=180", "install", "-y", "--no-install-recommends"]
        steps = [install, ["apt-get", "-qq", "update"], install]  # the lists may be missing or out of date
    else:
        steps = [["dnf", "install", "-y", "-q"]]
    said = ""
    for step in steps:
        is_install = "install" in step
        done = subprocess.run(
            step + packages if is_install else step,
            capture_output=True,
            text=True,
            env=_c_locale(),
            stdin=subprocess.DEVNULL,
        )
        if is_install and done.returncode == 0:
            return
        said = done.stderr.strip() or done.stdout.strip()
    lines = [line for line in said.splitlines() if line.startswith(("E:", "Error"))] or said.splitlines()[-3:]
    raise HostUnsuitable(
        f"cannot install {', '.join(packages)}:\n  " + "\n  ".join(lines[:3]),
        remedy=f"install them by hand: {' '.join(steps[0][:1])} install {' '.join(packages)}",
    )


def _install_distribution_criu(progress: Progress, refusal: HostUnsuitable) -> None:
    """Install the distribution's own CRIU if it is recent enough for this kernel; else raise the refusal as it is."""
    minimum = crius.minimum_criu(crius.running_kernel())
    if shutil.which("apt-cache"):
        policy = subprocess.run(["apt-cache", "policy", "criu"], capture_output=True, text=True, env=_c_locale())
        candidate = re.search(r"Candidate: (\S+)", policy.stdout)
        offered, manager = crius.parse_version(candidate[1]) if candidate else (), "apt"
    elif shutil.which("dnf"):
        query = subprocess.run(
            ["dnf", "-q", "repoquery", "--qf", "%{version}\n", "criu"], capture_output=True, text=True
        )
        offered, manager = max((crius.parse_version(line) for line in query.stdout.split()), default=()), "dnf"
    else:
        raise refusal
    if offered < minimum:
        raise refusal
    progress("installing the distribution's CRIU")
    _install(manager, ["criu"])


# ---------------------------------------------------------------- make setup


def main(arguments: list[str]) -> int:
    """Bring packages and CRIU; says nothing if there is nothing to do. `pins` prints `pins_of_today`."""

    def say(line: str) -> None:
        print(f"crab: {line}", file=sys.stderr, flush=True)

    try:
        if arguments == ["pins"]:
            print(json.dumps(pins_of_today(), indent=2))
            return 0
        install_packages(say)
        ensure_criu(crius.default_private_dir(), say)
    except CrabError as error:
        say(str(error))
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
