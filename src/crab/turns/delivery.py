"""One answer on its way to the agent: whoever asks for it gets it from its first byte, whenever he comes.

A client may go away while its answer is held, and ask again: it finds the same delivery, not a second one. Bytes are kept
until it ends; what may be given out, and when, is the gate's decision.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from crab.turns import gate as gates
from crab.turns.gate import Gate, Move
from crab.turns.wires.wire import Piece

PING_SECONDS = 15.0
"""How long a client hears nothing before it is told that somebody still works on it."""


class Broken(Exception):
    """The answer was cut: what is there is not all, and no more will come."""


class Delivery:
    """See the module. Used within one event loop."""

    def __init__(self, safe: bool = False) -> None:
        """`safe`: nothing has to be waited for but the record."""
        self.status = 0
        self.headers: list[tuple[str, str]] = []
        self.safe = asyncio.get_running_loop().create_future()
        self.when_taken: Callable[[], None] | None = None
        """Called when somebody has got all of it."""
        self._gate = Gate(safe=safe)
        self._given: list[bytes] = []
        self._held: list[bytes] = []
        self._over = False
        self._broken = False
        self._changed = asyncio.get_running_loop().create_future()

    # ---- what comes

    def begin(self, status: int, headers: list[tuple[str, str]]) -> None:
        """The head of the answer."""
        self.status, self.headers = status, headers
        self._tell()

    def give(self, data: bytes) -> None:
        """Bytes that nobody holds: of a refusal, or from the record."""
        self._given.append(data)
        self._tell()

    def finish(self, broken: bool = False) -> None:
        """No more comes. `broken`: and it is not whole."""
        self._over, self._broken = True, self._broken or broken
        self._held.clear()
        self._tell()

    def arrived(self, piece: Piece) -> None:
        """A piece of the model's answer."""
        self._gate, move = gates.arrived(self._gate, piece.part)
        if move == Move.PASS:
            self.give(piece.raw)
        else:
            self._held.append(piece.raw)

    def ended(self, complete: bool) -> None:
        """The model says no more."""
        self._gate, move = gates.ended(self._gate, complete)
        self._move(move)

    def recorded(self) -> None:
        """The answer is kept."""
        self._gate, move = gates.recorded(self._gate)
        self._move(move)

    def settled(self) -> None:
        """The turn is safe, or given up."""
        self._gate, move = gates.settled(self._gate)
        self._move(move)

    def let_all_pass(self) -> None:
        """What came is no answer that an agent could act upon: give it out as it is."""
        self._given += self._held
        self.finish()

    def _move(self, move: Move) -> None:
        if move == Move.RELEASE:
            self._given += self._held
            self.finish()
        elif move == Move.BREAK:
            self.finish(broken=True)

    def _tell(self) -> None:
        told, self._changed = self._changed, self._changed.get_loop().create_future()
        told.set_result(None)

    # ---- who wants it

    @property
    def is_over(self) -> bool:
        return self._over

    @property
    def is_holding(self) -> bool:
        """Something is kept back from the agent."""
        return bool(self._held) and not self._over

    async def over(self) -> None:
        """Wait until no more comes."""
        while not self._over:
            await asyncio.wait((self._changed,))

    def taken(self) -> None:
        """Somebody has got all of it."""
        if self.when_taken is not None:
            self.when_taken()

    async def head(self) -> None:
        """Wait until the head is there, or nothing ever will be. Raises `Broken`."""
        while not self.status:
            if self._over:
                raise Broken
            await asyncio.wait((self._changed,))  # which does not cancel it if this waiter goes away

    async def follow(self, ping: bytes = b"") -> AsyncGenerator[bytes, None]:
        """The bytes that may go out, from the first on. While something is held, `ping` now and then. Raises `Broken`."""
        at = 0
        while True:
            changed = self._changed
            if at < len(self._given):
                data = b"".join(self._given[at:])
                at = len(self._given)
                yield data
                continue
            if self._over:
                if self._broken:
                    raise Broken
                return
            heard, _ = await asyncio.wait((changed,), timeout=PING_SECONDS if ping else None)
            if not heard and self.is_holding and at:
                yield ping
