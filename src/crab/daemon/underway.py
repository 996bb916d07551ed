"""A command of an agent that was under way in the checkpoint to which its sandbox was brought back: it runs there already.

Knows by which name it is found in the restored sandbox, and what of its output and input is still to come. Whether the agent
wants it is decided in `crab.turns.forward`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from crab.daemon.core import Core
from crab.daemon.registry import Record
from crab.model import ExecResult, ExecSpec
from crab.sandbox.command import Command, Output, collected
from crab.sandbox.wire import Entry
from crab.turns.place import STEP, Ticket

PASSING = "run-"
"""Of names that the server gives, to be able to kill what nobody waits for any more: they tell nothing when it comes again."""
_PASSING = re.compile(rf"{PASSING}[0-9a-f]{{12}}")


def is_step(name: str) -> bool:
    """Whether a name is one of those that commands of agents are given."""
    return name.startswith(STEP)


def named(spec: ExecSpec, ticket: Ticket) -> ExecSpec:
    """The command with a name by which it is found in a restored sandbox: its own, or that of its ticket."""
    own = "" if _PASSING.fullmatch(spec.name) else spec.name
    return msgspec.structs.replace(spec, name=own or ticket.name)


def take_up(core: Core, record: Record, spec: ExecSpec) -> Resumed | None:
    """The command of that name, if the sandbox has it. Its time limit counts from now."""
    life = core.running(record, "exec")
    entry = next((one for one in life.entries() if one.name == spec.name), None)
    if entry is None:
        return None
    command = life.attach(entry)
    command.keeps_output = True
    if spec.timeout is not None:
        command.limit(spec.timeout)
    return Resumed(command, entry)


class Resumed:
    """A handle on such a command: what its reader is told is what init has kept, from the beginning if that is all."""

    def __init__(self, command: Command, entry: Entry) -> None:
        self._command = command
        self._input = max(entry.input, 0)
        self.gone = sum(entry.acknowledged)
        """Bytes of output that somebody had before the sandbox was captured, and nobody has now."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._command, name)

    def events(self) -> Iterator[Output]:
        """See `Command.events`. What is missing is said first, on standard error."""
        if self.gone:
            yield Output(
                2, f"crab: the first {self.gone} bytes of the output are lost: it ran before a crash\n".encode()
            )
        yield from self._command.events()

    def collect(self, limit: int = 64 << 20) -> ExecResult:
        """See `Command.collect`."""
        result = collected(self.events(), self._command.status, limit)
        return msgspec.structs.replace(result, truncated=result.truncated or bool(self.gone))

    def write(self, data: bytes) -> None:
        """See `Command.write`. Who comes back gives all of the input once more: what the command had is left out."""
        known = min(self._input, len(data))
        if known < len(data):
            self._command.write(data[known:])
        self._input -= known
