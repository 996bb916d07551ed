"""Sandboxes with a network: what they reach, what they do not, and what becomes of it when they are brought back."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e import leaks
from e2e.box import Box, eventually
from e2e.outside import Outside, outside
from e2e.roots import small_root

from crab.daemon import requests as ask
from crab.daemon.service import Service
from crab.errors import AlreadyExists, ExecFailed, NotCapturable
from crab.host import network
from crab.model import ExecSpec, State

pytestmark = [pytest.mark.kernel, pytest.mark.criu]

CONNECT = """
import socket, sys, time
begin = time.monotonic()
try:
    with socket.create_connection((sys.argv[1], int(sys.argv[2])), 5, (sys.argv[3], 0) if sys.argv[3:] else None) as line:
        line.sendall(b"GET / HTTP/1.0\\r\\n\\r\\n")
        data = b""
        while piece := line.recv(4096):
            data += piece
    print(data.partition(b"\\r\\n\\r\\n")[2].decode())
except OSError as error:
    print(type(error).__name__, error.errno, "slow" if time.monotonic() - begin > 3 else "at-once")
"""

HOLD = """
import json, os, socket, sys, time
line = socket.create_connection((sys.argv[1], 9000))
line.sendall(b"hello\\n")
def note(**what):
    with open("/tmp/hold.new", "w") as f:
        json.dump(what, f)
    os.rename("/tmp/hold.new", "/tmp/hold")
note(state="connected", name=line.getsockname()[0])
try:
    note(state="data", data=line.recv(100).decode())
except OSError as error:
    note(state="error", error=type(error).__name__)
time.sleep(1000)
"""
"""Connects to outside, says hello, and then waits for an answer that never comes."""

LISTEN = """
import socket, sys
listener = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("ready", flush=True)
while True:
    line, peer = listener.accept()
    line.recv(100)
    line.sendall(b"HTTP/1.0 200 OK\\r\\n\\r\\ninside " + peer[0].encode())
    line.close()
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Iterator[Outside]:
    if not shutil.which("nft") or subprocess.run(["nft", "list", "tables"], capture_output=True).returncode:
        pytest.skip("this kernel has no nf_tables, or the host no nft")
    with outside(tmp_path_factory.mktemp("outside")) as machine:
        yield machine


@pytest.fixture
def nat(make_box, world: Outside) -> Box:
    return make_box(network="nat")


