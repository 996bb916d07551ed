"""The way of one incarnation to the network, and what its resolver is told.

- none: loopback only.
- nat: a link of its own (`crab.host.network`) with an address that belongs to the sandbox's slot, so that it stays the
  same over starts, rewinds and recoveries. A fork has another one.
- host: the host's own network namespace. Nothing to make here.

When processes are restored, their sockets want the addresses that they were bound to, before anything else: so the link is
made first, closed. Connections that lead out of the sandbox are cut before it is opened: their other ends have gone on
meanwhile, and whatever was sent would be sent twice (law 5).
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from crab.errors import CrabError, HostUnsuitable
from crab.host import connections, namespaces, network
from crab.host.beneath import open_beneath
from crab.host.network import Link, Nat
from crab.model import NetworkMode
from crab.sandbox import inside

FALLBACK = ("9.9.9.9", "1.1.1.1")
"""Name servers for a host that has none that a sandbox can reach."""
MARK = "# Written by Crab from the host's name servers. Without this line the file is left alone.\n"
RESOLV = "resolv.conf"
_HOST_FILES = (Path("/etc/resolv.conf"), Path("/run/systemd/resolve/resolv.conf"))
log = logging.getLogger("crab.network")


class Way:
    """See the module. Used by who holds the sandbox's operation."""

    def __init__(self, nat: Nat, mode: NetworkMode, slot: int, generation: int) -> None:
        self.mode: NetworkMode = mode
        self._nat = nat
        self._slot = slot
        self._generation = generation
        self._made = False
        self._parted = True
        """Whether nothing that was restored leads out."""

    @property
    def name(self) -> str:
        """Name of the host's end of its link."""
        return self._nat.name(self._slot, self._generation)

    @property
    def link(self) -> Link:
        """Its link. Raises `HostUnsuitable`."""
        return self._nat.link(self._slot, self._generation)

    def prepare(self, pid: int, former: Sequence[str] = (), sealed: bool = False) -> None:
        """Make the way, closed, for the namespace of a process; `former` are addresses that its sockets may want.

        `sealed`: it is never opened, and nothing of it is on the host. Raises `HostUnsuitable`.
        """
        if self.mode != "nat":
            return
        if sealed:
            network.seal(pid, former)
            return
        link = self.link
        self._nat.delete([link.name])  # of a crash
        self._nat.create(link, pid, [address for address in former if address != str(link.inner)])
        self._made = True

    def restoring(self, pid: int, former: Sequence[str], sealed: bool) -> None:
        """The same for processes that are about to be restored there."""
        self.prepare(pid, former, sealed)
        self._parted = False

    def part(self, pid: int) -> None:
        """Cut what leads out of restored processes. Raises `HostUnsuitable` if this kernel cannot."""
        if self.mode != "nat" or self._parted:
            return
        own = network.addresses(pid)
        try:
            with namespaces.network(f"/proc/{pid}/ns/net"):
                for connection in leading_out(connections.established(), own):
                    connections.cut(connection)
        except OSError as error:
            lacks = error.errno in (errno.EOPNOTSUPP, errno.ENOENT)
            raise HostUnsuitable(
                f"connections to the outside cannot be cut: {'this kernel has no support for it' if lacks else error}",
                remedy="use a kernel with CONFIG_INET_DIAG_DESTROY, or bring the files back alone"
                if lacks
                else "try again",
            ) from error
        network.refuse_from(pid, [address for address in own if address != str(self.link.inner)])
        self._parted = True

    def open(self, pid: int) -> None:
        """Let the sandbox whose init has that pid reach the outside. Can be repeated. Raises `HostUnsuitable`."""
        if self.mode != "nat":
            return
        if not self._made:
            self.prepare(pid)
        self.part(pid)
        self._nat.open([self.link])

    def keep(self) -> None:
        """See that the host's rules for it are still there: a reload of the firewall flushes them. Takes 30 µs if they are.

        Raises `HostUnsuitable` if they cannot be made again.
        """
        if self.mode == "nat":
            self._nat.ensure()

    def adopt(self) -> None:
        """Take over what an earlier owner made of it."""
        self._made = network.exists(self.name)

    def close(self) -> None:
        """Take it away. No error if it is gone."""
        if self.mode == "nat":
            self._nat.delete([self.name])
            self._made = False


