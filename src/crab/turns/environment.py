"""The variables by which clients of the APIs find their model. What each client reads is written in docs/clients.md."""

from __future__ import annotations

from crab.turns.upstream import PLACEHOLDER

KEYS = {"anthropic": "ANTHROPIC_API_KEY", "gemini": "GEMINI_API_KEY", "openai": "OPENAI_API_KEY"}
"""Where the key for an API is, by convention of its clients."""
TOOLS = "CRAB_TOOLS"
"""Where an agent inside finds the tools for its own sandbox, if it may have them (docs/mcp.md)."""


def variables(url: str, placeholder: bool) -> dict[str, str]:
    """Variables for an agent whose proxy is at `url`. With `placeholder` it gets keys that are none: whoever has the real
    ones fills them in on the way, so that they are in no checkpoint."""
    found = {
        "ANTHROPIC_BASE_URL": url,
        "GOOGLE_GEMINI_BASE_URL": url,
        "OPENAI_API_BASE": f"{url}/v1",
        "OPENAI_BASE_URL": f"{url}/v1",
    }
    return found | (dict.fromkeys(KEYS.values(), PLACEHOLDER) if placeholder else {})