@pytest.fixture
def host_service() -> Iterator[int]:
    """Port of a service of the host that listens on all its addresses; it answers `host`."""
    listener = socket.create_server(("0.0.0.0", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                line, _ = listener.accept()
                line.recv(100)
                line.sendall(b"HTTP/1.0 200 OK\r\n\r\nhost")
                line.close()

    threading.Thread(target=serve, daemon=True).start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def get(box: Box, address: str, port: int = 8000, source: str = "") -> str:
    """What a server says to the sandbox, or the error that its program gets."""
    return box.python(CONNECT, address, str(port), *([source] if source else [])).strip()


def host_get(address: str, port: int) -> str:
    done = subprocess.run(
        [sys.executable, "-c", CONNECT, address, str(port)], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def address_of(box: Box) -> str:
    found = network.addresses(box.look().pid or 0)
    life = box.service._core.life(box.service._core.registry.find(box.name))
    assert str(life.way.link.inner) in found
    return str(life.way.link.inner)


def listen(box: Box, address: str, port: int) -> None:
    """A server in the sandbox that goes on by itself."""
    command = box.spawn("python3", "-c", LISTEN, address, str(port))
    assert next(command.events()).data == b"ready\n"
    command.detach()


def links(service: Service) -> list[str]:
    return sorted(service._core.nat.names())


def has_table(service: Service) -> bool:
    listed = subprocess.run(["nft", "list", "tables"], capture_output=True, text=True).stdout
    return f"table inet {service._core.nat.table}\n" in listed


# ---- what is reached


def test_without_a_network_there_is_loopback_only(box: Box, world: Outside) -> None:
    assert get(box, world.address).startswith("OSError 101")
    assert network.addresses(box.look().pid or 0) == []


def test_outside_sees_the_host_in_place_of_the_sandbox(nat: Box, world: Outside) -> None:
    assert get(nat, world.address) == f"outside {world.host}"


def test_the_host_reaches_a_server_in_the_sandbox(nat: Box) -> None:
    listen(nat, "0.0.0.0", 8080)
    assert host_get(address_of(nat), 8080).startswith("inside ")


def test_a_checkpoint_with_a_network_is_proven(nat: Box, world: Outside) -> None:
    nat.spawn("python3", "-c", HOLD, world.address).detach()
    listen(nat, address_of(nat), 8080)
    eventually(lambda: nat.read("/tmp/hold"), "the connection")
    nat.checkpoint()
    before = links(nat.service)
    result = nat.ask(ask.Verify, ref="head")
    assert result.proof.verdict == "proven", result
    assert links(nat.service) == before, "a trial restore leaves nothing on the host"


# ---- what is not


def refused(answer: str) -> bool:
    """An error, and at once: a program must not have to wait for what is denied."""
    return answer.startswith(("ConnectionRefusedError", "OSError", "PermissionError")) and answer.endswith("at-once")


def test_the_services_of_the_host_are_out_of_reach(nat: Box, world: Outside, host_service: int) -> None:
    link = nat.service._core.life(nat.service._core.registry.find(nat.name)).way.link
    routes = json.loads(subprocess.run(["ip", "-json", "-4", "address"], capture_output=True, check=True).stdout)
    own = {info["local"] for interface in routes for info in interface["addr_info"]}
    assert str(link.outer) in own and world.host in own
    for address in sorted(own):
        assert host_get(address, host_service) == "host"
        answer = get(nat, address, host_service)
        assert refused(answer), f"{address}: {answer}"
    assert refused(get(nat, "0.0.0.0", host_service))


def test_abstract_sockets_of_the_host_are_out_of_reach(nat: Box) -> None:
    name = "\0crab-test-abstract"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name)
        listener.listen()
        connect = f"import socket; socket.socket(socket.AF_UNIX).connect({name!r})"
        assert b"ConnectionRefusedError" in nat.ask(ask.Run, spec=ExecSpec(argv=("python3", "-c", connect))).stderr


def test_no_ipv6_leads_out_of_the_sandbox(nat: Box) -> None:
    script = (
        "import socket\nfor address in ('fe80::1', 'ff02::1', '2001:db8::1', 'fd00:ec2::254'):\n"
        " for scope in (0, socket.if_nametoindex('eth0')):\n"
        "  try: socket.socket(socket.AF_INET6).connect((address, 80, 0, scope)); print('connected')\n"
        "  except OSError as e: pass\n"
        "print(open('/proc/net/if_inet6').read())"
    )
    said = nat.python(script)
    assert "connected" not in said
    assert "eth0" not in said


def test_other_sandboxes_are_out_of_reach(nat: Box, make_box) -> None:
    other = make_box(network="nat")
    listen(other, "0.0.0.0", 8080)
    assert host_get(address_of(other), 8080).startswith("inside")
    assert refused(get(nat, address_of(other), 8080))
    free = network.Nat.link(nat.service._core.nat, network.NUMBERS - 1, 0).inner
    assert refused(get(nat, str(free), 8080)), "an address that no sandbox has"


@pytest.mark.parametrize("address", ["169.254.169.254", "169.254.170.2", "100.100.100.200", "192.0.0.192"])
def test_addresses_of_clouds_are_out_of_reach(nat: Box, address: str) -> None:
    assert refused(get(nat, address, 80))


def test_a_sandbox_may_not_change_its_network(nat: Box) -> None:
    said = nat.result(
        "ip link set eth0 down; ip address add 198.51.100.9/32 dev eth0; ip route add 192.0.2.0/24 dev lo"
    )
    assert said.stderr.count(b"Operation not permitted") == 3, said
    packet = nat.result("python3 -c 'import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)'")
    assert b"Address family not supported" in packet.stderr


def test_rules_that_were_flushed_are_there_again_for_the_next_command(
    nat: Box, world: Outside, host_service: int
) -> None:
    subprocess.run(["nft", "delete", "table", "inet", nat.service._core.nat.table], check=True)  # as a reload may do
    assert refused(get(nat, world.host, host_service))
    assert get(nat, world.address) == f"outside {world.host}"


# ---- names


def test_the_name_servers_of_the_host_are_told(nat: Box) -> None:
    said = nat.read("/etc/resolv.conf")
    assert said.startswith("# Written by Crab")
    assert "nameserver " in said
    assert "nameserver 127." not in said


def test_a_file_of_the_sandbox_stays_as_it_wrote_it(nat: Box) -> None:
    nat.run("echo 'nameserver 198.51.100.2' > /etc/resolv.conf")
    nat.checkpoint()
    nat.rewind()
    nat.ask(ask.Stop, grace=0)
    nat.ask(ask.Start)
    assert nat.read("/etc/resolv.conf") == "nameserver 198.51.100.2\n"


def test_a_link_in_its_place_is_not_followed(make_box, world: Outside, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("of the host")
    base = make_box(network="none")
    service = base.service
    base.run(
        f"rm -f /etc/resolv.conf && ln -s {target} /etc/resolv.conf && mkdir -p {tmp_path} && echo mine > {target}"
    )
    service.handle(ask.Commit(sandbox=base.name, name="linked"))
    try:
        box = make_box(network="nat", image="linked")
        assert box.read("/etc/resolv.conf").startswith("# Written by Crab")
        assert box.read(str(target)) == "mine\n"
        assert target.read_text() == "of the host"
        service.handle(ask.Remove(sandbox=box.name, force=True))
    finally:
        service.handle(ask.ImageRemove(name="linked"))


# ---- brought back


def test_a_rewind_keeps_address_and_network(nat: Box, world: Outside) -> None:
    address = address_of(nat)
    listen(nat, address, 8080)
    nat.checkpoint()
    for _ in range(3):
        nat.rewind()
        assert address_of(nat) == address
        assert get(nat, world.address) == f"outside {world.host}"
        assert get(nat, address, 8080) == f"inside {address}"
        assert host_get(address, 8080).startswith("inside")
        assert len(links(nat.service)) == 1


def test_a_recovered_sandbox_has_its_network(nat: Box, world: Outside) -> None:
    address = address_of(nat)
    nat.checkpoint()
    nat.ask(ask.Kill)
    assert nat.look().state == State.LOST
    nat.ask(ask.Recover)
    assert address_of(nat) == address
    assert get(nat, world.address) == f"outside {world.host}"


def test_a_stopped_sandbox_starts_with_its_network(nat: Box, world: Outside) -> None:
    nat.ask(ask.Stop, grace=0)
    assert links(nat.service) == []
    nat.ask(ask.Start)
    assert get(nat, world.address) == f"outside {world.host}"


def test_files_alone_come_back_with_a_network(nat: Box, world: Outside) -> None:
    nat.checkpoint()
    nat.ask(ask.Rewind, ref="head", files_only=True)
    assert get(nat, world.address) == f"outside {world.host}"


def test_connections_to_outside_end_with_an_error_never_a_hang(nat: Box, world: Outside) -> None:  # C07
    nat.spawn("python3", "-c", HOLD, world.address).detach()
    eventually(lambda: "connected" in nat.read("/tmp/hold"), "the connection")
    number = world.said("begin")[-1][1]
    eventually(lambda: world.said("got", number, "hello"), "the greeting")
    nat.checkpoint()
    time.sleep(0.2)
    assert not world.said("end", number), "a checkpoint leaves the connection alone"
    assert "connected" in nat.read("/tmp/hold")
    nat.rewind()
    eventually(lambda: json.loads(nat.read("/tmp/hold"))["state"] == "error", "an error in the program", 10)
    assert json.loads(nat.read("/tmp/hold"))["error"] in ("ConnectionAbortedError", "ConnectionResetError")
    eventually(lambda: world.said("end", number), "the end of the connection outside", 10)
    assert len(world.said("got", number)) == 1, "nothing is sent a second time"


def test_connections_inside_survive(nat: Box) -> None:  # C06
    nat.begin(["tcp_pairs"])
    nat.checkpoint()
    nat.rewind()
    nat.healthy(["tcp_pairs"])


def test_a_failed_rewind_leaves_the_network_as_it_was(nat: Box, world: Outside, monkeypatch) -> None:
    nat.spawn("python3", "-c", HOLD, world.address).detach()
    eventually(lambda: "connected" in nat.read("/tmp/hold"), "the connection")
    number = world.said("begin")[-1][1]
    nat.checkpoint()
    before = links(nat.service)

    def fail(*_: object) -> None:
        raise OSError(5, "made up")

    with monkeypatch.context() as patch:
        patch.setattr("crab.host.connections.cut", fail)
        with pytest.raises(Exception, match="made up"):
            nat.rewind()
    assert links(nat.service) == before
    assert get(nat, world.address) == f"outside {world.host}"
    assert "connected" in nat.read("/tmp/hold")
    assert not world.said("end", number)


def test_a_fork_has_an_address_of_its_own_and_keeps_the_old_one_for_itself(nat: Box, world: Outside) -> None:
    old = address_of(nat)
    listen(nat, old, 8080)
    nat.spawn("python3", "-c", HOLD, world.address).detach()
    eventually(lambda: "connected" in nat.read("/tmp/hold"), "the connection")
    number = world.said("begin")[-1][1]
    first, second = nat.fork(2)
    grandchild = first.fork(1)[0]
    boxes = [nat, first, second, grandchild]
    assert len({address_of(box) for box in boxes}) == 4
    for box in boxes:
        assert get(box, world.address) == f"outside {world.host}"
        assert get(box, old, 8080) == f"inside {old}", "what was bound to the old address answers inside"
    for clone in (first, second, grandchild):
        eventually(lambda: json.loads(clone.read("/tmp/hold"))["state"] == "error", "an error in the clone", 10)  # noqa: B023
        assert get(clone, world.address, 8000, old).startswith("OSError 101"), "nobody speaks to outside as another"
        assert refused(get(clone, address_of(nat), 9999)), "the old address is the clone's own"
    assert json.loads(nat.read("/tmp/hold"))["state"] == "connected", "the source of a fork keeps its connections"
    assert not world.said("end", number)


# ---- what is left


def test_nothing_is_left_of_removed_sandboxes(make_box, service: Service, world: Outside) -> None:
    before = links(service)
    boxes = [make_box(network="nat") for _ in range(2)]
    boxes[0].checkpoint()
    boxes[0].ask(ask.Kill)
    assert len(links(service)) <= len(before) + 2
    for box in boxes:
        box.ask(ask.Remove, force=True)
    assert links(service) == before


def test_a_sweep_takes_what_nobody_uses_and_opens_what_is_used(nat: Box, world: Outside) -> None:
    core = nat.service._core
    with subprocess.Popen(["unshare", "--net", "sleep", "1000"]) as stranger:
        eventually(lambda: not same_network(stranger.pid), "a namespace")
        left = core.nat.link(network.NUMBERS - 2, 7)
        core.nat.create(left, stranger.pid)
        assert left.name in links(nat.service)
        used = core.life(core.registry.find(nat.name)).way.link
        subprocess.run(["ip", "link", "set", used.name, "down"], check=True)
        core.sweep()
        assert links(nat.service) == [used.name]
        assert get(nat, world.address) == f"outside {world.host}"
        stranger.kill()


def same_network(pid: int) -> bool:
    return Path(f"/proc/{pid}/ns/net").stat().st_ino == Path("/proc/self/ns/net").stat().st_ino


def test_a_killed_owner_leaves_networks_that_the_next_one_takes_over(
    service: Service, image: str, state_dir: Path, world: Outside, tmp_path: Path
) -> None:
    """The owner dies at moments of a rewind, of a fork, of anything; each time everything is as it should be."""
    path = state_dir.parent / f"{state_dir.name}-network"
    owner_py = Path(__file__).parent.parent / "chaos" / "owner.py"
    small_root(service._core.images.path(image), tmp_path / "root")
    shutil.rmtree(path, ignore_errors=True)
    speak = (
        'socket(S, 2, 1, 0) && connect(S, pack("S n C4 x8", 2, 8000, split(/\\./, $ARGV[0]))) or die "$!\\n";'
        ' syswrite(S, "GET / HTTP/1.0\\r\\n\\r\\n"); print while <S>'
    )

    def reaches(box: Box) -> bool:
        done = box.ask(ask.Run, spec=ExecSpec(argv=("perl", "-e", speak, world.address)))
        assert done.ok, done
        return done.text().endswith(f"outside {world.host}")

    try:
        with Service.open(path) as first:
            first.handle(ask.ImageAdd(name="small", source=f"dir:{tmp_path / 'root'}"))
            box = Box(first, first.handle(ask.Create(name="one", image="small", network="nat")).name)
            assert reaches(box)
            box.checkpoint()
        for what, seconds in (("rewind", 0.05), ("rewind", 0.13), ("rewind", 0.22), ("fork", 0.1), ("mixed", 0.4)):
            victim = subprocess.Popen(
                [sys.executable, str(owner_py), str(path), "one", what], stdout=subprocess.PIPE, text=True
            )
            assert victim.stdout and victim.stdout.readline() == "ready\n"
            time.sleep(seconds)
            victim.send_signal(signal.SIGKILL)
            victim.communicate()
            with Service.open(path) as heir:
                sandboxes = {made.name: made for made in heir.handle(ask.SandboxList())}
                assert sandboxes["one"].state == State.RUNNING
                for name in sandboxes.keys() - {"one"}:
                    heir.handle(ask.Remove(sandbox=name, force=True))
                assert len(links(heir)) == 1, f"after {what}, {seconds} s"
                assert reaches(Box(heir, "one")), f"after {what}, {seconds} s"
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            last = Service.open(path)
            for sandbox in last.handle(ask.SandboxList()):
                last.handle(ask.Remove(sandbox=sandbox.name, force=True))
            owner = last._core.cgroups.owner
            last.close_down()
            assert not links(last)
            assert not has_table(last)
            assert not leaks.left_of(path, owner)
            shutil.rmtree(path)


# ---- the host's network, and builds


def test_a_sandbox_in_the_network_of_the_host_reaches_it_and_is_not_captured(make_box, host_service: int) -> None:
    box = make_box(network="host")
    assert get(box, "127.0.0.1", host_service) == "host"
    for policy in ("adaptive", "always", "files"):
        with pytest.raises(NotCapturable, match="shares the host's network"):
            box.checkpoint(policy=policy)
    with pytest.raises(NotCapturable):
        box.fork(1)
    assert not box.frozen()
    assert box.run("echo on") == "on\n"
    box.ask(ask.Stop, grace=0)
    box.ask(ask.Start)
    assert get(box, "127.0.0.1", host_service) == "host"


def test_nobody_on_the_host_commands_a_sandbox_in_its_network(make_box) -> None:
    box, other = make_box(network="host"), make_box(network="host")
    assert box.run("hostname") == f"{box.name}\n"
    assert other.run("hostname") == f"{other.name}\n"
    assert "crab-init" not in Path("/proc/net/unix").read_text(), "its line is in no namespace that others are in"
    box.run("sleep 0.1")
    connect = "import socket; socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect(b'\\0crab-init')"
    assert b"ConnectionRefusedError" in box.result(f'python3 -c "{connect}"').stderr


def fetch(world: Outside) -> tuple[str, ...]:
    script = "import sys, urllib.request as r; open('/fetched', 'wb').write(r.urlopen(sys.argv[1]).read())"
    return ("python3", "-c", script, f"http://{world.address}:8000/")


@pytest.mark.parametrize("mode", ["nat", "host"])
def test_an_image_is_built_with_network(service: Service, image: str, make_box, world: Outside, mode: str) -> None:
    before = [sandbox.name for sandbox in service.handle(ask.SandboxList())]
    made = service.handle(ask.ImageBuild(name="built", base=image, command=fetch(world), network=mode))
    try:
        assert made.source == f"build:{image}"
        box = make_box(image="built")
        assert box.read("/fetched") == f"outside {world.host}"
        assert [name for name in (s.name for s in service.handle(ask.SandboxList())) if name != box.name] == before
        with pytest.raises(AlreadyExists):
            service.handle(ask.ImageBuild(name="built", base=image, command=("true",)))
        box.ask(ask.Remove, force=True)
    finally:
        service.handle(ask.ImageRemove(name="built"))


def test_a_build_sees_its_environment_and_the_image_keeps_none_of_it(service: Service, image: str) -> None:
    command = ("sh", "-c", 'test "$TOKEN" = secret && echo yes > /made')
    service.handle(ask.ImageBuild(name="built", base=image, command=command, network="none", env={"TOKEN": "secret"}))
    try:
        assert "TOKEN" not in service._core.images.config("built").env
        assert (service._core.images.path("built") / "made").read_text() == "yes\n"
    finally:
        service.handle(ask.ImageRemove(name="built"))


def test_a_build_that_fails_says_why_and_leaves_nothing(service: Service, image: str) -> None:
    sandboxes, images = service.handle(ask.SandboxList()), service.handle(ask.ImageList())
    command = ("sh", "-c", "seq 5000; echo the reason >&2; exit 3")
    with pytest.raises(ExecFailed, match="status 3") as caught:
        service.handle(ask.ImageBuild(name="built", base=image, command=command, network="none"))
    assert "the reason" in caught.value.message
    assert "\n4999\n" in caught.value.message
    assert len(caught.value.message) < 1000
    with pytest.raises(ExecFailed):
        service.handle(ask.ImageBuild(name="built", base=image, command=("no-such-program",), network="none"))
    assert service.handle(ask.SandboxList()) == sandboxes
    assert service.handle(ask.ImageList()) == images


@pytest.mark.parametrize("kind", ["none", "nat"])
def test_connections_lie_in_a_table_of_the_sandbox_before_and_after_a_restore(make_box, kind: str) -> None:
    if not Path("/proc/sys/net/ipv4/tcp_child_ehash_entries").exists():
        pytest.skip("needs Linux 6.1")
    box = make_box(network=kind)
    box.checkpoint()
    box.rewind()
    for alike in (box, *box.fork(1)):
        # negative: the size of one that is shared with the host, which every look at connections reads from end to end
        assert alike.read("/proc/sys/net/ipv4/tcp_ehash_entries") == "4096\n"
