"""What a persistent shell can be: an interpreter that reads commands from a terminal, as the driver in `shell.py` needs it.

The driver knows terminals and time, an interpreter knows what is typed and what an answer means: pure functions, each in a
module of its own. `bash.py` is one. An interpreter whose `question` is None is a *plain survivor*: its state cannot be asked
for, so whenever its process ran it is taken for changed. That is the right answer for what keeps state where no question
reaches it. For Python: a digest of the globals of `__main__` would miss what imported modules and objects hold (the position
of `random`, an open connection, a list inside a closure), and would call such a process unchanged. For node: `let` and
`const` of a REPL are no properties of `globalThis`. Both would be plain survivors here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from crab.model import ShellState, Struct


class Ending(Struct, kw_only=True):
    """What is read when a command has ended."""

    status: int
    output: str
    hindrance: str = ""
    """Why the state must not be asked for now: asking would be seen. Empty if nothing is in the way."""


class Interpreter(Protocol):
    """See the module. `nonce` is a word of letters and digits that is made anew for each thing typed, so that no text that the
    interpreter holds or prints can look like an answer."""

    @property
    def name(self) -> str:
        """In messages, and what the image must have."""
        ...

    @property
    def argv(self) -> tuple[str, ...]: ...

    @property
    def env(self) -> Mapping[str, str]:
        """Environment that it is started with, beneath what the caller wants."""
        ...

    def typed(self, command: str, nonce: str) -> bytes:
        """What to type for a command; its output and `end_word` follow."""
        ...

    def mark(self, nonce: str) -> bytes:
        """What to type after an interrupt, so that `end_word` comes."""
        ...

    def end_word(self, nonce: str) -> bytes:
        """In the line that tells the end, and nowhere in what is typed (a terminal shows that too)."""
        ...

    def ending(self, output: bytes, nonce: str) -> Ending | None:
        """What came until that line and with it; None if it is damaged."""
        ...

    def so_far(self, output: bytes, nonce: str) -> str:
        """Output of a command that did not end."""
        ...

    def question(self, nonce: str) -> bytes | None:
        """What to type to learn the state, without a trace in it; `answer_word` ends the answer. None: plain survivor."""
        ...

    def answer_word(self, nonce: str) -> bytes:
        """In the last line of an answer, and nowhere in what is typed."""
        ...

    def answer(self, output: bytes, nonce: str, outside: Mapping[str, bytes]) -> ShellState:
        """The state that an answer tells. `outside` are parts of it that were seen from outside: `limits`, `libraries`."""
        ...
