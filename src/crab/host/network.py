"""Network address translation for one owner: veth pairs, addresses, one table of nftables. Knows nothing of sandboxes.

Everything on the host carries the owner in its name, so that a sweep finds exactly its own:
- a veth pair for each link; the host's end is `crabOOOOOOONNNG` (seven digits of the owner, three of the link's number,
  one of its generation), so the links of two generations of a number lie side by side for a moment;
- a block of 8192 addresses, claimed by an `unreachable` route whose metric is made of the owner. Without a link an
  address of the block leads nowhere, in particular not to the default gateway;
- the table `inet crab_OWNER`, whose rules name interfaces by that prefix: nothing is added to it for a link.

Links are made from inside their namespace, with the peer put into ours: `ip` runs once there and once here.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import shutil
import socket
import struct
import subprocess
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from crab.errors import HostUnsuitable
from crab.host import namespaces, netlink

RANGES = (ipaddress.IPv4Network("100.112.0.0/12"), ipaddress.IPv4Network("198.18.0.0/15"))
"""Where blocks are taken from: shared address space (RFC 6598) above what clouds use of it, then that for benchmarks."""
BLOCK_BITS = 19
NUMBERS = 1 << (31 - BLOCK_BITS)
"""Links of one owner: two addresses each."""
PREFIX = "crab"
INSIDE = "eth0"
_DEFAULT_ROUTE_BITS = 7
"""Routes up to this length are default routes in disguise (VPNs use 0.0.0.0/1), not somebody's network."""
_GET_TABLE = 10 << 8 | 1
_INET = 1
_BASE36 = "0123456789abcdefghijklmnopqrstuvwxyz"

METADATA = ("169.254.0.0/16", "100.100.100.200", "192.0.0.192")
"""Link-local addresses, and where clouds answer questions about the machine: Alibaba, Oracle."""
_FORWARD = Path("/proc/sys/net/ipv4/ip_forward")


class Link(msgspec.Struct, frozen=True):
    """One veth pair. Its inner end is `eth0` of the namespace that it was made for."""

    name: str
    """Of the host's end."""
    outer: ipaddress.IPv4Address
    """The host's end, gateway of the other."""
    inner: ipaddress.IPv4Address


