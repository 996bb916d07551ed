"""What was said so far, in the same words whichever API it came in.

Knows neither scripts nor how an API writes things down: each API's module reads its own requests.
"""

from __future__ import annotations

import json
from typing import Any, Literal

import blake3

from crab.model import Struct
from crab.turns.wires.shape import records

Json = dict[str, Any]
"""An object of somebody's request: nothing is known of what is in it."""
DIGITS = 24
"""Length of a conversation's key. Ids made of it stay below the 40 characters that some servers allow."""


class Said(Struct):
    """One thing that was said."""

    who: Literal["user", "model", "result"]
    """`result`: what a tool gave back."""
    text: str
    call: str = ""
    """Id of the call that a result belongs to, as far as the client says it."""


class Tool(Struct):
    """Something that the model may call."""

    name: str
    kind: Literal["function", "custom", "local_shell", "shell", "other"] = "function"
    """`custom` takes one text instead of JSON, `local_shell` and `shell` are known to the API; `other` is never called."""
    schema: Json = {}
    """JSON schema of the arguments of a function."""


class Conversation(Struct, kw_only=True):
    """One request for an answer."""

    model: str
    said: tuple[Said, ...]
    instructions: str = ""
    """What was said by nobody: system prompts."""
    tools: tuple[Tool, ...] = ()
    shape: Json | None = None
    """JSON schema of what is to be answered, if the request has one."""
    stream: bool = False
    sse: bool = True
    """A stream is one of server-sent events (Gemini also knows a list that grows)."""
    usage: bool = True
    """A stream ends with the number of tokens."""

    @property
    def key(self) -> str:
        """Names the conversation. Leaves ids out: some clients make up their own at each sending."""
        said = json.dumps([(one.who, one.text) for one in self.said])
        return blake3.blake3(said.encode()).hexdigest()[:DIGITS]

    @property
    def tokens(self) -> int:
        """About as many as a tokenizer would find."""
        return tokens(self.instructions) + sum(tokens(one.text) for one in self.said)


def tokens(text: str) -> int:
    """How long a text is, at four characters a token."""
    return len(text) // 4 + 1


def text_of(content: Any) -> str:
    """The text of a message that is either a string or a list of parts with a `text`."""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in records(content) if isinstance(part.get("text"), str))
