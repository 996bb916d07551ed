"""Which CRIU is chosen, and that the one of this machine works."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from crab.errors import HostUnsuitable
from crab.host import criu as crius


def fake_program(folder: Path, version: str) -> Path:
    """A system-wide `criu` that knows nothing but its version."""
    folder.mkdir(exist_ok=True)
    program = folder / "criu"
    program.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] || exit 9\necho "Version: {version}"\necho "GitID: v{version}"\n'
    )
    program.chmod(0o755)
    return program


def fake_private(private_dir: Path, version: str = "4.1.1") -> Path:
    folder = crius.private_folder(private_dir)
    (folder / "lib").mkdir(parents=True)
    (folder / "lib" / "ld-linux-x86-64.so.2").touch()
    (folder / "criu").touch()
    (folder / "stamp.json").write_text(f'{{"version": "{version}", "packages": []}}')
    return folder


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch):
    """Sets the version of the kernel; only what the test puts into `path` is installed system-wide."""
    monkeypatch.setattr(crius, "_SBIN", "")
    monkeypatch.setenv("PATH", "/nowhere")

    def set_kernel(*version: int, path: Path | None = None) -> None:
        monkeypatch.setattr(crius, "running_kernel", lambda: version)
        if path:
            monkeypatch.setenv("PATH", f"{path}:/bin:/usr/bin")

    return set_kernel


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("6.18.44-fc-v595", (6, 18, 44)),
        ("6.8.0-45-generic", (6, 8, 0)),
        ("Version: 4.1.1\nGitID: v4.1.1", (4, 1, 1)),
        ("3.17.1-2+deb12u2", (3, 17, 1)),
        ("none", ()),
    ],
)
def test_a_version_is_the_first_dotted_number(text: str, version: tuple[int, ...]):
    assert crius.parse_version(text) == version


@pytest.mark.parametrize(
    ("kernel", "minimum"),
    [
        ((5, 19), (3, 19)),
        ((6, 1, 120), (3, 19)),
        ((6, 12, 99), (3, 19)),
        ((6, 13), (4, 1)),
        ((6, 13, 1), (4, 1)),
        ((7, 0), (4, 1)),
    ],
)
def test_kernels_from_6_13_on_need_criu_4_1(kernel: tuple[int, ...], minimum: tuple[int, ...]):
    assert crius.minimum_criu(kernel) == minimum


def test_a_recent_system_criu_is_used(kernel, tmp_path: Path):
    program = fake_program(tmp_path / "bin", "4.2")
    fake_private(tmp_path / "private")
    kernel(6, 18, path=program.parent)
    criu = crius.find_criu(tmp_path / "private")
    assert (criu.source, criu.version, criu.program) == ("system", "4.2", program)
    assert criu.argv == (str(program), "--no-default-config")


def test_the_same_system_criu_may_be_too_old_for_a_newer_kernel(kernel, tmp_path: Path):
    program = fake_program(tmp_path / "bin", "4.0")
    fake_private(tmp_path / "private")
    kernel(6, 12, path=program.parent)
    assert crius.find_criu(tmp_path / "private").source == "system"
    kernel(6, 13, path=program.parent)
    assert crius.find_criu(tmp_path / "private").source == "private"


def test_without_a_usable_criu_the_error_names_what_is_there_and_the_remedy(kernel, tmp_path: Path):
    program = fake_program(tmp_path / "bin", "3.17.1")
    kernel(6, 18, path=program.parent)
    with pytest.raises(HostUnsuitable) as caught:
        crius.find_criu(tmp_path / "private")
    assert "3.17.1" in caught.value.message
    assert "4.1" in caught.value.message
    assert caught.value.remedy == "crab doctor --fix"


def test_a_system_criu_that_does_not_start_is_passed_over(kernel, tmp_path: Path):
    program = fake_program(tmp_path / "bin", "4.2")
    program.write_text("#!/bin/sh\nexit 127\n")
    kernel(6, 18, path=program.parent)
    with pytest.raises(HostUnsuitable, match="none is installed"):
        crius.find_criu(tmp_path / "private")


@pytest.mark.parametrize("gone", ["criu", "lib/ld-linux-x86-64.so.2", "stamp.json"])
def test_a_private_criu_that_is_not_whole_is_none(kernel, tmp_path: Path, gone: str):
    kernel(6, 18)
    folder = fake_private(tmp_path)
    assert crius.find_criu(tmp_path).source == "private"
    (folder / gone).unlink()
    assert crius.private_criu(tmp_path) is None


def test_a_private_criu_is_started_by_its_own_loader_with_absolute_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    argv = crius.at_folder(Path("private/criu-1"), "4.1.1").argv
    assert argv[0] == str(tmp_path / "private/criu-1/lib/ld-linux-x86-64.so.2")
    assert [word for word in argv if "/" in word and not word.startswith("/")] == []
    assert argv.index(str(tmp_path / "private/criu-1/criu")) > argv.index("--library-path")


# ---------------------------------------------------------------- the CRIU of this machine


@pytest.fixture
def real() -> crius.Criu:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    return crius.find_criu(crius.default_private_dir())


@pytest.mark.criu
def test_the_criu_of_this_machine_finds_the_kernel_good(real: crius.Criu):
    assert crius.check(real) == ""
    assert crius.stated_version(real.argv) == real.version


@pytest.mark.criu
def test_a_check_that_fails_says_why(real: crius.Criu):
    without = ["setpriv", "--bounding-set=-sys_admin,-sys_ptrace,-checkpoint_restore", "--", *real.argv]
    complaint = crius.check(crius.Criu(tuple(without), real.version, real.source, real.program))
    assert "CAP_SYS_ADMIN" in complaint


@pytest.mark.criu
def test_other_users_can_start_it_too(real: crius.Criu):
    done = subprocess.run([*real.argv, "--version"], capture_output=True, text=True, user=65534, group=65534, cwd="/")
    assert done.returncode == 0, done.stderr
    assert real.version in done.stdout


@pytest.mark.criu
def test_a_private_criu_takes_no_library_from_the_host(real: crius.Criu):
    if real.source != "private":
        pytest.skip("the distribution's CRIU is used here")
    end = real.argv.index(str(real.program))
    listing = subprocess.run(
        [*real.argv[:end], "--list", str(real.program)], capture_output=True, text=True, check=True
    )
    paths = [line.split(" => ")[1].split(" ")[0] for line in listing.stdout.splitlines() if " => " in line]
    assert len(paths) > 5
    assert [path for path in paths if not path.startswith(str(real.program.parent))] == []


@pytest.mark.criu
def test_it_brings_a_process_back_after_a_dump(real: crius.Criu, tmp_path: Path):
    null = subprocess.DEVNULL
    sleeper = subprocess.Popen(["sleep", "300"], stdin=null, stdout=null, stderr=null, start_new_session=True, cwd="/")
    images = tmp_path / "images"
    images.mkdir()
    try:
        dump = [*real.argv, "dump", "-t", str(sleeper.pid), "-D", str(images), "-o", "dump.log"]
        done = subprocess.run(dump, capture_output=True, text=True)
        assert done.returncode == 0, (images / "dump.log").read_text()[-2000:]
        assert sleeper.wait(10) == -signal.SIGKILL
        restore = [*real.argv, "restore", "-d", "-D", str(images), "-o", "restore.log"]
        done = subprocess.run(restore, capture_output=True, text=True)
        assert done.returncode == 0, (images / "restore.log").read_text()[-2000:]
        assert Path(f"/proc/{sleeper.pid}/cmdline").read_bytes() == b"sleep\x00300\x00"
    finally:
        sleeper.poll()
        if Path(f"/proc/{sleeper.pid}/cmdline").exists():
            os.kill(sleeper.pid, signal.SIGKILL)
        shutil.rmtree(images, ignore_errors=True)


@pytest.mark.criu
def test_finding_it_is_quick(real: crius.Criu):
    start = time.perf_counter()
    crius.find_criu(crius.default_private_dir())
    assert time.perf_counter() - start < 0.2
