"""Whether two requests ask the same: everything that differs between two sendings of one question.

This is the only place: what is not in one of these tables is part of the question. Each entry has its reason. Knows no API: a
wire takes a request apart. What never comes here, because no item of a conversation has it: headers, whether the answer shall
be a stream (clients retry without), the tools and the settings of the model.
"""

from __future__ import annotations

import functools
import json
import re
from typing import TYPE_CHECKING, Any

from blake3 import blake3

if TYPE_CHECKING:  # wires need this module
    from crab.turns.wires.wire import Ask

_CALL = "made anew for each call; which result belongs to which call is kept as a number"
_SEAL = "of the provider, and left out or replaced by clients that have none"
_THOUGHT = "clients leave out older thoughts when they send a conversation again"

FIELDS: dict[str, str] = {
    "id": "made anew by whoever sends or answers",
    "tool_use_id": _CALL,
    "tool_call_id": _CALL,
    "call_id": _CALL,
    "cache_control": "a marker for the provider's cache that moves on with the end of the conversation",
    "thoughtSignature": _SEAL,
    "thought_signature": _SEAL,
    "status": "how an item came: sent again from a file, it has none",
    "metadata": "of the sender, for its own use",
    "reasoning": _THOUGHT,
    "reasoning_content": _THOUGHT,
    "reasoning_details": _THOUGHT,
    "thinking_blocks": _THOUGHT,
}
"""Fields that are left out: name, reason. A field without a value (null) is one that is not there."""

THOUGHTS: frozenset[str] = frozenset({"thinking", "redacted_thinking", "reasoning"})
"""Types of blocks and items that are left out, since clients leave out older ones when they send a conversation again."""

OPAQUE: frozenset[str] = frozenset({"input", "arguments", "args", "action", "output", "response"})
"""Fields that hold what a tool was given or gave: nothing is left out there, whatever its name."""

RESULTS: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(r"\A(?:Chunk ID: \w+\nWall time: [\d.]+ seconds\n|Wall time: [\d.]+ seconds\n(?=Process ))"),
        "Codex and OpenAI's Agents SDK: a number of the output, and how long the command took",
    ),
    (
        re.compile(r"(?m)^Process Group PGID: \d+(?=(?:\n</untrusted_context>)?\Z)"),
        "Gemini CLI: number of the process that ran the command",
    ),
)
"""Left out of what a tool gave: pattern, reason. Only what the client wrote around it, at its fixed place: a command that runs
again in a sandbox which was brought back gives the same but for that."""

CONTEXT = re.compile(
    r"<(?P<tag>system-reminder|environment_context|session_context|env)>.*?(?:</(?P=tag)>|\Z)", re.DOTALL
)
"""Instructions that clients put into what the user says."""

_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*"
_DAY = r"(?:(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*,? )?"

TEXTS: tuple[tuple[re.Pattern[str], str, str], ...] = (
    (
        re.compile(r"(?m)^x-anthropic-billing-header:.*$"),
        "BILLING",
        "Claude Code: version and checksum of the request",
    ),
    (
        re.compile(r"This is the git status at the start of the conversation\..*?(?=\n# |</|\Z)", re.DOTALL),
        "GIT STATUS",
        "Claude Code: looked at anew when it starts again",
    ),
    (
        re.compile(r"(?m)^[│ ]*[├└]─+ ?.*$\n?"),
        "",
        "Gemini CLI: the tree of the working folder, looked at anew when it starts again",
    ),
    (
        re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", re.IGNORECASE),
        "UUID",
        "sessions, threads and their folders",
    ),
    (
        re.compile(r"\b\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?: ?[+-]\d\d:?\d\d|Z)?)?"),
        "DATE",
        "today, now: 2026-11-30, 2026-11-30T12:00:00.5Z",
    ),
    (
        re.compile(rf"\b{_DAY}(?:{_MONTH} \d{{1,2}},? \d{{4}}|\d{{1,2}}\.? {_MONTH},? \d{{4}})\b"),
        "DATE",
        "today: Monday, November 30, 2026; Mon Nov 30 2026; 30 November 2026",
    ),
    (
        re.compile(r"\b\d{1,2}([./])\d{1,2}\1\d{4}\b"),
        "DATE",
        "today: 11/30/2026, 30.11.2026",
    ),
    (
        re.compile(r"(?i)\b(today's date|current date|current time)(?: is(?: now)?)?:?[^\n.<]{0,60}"),
        r"\1 DATE",
        "today, in the words of any language",
    ),
    (
        re.compile(r"\b\d{1,2}:\d\d:\d\d(?: ?[AP]M)?\b"),
        "TIME",
        "now: 12:00:00",
    ),
    (
        re.compile(r"/tmp/(?:tmp\.?\w{8,10}|[\w.-]*?[-.](?=[a-z]*[A-Z0-9])[A-Za-z0-9]{6,10})(?![\w.-])"),
        "/tmp/NAME",
        "folders of mkdtemp, mktemp and their like",
    ),
)
"""Replaced in instructions and in `CONTEXT`, in this order: pattern, replacement, reason. What users, models and tools say
is compared as it is, but for `RESULTS`."""


