"""What the tests with real sandboxes share: one service, one image that holds all that the workloads need, and sandboxes.

`$CRAB_TEST_STATE` (default /var/lib/crab-tests) is the state directory. It stays: the image in it takes a minute to build,
once. Everything else that a test makes is gone at the end, and the end of the session checks that.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.box import Box
from e2e.leaks import clear, left_of
from e2e.roots import small_root

from crab.daemon.requests import Create, ImageAdd, ImageList, ImageRemove, Remove, SandboxList
from crab.daemon.service import Service
from crab.sdk.sync import Host
from crab.sdk.transport import EmbeddedTransport

if (
    signal.getsignal(signal.SIGINT) == signal.SIG_IGN
):  # a job in the background: the shells of the tests would ignore it, too
    signal.signal(signal.SIGINT, signal.default_int_handler)
STATE = Path(os.environ.get("CRAB_TEST_STATE", "/var/lib/crab-tests"))
AGENTS = Path(__file__).parents[1] / "examples" / "agents" / "image.sh"
"""Makes the image for test_clients.py, by which hundreds of megabytes are downloaded: only if $CRAB_TEST_CLIENTS says so."""
IMAGE = "workloads"
PACKAGES = (
    *("tmux", "redis-server", "nginx-light", "postgresql", "sqlite3", "nodejs", "openssh-server"),
    *("gdb-minimal", "strace", "iproute2", "perl"),
    *("make", "netcat-openbsd", "python3-pip"),  # of the labelled turns
)
"""Of Debian 12, above what every Debian image has (python3, git, procps)."""

UNREAD = (
    *(f"usr/share/{name}" for name in ("doc", "man", "zoneinfo", "locale", "i18n", "perl", "nodejs", "postgresql")),
    *("usr/lib/x86_64-linux-gnu/perl", "usr/lib/postgresql", "var/lib/postgresql", "etc/ssl"),
)
"""What no program opens in a test that goes without it: 13 of 21 thousand files."""


@pytest.fixture(scope="session")
def state_dir() -> Path:
    """The state directory of the tests. Skips what cannot run here."""
    if os.geteuid() != 0:
        pytest.skip("sandboxes need root: mounts, namespaces, CRIU")
    return Path(os.path.realpath(STATE))


@pytest.fixture(scope="session")
def service(state_dir: Path) -> Iterator[Service]:
    """The service that owns the state directory; at the end nothing of it may be left on the machine."""
    if os.environ.get("CRAB_TEST_CLIENTS"):
        crab = f"{sys.executable} -m crab.cli --embedded --state {state_dir}"
        subprocess.run([AGENTS], check=True, env={**os.environ, "CRAB": crab})
    service = Service.open(state_dir)
    owner = service._core.cgroups.owner
    try:
        for sandbox in service.handle(SandboxList()):  # of a run that was killed
            service.handle(Remove(sandbox=sandbox.name, force=True))
        yield service
        left = [sandbox.name for sandbox in service.handle(SandboxList())]
        for name in left:
            service.handle(Remove(sandbox=name, force=True))
        published = service._core.ground.store.identities()
        pool = service._core.pool
        folders = {name: sorted(os.listdir(pool.root / name)) for name in ("live", "staging")}
    finally:
        service.close_down()
    assert not left, f"tests left sandboxes behind: {left}"
    assert not published, f"checkpoints of removed sandboxes are left: {published}"
    assert folders == {"live": [], "staging": []}, f"the pool holds what nobody owns: {folders}"
    assert not left_of(state_dir, owner), left_of(state_dir, owner)


@pytest.fixture(scope="session")
def image(service: Service) -> str:
    """Name of an image with what the workloads and the labelled turns need; built by the first run, and if `PACKAGES` changed."""
    source = f"debian:bookworm+{','.join(PACKAGES)}"
    if not any((one.name, one.source) == (IMAGE, source) for one in service.handle(ImageList())):
        service.handle(ImageAdd(name=IMAGE, source=source, replace=True))
    return IMAGE


@pytest.fixture(scope="session")
def pruned(service: Service, image: str) -> Iterator[str]:
    """The same image without most of its files: for the oracle, which looks at each of them in every comparison."""
    images = service._core.images

    def build(root: Path) -> None:
        subprocess.run(["cp", "-a", "--reflink=auto", f"{images.path(image)}/.", root], check=True)
        for tree in UNREAD:
            shutil.rmtree(root / tree)

    yield images.add_subvolume("pruned", f"build:{image}", build, replace=True).name
    service.handle(ImageRemove(name="pruned"))


@pytest.fixture
def box(service: Service, image: str) -> Iterator[Box]:
    """A running sandbox of its own for each test."""
    with boxed(service, image) as made:
        yield made


class boxed:
    """A sandbox for the length of a block, with what was forked from it."""

    def __init__(self, service: Service, image: str, **options) -> None:
        self._service = service
        self._request = Create(image=image, **options)

    def __enter__(self) -> Box:
        self._before = {sandbox.id for sandbox in self._service.handle(SandboxList())}
        return Box(self._service, self._service.handle(self._request).name)

    def __exit__(self, *_: object) -> None:
        for sandbox in self._service.handle(SandboxList()):
            if sandbox.id not in self._before:
                self._service.handle(Remove(sandbox=sandbox.name, force=True))


@pytest.fixture
def make_box(service: Service, image: str):
    """Makes sandboxes with options of `Create`; they are gone after the test."""
    opened: list[boxed] = []

    def make(**options) -> Box:
        opened.append(boxed(service, options.pop("image", image), **options))
        return opened[-1].__enter__()

    yield make
    for one in reversed(opened):
        one.__exit__()


@pytest.fixture
def second_state(service: Service, image: str, state_dir: Path, tmp_path: Path) -> Iterator[Path]:
    """Another state directory, with an image `small`, owned by nobody: for owners that are killed or made with other settings.

    Nothing of it is left at the end.
    """
    path = state_dir.parent / f"{state_dir.name}-beside"
    small_root(service._core.images.path(image), tmp_path / "root")
    clear(path)
    try:
        with Service.open(path) as first:
            first.handle(ImageAdd(name="small", source=f"dir:{tmp_path / 'root'}"))
        yield path
    finally:
        last = Service.open(path)
        owner = last._core.cgroups.owner
        for sandbox in last.handle(SandboxList()):
            last.handle(Remove(sandbox=sandbox.name, force=True))
        last.close_down()
        left = left_of(path, owner)
        shutil.rmtree(path)
        assert not left, left


@pytest.fixture
def host(service: Service) -> Iterator[Host]:
    """The service of the session, as users see it; no sandbox may be left."""
    transport = EmbeddedTransport(service.state_dir)
    transport._service = service
    before = service.handle(SandboxList())
    yield Host(transport=transport)
    assert service.handle(SandboxList()) == before


# ---------------------------------------------------------------- figures

_figures: list[str] = []
_figures_lock = threading.Lock()


@pytest.fixture(scope="session")
def figures():
    """Take a line about what was measured; all are shown after the tests."""

    def note(line: str) -> None:
        with _figures_lock:
            _figures.append(line)

    return note


def pytest_terminal_summary(terminalreporter) -> None:
    """Show the figures."""
    if _figures:
        terminalreporter.section("figures")
        for line in _figures:
            terminalreporter.line(line)
