"""Who asks a model, and whether it is an agent's main loop: rules that are data (`clients.toml`).

Knows what clients say of themselves in headers, and how the requests of their main loops differ from those for titles,
summaries and probes. Knows nothing of turns: in doubt a request is the main loop's, since a turn too many costs a little time
and a missed one the state of the sandbox.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

import msgspec

from crab.model import Struct
from crab.turns.wires.wire import Ask

Kind = Literal["main", "helper"]
RESULTS = (b'"result_of":', b'"functionResponse":')
"""What the result of a tool has in it, as canonical JSON. In texts the quotes stand behind backslashes."""


class Helper(Struct, kw_only=True, forbid_unknown_fields=True):
    """A request that is none of the main loop's: all conditions that are given must hold."""

    what: str
    """For people: what it is for."""
    text: str = ""
    """An expression that is found in what is said. Without `only_tools`, it counts only if no tools are declared."""
    only_tools: tuple[str, ...] = ()
    """It declares tools, and only some of these."""
    most_items: int = 0
    """Its conversation is not longer (0: any)."""


class Client(Struct, kw_only=True, forbid_unknown_fields=True):
    """A program that is an agent; all conditions that are given must hold."""

    name: str
    user_agent: tuple[str, ...] = ()
    """Patterns, one of which must fit (as in a shell)."""
    headers: dict[str, str] = {}
    """Headers that it sends, in lower case, with patterns of their values."""
    only_tools: tuple[str, ...] = ()
    """It declares no other tools than these."""
    session: tuple[str, ...] = ()
    """Headers that name the session: the first that is there."""
    agent: tuple[str, ...] = ()
    """Headers that name a sub-agent; one that says the same as the session's names none."""
    declares_tools: bool
    """Its main loop always declares tools. If not, the model's commands may stand in its text."""
    keep_alive: bool
    """It takes the wire's ping while it waits for an event."""
    helper: tuple[Helper, ...] = ()


class Caller(Struct, kw_only=True):
    """Who asks."""

    client: str
    kind: Kind
    session: str
    """Empty if the client does not say."""
    agent: str
    """A sub-agent, which is a main loop of its own; empty for the first one."""
    why: str
    """One sentence for people: why it is of that kind."""
    keep_alive: bool
    """The client takes the wire's ping while it waits for an event."""


@functools.cache
def known() -> tuple[Client, ...]:
    """The rules; the last client fits everybody. Raises msgspec.ValidationError."""
    text = Path(__file__).with_name("clients.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text)["client"], tuple[Client, ...])


def classify(headers: Mapping[str, str], ask: Ask) -> Caller:
    """Who asks, and for what."""
    lower = {name.lower(): value for name, value in headers.items()}
    client = next(client for client in known() if _fits(client, lower, ask))
    session = _first(lower, client.session)
    agent = _first(lower, client.agent)
    kind, why = _kind(client, ask)
    return Caller(
        client=client.name,
        kind=kind,
        session=session,
        agent="" if agent == session else agent,
        why=why,
        keep_alive=client.keep_alive,
    )


def _fits(client: Client, headers: Mapping[str, str], ask: Ask) -> bool:
    name = headers.get("user-agent", "")
    return (
        (not client.user_agent or any(fnmatchcase(name, pattern) for pattern in client.user_agent))
        and all(header in headers and fnmatchcase(headers[header], p) for header, p in client.headers.items())
        and (not client.only_tools or set(ask.tools) <= set(client.only_tools))
    )


def _first(headers: Mapping[str, str], names: Iterable[str]) -> str:
    return next((headers[name] for name in names if headers.get(name)), "")


def _kind(client: Client, ask: Ask) -> tuple[Kind, str]:
    for helper in client.helper:
        if _helps(helper, ask):
            return "helper", f"It is {helper.what}."
    if ask.tools:
        return "main", f"It declares tools ({len(ask.tools)}), so the answer may use them."
    if ask.items and any(mark in ask.items[-1] for mark in RESULTS):
        return "main", "It declares no tools, but brings the result of one."
    if client.declares_tools:
        return "helper", f"It declares no tools, which the main loop of {client.name} always does."
    return "main", "It declares no tools, but the answer may have commands in its text."


def _helps(helper: Helper, ask: Ask) -> bool:
    if helper.only_tools:
        if not ask.tools or not set(ask.tools) <= set(helper.only_tools):
            return False
    elif ask.tools:
        return False
    if helper.most_items and len(ask.items) > helper.most_items:
        return False
    return not helper.text or any(re.search(helper.text.encode(), item) for item in ask.items)
