"""The APIs of models, one module each, and which of them a request speaks."""

from __future__ import annotations

from crab.turns.wires.anthropic import Anthropic
from crab.turns.wires.chat import Chat
from crab.turns.wires.gemini import Gemini
from crab.turns.wires.responses import Responses
from crab.turns.wires.wire import Wire

ALL: tuple[Wire, ...] = (Anthropic(), Chat(), Responses(), Gemini())


def find(method: str, path: str) -> Wire | None:
    """The wire that a request speaks, by its method and its path without the query; None if it asks no model."""
    return next((wire for wire in ALL if wire.takes(method, path)), None)
