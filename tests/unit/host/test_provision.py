"""Where packages come from, what is accepted of them, and a private CRIU made for real."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest

from crab.errors import Damaged, HostUnsuitable
from crab.host import criu as crius
from crab.host import provision

# ---------------------------------------------------------------- sources of apt

DEB822 = """\
# made by the installer
Types: deb deb-src
URIs: https://packages.example/node
Suites: nodistro
Components: main

Types: deb
URIs: http://mirror.example/debian http://other.example/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
"""

INLINE_KEY = """\
Types: deb
URIs: http://mirror.example/debian
Suites: trixie
Components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 mQINBGPL0BUBEADmW5NdOOHwPIJlgPu6JDcKw/NZJPR8lsD3K87ZM18gzyQZJD+w
 -----END PGP PUBLIC KEY BLOCK-----
"""

NO_KEYRING = Path("/nowhere.gpg")


def sources(folder: Path, **files: str) -> Path:
    (folder / "sources.list.d").mkdir()
    for name, text in files.items():
        path = folder / "sources.list" if name == "classic" else folder / "sources.list.d" / f"{name}.sources"
        path.write_text(text)
    return folder


def test_the_mirror_of_deb822_sources_is_used_and_foreign_sources_are_not(tmp_path: Path):
    found = provision.debian_source(sources(tmp_path, debian=DEB822), keyring=NO_KEYRING)
    assert found == provision.DebianSource(
        "http://mirror.example/debian", "/usr/share/keyrings/debian-archive-keyring.gpg"
    )


def test_a_key_inside_the_sources_file_is_kept(tmp_path: Path):
    found = provision.debian_source(sources(tmp_path, debian=INLINE_KEY), keyring=NO_KEYRING)
    assert found is not None
    # A deb822 field goes on in lines that begin with a space.
    assert INLINE_KEY[INLINE_KEY.index(" -----BEGIN") :].rstrip() in found.stanza("trixie")


@pytest.mark.parametrize(
    ("line", "signed_by"),
    [
        ("deb http://mirror.example/debian bookworm main", ""),
        ("deb [arch=amd64 signed-by=/k.gpg] http://mirror.example/debian bookworm main contrib", "/k.gpg"),
        ("  deb\thttp://mirror.example/debian\tsid main # with a comment", ""),
    ],
)
def test_a_classic_sources_list_is_read(tmp_path: Path, line: str, signed_by: str):
    text = f"# deb http://old.example/debian bookworm main\ndeb-src http://src.example/debian bookworm main\n{line}\n"
    found = provision.debian_source(sources(tmp_path, classic=text), keyring=NO_KEYRING)
    assert found == provision.DebianSource("http://mirror.example/debian", signed_by)


@pytest.mark.parametrize(
    "text",
    [
        "deb http://archive.example/ubuntu noble main universe",
        "deb http://security.example/debian-security bookworm-security main",
        "deb cdrom:[Debian_12]/ bookworm main",
        "deb-src http://mirror.example/debian bookworm main",
        "",
    ],
)
def test_what_is_no_source_of_debian_packages_is_not_taken_for_one(tmp_path: Path, text: str):
    assert provision.debian_source(sources(tmp_path, classic=text), keyring=NO_KEYRING) is None


def test_a_source_that_is_switched_off_is_passed_over(tmp_path: Path):
    off = INLINE_KEY.replace("Types: deb", "Types: deb\nEnabled: no")
    assert provision.debian_source(sources(tmp_path, debian=off), keyring=NO_KEYRING) is None


def test_a_source_without_keyring_is_checked_with_that_of_the_debian_package(tmp_path: Path):
    keyring = tmp_path / "debian.gpg"
    keyring.touch()
    folder = sources(tmp_path, classic="deb http://mirror.example/debian bookworm main\n")
    assert provision.debian_source(folder, keyring=keyring) == provision.DebianSource(
        "http://mirror.example/debian", str(keyring)
    )


def test_a_mirror_can_be_named_but_not_without_the_keyring_of_debian(tmp_path: Path):
    keyring = tmp_path / "debian.gpg"
    ubuntu = sources(tmp_path, classic="deb http://archive.example/ubuntu noble main\n")
    assert provision.debian_source(ubuntu, "http://mine.example/debian", keyring) is None
    keyring.touch()
    found = provision.debian_source(ubuntu, "http://mine.example/debian", keyring)
    assert found == provision.DebianSource("http://mine.example/debian", str(keyring))


def test_trust_without_signature_is_not_taken_over(tmp_path: Path):
    folder = sources(tmp_path, debian=DEB822.replace("Components: main", "Components: main\nTrusted: yes"))
    found = provision.debian_source(folder, keyring=NO_KEYRING)
    assert found is not None
    assert "rusted" not in found.stanza("trixie")


# ---------------------------------------------------------------- pins


@pytest.fixture
def package(tmp_path: Path):
    """Makes a Debian package."""
    if not shutil.which("dpkg-deb"):
        pytest.skip("needs dpkg-deb")

    def make(name: str, version: str, content: str = "") -> Path:
        tree = tmp_path / f"{name}-tree"
        (tree / "DEBIAN").mkdir(parents=True)
        control = f"Package: {name}\nVersion: {version}\nArchitecture: all\nMaintainer: x <x@example>\nDescription: x\n"
        (tree / "DEBIAN" / "control").write_text(control)
        (tree / "file").write_text(content)
        deb = tmp_path / f"{name}.deb"
        subprocess.run(["dpkg-deb", "--build", "--root-owner-group", tree, deb], check=True, capture_output=True)
        shutil.rmtree(tree)
        return deb

    return make


def pin(deb: Path, version: str) -> dict[str, str]:
    return {"version": version, "sha256": hashlib.sha256(deb.read_bytes()).hexdigest()}


def test_pinned_packages_are_accepted(package):
    criu, libc = package("criu", "4.1.1-1"), package("libc6", "2.41-12")
    pins = {"criu": pin(criu, "4.1.1-1"), "libc6": pin(libc, "2.41-12")}
    assert [(found.name, found.pinned) for found in provision.check_pins([libc, criu], pins)] == [
        ("criu", True),
        ("libc6", True),
    ]


def test_a_library_that_debian_has_replaced_is_accepted_and_reported(package, tmp_path: Path):
    criu, libc = package("criu", "4.1.1-1"), package("libc6", "2.41-13")
    pins = {"criu": pin(criu, "4.1.1-1"), "libc6": {"version": "2.41-12", "sha256": "0" * 64}}
    packages = provision.check_pins([criu, libc], pins)
    result = provision.Provisioning(crius.at_folder(tmp_path, "4.1.1"), packages, fresh=True)
    assert [found.name for found in result.replaced] == ["libc6"]
    assert "1 of 2 packages as pinned" in result.summary()
    assert "libc6 2.41-13" in result.summary()
    assert "signature" in result.summary()


@pytest.mark.parametrize(("name", "version"), [("criu", "4.1.1-1"), ("criu", "4.2-1"), ("libc6", "2.41-12")])
def test_another_content_is_refused(package, name: str, version: str):
    good = {"criu": package("criu", "4.1.1-1"), "libc6": package("libc6", "2.41-12")}
    pins = {"criu": pin(good["criu"], "4.1.1-1"), "libc6": pin(good["libc6"], "2.41-12")}
    bad = {**good, name: package(name, version, "something else")}
    with pytest.raises(Damaged, match=f"{name} {version} has SHA-256"):
        provision.check_pins(bad.values(), pins)


def test_missing_and_foreign_packages_are_refused(package):
    criu, other = package("criu", "4.1.1-1"), package("other", "1")
    pins = {"criu": pin(criu, "4.1.1-1"), "libc6": {"version": "2.41-12", "sha256": "0" * 64}}
    with pytest.raises(Damaged, match="libc6 did not arrive"):
        provision.check_pins([criu], pins)
    with pytest.raises(Damaged, match="not one of the pinned"):
        provision.check_pins([criu, other], pins)


def test_the_pins_are_those_of_the_version_that_gets_the_folder():
    pins = provision.read_pins()
    assert pins["packages"]["criu"]["version"] == crius.PACKAGE_VERSION
    assert all(len(found["sha256"]) == 64 for found in pins["packages"].values())


# ---------------------------------------------------------------- refusals


@pytest.fixture
def like_root(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)


def test_only_root_can_make_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(HostUnsuitable, match="by root only"):
        provision.provision_criu(tmp_path / "private")
    assert not (tmp_path / "private").exists()


def test_without_apt_the_remedy_is_the_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, like_root):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HostUnsuitable, match="no apt-get") as caught:
        provision.provision_criu(tmp_path / "private")
    assert "from your distribution" in caught.value.remedy


def test_without_a_debian_mirror_the_remedy_names_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, like_root
):
    if not shutil.which("apt-get"):
        pytest.skip("needs apt")
    monkeypatch.setattr(provision, "debian_source", lambda *_: None)
    with pytest.raises(HostUnsuitable) as caught:
        provision.provision_criu(tmp_path / "private")
    assert provision.MIRROR in caught.value.remedy


@pytest.mark.parametrize(
    ("mirror", "said"),
    [
        ("http://127.0.0.1:9/debian", "no connection to the Debian mirror http://127.0.0.1:9/debian"),
        ("file:{empty}", "has no valid signature"),
    ],
)
def test_a_mirror_that_cannot_be_used_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mirror: str, said: str
):
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        pytest.skip("needs root and apt")
    keyring = tmp_path / "debian.gpg"
    keyring.touch()
    source = provision.DebianSource(mirror.format(empty=tmp_path), str(keyring))
    monkeypatch.setattr(provision, "debian_source", lambda *_: source)
    with pytest.raises(HostUnsuitable, match=said):
        provision.provision_criu(tmp_path / "private")
    assert [path.name for path in (tmp_path / "private").iterdir()] == [".lock"]


# ---------------------------------------------------------------- the way into place, with a stand-in for the download


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, like_root):
    """Everything but the network: unpacked "packages" that say they are CRIU. Counts the downloads."""
    downloads: list[float] = []

    def download(*_arguments: object) -> list[Path]:
        downloads.append(time.monotonic())
        time.sleep(0.05)
        return []

    def lay_out(staging: Path, _debs: list[Path]) -> Path:
        folder = staging / "criu"
        (folder / "lib").mkdir(parents=True)
        (folder / "lib" / "ld-linux-x86-64.so.2").touch()
        (folder / "criu").touch()
        return folder

    monkeypatch.setattr(provision, "_require_debian", lambda _pins: provision.DebianSource("http://mirror.example", ""))
    monkeypatch.setattr(provision, "_download", download)
    monkeypatch.setattr(provision, "check_pins", lambda *_: (provision.Package("criu", "4.1.1-1", "0" * 64, True),))
    monkeypatch.setattr(provision, "_lay_out", lay_out)
    monkeypatch.setattr(provision, "_prove", lambda folder: crius.at_folder(folder, "4.1.1"))
    return downloads


def test_several_at_once_make_one(stand_in: list[float], tmp_path: Path):
    results: list[provision.Provisioning] = []
    threads = [
        threading.Thread(target=lambda: results.append(provision.provision_criu(tmp_path / "private")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(stand_in) == 1
    assert sorted(result.fresh for result in results) == [False, False, False, True]
    assert len({result.criu for result in results}) == 1


def test_what_a_killed_one_left_is_removed_and_a_broken_one_replaced(stand_in: list[float], tmp_path: Path):
    (tmp_path / ".staging-dead" / "apt").mkdir(parents=True)
    broken = crius.private_folder(tmp_path)
    broken.mkdir()
    (broken / "half").touch()
    result = provision.provision_criu(tmp_path)
    assert result.fresh
    assert {path.name for path in tmp_path.iterdir()} == {".lock", broken.name}
    assert not (broken / "half").exists()


def test_one_that_does_not_work_never_gets_into_place(
    stand_in: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(_folder: Path) -> crius.Criu:
        raise HostUnsuitable("CRIU cannot work on this kernel")

    monkeypatch.setattr(provision, "_prove", refuse)
    with pytest.raises(HostUnsuitable):
        provision.provision_criu(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_new_folders_can_be_entered_by_others_whatever_the_umask(stand_in: list[float], tmp_path: Path):
    before = os.umask(0o077)
    try:
        provision.provision_criu(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/b")] == [0o755, 0o755]


# ---------------------------------------------------------------- for real


@pytest.mark.network
@pytest.mark.criu
@pytest.mark.slow
def test_a_private_criu_is_made_from_the_mirror_of_this_machine(tmp_path: Path):
    if os.geteuid() != 0 or not provision.debian_source(Path("/etc/apt"), os.environ.get(provision.MIRROR, "")):
        pytest.skip("needs root and a Debian mirror")
    lists = Path("/var/lib/apt/lists")
    before = {path: path.stat().st_mtime_ns for path in lists.iterdir()} if lists.exists() else {}
    steps: list[str] = []
    result = provision.provision_criu(tmp_path / "private", steps.append)
    assert result.fresh
    assert result.criu.version == "4.1.1"
    assert steps[-1] == result.summary()
    assert crius.check(result.criu) == ""
    assert crius.private_criu(tmp_path / "private") == result.criu
    modes = {path.stat().st_mode & 0o005 for path in result.criu.program.parent.rglob("*") if path.suffix != ".json"}
    assert modes == {0o005}
    if lists.exists():
        assert {path: path.stat().st_mtime_ns for path in lists.iterdir()} == before

    start = time.perf_counter()
    again = provision.provision_criu(tmp_path / "private", steps.append)
    assert time.perf_counter() - start < 0.1
    assert (again.fresh, again.criu, again.packages) == (False, result.criu, result.packages)


# ---------------------------------------------------------------- packages of the distribution


def test_nothing_is_installed_when_nothing_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a program was started"))
    met = provision.Need("shell", "bash", "bash", lambda: True)
    assert provision.install_packages(needs=(met,)) == ()


def test_only_what_is_missing_is_installed_each_package_once(monkeypatch: pytest.MonkeyPatch, like_root):
    asked: list[list[str]] = []
    monkeypatch.setattr(provision, "_install", lambda _manager, packages: asked.append(packages))
    monkeypatch.setattr(shutil, "which", lambda name, **_: "/usr/bin/apt-get" if name == "apt-get" else None)
    needs = (
        provision.Need("a", "one", "x", lambda: True),
        provision.Need("b", "two", "x", lambda: False),
        provision.Need("c", "two", "x", lambda: False),
        provision.Need("d", "three", "x", lambda: False, required=False),
    )
    assert provision.install_packages(needs=needs) == ("two", "three")
    assert asked == [["two"], ["three"]]


def test_an_optional_package_that_does_not_exist_is_passed_over(monkeypatch: pytest.MonkeyPatch, like_root):
    def refuse(_manager: str, packages: list[str]) -> None:
        raise HostUnsuitable(f"cannot install {packages[0]}:\n  E: Unable to locate package {packages[0]}")

    monkeypatch.setattr(provision, "_install", refuse)
    monkeypatch.setattr(shutil, "which", lambda name, **_: f"/usr/bin/{name}")
    said: list[str] = []
    optional = provision.Need("d", "exotic", "exotic", lambda: False, required=False)
    assert provision.install_packages(said.append, (optional,)) == ()
    assert "going on without exotic: E: Unable to locate package exotic" in said[-1]
    with pytest.raises(HostUnsuitable):
        provision.install_packages(needs=(provision.Need("d", "exotic", "exotic", lambda: False),))


def test_without_a_package_manager_the_remedy_names_the_packages(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(HostUnsuitable) as caught:
        provision.install_packages(needs=(provision.Need("b", "btrfs-progs", "btrfs-progs", lambda: False),))
    assert "btrfs-progs" in caught.value.remedy
