"""Which processes of a sandbox are more than a survivor: persistent shells, and the agent itself."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Protocol

from crab.errors import CrabError
from crab.sandbox.incarnation import Incarnation


class Shell(Protocol):
    """A persistent shell whose state can be asked for."""

    def digest(self, *, stale: bool = False) -> str | None:
        """Digest of its state; None if it cannot be told. `stale`: its process ran, so it must be asked again."""
        ...

    def changed_since(self, digest: str) -> str:
        """In words, what is other than in the state with that digest; empty if that is not known any more."""
        ...


def shells(incarnation: Incarnation) -> Mapping[int, Shell]:
    """Registered shells that run, by host number of their process."""
    found: dict[int, Shell] = {}
    for shell in incarnation.shells.registered().values():
        with contextlib.suppress(CrabError, OSError):
            found[shell.host_pid()] = shell
    return found


def agents(incarnation: Incarnation) -> Mapping[int, str]:
    """Names of agents by host number of their process."""
    return incarnation.agents()