class Nat:
    """The links of one owner and what they need on the host. Safe from any thread."""

    def __init__(self, owner: str, memory: Path) -> None:
        """`owner` is a string of hexadecimal digits, `memory` a file that keeps the block of addresses."""
        self.owner = owner
        self.table = f"crab_{owner}"
        self.prefix = f"{PREFIX}{owner[:7]}"
        self.metric = int(owner[:7], 16) + 1
        self._memory = memory
        self._lock = threading.Lock()
        self._block: ipaddress.IPv4Network | None = None

    # ---- names and addresses

    def name(self, number: int, generation: int) -> str:
        """Name of the host's end of a link."""
        return f"{self.prefix}{number:03x}{_BASE36[generation % 36]}"

    def link(self, number: int, generation: int) -> Link:
        """A link; nothing is made yet. Raises `HostUnsuitable` like `ensure`."""
        if not 0 <= number < NUMBERS:
            raise ValueError(number)
        first = self.ensure()[2 * number]
        return Link(self.name(number, generation), first, first + 1)

    def names(self) -> list[str]:
        """Names of all links of the owner that this host has."""
        return [name for _, name in socket.if_nameindex() if name.startswith(self.prefix) and len(name) == 15]

    # ---- what all links need

    def ensure(self) -> ipaddress.IPv4Network:
        """Make the rules, claim the addresses, switch forwarding on, whatever of it is missing; returns the addresses.

        Raises `HostUnsuitable` if a program is missing, no range of addresses is free, or the kernel has no nftables.
        """
        with self._lock:
            if self._block is not None and self._table_exists():
                return self._block
            for program, package in (("ip", "iproute2"), ("nft", "nftables")):
                if not shutil.which(program):
                    raise HostUnsuitable(
                        f"network mode nat needs the program {program}",
                        remedy=f"install {package}, or use network none",
                    )
            self._block = self._claim()
            _run(["nft", "-f", "-"], rules(self.table, self.prefix, self._block))
            _forward()
            return self._block

    def _table_exists(self) -> bool:
        """Whether our rules are there; a reload of the host's firewall may have flushed them."""
        name = self.table.encode() + b"\0"
        attribute = struct.pack("=HH", 4 + len(name), 1) + name + bytes(-len(name) % 4)
        try:
            netlink.ask(netlink.NETFILTER, _GET_TABLE, netlink.ACK, struct.pack("=BBH", _INET, 0, 0) + attribute)
        except OSError:
            return False
        return True

    def _claim(self) -> ipaddress.IPv4Network:
        routes: list[dict[str, object]] = json.loads(
            _run(["ip", "-json", "-4", "route", "show", "table", "all"]) or "[]"
        )
        taken = occupied(routes, self.prefix, self.metric)
        try:
            known = ipaddress.IPv4Network(self._memory.read_text().strip())
        except (OSError, ValueError):
            known = None
        block = choose(self.owner, known, taken, bool(self.names()))
        _run(["ip", "route", "replace", "unreachable", str(block), "metric", str(self.metric)])
        if block != known:
            new = self._memory.with_name(f".{self._memory.name}.new")
            new.write_text(f"{block}\n")
            new.rename(self._memory)
        return block

    def remove(self) -> None:
        """Take everything of the owner off the host. Forwarding stays on: others may rely on it by now."""
        self.delete(self.names())
        with self._lock:
            if self._table_exists():
                _run(["nft", "-f", "-"], f"delete table inet {self.table}\n")
            routes: list[dict[str, object]] = []
            if self._block is not None or self._memory.exists():
                routes = json.loads(_run(["ip", "-json", "-4", "route", "show", "type", "unreachable"]) or "[]")
            for route in routes:
                if route.get("metric") == self.metric:
                    _run(["ip", "route", "del", "unreachable", str(route["dst"]), "metric", str(self.metric)])
            self._block = None

    def sweep(self, used: Iterable[str]) -> None:
        """Delete all links but those named, and everything if none is used: what a dead owner left."""
        used = set(used)
        left = [name for name in self.names() if name not in used]
        if used:
            self.delete(left)
        elif left or self._table_exists():
            self.remove()

    # ---- links

    def create(self, link: Link, pid: int, former: Sequence[str] = ()) -> None:
        """Make a link for the network namespace of a process: there it is complete, here it is down and leads nowhere.

        `former` are addresses that its programs had before; they are its own besides.
        """
        here = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        words = [
            f"link add dev {INSIDE} address {_hardware(link.inner)} type veth"
            f" peer name {link.name} address {_hardware(link.outer)} netns /proc/self/fd/{here}",
            *_without_ipv6(INSIDE),
            f"address add {link.inner}/31 dev {INSIDE}",
            f"link set dev {INSIDE} up",
            f"route add default via {link.outer} dev {INSIDE}",
            *_more_addresses(former),
        ]
        try:
            with namespaces.network(f"/proc/{pid}/ns/net"):
                _batch(words, here)
        finally:
            os.close(here)

    def open(self, links: Iterable[Link]) -> None:
        """Let traffic through. Can be repeated; the newest link of a number gets its address."""
        words: list[str] = []
        for link in links:
            words += [
                *_without_ipv6(link.name),
                f"address replace {link.outer}/32 dev {link.name}",
                f"link set dev {link.name} up",
                f"route replace {link.inner}/32 dev {link.name}",
            ]
        if words:
            _batch(words)

    def delete(self, names: Iterable[str]) -> None:
        """Delete links by name; those that are gone already (with their namespace) are no error."""
        for name in names:
            if exists(name):
                try:
                    _run(["ip", "link", "delete", "dev", name])
                except HostUnsuitable:
                    if exists(name):
                        raise


def seal(pid: int, addresses: Sequence[str]) -> None:
    """Give a namespace those addresses and a default route, and no way out: sockets can be bound, packets are lost."""
    with namespaces.network(f"/proc/{pid}/ns/net"):
        _batch([*_more_addresses(addresses), "route add default dev lo"])


def refuse_from(pid: int, addresses: Sequence[str]) -> None:
    """Answer packets with these sources at once with "no route to host", unless they stay in the namespace."""
    if addresses:
        with namespaces.network(f"/proc/{pid}/ns/net"):
            _batch([f"rule add from {address}/32 unreachable" for address in addresses])


def addresses(pid: int | str = "self") -> list[str]:
    """IPv4 addresses of the network namespace of a process, loopback's left out."""
    found: set[str] = set()
    address = ""
    for line in Path(f"/proc/{pid}/net/fib_trie").read_text().splitlines():
        head, mark, rest = line.partition("-- ")
        if mark and head.strip() == "|":
            address = rest.strip()
        elif "/32 host LOCAL" in line and not address.startswith("127."):
            found.add(address)
    return sorted(found, key=ipaddress.IPv4Address)


def exists(name: str) -> bool:
    """Whether our network namespace has an interface of that name."""
    try:
        return socket.if_nametoindex(name) > 0
    except OSError:
        return False


# ---- decisions


def occupied(routes: Iterable[dict[str, object]], prefix: str, metric: int) -> list[ipaddress.IPv4Network]:
    """Networks that routes (as `ip -json route` lists them) lead to, but for our own and the default routes."""
    found: list[ipaddress.IPv4Network] = []
    for route in routes:
        if str(route.get("dev", "")).startswith(prefix):
            continue
        if route.get("metric") == metric and route.get("type") == "unreachable":
            continue
        try:
            network = ipaddress.IPv4Network(str(route.get("dst", "")))
        except ValueError:  # "default"
            continue
        if network.prefixlen > _DEFAULT_ROUTE_BITS:
            found.append(network)
    return found


