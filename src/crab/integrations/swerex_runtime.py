"""SWE-ReX: what is run in a sandbox; its sessions are persistent shells. The sandbox's life: `swerex`."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportIncompatibleMethodOverride=false
from __future__ import annotations

import logging

from swerex import exceptions
from swerex.runtime import abstract as rex

from crab.errors import CrabError
from crab.integrations.box import Box
from crab.model import State
from crab.sdk.aio import AsyncShell


class CrabRuntime(rex.AbstractRuntime):
    """What is run in the sandbox. All of it is recorded as the agent's steps."""

    def __init__(self, box: Box, logger: logging.Logger) -> None:
        self.box, self.sandbox, self.logger = box, box.sandbox, logger
        self._shells: dict[str, AsyncShell] = {}

    async def is_alive(self, *, timeout: float | None = None) -> rex.IsAliveResponse:
        try:
            state = (await self.sandbox.info()).state
        except CrabError as error:
            return rex.IsAliveResponse(is_alive=False, message=str(error))
        return rex.IsAliveResponse(is_alive=state == State.RUNNING, message=f"the sandbox is {state}")

    async def create_session(self, request: rex.CreateSessionRequest) -> rex.CreateSessionResponse:
        if request.session in self._shells:
            raise exceptions.SessionExistsError(f"session {request.session} already exists")
        shell = self._shells[request.session] = self.sandbox.shell(request.session, by_agent=True)
        result = await shell.run(" ; ".join(f"source {path}" for path in request.startup_source) or ":")
        return rex.CreateBashSessionResponse(output=result.output)

    async def run_in_session(self, action: rex.Action) -> rex.Observation:
        shell = self._shell(action.session)
        if isinstance(action, rex.BashInterruptAction):
            await shell.interrupt()
            return rex.BashObservation(exit_code=0)
        if action.is_interactive_command or action.is_interactive_quit or action.expect:
            raise NotImplementedError("a session of Crab runs whole commands, not interactive ones")
        await self._check_syntax(action.command)
        result = await shell.run(action.command, timeout=action.timeout)
        if result.timed_out:
            raise exceptions.CommandTimeoutError(f"timeout after {action.timeout} seconds: {action.command!r}")
        if result.ended:
            self._shells.pop(action.session)
            raise exceptions.SessionNotInitializedError(f"the session ended with status {result.exit_code}")
        if action.check == "raise":
            _check(action, result.exit_code, result.output)
        status = None if action.check == "ignore" else result.exit_code
        return rex.BashObservation(output=result.output, exit_code=status)

    async def _check_syntax(self, command: str) -> None:
        checked = await self.sandbox.run(["bash", "-n"], input=command.encode())
        if not checked.ok:
            said = checked.stderr.decode(errors="backslashreplace")
            extra = {"bash_stdout": "", "bash_stderr": said}
            raise exceptions.BashIncorrectSyntaxError(f"Error while checking {command!r}\n{said}", extra_info=extra)

    def _shell(self, session: str) -> AsyncShell:
        if session not in self._shells:
            raise exceptions.SessionDoesNotExistError(f"session {session!r} does not exist")
        return self._shells[session]

    async def close_session(self, request: rex.CloseSessionRequest) -> rex.CloseSessionResponse:
        await self._shell(request.session).run("exit 0")
        del self._shells[request.session]
        return rex.CloseBashSessionResponse()

    async def execute(self, command: rex.Command) -> rex.CommandResponse:
        words = [command.command] if isinstance(command.command, str) else command.command
        argv = ["sh", "-c", *words] if command.shell else words
        if command.merge_output_streams:
            argv = ["sh", "-c", 'exec "$@" 2>&1', "sh", *argv]
        cwd, limit = command.cwd or "", command.timeout
        result = await self.sandbox.run(argv, timeout=limit, env=command.env, cwd=cwd, by_agent=True)
        if result.timed_out:
            raise exceptions.CommandTimeoutError(f"timeout after {limit} seconds: {command.command!r}")
        out, err = (data.decode(errors="backslashreplace") for data in (result.stdout, result.stderr))
        if command.check:
            _check(command, result.exit_code, out + err)
        return rex.CommandResponse(stdout=out, stderr=err, exit_code=result.exit_code)

    async def read_file(self, request: rex.ReadFileRequest) -> rex.ReadFileResponse:
        data = await self.box.read(request.path)
        return rex.ReadFileResponse(content=data.decode(request.encoding or "utf-8", request.errors or "strict"))

    async def write_file(self, request: rex.WriteFileRequest) -> rex.WriteFileResponse:
        await self.box.write(request.path, request.content.encode())
        return rex.WriteFileResponse()

    async def upload(self, request: rex.UploadRequest) -> rex.UploadResponse:
        await self.box.upload(request.source_path, request.target_path)
        return rex.UploadResponse()

    async def close(self) -> rex.CloseResponse:
        self._shells.clear()
        return rex.CloseResponse()


def _check(asked: rex.BashAction | rex.Command, status: int, output: str) -> None:
    if status:
        said = f"Command {asked.command!r} failed with exit code {status}. Here is the output:\n{output!r}"
        raise exceptions.NonZeroExitCodeError(f"{asked.error_msg}: {said}" if asked.error_msg else said)
