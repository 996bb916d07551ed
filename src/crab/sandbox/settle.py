"""What a new incarnation is told once it runs: who it is, and its way to the network."""

from __future__ import annotations

import os

from blake3 import blake3

from crab.sandbox import inside
from crab.sandbox.incarnation import Incarnation
from crab.sandbox.network import resolver, tell_resolver


def machine_id(sandbox: str) -> str:
    """The machine id of a sandbox: made of its own id, so that no two have the same (hazard R05)."""
    return blake3(f"machine-id {sandbox}".encode()).hexdigest(16)


def identity(incarnation: Incarnation, sandbox: str) -> None:
    """Write the files that say who this machine is. Called for new sandboxes and forks, not when one is brought back."""
    name = incarnation.enclave.hostname
    files = {
        "/etc/hostname": f"{name}\n",
        "/etc/machine-id": f"{machine_id(sandbox)}\n",
        "/etc/hosts": f"127.0.0.1\tlocalhost {name}\n::1\tlocalhost ip6-localhost\n",
    }

    def write() -> None:
        with inside.root_of(incarnation.pid) as root:
            for path, text in files.items():
                if inside.read_text(incarnation.pid, path) == text:
                    continue  # of an earlier start: nothing is to change
                try:
                    fd = inside.open_in(root, path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
                except OSError:
                    continue  # an image without /etc, or with links there: its own business
                try:
                    os.write(fd, text.encode())
                finally:
                    os.close(fd)

    inside.as_owner(incarnation.enclave.first_id, write)


def part_network(incarnation: Incarnation) -> None:
    """Cut what leads out of a restored incarnation. Its way to the network stays closed until `network`."""
    incarnation.way.part(incarnation.pid)


def network(incarnation: Incarnation) -> None:
    """Open its way to the network and tell it the name servers."""
    way = incarnation.way
    way.open(incarnation.pid)
    if way.mode != "none":
        tell_resolver(incarnation.pid, incarnation.enclave.first_id, incarnation.files / "u", resolver(way.mode))


def forget_network(incarnation: Incarnation) -> None:
    """Take its way to the network away."""
    incarnation.way.close()
