"""Checkpoints go into a store, their host goes away, and they come to life on another one."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from e2e.box import Box
from e2e.roots import lean_root
from e2e.test_archive import LOOK, MAKE, Host

from crab.daemon import requests as ask
from crab.daemon.service import Service
from crab.errors import Damaged, Incompatible, InvalidRequest, NotFound, WrongKey
from crab.model import State

pytestmark = [pytest.mark.kernel, pytest.mark.criu, pytest.mark.slow]

WORKLOADS = ("counters", "unix_sockets", "many_threads", "named_pipes")


@pytest.fixture(scope="module")
def beside(state_dir: Path) -> Iterator[Callable[[str], Path]]:
    """Makes paths beside the state directory; what is there at the end is removed."""
    made: list[Path] = []

    def path(name: str) -> Path:
        made.append(state_dir.with_name(f"{state_dir.name}-{name}"))
        shutil.rmtree(made[-1], ignore_errors=True)
        return made[-1]

    yield path
    for one in made:
        shutil.rmtree(one, ignore_errors=True)


@pytest.fixture(scope="module")
def lean(service: Service, image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An image with Python and little else: what it takes to send it is no concern of these tests."""
    root = tmp_path_factory.mktemp("lean") / "root"
    lean_root(service._core.images.path(image), root)
    yield service.handle(ask.ImageAdd(name="lean", source=f"dir:{root}", replace=True)).name
    for sandbox in service.handle(ask.SandboxList()):  # of a test that failed
        if sandbox.spec.image == "lean":
            service.handle(ask.Remove(sandbox=sandbox.name, force=True))
    service.handle(ask.ImageRemove(name="lean"))


@pytest.fixture(scope="module")
def host(beside: Callable[[str], Path]) -> Iterator[Host]:
    host = Host(beside("stored"))
    yield host
    host.close()


@pytest.fixture(autouse=True)
def nothing_left(host: Host) -> Iterator[None]:
    yield
    host.empty()
    state = host.state()
    places = ("live", "checkpoints", "staging", "process", "sandboxes", "indexed")
    assert not any(state[place] for place in places), state


@pytest.fixture
def where(service: Service, beside: Callable[[str], Path], request: pytest.FixtureRequest) -> dict[str, str]:
    """A new store, encrypted."""
    folder = beside(f"store-{time.monotonic_ns()}")
    folder.mkdir()
    key = folder.with_name(f"{folder.name}.key")
    key.write_text("0123456789abcdef0123456789abcdef\n")
    request.addfinalizer(key.unlink)
    found = {"url": str(folder / "s"), "key_file": str(key)}
    assert service.handle(ask.StoreInit(**found)).encrypted
    return found


def created(service: Service, image: str, name: str) -> Box:
    return Box(service, service.handle(ask.Create(name=name, image=image)).name)


def stored(box: Box, where: dict[str, str], ref: str = "head"):
    return box.ask(ask.StorePut, ref=ref, **where)


def test_it_goes_on_elsewhere(service: Service, lean: str, host: Host, where: dict[str, str], figures) -> None:
    box = created(service, lean, "wandering")
    box.begin(WORKLOADS)
    beats = box.beats(WORKLOADS)
    box.checkpoint("first", policy="always")
    first = stored(box, where)
    box.run("head -c 3000000 /dev/urandom >/root/new")
    box.checkpoint("second", policy="always")
    begin = time.perf_counter()
    second = stored(box, where)
    figures(
        f"store: first put {first.logical >> 20} MiB, {first.added >> 20} stored; the next one after 3 MB of changes "
        f"{second.added / 1e6:.1f} MB in {time.perf_counter() - begin:.2f} s"
    )
    assert second.added < 3_000_000 + 2_500_000
    assert stored(box, where, "first") == first  # it is there
    box.ask(ask.Remove, force=True)
    with pytest.raises(WrongKey):
        host.ask(ask.StoreGet(url=where["url"], checkpoint="wandering"))
    made = host.ask(ask.StoreGet(checkpoint="wandering", **where))
    assert (made.name, made.state, made.turn) == ("wandering", State.STOPPED, 2)
    host.ask(ask.Recover(sandbox="wandering"))
    there = host.box("wandering")
    now = there.healthy(WORKLOADS)
    assert all(now[name].counter >= beats[name].counter for name in WORKLOADS)
    assert there.run("stat -c %s /root/new").strip() == "3000000"
    # what is sent back shares with what came
    there.checkpoint("third", policy="always")
    third = stored(there, where)
    assert third.added < second.added
    earlier = host.ask(ask.StoreGet(checkpoint=first.id, name="earlier", **where))
    assert earlier.turn == 1
    host.ask(ask.Recover(sandbox="earlier"))
    assert not host.box("earlier").result("stat /root/new").ok
    host.box("earlier").healthy(WORKLOADS)
    listed = host.ask(ask.StoreList(**where))
    assert [(one.label, one.turn) for one in listed] == [("first", 1), ("second", 2), ("third", 3)]
    assert host.ask(ask.StoreLook(data=True, **where)).affected == ()
    found = host.ask(ask.StoreFigures(**where))
    figures(f"store: {found.logical >> 20} MiB of checkpoints in {found.stored >> 20} MiB, ratio {found.ratio:.1f}")


