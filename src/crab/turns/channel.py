"""One sandbox's way to its model: each request of its agent is answered once, and only when the turn is safe.

Ties together what the other modules know: who asks (`clients`), what exactly (`identity`), whether it was asked before
(`place`), when the answer may go out (`gate`, in `delivery`), what makes the sandbox safe (`protection`), what is kept
(`record`). Knows nothing of sockets; the proxy gives it requests and takes deliveries.
"""

from __future__ import annotations

import asyncio
import enum
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from crab.errors import CrabError, NotFound
from crab.model import ModelAccess, Struct
from crab.turns import bodies, branches, forms, refusals
from crab.turns.clients import Caller
from crab.turns.delivery import Delivery
from crab.turns.exchange import Exchange
from crab.turns.forward import Step
from crab.turns.mcp import Desk
from crab.turns.place import Place
from crab.turns.protection import Protection, Safety
from crab.turns.record import Record
from crab.turns.upstream import FAILURES, Headers, Ready, Upstream, reason, secrets
from crab.turns.wires.wire import Ask, Part, Piece, Wire

T = TypeVar("T")
log = logging.getLogger("crab.turns")


class Call(Struct, kw_only=True):
    """A request as it came."""

    method: str
    target: str
    """Path and query."""
    headers: Headers
    body: bytes
    ask: Ask
    """What it asks."""
    chain: tuple[bytes, ...]
    """Digests of its conversation (`crab.turns.identity`); the last one says whether another asks the same."""
    inside: bool
    """It came through the sandbox's own door: the agent lives in the sandbox."""


class Verdict(enum.Enum):
    """Of a question that is under way, when one like it comes."""

    THE_SAME = "the same"
    LOST = "lost"
    """It was asked before its sandbox died: its answer is this one's, but ends no turn of the sandbox as it is now."""
    ANOTHER = "another"
    """Nothing is under way, or a rewind wants another answer."""


class Underway:
    """A question that the model is asked now."""

    def __init__(self, delivery: Delivery, number: asyncio.Future[int | None], stream: bool, life: int) -> None:
        self.delivery, self.number, self.stream = delivery, number, stream
        """`number`: of its exchange in the record; None if it cannot be recorded."""
        self.life = life
        """Of the sandbox (`Place.life`), when it was asked for the last time."""


