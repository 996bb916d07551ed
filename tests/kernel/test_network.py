"""Links, addresses and rules on a real kernel, without sandboxes: what is made, what is found again, what is left."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from crab.errors import HostUnsuitable
from crab.host import connections, namespaces, network
from crab.host.network import Nat

pytestmark = pytest.mark.kernel

OWNER = "f00dfeed00"


@pytest.fixture(autouse=True)
def needs() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    if not shutil.which("nft") or subprocess.run(["nft", "list", "tables"], capture_output=True).returncode:
        pytest.skip("this kernel has no nf_tables, or the host no nft")


@pytest.fixture
def nat(tmp_path: Path) -> Iterator[Nat]:
    forward = Path("/proc/sys/net/ipv4/ip_forward")
    before = forward.read_text()
    made = Nat(OWNER, tmp_path / "network")
    yield made
    made.remove()
    assert made.names() == []
    assert str(made.metric) not in said("ip", "route")
    assert made.table not in said("nft", "list", "tables")
    if before.strip() == "0" and "crab_" not in said("nft", "list", "tables"):
        forward.write_text("0")


@pytest.fixture
def namespace() -> Iterator[int]:
    """A process in a network namespace of its own."""
    with subprocess.Popen(["unshare", "--net", "sleep", "1000"]) as process:
        end = time.monotonic() + 10
        while namespaces.shares_our_network(process.pid):
            assert time.monotonic() < end
            time.sleep(0.01)
        yield process.pid
        process.kill()


def said(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def inside(pid: int, *words: str) -> str:
    return said("nsenter", "--net", "--target", str(pid), *words)


def test_a_link_is_complete_inside_and_shut_outside_until_it_is_opened(nat: Nat, namespace: int) -> None:
    link = nat.link(5, 1)
    nat.create(link, namespace, ["100.64.0.9"])
    assert network.addresses(namespace) == ["100.64.0.9", str(link.inner)]
    assert f"default via {link.outer} dev eth0" in inside(namespace, "ip", "route")
    assert "DOWN" in said("ip", "-brief", "link", "show", link.name)
    assert str(link.inner) not in said("ip", "route")
    for _ in range(2):
        nat.open([link])
    assert f"{link.inner} dev {link.name}" in said("ip", "route")
    assert "inet6" not in said("ip", "address", "show", link.name)
    assert "inet6" not in inside(namespace, "ip", "address", "show", "eth0")
    nat.delete([link.name, "crab-none"])
    assert str(link.inner) not in said("ip", "route")


def test_the_newest_link_of_a_number_gets_its_address(nat: Nat, namespace: int) -> None:
    old, new = nat.link(5, 1), nat.link(5, 2)
    assert (old.inner, old.outer) == (new.inner, new.outer)
    nat.create(old, namespace)
    nat.open([old])
    with subprocess.Popen(["unshare", "--net", "sleep", "1000"]) as other:
        time.sleep(0.2)
        nat.create(new, other.pid)
        assert f"{old.inner} dev {old.name}" in said("ip", "route"), "until it is opened, the old one has it"
        nat.open([new])
        nat.delete([old.name])
        assert f"{new.inner} dev {new.name}" in said("ip", "route")
        assert f"local {new.outer} dev {new.name}" in said("ip", "route", "show", "table", "local")
        other.kill()


def test_a_link_can_be_made_from_any_thread(nat: Nat, namespace: int) -> None:
    link = nat.link(6, 1)
    thread = threading.Thread(target=nat.create, args=(link, namespace))
    thread.start()
    thread.join()
    assert network.exists(link.name)
    nat.delete([link.name])
    with namespaces.network(f"/proc/{namespace}/ns/net"):
        assert not network.exists(link.name)


def test_a_sweep_keeps_what_is_used_and_forgets_all_if_nothing_is(nat: Nat, namespace: int) -> None:
    used = nat.link(1, 1)
    nat.create(used, namespace)
    with subprocess.Popen(["unshare", "--net", "sleep", "1000"]) as other:
        time.sleep(0.2)
        nat.create(nat.link(2, 1), other.pid)
        heir = Nat(OWNER, nat._memory)
        heir.sweep([used.name])
        assert heir.names() == [used.name]
        assert nat.table in said("nft", "list", "tables")
        heir.sweep([])
        assert heir.names() == []
        assert nat.table not in said("nft", "list", "tables")
        other.kill()


def test_the_block_is_remembered_and_no_other_owner_takes_it(nat: Nat, tmp_path: Path) -> None:
    block = nat.ensure()
    assert Nat(OWNER, nat._memory).ensure() == block
    other = Nat("beefbeef00", tmp_path / "other")
    (tmp_path / "other").write_text(f"{block}\n")  # had it while we were away
    try:
        assert not other.ensure().overlaps(block)
    finally:
        other.remove()


def test_a_network_of_the_host_is_left_alone(nat: Nat) -> None:
    block = network.choose(OWNER, None, [], False)
    free = block[100]
    subprocess.run(["ip", "route", "add", "blackhole", f"{free}/32"], check=True)
    try:
        assert not nat.ensure().overlaps(ipaddress.IPv4Network(f"{free}/32"))
    finally:
        subprocess.run(["ip", "route", "del", "blackhole", f"{free}/32"], check=True)


def test_an_address_without_a_link_leads_nowhere(nat: Nat) -> None:
    with socket.socket() as line, pytest.raises(OSError, match="No route to host"):
        line.connect((str(nat.link(7, 1).inner), 80))


def test_a_missing_program_is_said_with_a_remedy(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "nft" else f"/usr/sbin/{name}")
    with pytest.raises(HostUnsuitable, match="nft") as caught:
        Nat(OWNER, tmp_path / "network").ensure()
    assert "nftables" in caught.value.remedy


def test_flushed_rules_are_made_again(nat: Nat) -> None:
    nat.ensure()
    before = said("nft", "list", "table", "inet", nat.table)
    subprocess.run(["nft", "delete", "table", "inet", nat.table], check=True)
    nat.ensure()
    assert said("nft", "list", "table", "inet", nat.table) == before


def test_sealed_addresses_can_be_bound_and_nothing_leaves(namespace: int) -> None:
    inside(namespace, "ip", "link", "set", "lo", "up")
    network.seal(namespace, ["100.64.0.9"])
    with namespaces.network(f"/proc/{namespace}/ns/net"):
        line = socket.socket()
    with line:
        line.bind(("100.64.0.9", 0))
        line.settimeout(0.3)
        with pytest.raises(TimeoutError):
            line.connect(("198.51.100.7", 80))
    with pytest.raises(ValueError):
        network.seal(namespace, ["1.2.3.4/8 dev lo\nlink delete dev lo"])


def test_a_connection_that_is_cut_ends_at_both_ends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        far, peer = server.accept()
        with far:
            found = [
                c
                for c in connections.established()
                if c.identity[:4] == peer[1].to_bytes(2, "big") + server.getsockname()[1].to_bytes(2, "big")
            ]
            assert [str(c.remote) for c in found] == ["127.0.0.1"]
            connections.cut(found[0])
            connections.cut(found[0])
            with pytest.raises(ConnectionAbortedError):
                near.recv(1)
            with pytest.raises(ConnectionResetError):
                far.recv(1)


def test_a_mapped_address_is_seen_as_what_it_is() -> None:
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        with socket.create_connection(("127.0.0.1", server.getsockname()[1])) as near:
            far, _ = server.accept()
            with far:
                port = near.getsockname()[1].to_bytes(2, "big")
                ends = [c for c in connections.established() if c.identity[2:4] == port]
                assert ends[0].remote == ipaddress.IPv4Address("127.0.0.1")


def test_our_own_addresses_are_those_that_ip_lists() -> None:
    listed = json.loads(said("ip", "-json", "-4", "address"))
    wanted = {info["local"] for link in listed for info in link["addr_info"] if not info["local"].startswith("127.")}
    assert set(network.addresses()) == wanted


def test_a_socket_beside_another_is_of_its_namespace(namespace: int) -> None:
    with namespaces.network(f"/proc/{namespace}/ns/net"):
        theirs = socket.socket(socket.AF_UNIX)
    with theirs:
        theirs.bind("\0crab-test-beside")
        theirs.listen()
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as stranger, pytest.raises(ConnectionRefusedError):
            stranger.connect("\0crab-test-beside")
        with namespaces.socket_beside(os.getpid(), theirs.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.connect("\0crab-test-beside")