def choose(
    owner: str, known: ipaddress.IPv4Network | None, taken: Iterable[ipaddress.IPv4Network], in_use: bool
) -> ipaddress.IPv4Network:
    """The block of addresses for an owner: the one it had, else the first free one from a place that its name gives.

    A block that links use stays, whatever else appeared on the host. Raises `HostUnsuitable` if all are taken.
    """
    taken = list(taken)
    if known is not None and (in_use or not any(known.overlaps(network) for network in taken)):
        return known
    for whole in RANGES:
        blocks = list(whole.subnets(new_prefix=BLOCK_BITS))
        start = int(hashlib.sha256(owner.encode()).hexdigest(), 16) % len(blocks)
        for block in blocks[start:] + blocks[:start]:
            if not any(block.overlaps(network) for network in taken):
                return block
    ranges = " and ".join(map(str, RANGES))
    raise HostUnsuitable(
        f"no addresses are left for network mode nat: routes of this host ({', '.join(map(str, taken[:5]))}) cover {ranges}",
        remedy="remove the route (`ip route show table all`), or use network none",
    )


def rules(table: str, prefix: str, block: ipaddress.IPv4Network) -> str:
    """The owner's table, replacing an older one in one step.

    The source of a packet must be the address of its link (`fib … oif`), so nothing passes before a link is open, and
    nobody takes another's address. What is denied is answered, so that programs fail at once and do not wait.
    """
    own = f'iifname "{prefix}*"'
    denied = ", ".join((*METADATA, str(block)))
    return f"""\
add table inet {table}
delete table inet {table}
table inet {table} {{
    chain arriving {{
        type filter hook prerouting priority raw - 10; policy accept;
        {own} meta nfproto != ipv4 drop
        {own} fib saddr . iif oif missing drop
    }}
    chain refused {{
        meta l4proto tcp reject with tcp reset
        reject with icmpx type admin-prohibited
    }}
    chain to_host {{
        type filter hook input priority filter - 10; policy accept;
        {own} ct state established,related accept
        {own} goto refused
    }}
    chain outward {{
        oifname "{PREFIX}*" goto refused
        ct status dnat goto refused
        ip daddr {{ {denied} }} goto refused
        ip daddr 168.63.129.16 tcp dport {{ 80, 32526 }} goto refused
        tcp flags syn tcp option maxseg size set rt mtu
    }}
    chain through {{
        type filter hook forward priority filter - 10; policy accept;
        {own} goto outward
        oifname "{prefix}*" ct state established,related accept
        oifname "{prefix}*" drop
    }}
    chain leaving {{
        type nat hook postrouting priority srcnat; policy accept;
        ip saddr {block} oifname != "{PREFIX}*" masquerade
    }}
}}
"""


def _forward() -> None:
    """Let the host pass packets on between interfaces, if it does not yet."""
    try:
        if _FORWARD.read_text().strip() == "0":
            _FORWARD.write_text("1")
    except OSError as error:
        raise HostUnsuitable(
            f"network mode nat needs IP forwarding, and {_FORWARD} cannot be changed: {error.strerror}",
            remedy="`sysctl -w net.ipv4.ip_forward=1` on the host, or use network none",
        ) from error


def _hardware(address: ipaddress.IPv4Address) -> str:
    """Hardware address of an end: the same in every generation of a link."""
    return ":".join(f"{byte:02x}" for byte in b"\x02\x00" + address.packed)


def _without_ipv6(name: str) -> list[str]:
    return [f"link set dev {name} addrgenmode none"] if os.path.isdir("/proc/sys/net/ipv6") else []


def _more_addresses(addresses: Sequence[str]) -> list[str]:
    return [f"address add {ipaddress.IPv4Address(address)}/32 dev lo" for address in addresses]


# ---- programs


def _batch(words: Sequence[str], *descriptors: int) -> None:
    _run(["ip", "-batch", "-"], "\n".join(words) + "\n", descriptors)


def _run(words: Sequence[str], text: str = "", descriptors: Sequence[int] = ()) -> str:
    """Output of a program. Raises `HostUnsuitable` with its own words."""
    try:
        done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=60, pass_fds=descriptors)
    except subprocess.TimeoutExpired:
        raise HostUnsuitable(f"`{' '.join(words)}` did not end within 60 s", remedy="see dmesg") from None
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"status {done.returncode}"
        raise HostUnsuitable(f"`{' '.join(words)}` failed: {said}", remedy="`crab doctor` shows what this host lacks")
    return done.stdout
