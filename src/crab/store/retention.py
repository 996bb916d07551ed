"""Which checkpoints are kept, of a store or on this host. A pure decision over what is there; who removes the others is
elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeVar

from crab.errors import InvalidRequest
from crab.model import Checkpoint, StoredCheckpoint, Struct

Kept = TypeVar("Kept", Checkpoint, StoredCheckpoint)


class Policy(Struct, kw_only=True):
    """What is to be kept of each sandbox; what one rule keeps is kept."""

    last: int = 0
    """The newest so many."""
    every: int = 0
    """Every turn whose number is a multiple of this."""
    labelled: bool = True
    heads: bool = True
    """Those that no other was taken after: the ends of all branches."""

    def check(self) -> None:
        """Raise `InvalidRequest` for a policy that keeps nothing on purpose."""
        if self.last < 0 or self.every < 0:
            raise InvalidRequest("a negative number of checkpoints makes no sense", remedy="give positive numbers")
        if not (self.last or self.every or self.labelled or self.heads):
            raise InvalidRequest(
                "that policy keeps nothing",
                remedy="say what to keep, or remove single checkpoints (`crab rm-checkpoint`, `crab store rm`)",
            )


def kept(policy: Policy, everything: Sequence[Kept]) -> frozenset[str]:
    """Ids of those to keep."""
    policy.check()
    parents = {one.parent for one in everything}
    keep: set[str] = set()
    seen: Counter[str] = Counter()
    for one in _newest_first(everything):
        seen[one.sandbox] += 1
        if seen[one.sandbox] <= policy.last:
            keep.add(one.id)
    for one in everything:
        if (
            (policy.every and one.turn % policy.every == 0)
            or (policy.labelled and one.label)
            or (policy.heads and one.id not in parents)
        ):
            keep.add(one.id)
    return frozenset(keep)


def _newest_first(everything: Iterable[Kept]) -> list[Kept]:
    return sorted(everything, key=lambda one: (one.created, one.turn, one.id), reverse=True)
