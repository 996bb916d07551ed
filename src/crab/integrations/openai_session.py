"""OpenAI Agents SDK: a session, which is a sandbox, and its snapshots, which are checkpoints. The client: `openai_agents`."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportIncompatibleMethodOverride=false
from __future__ import annotations

import io
from pathlib import Path
from typing import Any, Literal

from agents.sandbox.errors import (
    ExecTimeoutError,
    ExecTransportError,
    SnapshotNotRestorableError,
    WorkspaceArchiveReadError,
    WorkspaceArchiveWriteError,
)
from agents.sandbox.session.base_sandbox_session import BaseSandboxSession
from agents.sandbox.session.sandbox_session_state import SandboxSessionState
from agents.sandbox.snapshot import SnapshotBase, SnapshotSpec
from agents.sandbox.types import ExecResult, User

from crab.errors import CrabError
from crab.integrations.box import Box
from crab.model import State
from crab.sdk.aio import AsyncSandbox


class CrabSnapshot(SnapshotBase):
    """A checkpoint. Taking and restoring it is the session's and the client's work; there is no stream of bytes."""

    type: Literal["crab"] = "crab"
    sandbox: str = ""
    checkpoint: str = ""
    """Empty: none was taken yet."""

    async def persist(self, data: io.IOBase, *, dependencies: Any = None) -> None:
        """Nothing: the checkpoint is there."""

    async def restore(self, *, dependencies: Any = None) -> io.IOBase:
        raise SnapshotNotRestorableError(snapshot_id=self.id, path=Path(f"<crab:{self.checkpoint}>"))

    async def restorable(self, *, dependencies: Any = None) -> bool:
        return False  # what starts from it has it in it already


class CrabSnapshotSpec(SnapshotSpec):
    """Every stop of a session takes a checkpoint."""

    type: Literal["crab"] = "crab"

    def build(self, snapshot_id: str) -> SnapshotBase:
        return CrabSnapshot(id=snapshot_id)


class CrabSessionState(SandboxSessionState):
    """What is needed to find the sandbox again."""

    type: Literal["crab"] = "crab"
    sandbox: str
    stays: bool = False


class CrabSession(BaseSandboxSession):
    """A session. What is run between its start and its stop is recorded as the agent's steps."""

    state: CrabSessionState

    def __init__(self, state: CrabSessionState, sandbox: AsyncSandbox, preserved: bool) -> None:
        self.state, self.sandbox = state, sandbox
        self.box = Box(sandbox, stays=True)
        self._by_agent = False
        self._set_start_state_preserved(preserved)

    async def _after_start(self) -> None:
        self._by_agent = True

    async def _before_stop(self) -> None:
        self._by_agent = False

    async def _persist_snapshot(self) -> None:
        if isinstance(self.state.snapshot, CrabSnapshot):
            taken = await self.sandbox.checkpoint()
            here = {"sandbox": self.state.sandbox, "checkpoint": taken.id}
            self.state.snapshot = self.state.snapshot.model_copy(update=here)
        else:
            await super()._persist_snapshot()

    async def exec(
        self,
        *command: str | Path,
        timeout: float | None = None,
        shell: bool | list[str] = True,
        user: str | User | None = None,
    ) -> ExecResult:
        return await self._run(self._prepare_exec_command(*command, shell=shell, user=None), timeout, _name(user))

    async def _exec_internal(self, *command: str | Path, timeout: float | None = None) -> ExecResult:
        return await self._run([str(word) for word in command], timeout)

    async def _run(self, argv: list[str], timeout: float | None, user: str = "", data: bytes = b"") -> ExecResult:
        cwd = self.state.manifest.root if self._by_agent else "/"
        try:
            result = await self.sandbox.run(
                argv, timeout=timeout, user=user, cwd=cwd, input=data, by_agent=self._by_agent
            )
        except CrabError as error:
            raise ExecTransportError(command=argv, cause=error, message=error.message) from error
        if result.timed_out:
            raise ExecTimeoutError(command=argv, timeout_s=timeout)
        return ExecResult(stdout=result.stdout, stderr=result.stderr, exit_code=result.exit_code)

    async def read(self, path: Path, *, user: str | User | None = None) -> io.IOBase:
        found = await self._validate_path_access(path)
        argv = ["cat", "--", str(found)]
        result = await self.exec(*argv, shell=False, user=user)
        if not result.ok():
            said: Any = {"workspace_path": found, "command": argv, "result": result, "user": user}
            await self._raise_read_error_from_exec(path=path, **said)
        return io.BytesIO(result.stdout)

    async def write(self, path: Path, data: io.IOBase, *, user: str | User | None = None) -> None:
        found = await self._validate_path_access(path, for_write=True)
        content = data.read()
        content = content.encode() if isinstance(content, str) else content
        try:
            await self.box.write(str(found), content, user=_name(user), by_agent=self._by_agent)
        except (OSError, CrabError) as error:
            raise WorkspaceArchiveWriteError(path=found, cause=error) from error

    async def running(self) -> bool:
        return (await self.sandbox.info()).state == State.RUNNING

    async def persist_workspace(self) -> io.IOBase:
        skipped = [f"--exclude=./{path.as_posix()}" for path in self._persist_workspace_skip_relpaths()]
        root = self._workspace_root_path()
        result = await self.exec("tar", "-C", str(root), *skipped, "-cf", "-", ".", shell=False)
        if not result.ok():
            raise WorkspaceArchiveReadError(path=root, context={"stderr": result.stderr.decode(errors="replace")})
        return io.BytesIO(result.stdout)

    async def hydrate_workspace(self, data: io.IOBase) -> None:
        root = self._workspace_root_path()
        script = ["sh", "-c", 'mkdir -p "$1" && tar -C "$1" -xf -', "sh", str(root)]
        result = await self._run(script, None, data=data.read())
        if not result.ok():
            raise WorkspaceArchiveWriteError(path=root, context={"stderr": result.stderr.decode(errors="replace")})


def _name(user: Any) -> str:
    return str(getattr(user, "name", user) or "")
