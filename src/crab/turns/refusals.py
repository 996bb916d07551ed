"""What an agent is told when there is no answer, in a form that every client of the APIs understands."""

from __future__ import annotations

import json

from crab.turns.delivery import Delivery


def body(kind: str, message: str) -> bytes:
    """An error as Anthropic writes it, which has all that those of OpenAI and Google have as well."""
    return json.dumps({"type": "error", "error": {"type": kind, "code": kind, "message": f"crab: {message}"}}).encode()


def unreachable(delivery: Delivery, why: str) -> None:
    """Nobody answered: 502, upon which clients try again by themselves."""
    _refuse(delivery, 502, body("api_error", why))


def unready(delivery: Delivery, why: str) -> None:
    """The sandbox cannot be where the agent is: 503, upon which clients try again by themselves."""
    _refuse(delivery, 503, body("overloaded_error", why), ("Retry-After", "2"))


def _refuse(delivery: Delivery, status: int, said: bytes, *headers: tuple[str, str]) -> None:
    delivery.begin(status, [("Content-Type", "application/json"), *headers])
    delivery.give(said)
    delivery.finish()
