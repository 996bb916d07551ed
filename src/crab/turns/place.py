"""Where an agent stands in its own past: the record of a sandbox, and how far the agent has come in it.

Holds what `crab.turns.forward` decides upon, asks it, and remembers what follows. It is kept with the record, so that a daemon
that is killed in the middle of a fast-forward goes on with it.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Callable, Collection, Iterator, Sequence

import msgspec
from blake3 import blake3

from crab.errors import SandboxGone
from crab.model import Struct
from crab.turns import forward
from crab.turns.exchange import Exchange, Outcome, Standing
from crab.turns.forward import CommandStep, Kept, Known, Progress, Situation, Step
from crab.turns.record import Record

RETURN_SECONDS = 120.0


STEP = "step:"
"""Of the names of commands of agents, inside of the sandbox."""


class Ticket(Struct, kw_only=True):
    """A command that runs now; its outcome is to be recorded under this."""

    outcome: int
    name: str
    """By which it is found in the sandbox. One that was captured and restored has it still, also in a fork, where the outcome
    is another row: so it is made of what a copy has in common with what it was copied from."""

    @classmethod
    def of(cls, outcome: Outcome) -> Ticket:
        """The ticket of an outcome that is to come."""
        unique = blake3(outcome.command + struct.pack("<d", outcome.started)).hexdigest()[:16]
        return cls(outcome=outcome.id, name=f"{STEP}{unique}")


class Place:
    """See the module. Safe to use from several threads."""

    def __init__(self, record: Record, sandbox: str) -> None:
        self._record, self._sandbox = record, sandbox
        self._lock = threading.RLock()
        self._standing = self._alone(record.standing(sandbox))
        self.life = 0
        """Grows each time the sandbox is brought back: what was under way before belongs to another life of it."""
        self._delivered: set[tuple[int, int]] = set()
        """Lives and exchanges of which the record is still to hear that the answers were taken."""
        self._returned = threading.Condition(self._lock)
        self._returning = 0

    @contextlib.contextmanager
    def returning(self) -> Iterator[None]:
        """For the length of the block the sandbox is being brought back: its agent may run already, and asks before anybody has
        said how far it is. Who asks for `ready` waits."""
        with self._lock:
            self._returning += 1
        try:
            yield
        finally:
            with self._lock:
                self._returning -= 1
                self._returned.notify_all()

    @property
    def is_ready(self) -> bool:
        """Nobody brings the sandbox back just now."""
        return not self._returning

    def ready(self) -> bool:
        """Wait until it is; whether it was all the time."""
        with self._lock:
            was = self.is_ready
            self._returned.wait_for(lambda: self.is_ready, RETURN_SECONDS)
            return was

    @property
    def forwarding(self) -> bool:
        """The agent may be behind its sandbox."""
        return self._standing.forwarding

    def _alone(self, known: Standing) -> Standing:
        """How it stands for a new daemon: whoever waited for a command that was under way has to ask for it again."""
        if not known.given:
            return known
        recorded = self._record.outcomes.of(self._sandbox, known.exchange)
        waited = {one.index for one in recorded if one.state == "intended"}
        return msgspec.structs.replace(known, given=tuple(one for one in known.given if one not in waited))

    def _move(self, **changes: object) -> None:
        new = msgspec.structs.replace(self._standing, **changes)
        if new != self._standing:
            self._standing = new
            self._record.stand(self._sandbox, new)

    # ---- questions

    def step(self, chain: Sequence[bytes], session: str) -> Step:
        """What to do with a request of the main loop; the agent is there from now on."""
        with self._lock:
            step = self._decided(chain, session)
            if step.kind == "replay" and step.exchange is not None and not step.guarded:
                self._at(step.exchange)
            if step.caught_up and step.kind != "diverged":
                self._move(forwarding=False, beyond=False)
            return step

    def step_at_once(self, chain: Sequence[bytes], session: str) -> Step | None:
        """The same for an agent that goes on as it did, which is what nearly all do; None if it takes a write, or a wait for
        somebody's."""
        if self._standing.forwarding or not self._lock.acquire(blocking=False):
            return None
        try:
            step = self._decided(chain, session)
            return step if step.kind == "ask" and self._standing == self._caught_up() else None
        finally:
            self._lock.release()

    def _caught_up(self) -> Standing:
        return msgspec.structs.replace(self._standing, forwarding=False, beyond=False)

    def _decided(self, chain: Sequence[bytes], session: str) -> Step:
        found = self._record.find(self._sandbox, chain[-1])
        same = self._known(found)
        if not self._standing.forwarding:
            went_on = found is not None and self._record.goes_on(found)
            return forward.decide(Situation(forwarding=False, session=session, same=same, went_on=went_on))
        position = self._record.position(self._sandbox, chain)
        head = self._record.newest(self._sandbox)
        return forward.decide(
            Situation(
                forwarding=True,
                session=session,
                same=same,
                position=self._known(position),
                head=self._known(head),
                went_on=position is not None and self._record.goes_on(position),
                beyond=self._standing.beyond,
                followed=head is not None and bool(self._record.outcomes.of(self._sandbox, head.id)),
            )
        )

    def _known(self, exchange: Exchange | None) -> Known | None:
        if exchange is None:
            return None
        return Known(
            id=exchange.id,
            session=exchange.session,
            whole=exchange.complete and not exchange.redacted,
            safe=exchange.protection is not None,
            delivered=exchange.delivered or (self.life, exchange.id) in self._delivered,
        )

    def _at(self, exchange: int) -> None:
        if exchange != self._standing.exchange:
            self._move(exchange=exchange, given=())

    def answered(self, exchange: int, life: int, keep: Callable[..., object]) -> None:
        """The agent gets a new answer: what it does now follows from that (not if it asked in an earlier life). `keep`
        writes the answer to the record, and in the same transaction (the agent waits for it) the standing that it is called
        with. Raises what that does; the agent gets its answer then, too."""
        with self._lock:
            if life != self.life:
                keep(exchange)
                return
            new = msgspec.structs.replace(self._standing, exchange=exchange, given=())
            try:
                keep(exchange, standing=new)
            finally:
                self._standing = new

    def taken(self, exchange: int, life: int) -> None:
        """The agent has got the whole of an answer (not if it asked in an earlier life). Counts at once; does not block, so
        `keep_taken` is to be called after it."""
        self._delivered.add((life, exchange))

    def keep_taken(self, exchange: int, life: int) -> None:
        """Write that to the record: who asks the same after a restart of the daemon wants another answer."""
        with self._lock:
            if life == self.life and (life, exchange) in self._delivered:
                self._record.delivered(exchange)
            self._delivered.discard((life, exchange))

    def after(self, exchange: int) -> Exchange | None:
        """The recorded exchange that came next (0: the first one); None if that was the newest."""
        later = [e for e in self._record.exchanges(self._sandbox) if e.kind == "main" and not e.abandoned]
        return next((e for e in later if e.id > exchange), None)

    @property
    def next(self) -> Exchange | None:
        """The recorded exchange after the one that the agent is at."""
        return self.after(self._standing.exchange)

    # ---- commands

    def command(self, digest: bytes) -> tuple[CommandStep, Outcome | None]:
        """What to do with a command of the agent; with its outcome, if it is to be given that or to wait for it.

        Raises `SandboxGone` while the sandbox is brought back: who runs a command then was there before, and knows nothing
        of it.
        """
        if not self.ready():
            raise SandboxGone(
                "the sandbox is being brought back", remedy="start the agent again: it is given what it had"
            )
        with self._lock:
            standing = self._standing
            if not standing.forwarding:
                return CommandStep(kind="run"), None
            recorded = self._record.outcomes.of(self._sandbox, standing.exchange)
            known = [(one.state != "intended", Kept(index=one.index, command=one.command)) for one in recorded]
            head = self._record.newest(self._sandbox)
            progress = Progress(
                kept=tuple(one for ended, one in known if ended),
                under_way=tuple(one for ended, one in known if not ended),
                at_head=standing.exchange == (head.id if head else 0) and not standing.beyond,
                new=standing.beyond and not standing.exchange and not standing.given,
            )
            step = forward.decide_command(progress, digest, frozenset(standing.given))
            if step.kind in ("replay", "resume"):
                self._move(given=(*standing.given, step.index))
                return step, next(one for one in recorded if one.index == step.index)
            if step.caught_up and step.kind == "run":
                self._move(forwarding=False, beyond=False)
            return step, None

    def begin(self, digest: bytes, life: int) -> Ticket:
        """A command of the agent is about to run, which came in that life of the sandbox. Durable when it returns.

        Raises `SandboxGone` if the sandbox was brought back since: an agent of before acts no more.
        """
        with self._lock:
            self._must_be(life)
            exchange = self._standing.exchange
            index = self._record.outcomes.next_index(self._sandbox, exchange)
            made = self._record.outcomes.begin(self._sandbox, exchange, index, digest)
            if self._standing.forwarding:  # it is none of those that were begun before
                self._move(given=(*self._standing.given, index))
            return Ticket.of(made)

    def withdraw(self, ticket: Ticket) -> None:
        """It was not begun after all, and certainly did nothing."""
        self._record.outcomes.withdraw(ticket.outcome)

    def resume(self, outcome: Outcome, life: int) -> Ticket:
        """The same for one that was begun before the sandbox was brought back: it keeps its place."""
        with self._lock:
            self._must_be(life)
            return Ticket.of(outcome)

    def take_back(self, outcome: Outcome) -> None:
        """The agent could not wait for it now. If that is all that is known of it, it may do so when it comes again."""
        with self._lock:
            now = self._record.outcomes.at(self._sandbox, outcome.exchange, outcome.index)
            if now is not None and now.id == outcome.id and now.state == "intended":
                self._move(given=tuple(one for one in self._standing.given if one != outcome.index))

    def _must_be(self, life: int) -> None:
        if life != self.life:
            raise SandboxGone("the sandbox was brought back", remedy="start the agent again: it is given what it had")

    def end(self, ticket: Ticket, result: bytes, failed: bool = False) -> None:
        """It has ended; `result` is what the agent is told."""
        self._record.outcomes.end(ticket.outcome, "failed" if failed else "done", result)

    # ---- the sandbox moves

    def brought_back(self, kept: Collection[str], head: str, ask_again: bool) -> None:
        """The sandbox is as it was at checkpoint `head`, whose ancestors (and itself) are `kept`. With `ask_again` the
        question that was asked there is a new one."""
        with self._lock:
            self._record.rewound(self._sandbox, set(kept), head, ask_again)
            self.life += 1
            self._delivered.clear()
            self._standing = Standing(forwarding=True, beyond=ask_again)
            self._record.stand(self._sandbox, self._standing)

    def diverged(self) -> None:
        """The agent goes its own way from here."""
        with self._lock:
            self._move(forwarding=False, beyond=False)
