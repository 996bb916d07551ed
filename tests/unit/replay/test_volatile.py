"""The table of what is volatile."""

from __future__ import annotations

import re

import pytest

from crab.replay import volatile


@pytest.mark.parametrize(
    ("pattern", "path", "fits"),
    [
        ("/proc/*", "/proc/1", True),
        ("/proc/*", "/proc", False),
        ("/proc/*", "/procedures", False),
        ("/run/**/*.pid", "/run/a.pid", True),
        ("/run/**/*.pid", "/run/a/b/c.pid", True),
        ("/run/**/*.pid", "/run/a.pid.old", False),
        ("/var/log/**", "/var/log/a/b", True),
        ("/var/log/**", "/var/log", False),
        ("/**/*.pyc", "/a.pyc", True),
        ("/**/.git/index", "/root/x/.git/index", True),
        ("/**/.git/index", "/root/x.git/index", False),
        ("/etc/host{name,s}", "/etc/hosts", True),
        ("/etc/host{name,s}", "/etc/hostess", False),
        ("/a.b", "/aXb", False),
        ("/a{b", "/a{b", True),
    ],
)
def test_patterns_mean_what_shells_mean(pattern: str, path: str, fits: bool) -> None:
    assert bool(re.compile(volatile.expression(pattern)).fullmatch(path)) is fits


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("at 2024-05-01 12:00:00.123+02:00", "at 2025-06-02T13:01:07Z"),
        ("-rw-r--r-- 1 root root 5 May  1 12:00 a", "-rw-r--r-- 1 root root 5 Dec 31 23:59 a"),
        ("Ran 12 tests in 0.003s", "Ran 12 tests in 10.250s"),
        ("<a.B object at 0x7f0012345678>", "<a.B object at 0x55aa12345678>"),
        ("server started, pid 12", "server started, pid 4711"),
    ],
)
def test_output_that_differs_in_times_addresses_and_pids_only_is_the_same(one: str, other: str) -> None:
    assert volatile.plain(one) == volatile.plain(other)


@pytest.mark.parametrize(
    ("one", "other"), [("3 apples", "4 apples"), ("Ran 12 tests in 0.1s", "Ran 13 tests in 0.1s"), ("v1.2.3", "v1.2.4")]
)
def test_other_numbers_stay(one: str, other: str) -> None:
    assert volatile.plain(one) != volatile.plain(other)


def test_every_exception_has_its_reason() -> None:
    assert all(volatile.PATHS.values())
    assert all(reason for _, reason in volatile.CONTENTS.values())
