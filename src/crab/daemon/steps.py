"""Commands of an agent: how each ended is recorded, and none is run a second time by an agent that comes back.

A command of an agent is one with `by_agent`. While the agent is behind its sandbox, it is given the recorded outcome of
what it runs; the sandbox has its effects already. What was under way there is waited for (`underway`). Once it has caught up,
what it runs is run, and recorded.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import blake3
import msgspec

from crab.daemon import underway
from crab.daemon.core import TURN_SECONDS, Core
from crab.daemon.keeper import bring_back, protected
from crab.daemon.underway import Resumed
from crab.errors import Busy, CrabError, SandboxGone, Uncertain, WrongState, from_wire
from crab.model import ExecResult, ExecSpec, ExecStatus, ShellResult, Struct
from crab.sandbox.command import Command, Output
from crab.turns.exchange import Outcome
from crab.turns.place import Place, Ticket

R = TypeVar("R", ExecResult, ShellResult)
Told = TypeVar("Told", bound="Result")
KEPT = 16 << 20
"""Bytes of streamed output that are recorded with an outcome; what is more, an agent that comes back is not told."""
log = logging.getLogger("crab.turns")


class Streamed(Struct, kw_only=True):
    """The outcome of a command whose output was streamed."""

    status: ExecStatus
    output: tuple[tuple[int, bytes], ...]
    """Pieces with the number of their stream, in the order in which they came."""


class Refused(Struct, kw_only=True):
    """The outcome of a command that could not be run: the error as it goes over the wire."""

    error: dict[str, Any]


def digest(*parts: object) -> bytes:
    """Of what is to be run; equal digests, the same command."""
    return blake3.blake3(msgspec.msgpack.encode(parts, order="deterministic")).digest()


def digest_of(spec: ExecSpec, input: bytes = b"") -> bytes:
    """The same of a command."""
    return digest("exec", spec.argv, spec.env, spec.cwd, spec.user, spec.tty, input)


def end_turn(core: Core, sandbox: str) -> None:
    """A command has ended: if each is a turn here, make it safe. What could not be done is said in the log, and at the next
    turn."""
    record = core.registry.find(sandbox)
    if record.spec.exec_turns:
        made = protected(core, record.id, durable=True, seconds=TURN_SECONDS, marks=True)
        if made.protection == "unprotected":
            log.warning("%s: the turn is not safe: %s", record.id, made.why)


def once(
    core: Core,
    sandbox: str,
    what: bytes,
    kind: type[R],
    run: Callable[[Ticket], R],
    resume: Callable[[Ticket], R | None] = lambda _: None,
) -> R:
    """Run something for an agent, or give back how it ended when it was run before. Raises what `run` raises, again.

    `resume` waits for what runs in the restored sandbox already; None if that is not there. Then raises `Uncertain`.
    """
    record = core.registry.find(sandbox)
    place = core.coordinator.place(record.id)
    found, life = _found(core, place, record.id, what)
    if found is not None and found.result is not None:
        return _decoded(found.result, kind)
    ticket = place.begin(what, life) if found is None else place.resume(found, life)
    try:
        result = run(ticket) if found is None else resume(ticket)
        if result is None:
            raise _uncertain(record.name)
    except CrabError as error:
        _refused(place, record.id, ticket, error, found)
        raise
    except BaseException:
        if found is not None:
            place.take_back(found)
        raise
    _end(place, record.id, ticket, result)
    end_turn(core, sandbox)
    return result


def _found(core: Core, place: Place, sandbox: str, what: bytes) -> tuple[Outcome | None, int]:
    """The outcome, if the command is not to be started: with its result, or (`intended`) to wait for. And the life of the
    sandbox in which it may be."""
    life = place.life
    step, outcome = place.command(what)
    if step.kind == "diverged":
        _diverged(core, place, sandbox, step.why)
        life = place.life
    return outcome, life


def _uncertain(sandbox: str) -> Uncertain:
    """It was begun before the checkpoint, or about to be, and is not there to be waited for. It may have ended just then: to
    run it again might do it twice."""
    log.warning("%s: a command was under way when it was captured, and does not run any more", sandbox)
    return Uncertain(
        f"how this command ended is not known: it was under way when sandbox {sandbox} was captured, and runs no more",
        remedy="look at what it did, if anything; asked for once more it is run",
    )


def _diverged(core: Core, place: Place, sandbox: str, why: str) -> None:
    """The agent does something else than it did: it goes on from the first checkpoint after the last command that both ran."""
    later = place.next
    log.warning("%s: %s", sandbox, why)
    if later is not None and later.checkpoint is not None:
        bring_back(core, sandbox, later.checkpoint)
    place.diverged()


def _refused(place: Place, sandbox: str, ticket: Ticket, error: CrabError, found: Outcome | None) -> None:
    """It could not be run, or (`found`) waited for. Of a sandbox that died meanwhile nothing is kept: it is brought back to
    before. One that was told to come later was not begun."""
    if not isinstance(error, (SandboxGone, WrongState, Busy)):
        _end(place, sandbox, ticket, Refused(error=error.to_wire()), failed=True)
    elif found is None and not isinstance(error, SandboxGone):
        place.withdraw(ticket)
    if found is not None:
        place.take_back(found)


Result = ExecResult | ShellResult | Streamed | Refused


def _end(place: Place, sandbox: str, ticket: Ticket, result: Result, failed: bool = False) -> None:
    try:
        place.end(ticket, msgspec.msgpack.encode(result), failed)
    except (CrabError, OSError) as error:
        log.error("%s: the outcome of a command cannot be recorded: %s", sandbox, error)


def _decoded(known: bytes, kind: type[Told]) -> Told:
    try:
        return msgspec.msgpack.decode(known, type=kind)
    except msgspec.ValidationError:
        raise from_wire(msgspec.msgpack.decode(known, type=Refused).error) from None


# ---------------------------------------------------------------- streamed commands


class Recording:
    """A command of which something is to be done when it has been read to its end, before its reader hears of that."""

    def __init__(
        self, command: Command | Resumed, end: Callable[[Streamed], None], left: Callable[[], None] = lambda: None
    ) -> None:
        """`left` is called instead of `end` if its reader goes away before."""
        self._command, self._end, self._left = command, end, left

    def __getattr__(self, name: str) -> Any:
        return getattr(self._command, name)

    def events(self) -> Iterator[Output]:
        """See `Command.events`."""
        pieces: list[tuple[int, bytes]] = []
        size = 0
        try:
            for piece in self._command.events():
                if size < KEPT:
                    pieces.append((piece.stream, piece.data))
                    size += len(piece.data)
                yield piece
            status = self._command.status()
        except BaseException:
            self._left()
            raise
        if not status.running:
            self._end(Streamed(status=status, output=tuple(pieces)))


class Replayed:
    """A command that was run before: it gives its output, and how it ended, and does nothing else."""

    _numbers = itertools.count(1)

    def __init__(self, known: Streamed, name: str) -> None:
        self.id = -next(self._numbers)
        self.name = name
        self.pid = known.status.pid or 0
        self.tty = False
        self.timed_out = known.status.timed_out
        self._known = known

    def events(self) -> Iterator[Output]:
        """Its output, as it came then."""
        for stream, data in self._known.output:
            yield Output(stream, data)

    def status(self) -> ExecStatus:
        """How it ended."""
        return self._known.status

    def write(self, data: bytes) -> None:
        """It takes input as it did, and does nothing with it."""

    def close_input(self) -> None: ...

    def signal(self, number: int) -> None: ...

    def resize(self, rows: int, columns: int) -> None: ...

    def kill(self) -> None: ...

    def detach(self) -> None: ...

    def release(self) -> None: ...


def stream_once(
    core: Core, sandbox: str, spec: ExecSpec, start: Callable[[ExecSpec], Command]
) -> Command | Recording | Replayed:
    """Start a command for an agent, or give what it came to when it was run before, or one that runs in the restored sandbox.
    Raises `Uncertain` if that is not there."""
    record = core.registry.find(sandbox)
    place = core.coordinator.place(record.id)
    what = digest_of(spec)
    found, life = _found(core, place, record.id, what)
    if found is not None and found.result is not None:
        return Replayed(_decoded(found.result, Streamed), spec.name)
    ticket = place.begin(what, life) if found is None else place.resume(found, life)
    spec = underway.named(spec, ticket)
    try:
        command = start(spec) if found is None else underway.take_up(core, record, spec)
        if command is None:
            raise _uncertain(record.name)
    except CrabError as error:
        _refused(place, record.id, ticket, error, found)
        raise

    def over(result: Streamed) -> None:
        _end(place, record.id, ticket, result)
        end_turn(core, sandbox)

    def left() -> None:
        if found is not None:
            with contextlib.suppress(CrabError, OSError):  # the daemon ends: to the next one nobody waits for it anyway
                place.take_back(found)

    return Recording(command, over, left)
