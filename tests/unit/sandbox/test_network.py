"""What a sandbox's resolver is told, and which of its connections lead out."""

from __future__ import annotations

import socket
from ipaddress import ip_address

import pytest

from crab.host.connections import Connection
from crab.sandbox.network import FALLBACK, MARK, leading_out, resolver_for

STUB = "# stub\nnameserver 127.0.0.53\noptions edns0 trust-ad\nsearch example.org\n"
REAL = "nameserver 192.0.2.53\nnameserver 2001:db8::53\nsearch example.org\n"


def test_the_first_file_with_a_reachable_server_is_taken() -> None:
    assert resolver_for([STUB, REAL], []) == f"{MARK}nameserver 192.0.2.53\nsearch example.org\n"
    assert resolver_for([REAL, STUB], []) == f"{MARK}nameserver 192.0.2.53\nsearch example.org\n"


def test_a_server_on_the_host_itself_is_out_of_reach() -> None:
    text = "nameserver 192.0.2.2\nnameserver 192.0.2.53\n"
    assert resolver_for([text], ["192.0.2.2"]) == f"{MARK}nameserver 192.0.2.53\n"


@pytest.mark.parametrize("texts", [[], [STUB], ["nameserver\nnameserver ::1\nnameserver 169.254.169.253\nrubbish"]])
def test_without_any_the_fallback_is_told(texts: list[str]) -> None:
    said = resolver_for(texts, [])
    assert said == MARK + "".join(f"nameserver {server}\n" for server in FALLBACK)


def test_connections_inside_stay() -> None:
    def to(remote: str) -> Connection:
        return Connection(socket.AF_INET, ip_address("10.0.0.1"), ip_address(remote), remote.encode())

    found = [to("127.0.0.1"), to("127.0.0.9"), to("::1"), to("10.0.0.1"), to("10.0.0.2"), to("198.51.100.1")]
    assert leading_out(found, ["10.0.0.1", "10.0.0.3"]) == [to("10.0.0.2"), to("198.51.100.1")]