class Calls:
    """Numbers of the calls of a conversation, in order: ids change, and a provider may give one twice."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._made = 0

    def made(self, name: object) -> int:
        """Number of a call that comes now, whatever its id."""
        self._made += 1
        self._numbers[str(name)] = self._made
        return self._made

    def answered(self, name: object) -> int:
        """Number of the newest call with that id; 0 if the conversation has none."""
        return self._numbers.get(str(name), 0)


def canonical(value: Any, *, instructions: bool = False) -> bytes:
    """JSON of an item without what is volatile: sorted keys, no spaces, UTF-8. Raises ValueError if it is nested too deeply.

    `instructions` says that it is what the client itself tells the model.
    """
    try:
        kept = _kept(value, _instructions if instructions else _said)
        text = json.dumps(kept, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    except RecursionError:
        raise ValueError("the request is nested too deeply") from None
    return text.encode(errors="surrogatepass")  # halves of characters are no UTF-8, but JSON can name them


def is_thought(value: Any) -> bool:
    """Whether a block or an item is what the model thought."""
    if not isinstance(value, dict):
        return False
    kind = value.get("type")
    return (isinstance(kind, str) and kind in THOUGHTS) or (
        value.get("thought") is True and "functionCall" not in value
    )


def plain(text: str) -> str:
    """Instructions without what is volatile in them."""
    for pattern, replacement, _ in TEXTS:
        text = pattern.sub(replacement, text)
    return text


def link(parent: bytes, item: bytes) -> bytes:
    """The digest (32 bytes) of a conversation that goes on with an item; `parent` is the digest of what came before."""
    return blake3(parent + item, derive_key_context="crab.turns.identity 1 link").digest()


def root(wire: str, model: str) -> bytes:
    """The digest of a conversation in which nothing was said."""
    return blake3(canonical([wire, model]), derive_key_context="crab.turns.identity 1 root").digest()


def chain(ask: Ask) -> tuple[bytes, ...]:
    """The digest after each item.

    Two requests ask the same if their last ones are equal; one is the beginning of another if its last one is anywhere in
    the other's.
    """
    links: list[bytes] = []
    last = root(ask.wire, ask.model)
    for item in ask.items:
        last = link(last, item)
        links.append(last)
    return tuple(links)


_instructions = functools.lru_cache(maxsize=64)(plain)
"""The same instructions come with each request of an agent: tens of kilobytes that need not be searched again."""


def _said(text: str) -> str:
    text = _result(text)  # of a tool, in the APIs where its result is a message like others
    return CONTEXT.sub(lambda found: plain(found[0]), text) if "<" in text else text


def _result(text: str) -> str:
    for pattern, _ in RESULTS:
        text = pattern.sub("", text)
    return text


def _given(value: Any) -> Any:
    """What a tool was given or gave, without what its client wrote around it."""
    if isinstance(value, str):
        return _result(value)
    if isinstance(value, list):
        return [_given(entry) for entry in value]
    return {key: _given(entry) for key, entry in value.items()} if isinstance(value, dict) else value


def _kept(value: Any, read: Any) -> Any:
    if isinstance(value, str):
        return read(value)
    if isinstance(value, list):
        return [_kept(entry, read) for entry in value if not is_thought(entry)]
    if isinstance(value, dict):
        return {
            key: _given(entry) if key in OPAQUE else _kept(entry, read)
            for key, entry in value.items()
            if entry is not None and key not in FIELDS
        }
    return value
