"""How an answer is cut into the events of a stream. Knows no API."""

from __future__ import annotations

import json
import re
from typing import Any

PIECE = 16
"""Characters of arguments in one event: few, so that every call is spread over several."""


def event(data: Any, name: str = "", end: str = "\n\n") -> bytes:
    """One event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {dumps(data)}{end}".encode(errors="replace")


def dumps(data: Any) -> str:
    """JSON without spaces, as servers write it."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False)


def words(text: str) -> list[str]:
    """A text in the pieces in which it is said."""
    return re.findall(r"\S+\s*|\s+", text)


def pieces(text: str) -> list[str]:
    """Arguments in the pieces in which they are said."""
    return [text[at : at + PIECE] for at in range(0, len(text), PIECE)]
