"""What can be reached from a root: the blobs that a checkpoint needs. A part that many share is looked at once."""

from __future__ import annotations

from collections.abc import Iterable

from crab.errors import Damaged, Incompatible, WrongKey
from crab.store.packs import NODE
from crab.store.repository import Repository


def is_whole(repository: Repository, roots: Iterable[bytes]) -> bool:
    """Whether all that can be reached from there is in the indexes. Remembered until an index forgets something."""
    whole = repository.whole  # another set as soon as an index forgets something
    new = [root for root in roots if root not in whole]
    if new and Closure(repository).faults(new):
        return False
    whole.update(new)
    return True


class Closure:
    """Walks a store's graph, and remembers what it saw."""

    def __init__(self, repository: Repository, bad: frozenset[bytes] = frozenset()) -> None:
        """`bad` are blobs that are known to be damaged."""
        self._repository = repository
        self._bad = bad
        self.seen: set[bytes] = set()
        """Every blob that was reached."""
        self._faults: dict[bytes, frozenset[bytes]] = {}

    def faults(self, roots: Iterable[bytes]) -> frozenset[bytes]:
        """The blobs that are missing or damaged among all that can be reached from there."""
        stack = [(root, False) for root in roots]
        wanted = [root for root, _ in stack]
        below: dict[bytes, list[bytes]] = {}
        while stack:
            identity, done = stack.pop()
            if done:
                found = [self._faults[link] for link in below.pop(identity) if self._faults[link]]
                self._faults[identity] = frozenset().union(*found)
                continue
            if identity in self._faults:
                continue
            self.seen.add(identity)
            links = self._links(identity)
            if links is None:
                self._faults[identity] = frozenset({identity})
                continue
            if not links:
                self._faults[identity] = frozenset()
                continue
            below[identity] = links
            self._faults[identity] = frozenset()  # the names are digests: there are no circles
            stack.append((identity, True))
            stack += [(link, False) for link in links if link not in self._faults]
        return frozenset().union(*(self._faults[root] for root in wanted))

    def _links(self, identity: bytes) -> list[bytes] | None:
        """What a blob needs; None if it cannot be had."""
        place = self._repository.place(identity)
        if place is None or identity in self._bad:
            return None
        pack, number = place
        if pack.entry(number)[1] != NODE:
            return []
        try:
            return self._repository.node(identity)[0]
        except (Damaged, Incompatible, WrongKey):
            return None
