"""Decisions about addresses, names and rules."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

import pytest

from crab.errors import HostUnsuitable
from crab.host import network
from crab.host.network import Nat, choose, occupied, rules
from crab.sandbox.box import RANGES

OWNER = "0123456789"


def test_names_fit_and_tell_owner_number_and_generation_apart() -> None:
    nat, other = Nat(OWNER, Path("/none")), Nat("1123456789", Path("/none"))
    names = {n.name(number, generation) for n in (nat, other) for number in (0, 1, RANGES) for generation in (1, 2, 37)}
    assert len(names) == 2 * 3 * 2, "generations 1 and 37 share a name, all else differs"
    assert all(len(name) == 15 for name in names)
    assert nat.name(0x2A, 1) == "crab012345602a1"


def test_every_slot_of_a_sandbox_has_a_link() -> None:
    assert network.NUMBERS > RANGES


def test_a_block_is_the_one_that_was_known() -> None:
    known = IPv4Network("100.112.32.0/19")
    assert choose(OWNER, known, [], False) == known


def test_a_known_block_that_is_taken_is_given_up_unless_links_use_it() -> None:
    known = IPv4Network("100.112.32.0/19")
    taken = [IPv4Network("100.112.40.0/24")]
    assert not choose(OWNER, known, taken, False).overlaps(taken[0])
    assert choose(OWNER, known, taken, True) == known


def test_the_second_range_is_taken_when_the_first_is_routed() -> None:
    assert choose(OWNER, None, [IPv4Network("100.64.0.0/10")], False).subnet_of(IPv4Network("198.18.0.0/15"))


def test_without_a_free_range_the_refusal_names_the_routes() -> None:
    with pytest.raises(HostUnsuitable, match=r"100\.64\.0\.0/10") as caught:
        choose(OWNER, None, [IPv4Network("100.64.0.0/10"), IPv4Network("198.18.0.0/15")], False)
    assert caught.value.remedy


def test_default_routes_and_our_own_are_nobodys_network() -> None:
    routes: list[dict[str, object]] = [
        {"dst": "default", "gateway": "192.0.2.1", "dev": "eth0"},
        {"dst": "0.0.0.0/1", "dev": "tun0"},
        {"dst": "100.112.0.1", "dev": "crab01234560001"},
        {"dst": "100.112.0.0/19", "type": "unreachable", "metric": 7},
        {"dst": "100.112.64.0/19", "type": "unreachable", "metric": 8},
        {"dst": "10.0.0.0/8", "dev": "eth0"},
        {"dst": "192.0.2.2", "dev": "eth0", "type": "local"},
    ]
    assert occupied(routes, "crab0123456", 7) == [
        IPv4Network("100.112.64.0/19"),
        IPv4Network("10.0.0.0/8"),
        IPv4Network("192.0.2.2/32"),
    ]


def test_rules_name_no_interface_but_the_owners() -> None:
    text = rules("crab_x", "crab0123456", IPv4Network("100.112.32.0/19"))
    assert text.count('iifname "') == text.count('iifname "crab0123456*"')
    assert "100.112.32.0/19" in text and "169.254.0.0/16" in text


def test_hardware_addresses_are_local_and_stay_the_same() -> None:
    assert network._hardware(IPv4Address("100.112.0.1")) == "02:00:64:70:00:01"
