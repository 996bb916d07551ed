"""JSON of strangers, taken apart without trust.

Knows how to get at a value that may be anything. Knows no API. What is asked must have a shape (ValueError says which);
of an answer, what has none is left aside.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from crab import lenient


def parse(data: str | bytes) -> Any:
    """What JSON says; None if it is none."""
    try:
        return lenient.raw(data.encode(errors="replace") if isinstance(data, str) else data)
    except msgspec.DecodeError:
        return None


def record(value: Any) -> dict[str, Any]:
    """The value if it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


def records(value: Any) -> list[dict[str, Any]]:
    """The objects in a list."""
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def text(value: Any) -> str:
    """The value if it is a text, else an empty one."""
    return value if isinstance(value, str) else ""


def asked(body: bytes) -> dict[str, Any]:
    """The object that a request is. Raises ValueError if it is none."""
    try:
        value = lenient.raw(body)
    except msgspec.DecodeError as error:
        raise ValueError(f"the request is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("the request is no JSON object")
    return value


def model(asked: dict[str, Any]) -> str:
    """Name of the model; empty if the path says it (as deployments of Azure do). Raises ValueError if it is no text."""
    found = asked.get("model")
    if found is not None and not isinstance(found, str):
        raise ValueError("the request's 'model' is no text")
    return found or ""


def listed(asked: dict[str, Any], field: str) -> list[dict[str, Any]]:
    """A list of objects that a request must have. Raises ValueError if it has none, or something else in it."""
    found = asked.get(field)
    if not isinstance(found, list) or not found:
        raise ValueError(f"the request has no list of '{field}'")
    for number, entry in enumerate(found):
        if not isinstance(entry, dict):
            raise ValueError(f"entry {number} of the request's '{field}' is no object")
    return found


def blocks(content: Any, kind: str) -> list[Any]:
    """What a message contains, as a list: a text is short for one block of text, of the type `kind`. Raises ValueError."""
    if content is None or content == "":
        return []
    if isinstance(content, str):
        return [{"type": kind, "text": content}]
    if not isinstance(content, list):
        raise ValueError("the content of a message is neither a text nor a list")
    return content


def ends(path: str, pattern: str) -> re.Match[str] | None:
    """The match of a path (without its query) whose end is like `pattern`; whatever stands before it is a prefix."""
    return re.fullmatch(rf"(?:/.*)?/{pattern}/?", path.partition("?")[0])
