"""SWE-ReX: a deployment whose sessions are persistent shells of a sandbox: they live in it, and come back with it.

    deployment = CrabDeployment(image="debian")
    await deployment.start()

A session cannot be talked to while a command runs: interactive commands (`is_interactive_command`, `expect`) are refused.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportIncompatibleMethodOverride=false
from __future__ import annotations

import logging
from typing import Any

from swerex import exceptions
from swerex.deployment.abstract import AbstractDeployment
from swerex.deployment.hooks.abstract import CombinedDeploymentHook, DeploymentHook
from swerex.runtime import abstract as rex
from swerex.utils.log import get_logger

from crab.errors import CrabError
from crab.integrations.box import Box
from crab.integrations.options import SandboxOptions
from crab.integrations.swerex_runtime import CrabRuntime
from crab.sdk.aio import AsyncHost, aconnect


class CrabDeploymentConfig(SandboxOptions):
    """How the sandbox is made."""

    def get_deployment(self) -> CrabDeployment:
        """As the configurations of the framework do."""
        return CrabDeployment(**self.model_dump())


class CrabDeployment(AbstractDeployment):
    """The life of the sandbox. Options: `CrabDeploymentConfig`; `host` is an open one, in place of the daemon's."""

    def __init__(self, *, logger: logging.Logger | None = None, host: AsyncHost | None = None, **kwargs: Any) -> None:
        self._config = CrabDeploymentConfig(**kwargs)
        self._given, self._host = host, host
        self._runtime: CrabRuntime | None = None
        self._hooks = CombinedDeploymentHook()
        self.logger = logger or get_logger("rex-deploy")

    def add_hook(self, hook: DeploymentHook) -> None:
        self._hooks.add_hook(hook)

    async def is_alive(self, *, timeout: float | None = None) -> rex.IsAliveResponse:
        return await self.runtime.is_alive(timeout=timeout)

    async def start(self, *args: Any, **kwargs: Any) -> None:
        wanted = self._config
        self._host = self._given or (AsyncHost(wanted.state_dir) if wanted.state_dir else aconnect())
        self._hooks.on_custom_step("Starting sandbox")
        try:
            box = await Box.open(self._host, wanted.sandbox, **wanted.made())
        except CrabError as error:
            raise exceptions.DeploymentStartupError(str(error)) from error
        self._runtime = CrabRuntime(box, self.logger)

    async def stop(self, *args: Any, **kwargs: Any) -> None:
        if self._runtime is not None:
            runtime, self._runtime = self._runtime, None
            await runtime.box.close()
        if self._host is not None and self._given is None:
            await self._host.close()
            self._host = None

    @property
    def runtime(self) -> CrabRuntime:
        if self._runtime is None:
            raise exceptions.DeploymentNotStartedError
        return self._runtime
