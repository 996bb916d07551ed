"""How forks are called that were given no name."""

from __future__ import annotations

from itertools import islice

import pytest

from crab.checkpoint import refs
from crab.daemon.history import _fork_names


@pytest.mark.parametrize("source", ["work", "work-fork-3"])
def test_a_fork_is_named_after_where_it_comes_from_in_the_end(source: str) -> None:
    assert list(islice(_fork_names(source), 2)) == ["work-fork-1", "work-fork-2"]


def test_names_of_forks_are_names() -> None:
    for name in islice(_fork_names("x" * 63), 12):
        assert refs.check_name(name).startswith("xxx")