class Channel:
    """See the module. Used within one event loop."""

    def __init__(
        self,
        sandbox: str,
        access: ModelAccess,
        record: Record,
        place: Place,
        upstream: Upstream,
        protection: Protection,
        bring_back: Callable[[str], None],
        tools: Desk | None = None,
    ) -> None:
        """`bring_back` restores a checkpoint of it; it blocks, and raises `CrabError`. `tools`: of an agent inside."""
        self.sandbox, self.access, self.upstream, self.place = sandbox, access, upstream, place
        self._record, self._protection, self._bring_back = record, protection, bring_back
        self.tools = tools
        self.unread, self.unread_why = 0, ""
        """Requests that could not be read, and were passed through, and why the newest could not."""
        self._running: dict[tuple[str, bytes], Underway] = {}
        """By the kind of the question, and its key."""
        self._given_up: set[int] = set()
        """Exchanges whose answer went out before the turn was safe."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._deciding = asyncio.Lock()

    async def delivery(self, call: Call, wire: Wire, caller: Caller) -> Delivery:
        """The answer to a request: one that is under way, one from the record, or a new one."""
        key = (caller.kind, call.chain[-1])
        while True:
            async with self._deciding:
                if not self.place.is_ready:
                    await asyncio.to_thread(self.place.ready)
                life = self.place.life
                running = self._running.get(key)
                verdict = await self._verdict(running, life)
                if running is None or verdict == Verdict.ANOTHER:
                    before = await self._again(call, caller)
                    if isinstance(before, Delivery):
                        return before
                    return (await self._begin(call, wire, caller, before)).delivery
                if verdict == Verdict.THE_SAME and running.stream == call.ask.stream:
                    running.life = life  # a client that went away and asks again
                    return running.delivery
            await running.delivery.over()  # what is wanted is made of the whole answer

    async def _begin(self, call: Call, wire: Wire, caller: Caller, kept: Upstream | None) -> Underway:
        """Ask the model, or take the answer that it gave (`kept`), for a new turn."""
        upstream = kept or await self._recalled(call, caller) or self.upstream
        hidden = secrets(call.target, call.headers, self.upstream)
        running = self._running[caller.kind, call.chain[-1]] = Underway(
            Delivery(safe=caller.kind == "helper" or self.access.gate == "none"),
            asyncio.ensure_future(self._begun(call, caller, hidden, self.place.life)),
            call.ask.stream,
            self.place.life,
        )
        self._spawn(self._converse(running, call, wire, caller, upstream, hidden))
        return running

    async def _verdict(self, running: Underway | None, life: int) -> Verdict:
        """Whether a question that is under way is asked again now."""
        if running is None or running.delivery.is_over:
            return Verdict.ANOTHER
        if running.life == life:
            return Verdict.THE_SAME
        number = await asyncio.shield(running.number)
        try:
            found = branches.FOR_GOOD if number is None else await asyncio.to_thread(self._record.verdict, number)
        except CrabError:
            return Verdict.ANOTHER
        return {0: Verdict.THE_SAME, branches.LOST: Verdict.LOST}.get(found, Verdict.ANOTHER)

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def drain(self, seconds: float) -> None:
        """Let answers that are under way arrive, and be recorded; then cut the rest."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)
        for task in list(self._tasks):
            task.cancel()

    # ---- what was asked before

    async def _again(self, call: Call, caller: Caller) -> Delivery | Upstream | None:
        """The answer that was given before, if it is to be given again; as an upstream if it is to pass the gate."""
        try:
            return await self._before(call, caller)
        except CrabError as error:
            log.error("%s: what was asked before cannot be looked up: %s", self.sandbox, error)
            return None

    async def _before(self, call: Call, caller: Caller) -> Delivery | Upstream | None:
        if caller.kind == "helper":
            if not self.place.forwarding:
                return None
            known = await asyncio.to_thread(self._record.find, self.sandbox, call.chain[-1])
            return await self._replayed(known.id, call.ask.stream) if known and not known.redacted else None
        step = self.place.step_at_once(call.chain, caller.session)
        step = step or await asyncio.to_thread(self.place.step, call.chain, caller.session)
        if step.kind == "replay" and step.exchange is not None:
            if step.guarded:
                return await self._given_up_for(await asyncio.to_thread(self._record.get, step.exchange), call)
            return await self._replayed(step.exchange, call.ask.stream)
        if step.kind == "diverged" and (why := await self._diverge(step, call.inside)):
            refused = Delivery(safe=True)
            refusals.unready(refused, why)
            return refused
        return None

    async def _replayed(self, number: int, stream: bool) -> Delivery | None:
        """A recorded answer; None if it cannot be given in the form that is asked for."""
        known = await asyncio.to_thread(self._record.get, number)
        kept = await self._kept(known, stream)
        if kept is None:
            return None
        delivery = Delivery(safe=True)
        delivery.begin(kept.status, kept.headers)
        delivery.give(kept.body)
        delivery.when_taken = functools.partial(self._taken, number, self.place.life)
        await asyncio.to_thread(self._record.released, number, known.held_ms)
        delivery.finish()
        log.info("%s: answer %d again, from the record", self.sandbox, number)
        return delivery

    async def _kept(self, known: Exchange, stream: bool) -> Ready | None:
        body = await asyncio.to_thread(self._record.answer, known.id)
        kind = known.content_type
        if kind.startswith("text/event-stream") != stream:
            converted = (forms.streamed if stream else forms.whole)(known.wire, body)
            if converted is None:
                return None
            body, kind = converted, "text/event-stream" if stream else "application/json"
        headers = [(key, value) for key, value in known.headers.items() if key.lower() != "content-type"]
        return Ready(known.status or 200, [*headers, ("Content-Type", kind)], body)

    async def _recalled(self, call: Call, caller: Caller) -> Upstream | None:
        """The answer that was got for this question before its turn was lost with the sandbox. The turn is taken anew, but no
        model is asked twice."""
        if caller.kind != "main":
            return None
        try:
            lost = self._record.lost(self.sandbox, call.chain[-1])
            return await self._given_up_for(lost, call) if lost else None
        except CrabError as error:
            log.error("%s: what was asked before cannot be looked up: %s", self.sandbox, error)
            return None

    async def _given_up_for(self, known: Exchange, call: Call) -> Upstream | None:
        """The answer of an exchange, for a new one that takes its place; None if it has no such form."""
        kept = await self._kept(known, call.ask.stream)
        if kept is not None:
            await asyncio.to_thread(self._record.recall, known)
        return kept

    async def _diverge(self, step: Step, inside: bool) -> str:
        """The agent goes another way than it did: from here on it is on its own, from the state of that point. Why it
        cannot, if it cannot be brought there."""
        later = await asyncio.to_thread(self.place.after, step.exchange or 0)
        log.warning("%s: %s (after answer %d)", self.sandbox, step.why, step.exchange or 0)
        # an agent inside would be brought back itself; it goes on from the state that is there
        if not inside and later is not None and later.checkpoint is not None:
            try:
                await asyncio.to_thread(self._bring_back, later.checkpoint)
            except CrabError as error:
                log.error("%s: it cannot be brought back to that point: %s", self.sandbox, error.message)
                return error.message
        await asyncio.to_thread(self.place.diverged)
        return ""

    # ---- a new one

    async def _converse(
        self, mine: Underway, call: Call, wire: Wire, caller: Caller, upstream: Upstream, hidden: Sequence[bytes]
    ) -> None:
        delivery, number = mine.delivery, mine.number
        main = caller.kind == "main"
        if main:
            self._spawn(self._settle(mine, self._protection.ask()))
        try:
            await self._heard(mine, call, wire, upstream, hidden, main)
        except FAILURES as error:
            what = "the model's answer was cut" if delivery.status else "the model cannot be reached"
            why = f"{what}: {reason(error)}"
            log.warning("%s: %s", self.sandbox, why)
            if not delivery.status:
                refusals.unreachable(delivery, why)
            elif not delivery.is_over:
                delivery.finish(broken=True)
            await self._noted(number, self._record.failed, 502, why, hidden)
        except Exception:
            log.exception("%s: an exchange failed", self.sandbox)
        finally:
            if not delivery.is_over:
                delivery.finish(broken=True)
            key = (caller.kind, call.chain[-1])
            if self._running.get(key) is mine:
                del self._running[key]

    async def _begun(self, call: Call, caller: Caller, hidden: Sequence[bytes], life: int) -> int | None:
        """Number of the exchange in the record; None if it cannot be recorded."""
        await asyncio.sleep(0)  # the question goes out first: what works in a thread takes the interpreter from it
        try:
            known = await asyncio.to_thread(
                self._record.begin,
                self.sandbox,
                chain=call.chain,
                items=call.ask.items,
                kind=caller.kind,
                wire=call.ask.wire,
                model=call.ask.model,
                client=caller.client,
                agent=caller.agent,
                session=caller.session,
                bytes_in=len(call.body),
                secrets=hidden,
            )
            if life != self.place.life:  # the sandbox died meanwhile: this is no question of the one that came back
                await asyncio.to_thread(self._record.lose, known)
            self._given_up.discard(known.id)
            return known.id
        except Exception as error:
            log.error("%s: the question cannot be recorded: %s", self.sandbox, error)
            return None

    async def _noted(
        self, number: Awaitable[int | None], what: Callable[..., T], *values: object, **named: object
    ) -> T | None:
        """Write something about an exchange to the record; what fails is said, and the agent goes on."""
        known = await number
        if known is None:
            return None
        try:
            return await asyncio.to_thread(what, known, *values, **named)
        except (CrabError, OSError) as error:
            log.error("%s: exchange %d cannot be recorded: %s", self.sandbox, known, error)
            return None

    async def _heard(
        self,
        mine: Underway,
        call: Call,
        wire: Wire,
        upstream: Upstream,
        hidden: Sequence[bytes],
        main: bool,
    ) -> None:
        delivery, number = mine.delivery, mine.number
        begun = time.perf_counter()
        headers = bodies.unencoded(call.headers)
        async with upstream.ask(call.method, call.target, headers, call.body) as answer:
            decode = bodies.decoder(answer.headers) if answer.status == 200 else None
            delivery.begin(answer.status, answer.headers)
            if answer.status != 200:
                async for data in answer.chunks():
                    delivery.give(data)
                delivery.finish()
                await self._noted(number, self._record.failed, answer.status, "")
                return
            content_type = bodies.header(answer.headers, "content-type")
            reader = wire.reader(call.ask, content_type)
            body: list[bytes] = []
            async for data in answer.chunks():
                body.append(data)
                if decode is None:
                    for piece in reader.feed(data):
                        delivery.arrived(piece)
        if decode is not None:  # it was told not to encode; so nothing is given out before all is there
            reader.feed(decode(b"".join(body)))
            reader.close()
            delivery.arrived(Piece(raw=b"".join(body), part=Part.CALL))
        else:
            for piece in reader.close():
                delivery.arrived(piece)
        if not reader.complete and reader.refused:
            delivery.let_all_pass()
            await self._noted(
                number, self._record.failed, answer.status, "what came is an error, or no answer of this API"
            )
            return
        whole = time.perf_counter()
        if main:
            self._protection.haste.answered(whole - begun)
        delivery.ended(reader.complete)
        if not reader.complete:
            log.warning("%s: the model's answer was cut", self.sandbox)
            await self._noted(number, self._record.failed, answer.status, "the answer was cut")
            return
        plain = b"".join(body)
        keep = functools.partial(
            self._record.answered,
            status=answer.status,
            headers=dict(answer.headers),
            body=plain if decode is None else decode(plain),
            complete=True,
            calls=reader.calls,
            wait_ms=(whole - begun) * 1e3,
            secrets=hidden,
        )
        await self._noted(number, self.place.answered if main else keep, *([mine.life, keep] if main else []))
        if (known := await number) is not None:
            delivery.when_taken = functools.partial(self._taken, known, mine.life)
        delivery.recorded()
        if not delivery.is_over:
            await self._held(delivery, number)
        await self._noted(number, self._record.released, (time.perf_counter() - whole) * 1e3)

    def _taken(self, number: int, life: int) -> None:
        """The client has got the whole of an answer."""
        self.place.taken(number, life)
        self._spawn(self._kept_taken(number, life))

    async def _kept_taken(self, number: int, life: int) -> None:
        try:
            await asyncio.to_thread(self.place.keep_taken, number, life)
        except NotFound:
            pass  # its sandbox was removed meanwhile
        except (CrabError, OSError) as error:
            log.error("%s: that answer %d was taken cannot be recorded: %s", self.sandbox, number, error)

    async def _held(self, delivery: Delivery, number: asyncio.Future[int | None]) -> None:
        """Wait until the turn is safe, but not for ever."""
        haste = self._protection.haste
        try:
            with haste.awaited():
                await asyncio.wait_for(asyncio.shield(delivery.safe), self.access.hold)
        except TimeoutError:
            jam = haste.why_not_yet()
            why = f"the turn was not safe within {self.access.hold:g} s" + (f": {jam}" if jam else "")
            log.warning("%s: %s; the answer goes out all the same", self.sandbox, why)
            if (known := await number) is not None:
                self._given_up.add(known)
            await self._noted(number, self._protected, Safety(protection="unprotected", why=why))
        delivery.settled()

    async def _settle(self, mine: Underway, safety: asyncio.Future[Safety]) -> None:
        made = await safety
        if made.protection == "unprotected":
            log.warning("%s: the turn is not safe: %s", self.sandbox, made.why)
        if mine.life == self.place.life and await mine.number not in self._given_up:
            await self._noted(mine.number, self._protected, made)
        else:  # the agent has gone on, or the sandbox was brought elsewhere: this is not how it was when the question came
            log.warning("%s: a turn was safe too late", self.sandbox)
        if not mine.delivery.safe.done():
            mine.delivery.safe.set_result(None)
        mine.delivery.settled()

    def _protected(self, number: int, made: Safety) -> None:
        self._record.protected(
            number, checkpoint=made.checkpoint, turn=made.turn, protection=made.protection, why=made.why
        )
