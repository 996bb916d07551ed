"""What can be said about the sandbox of a plug-in, whatever the framework: the same words everywhere."""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false
from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from crab.integrations.box import named
from crab.model import NetworkMode


class SandboxOptions(BaseModel):
    """Base of the configurations."""

    sandbox: str = Field(default_factory=named)
    """Name: made if it is not there, brought back if it was lost, kept at the end. Empty: one is made, and removed at the
    end. Default: `$CRAB_SANDBOX`, which `crab run --outside` sets."""
    image: str = "debian"
    env: dict[str, str] = {}
    workdir: str = ""
    user: str = ""
    network: NetworkMode = "none"
    upstream: str | None = "api"
    """Who answers the agent's questions, if the sandbox is made: `api` (the real one that is asked for), an address,
    `replay:FILE`, `mock`. None: the agent asks by itself, and no turns are taken."""
    state_dir: str = ""
    """Own this state directory. Empty: ask the daemon (`$CRAB_SOCKET`)."""

    def made(self) -> dict[str, Any]:
        """Arguments of `Box.open`."""
        return {
            name: getattr(self, name) for name in SandboxOptions.model_fields if name not in ("sandbox", "state_dir")
        }