CHANGES = (
    # what a comparison of names, sizes and times would miss: the same size in the same tick, times put back, other names
    "cd /root/w; for i in 1 2 3 4 5 6 7 8; do echo $i >tick; done; touch -d @1000000000 tick",
    "cd /root/w; echo 9 >tick; touch -d @1000000000 tick; echo more >>big; rm a; mv suid moved; chmod 700 h; cp sparse other",
    "cd /root/w; echo 0 >tick; touch -d @1000000000 tick; rm -r sticky; mkdir sticky; mv /usr/share/zi /usr/share/zx; "
    "rm -rf /etc/apt /usr/share/perl5; dd if=/dev/zero of=big bs=1 count=1 seek=5000 conv=notrunc",
)


def test_the_files_are_the_same_at_every_turn(service: Service, lean: str, host: Host, where: dict[str, str]) -> None:
    box = created(service, lean, "still")
    looks: list[list[str]] = []
    try:
        box.python(MAKE)
        for turn, change in enumerate(("true", *CHANGES), 1):
            box.result(change)
            box.checkpoint(policy="always" if turn % 2 else "adaptive")
            box.rewind()
            looks.append(box.python(LOOK).splitlines())
            added = stored(box, where).added
            assert turn == 1 or added < 2_500_000, turn
    finally:
        box.ask(ask.Remove, force=True)
    assert len({tuple(look) for look in looks}) == len(looks)
    for turn, before in enumerate(looks, 1):
        host.ask(ask.StoreGet(checkpoint=f"still@{turn}", name="still", **where))
        host.ask(ask.Recover(sandbox="still"))
        assert host.box("still").python(LOOK).splitlines() == before
        host.empty()


def test_turns_that_changed_nothing_cost_next_to_nothing(
    service: Service, lean: str, host: Host, where: dict[str, str]
) -> None:
    box = created(service, lean, "quiet")
    try:
        box.run("echo kept >/root/kept")
        box.checkpoint()
        stored(box, where)
        quiet = [box.checkpoint() for _ in range(3)]
        last = [stored(box, where, checkpoint.id).added for checkpoint in quiet]
    finally:
        box.ask(ask.Remove, force=True)
    assert all(added < 40_000 for added in last), last
    host.ask(ask.StoreGet(checkpoint="quiet", **where))
    host.ask(ask.Recover(sandbox="quiet"))
    assert host.box("quiet").read("/root/kept") == "kept\n"


def test_damage_is_named_and_nothing_of_it_is_let_in(
    service: Service, lean: str, host: Host, where: dict[str, str]
) -> None:
    box = created(service, lean, "hurt")
    try:
        box.checkpoint("whole", policy="always")
        whole = stored(box, where)
        packs = set(Path(where["url"]).rglob("packs/*/*"))
        box.run("head -c 4000000 /dev/urandom >/root/new")
        box.checkpoint("damaged", policy="always")
        damaged = stored(box, where)
    except BaseException:
        box.ask(ask.Remove, force=True)
        raise
    (largest, *_) = sorted(set(Path(where["url"]).rglob("packs/*/*")) - packs, key=lambda path: -path.stat().st_size)
    content = bytearray(largest.read_bytes())
    for place in range(1000, len(content), 1000):
        content[place] ^= 1
    largest.write_bytes(content)
    assert host.ask(ask.StoreLook(data=True, **where)).affected == (damaged.id,)
    before = host.state()
    with pytest.raises(Damaged):
        host.ask(ask.StoreGet(checkpoint="hurt@damaged", **where))
    assert host.state() == before
    largest.unlink()
    with pytest.raises(Damaged):
        host.ask(ask.StoreGet(checkpoint=damaged.id, **where))
    assert host.state() == before
    host.ask(ask.StoreGet(checkpoint="hurt@whole", **where))
    host.ask(ask.Recover(sandbox="hurt"))
    host.empty()
    # after a repair, the next turn of the same sandbox brings along what is lost, and so mends the one before
    assert host.ask(ask.StoreLook(repair=True, **where)).affected == (damaged.id,)
    try:
        box.checkpoint("next", policy="always")
        mended = stored(box, where)
    finally:
        box.ask(ask.Remove, force=True)
    assert mended.added > 4_000_000
    assert mended.id not in host.ask(ask.StoreLook(data=True, **where)).affected
    host.ask(ask.StoreGet(checkpoint="hurt@next", name="next", **where))
    host.ask(ask.Recover(sandbox="next"))
    assert host.box("next").run("stat -c %s /root/new").strip() == "4000000"
    host.ask(ask.StoreRemove(checkpoint=damaged.id, **where))
    assert [one.id for one in host.ask(ask.StoreList(**where))] == [whole.id, mended.id]


def test_what_does_not_fit_is_refused(
    service: Service, lean: str, host: Host, where: dict[str, str], monkeypatch
) -> None:
    import msgspec

    box = created(service, lean, "small")
    try:
        box.checkpoint(policy="files")
        stored(box, where)
    finally:
        box.ask(ask.Remove, force=True)
    before = host.state()
    for kind, text, fields in (
        (NotFound, "no checkpoint", {"checkpoint": "nobody"}),
        (Damaged, "allowed", {"checkpoint": "small", "limit": 1000}),
        (InvalidRequest, "no sense", {"checkpoint": "small", "limit": 0}),
        (InvalidRequest, "not a name", {"checkpoint": "small", "name": "No Name"}),
    ):
        with pytest.raises(kind, match=text):
            host.ask(ask.StoreGet(**fields, **where))
        assert host.state() == before
    host.ask(ask.StoreGet(checkpoint="small", **where))
    host.ask(ask.Recover(sandbox="small"))
    host.empty()
    made = host.service._core.ground
    monkeypatch.setattr(made, "host", msgspec.structs.replace(made.host, kernel="5.4.0-old"))
    host.ask(ask.StoreGet(checkpoint="small", **where))  # files come on any host of the architecture
    assert Incompatible.exit_status == 70
