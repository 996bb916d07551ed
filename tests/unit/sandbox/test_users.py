"""From a user's name to the numbers of a process."""

from __future__ import annotations

import pytest

from crab.errors import ExecFailed
from crab.sandbox.users import ROOT, resolve

PASSWD = "root:x:0:0:root:/root:/bin/bash\nbroken line\nwww-data:x:33:33:www:/var/www:/bin/sh\nalice:x:1000:1000::/home/alice:/bin/zsh\n"
GROUP = "root:x:0:\nwww-data:x:33:\nsudo:x:27:alice,bob\ndocker:x:998:alice\nalice:x:1000:\n"


def test_a_name_gives_home_shell_and_all_groups() -> None:
    found = resolve("alice", PASSWD, GROUP)
    assert (found.uid, found.gid, found.groups, found.home, found.shell) == (
        1000,
        1000,
        (27, 998, 1000),
        "/home/alice",
        "/bin/zsh",
    )


def test_a_number_of_a_known_user_is_that_user() -> None:
    assert resolve("33", PASSWD, GROUP).name == "www-data"


def test_a_number_that_nobody_has_is_taken_as_it_is() -> None:
    found = resolve("4242:999", PASSWD, GROUP)
    assert (found.uid, found.gid, found.home) == (4242, 999, "/")


def test_a_group_can_be_chosen() -> None:
    assert resolve("alice:docker", PASSWD, GROUP).gid == 998


def test_root_needs_no_passwd() -> None:
    assert resolve("root", "", "") == ROOT or resolve("root", "", "").uid == 0


@pytest.mark.parametrize("user", ["bob", "alice:nosuch", "x y"])
def test_an_unknown_user_or_group_is_an_error_that_says_what_exists(user: str) -> None:
    with pytest.raises(ExecFailed):
        resolve(user, PASSWD, GROUP)