def leading_out(found: Iterable[connections.Connection], own: Iterable[str]) -> list[connections.Connection]:
    """Those connections whose other end is none of these addresses, nor loopback."""
    local = {ipaddress.ip_address(address) for address in own}
    return [connection for connection in found if not connection.remote.is_loopback and connection.remote not in local]


def sweep(nat: Nat, lives: Mapping[Way, int]) -> None:
    """Take away the links of all others, and see that those of live sandboxes (with the pid of their init) are open."""
    used = {way: pid for way, pid in lives.items() if way.mode == "nat"}
    nat.sweep(way.name for way in used)
    try:
        if used:
            nat.ensure()
    except CrabError:
        nat.sweep(())  # without our rules nothing would keep them from the host
        log.exception("the network of %d running sandboxes was taken away", len(used))
        return
    for way, pid in used.items():
        try:
            way.adopt()
            way.open(pid)
        except CrabError:
            log.exception("a running sandbox has no network: link %s", way.name)


# ---- names


def resolver_for(texts: Sequence[str], own: Iterable[str]) -> str:
    """A resolv.conf for a sandbox behind nat, of the first text that names a server which it can reach: one with an IPv4
    address that is none of the host's `own`."""
    mine = set(own)
    for text in texts:
        lines = [line.split() for line in text.splitlines()]
        servers = [words[1] for words in lines if len(words) > 1 and words[0] == "nameserver"]
        usable = [server for server in servers if server not in mine and _reachable(server)]
        if usable:
            rest = [
                " ".join(words) for words in lines if len(words) > 1 and words[0] in ("search", "domain", "options")
            ]
            return MARK + "\n".join([*(f"nameserver {server}" for server in usable), *rest]) + "\n"
    return MARK + "".join(f"nameserver {server}\n" for server in FALLBACK)


def _reachable(server: str) -> bool:
    try:
        address = ipaddress.IPv4Address(server)
    except ValueError:  # IPv6 does not lead out of a sandbox
        return False
    return not address.is_loopback and not address.is_link_local and not address.is_unspecified


def resolver(mode: NetworkMode) -> str:
    """The resolv.conf for a sandbox of that mode, from what the host has now."""
    texts: list[str] = []
    for path in _HOST_FILES:
        try:
            texts.append(path.read_text(errors="replace"))
        except OSError:
            continue
    if mode == "host":
        return MARK + (texts[0] if texts else "")
    return resolver_for(texts, network.addresses())


def tell_resolver(pid: int, uid: int, upper: Path, text: str) -> None:
    """Write /etc/resolv.conf of a sandbox, as its root (host id `uid`); a link in its place is replaced, not followed.

    A file that the sandbox has written itself stays: one in its writable layer `upper` that does not begin with our mark.
    """

    def write() -> None:
        with inside.opened(pid, "/etc", os.O_RDONLY | os.O_DIRECTORY) as folder:
            old = _read(folder)
            if old == text or (not old.startswith(MARK) and _lies_in(upper)):
                return
            new = f".{RESOLV}.crab"
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(new, flags, 0o644, dir_fd=folder)
            try:
                os.fchmod(fd, 0o644)
                os.write(fd, text.encode())
            finally:
                os.close(fd)
            os.rename(new, RESOLV, src_dir_fd=folder, dst_dir_fd=folder)

    try:
        inside.as_owner(uid, write)
    except OSError as error:
        log.warning("the name servers could not be written to a sandbox (pid %d): %s", pid, error)


def _read(folder: int) -> str:
    """Content of the file as it is now; empty if there is none, or no regular one."""
    try:
        fd = os.open(RESOLV, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return ""
    try:
        return os.read(fd, 1 << 16).decode(errors="replace") if stat.S_ISREG(os.fstat(fd).st_mode) else ""
    finally:
        os.close(fd)


def _lies_in(upper: Path) -> bool:
    root = os.open(upper, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.close(open_beneath(root, f"etc/{RESOLV}".encode(), os.O_PATH | os.O_NOFOLLOW))
    except FileNotFoundError:
        return False
    except OSError:
        return True
    finally:
        os.close(root)
    return True
