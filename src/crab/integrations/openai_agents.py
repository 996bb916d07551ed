"""OpenAI Agents SDK: sandbox sessions whose snapshots are Crab checkpoints.

    client = CrabSandboxClient()
    sandbox = SandboxRunConfig(client=client, options=CrabSandboxClientOptions(), snapshot=CrabSnapshotSpec())

A new session from a snapshot is a fork of that checkpoint: its processes run on in it. A session that is resumed is its
sandbox, brought back to its snapshot if anything happened since; one without a snapshot that was lost, to its newest turn.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportIncompatibleMethodOverride=false
from __future__ import annotations

import uuid
from typing import Any, Literal

from agents.sandbox.manifest import Manifest
from agents.sandbox.session.sandbox_client import BaseSandboxClient, BaseSandboxClientOptions
from agents.sandbox.session.sandbox_session import SandboxSession
from agents.sandbox.session.sandbox_session_state import SandboxSessionState
from agents.sandbox.snapshot import SnapshotBase, SnapshotSpec, resolve_snapshot

from crab.errors import NotFound
from crab.integrations.box import Box, find
from crab.integrations.openai_session import CrabSession, CrabSessionState, CrabSnapshot, CrabSnapshotSpec
from crab.integrations.options import SandboxOptions
from crab.model import State
from crab.sdk.aio import AsyncHost, AsyncSandbox, aconnect

__all__ = [
    "CrabSandboxClient",
    "CrabSandboxClientOptions",
    "CrabSession",
    "CrabSessionState",
    "CrabSnapshot",
    "CrabSnapshotSpec",
]


class CrabSandboxClientOptions(BaseSandboxClientOptions, SandboxOptions):
    """How a sandbox is made. One without a name is removed at the end, if no snapshot needs it; one that a snapshot needs
    is stopped. `state_dir` and `env` are not used: a client has its host, a manifest its environment."""

    type: Literal["crab"] = "crab"


class CrabSandboxClient(BaseSandboxClient[CrabSandboxClientOptions | None]):
    """Makes, resumes and deletes sessions on a host: the daemon's, if none is given."""

    backend_id = "crab"
    supports_default_options = True

    def __init__(self, host: AsyncHost | None = None) -> None:
        self.host = host or aconnect()

    async def create(
        self,
        *,
        snapshot: SnapshotSpec | SnapshotBase | None = None,
        manifest: Manifest | None = None,
        options: CrabSandboxClientOptions | None = None,
    ) -> SandboxSession:
        wanted = options or CrabSandboxClientOptions()
        content: Manifest = self._validate_manifest_for_create(manifest or Manifest())
        identity = uuid.uuid4()
        kept = resolve_snapshot(snapshot, str(identity))
        ready = isinstance(kept, CrabSnapshot) and bool(kept.checkpoint)
        if isinstance(kept, CrabSnapshot) and kept.checkpoint:
            source = await self.host.sandbox(kept.sandbox)
            (sandbox,) = await source.fork(kept.checkpoint, names=[wanted.sandbox] if wanted.sandbox else [])
        elif wanted.sandbox and (sandbox := await find(self.host, wanted.sandbox)):
            ready = await _is_used(sandbox)
        else:
            made: dict[str, Any] = wanted.made() | {"env": await content.environment.resolve()}
            sandbox = (await Box.open(self.host, wanted.sandbox, **made)).sandbox
        state = CrabSessionState(
            session_id=identity,
            snapshot=kept,
            manifest=content,
            sandbox=sandbox.name,
            stays=bool(wanted.sandbox),
            workspace_root_ready=ready,
        )
        return self._wrap_session(CrabSession(state, sandbox, preserved=ready))

    async def resume(self, state: SandboxSessionState) -> SandboxSession:
        if not isinstance(state, CrabSessionState):
            raise TypeError("CrabSandboxClient.resume expects a CrabSessionState")
        state.assert_path_grants_rebound()
        kept = state.snapshot
        if isinstance(kept, CrabSnapshot) and kept.checkpoint:
            sandbox = await self.host.sandbox(state.sandbox)
            info = await sandbox.info()
            if info.head != kept.checkpoint or info.state != State.RUNNING or (await sandbox.explain()).kind != "none":
                await sandbox.rewind(kept.checkpoint)
        elif not (sandbox := await find(self.host, state.sandbox)):
            raise NotFound(f"the sandbox of the session, {state.sandbox}, is gone", remedy="create a new session")
        return self._wrap_session(CrabSession(state, sandbox, preserved=True))

    async def delete(self, session: SandboxSession) -> SandboxSession:
        """Remove the sandbox; one that has a name of its own stays, and one of which there is a snapshot is stopped."""
        inner = session._inner
        if not isinstance(inner, CrabSession):
            raise TypeError("CrabSandboxClient.delete expects a CrabSession")
        kept = inner.state.snapshot
        if inner.state.stays:
            return session
        if isinstance(kept, CrabSnapshot) and kept.checkpoint:
            await inner.sandbox.stop()
        else:
            await inner.sandbox.remove(force=True)
        return session

    def deserialize_session_state(self, payload: dict[str, object]) -> SandboxSessionState:
        return self._deserialize_session_state_payload(payload, CrabSessionState)

    async def aclose(self) -> None:
        """Give the host up. Sandboxes run on."""
        await self.host.close()


async def _is_used(sandbox: AsyncSandbox) -> bool:
    """Whether a session was in it before."""
    return (await sandbox.run(["test", "-e", "/workspace"])).ok
