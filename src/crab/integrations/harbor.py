"""Harbor: an environment of trials, `--env crab.integrations.harbor:CrabEnvironment`. Python >= 3.12.

The image is the option `image`, or the task's `docker_image`; a Dockerfile is not built. An agent in the sandbox reaches its
model through Crab, as does one on the host at `environment.sandbox.model_address()`: each question ends a turn.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportIncompatibleMethodOverride=false
from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult, SandboxBuildFailedError
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.environments.options import EnvironmentOptions

from crab.errors import CommandNotFound, CrabError
from crab.integrations.box import Box
from crab.integrations.options import SandboxOptions
from crab.sdk.aio import AsyncHost, AsyncSandbox, aconnect


class CrabOptions(EnvironmentOptions, SandboxOptions):
    """Options of `--environment-kwarg`."""

    image: str = ""
    recorded: bool = False
    """Take every command for a step of the agent: for a trial that is begun again on the same sandbox."""


class CrabEnvironment(BaseEnvironment):
    """See the module."""

    options_model = CrabOptions
    options: CrabOptions

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._host: AsyncHost | None = None
        self._box: Box | None = None
        self._model: dict[str, str] = {}

    @staticmethod
    def type() -> str:
        return "crab"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    @property
    def sandbox(self) -> AsyncSandbox:
        """Crab's own: for checkpoints, forks and rewinds. Raises `RuntimeError` before the start."""
        return self._started().sandbox

    def _started(self) -> Box:
        if self._box is None:
            raise RuntimeError("the environment was not started")
        return self._box

    def _validate_definition(self) -> None:
        if not (self.options.image or self.task_env_config.docker_image):
            raise ValueError(
                "Crab builds no Dockerfile: give image=NAME (one of `crab image ls`), or `docker_image` in task.toml"
            )

    async def start(self, force_build: bool) -> None:
        options, task = self.options, self.task_env_config
        self._host = AsyncHost(options.state_dir) if options.state_dir else aconnect()
        made = options.made() | {
            "image": options.image or await self._image(self._host, task.docker_image or "", force_build),
            "env": options.env | self._startup_env(),
            "workdir": task.workdir or options.workdir,
            "network": "none" if self._network_disabled else "nat" if self._network_is_public else options.network,
        }
        self._box = await Box.open(self._host, options.sandbox, **made)
        if options.upstream is not None:
            self._model = (await self.sandbox.model_address(inside=True)).env
        await self.ensure_dirs(["/logs/agent", "/logs/verifier", "/logs/artifacts"])
        await self._upload_environment_dir_after_start()

    @staticmethod
    async def _image(host: AsyncHost, source: str, force_build: bool) -> str:
        name = re.sub(r"[^a-z0-9_.-]+", "-", source.lower())
        try:
            await host.images.add(name, f"oci:docker://{source}", replace=force_build, if_missing=not force_build)
        except CrabError as error:
            raise SandboxBuildFailedError(str(error)) from error
        return name

    async def stop(self, delete: bool) -> None:
        if self._box is not None and delete:
            await self._box.close()
        elif self._box is not None and not self._box.stays:
            await self.sandbox.stop()
        self._box = None
        if self._host is not None:
            await self._host.close()
            self._host = None

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        who = self._resolve_user(user)
        try:
            result = await self.sandbox.run(
                ["bash", "-c", command],
                cwd=cwd or "",
                env=self._model | (self._merge_env(env) or {}),
                user="" if who is None else str(who),
                timeout=timeout_sec,
                by_agent=self.options.recorded,
            )
        except CommandNotFound as error:
            return ExecResult(stdout="", stderr=error.message, return_code=127)
        if result.timed_out:
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds")
        out, err = result.stdout.decode(errors="replace"), result.stderr.decode(errors="replace")
        return ExecResult(stdout=out, stderr=err, return_code=result.exit_code)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await self._started().upload(str(source_path), target_path)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self._started().upload(str(source_dir), target_dir)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        await self._started().download(source_path, str(target_path))

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        await self._started().download(source_dir, str(target_dir))
