"""Which checkpoint is made compact next."""

from __future__ import annotations

from collections.abc import Collection

from crab.daemon.compacting import NEWEST_SECONDS, next_to_compact
from crab.model import Checkpoint


def _checkpoint(name: str, created: float) -> Checkpoint:
    return Checkpoint(id=name, sandbox="s", turn=1, kind="full", created=created, processes_from=name)


def chosen(*loose: Checkpoint, newest: Collection[str] = (), now: float = 100.0) -> str | None:
    found = next_to_compact(loose, newest, now)
    return found.id if found else None


def test_the_oldest_comes_first_so_that_others_can_share_with_it() -> None:
    assert chosen(_checkpoint("a", 2.0), _checkpoint("b", 1.0), _checkpoint("c", 3.0)) == "b"


def test_the_newest_of_a_sandbox_waits_until_it_is_old_or_not_the_newest() -> None:
    first, second = _checkpoint("a", 1.0), _checkpoint("b", 2.0)
    assert chosen(first, newest={"a"}) is None
    assert chosen(first, second, newest={"b"}) == "a"
    assert chosen(first, second, newest={"a", "b"}, now=1.5 + NEWEST_SECONDS) == "a"
    assert chosen(second, newest={"b"}, now=1.5 + NEWEST_SECONDS) is None


def test_nothing_to_do() -> None:
    assert chosen(newest={"gone"}) is None
