"""What the coordinator asks of the owner of sandboxes: how one reaches its model, and that it be made safe.

A turn that cannot be made safe is no error: the agent goes on, and the turn says why it is `unprotected`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from crab.daemon import history
from crab.daemon.core import TURN, TURN_SECONDS, Core
from crab.daemon.past import note_return, returning
from crab.daemon.registry import Owed
from crab.daemon.requests import Request
from crab.daemon.tools import Kit
from crab.engine.engine import Engine
from crab.engine.jobs import Urgency
from crab.errors import CrabError
from crab.model import ModelAccess
from crab.turns.protection import Haste, Safety

log = logging.getLogger("crab.turns")


class _Haste(Haste):
    """Tells the engine."""

    def __init__(self, engine: Engine, sandbox: str) -> None:
        self._engine, self._sandbox = engine, sandbox

    def answered(self, seconds: float) -> None:
        self._engine.answered(self._sandbox, seconds)

    def awaited(self) -> AbstractContextManager[None]:
        return self._engine.awaited(self._sandbox)

    def why_not_yet(self) -> str:
        return self._engine.why(self._sandbox)


class Keeper:
    """See the module (`crab.turns.coordinator.Keeper`)."""

    def __init__(self, core: Core, call: Callable[[Request], Any]) -> None:
        """`call` answers any request."""
        self._core, self._call = core, call

    def access(self, sandbox: str) -> ModelAccess | None:
        """How a sandbox reaches its model; None if it has none, or is gone."""
        try:
            return self._core.registry.find(sandbox).spec.model
        except CrabError:
            return None

    def exists(self, sandbox: str) -> bool:
        """Whether there is such a sandbox, be it damaged."""
        registry = self._core.registry
        return any(one.id == sandbox for one in (*registry.all(), *registry.broken()))

    def protect(self, sandbox: str) -> Safety:
        """A checkpoint of what changed. Waits for another operation on the sandbox, but not longer than an answer is held."""
        access = self.access(sandbox) or ModelAccess()
        return protected(
            self._core, sandbox, durable=access.gate == "durable", seconds=access.hold, waits=access.gate != "none"
        )

    def haste(self, sandbox: str) -> _Haste:
        """Where to say how urgent that is."""
        return _Haste(self._core.engine, sandbox)

    def tools(self, sandbox: str) -> Kit:
        """What an agent inside may do with its sandbox."""
        return Kit(self._call, sandbox, inside=True)

    def bring_back(self, sandbox: str, checkpoint: str) -> None:
        """Restore a checkpoint of it, whose question is to be asked anew. Raises `CrabError`."""
        bring_back(self._core, sandbox, checkpoint)


def bring_back(core: Core, sandbox: str, checkpoint: str) -> None:
    """Restore a checkpoint for an agent that goes another way from there. Waits for another operation. Raises `CrabError`."""
    with core.operation(sandbox, "rewind", TURN_SECONDS) as record, returning(core, record):
        found = history.find(core, record, checkpoint)
        note_return(core, history.bring_back(core, record, found, Owed(ask_again=True)))


def protected(
    core: Core, sandbox: str, *, durable: bool, seconds: float, waits: bool = True, marks: bool = False
) -> Safety:
    """Take a checkpoint as soon as nothing else is done with the sandbox; never raises. With `marks` no question was asked."""
    try:
        with core.operation(sandbox, TURN, seconds) as record:
            agents = set() if marks else core.life(record).agent_pids()
            if agents is None:  # its last safe turn is worth more than one without it
                return Safety(protection="unprotected", why="the agent ended before its turn was safe")
            urgency = Urgency.URGENT if marks else Urgency.NORMAL  # of a question, the answer will say when it is
            made = history.checkpoint_of(core, record, "", "adaptive", durable, agents, urgency, asked=not marks)
        kind = "none" if not waits else "durable" if durable else "captured"
        return Safety(protection=kind, checkpoint=made.id, turn=made.turn)
    except CrabError as error:
        return Safety(protection="unprotected", why=error.message)
    except Exception as error:
        log.exception("a turn of %s could not be made safe", sandbox)
        return Safety(protection="unprotected", why=f"{type(error).__name__}: {error}")
