"""inspect_ai: the sandbox type `crab`, one sandbox for each sample.

    Task(dataset=…, solver=react(tools=[bash()]), sandbox=SandboxEnvironmentSpec("crab", CrabConfig(image="debian")))

What a sample does in its sandbox is recorded. A sample that is run again in a sandbox with a name (by `retry_on_error`, or in
another process) gets what was recorded. Where its questions go: `sample_model`.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportIncompatibleMethodOverride=false
from __future__ import annotations

import re
import shlex
from typing import Any

from inspect_ai.log._samples import sample_active
from inspect_ai.model import Model, get_model
from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxConnection,
    SandboxEnvironment,
    SandboxEnvironmentLimits,
    sandbox,
    sandboxenv,
)
from inspect_ai.util._sandbox.environment import SandboxUserUnsupportedError

from crab.errors import CommandNotFound, ExecFailed
from crab.integrations.box import Box, close_shared, shared_host
from crab.integrations.options import SandboxOptions
from crab.model import State
from crab.sdk.aio import AsyncSandbox

SETUP = re.compile(r"/tmp/[2-9A-HJ-NP-Za-km-z]{22}")
"""The name of inspect's copy of a sample's setup script, made anew each time; the same command has to look the same."""
ADDRESSES = {"anthropic": "ANTHROPIC_BASE_URL", "google": "GOOGLE_GEMINI_BASE_URL"}


class CrabConfig(SandboxOptions):
    """How the sandboxes of a task are made. In the name, `{sample}` and `{epoch}` are replaced."""

    workdir: str = "/root"

    def __hash__(self) -> int:  # inspect asks which samples share a configuration
        return hash(self.model_dump_json())

    def name(self) -> str:
        """Of the sandbox of the sample that runs now."""
        now = sample_active()
        name = self.sandbox.replace("{sample}", f"{now.sample.id if now else 0}")
        return re.sub(r"[^A-Za-z0-9_.-]", "-", name.replace("{epoch}", f"{now.epoch if now else 1}"))


def _config(config: Any) -> CrabConfig:
    return config if isinstance(config, CrabConfig) else CrabConfig(image=config) if config else CrabConfig()


@sandboxenv(name="crab")
class CrabSandbox(SandboxEnvironment):
    """See the module. A dead sandbox or daemon fails the sample; it is not told the model as the outcome of a tool."""

    def __init__(self, box: Box, config: CrabConfig) -> None:
        super().__init__()
        self.box, self.config = box, config

    @property
    def sandbox(self) -> AsyncSandbox:
        """Crab's own: for checkpoints, forks and rewinds."""
        return self.box.sandbox

    @classmethod
    async def sample_init(cls, task_name: str, config: Any, metadata: dict[str, str]) -> dict[str, SandboxEnvironment]:
        wanted = _config(config)
        box = await Box.open(shared_host(wanted.state_dir), wanted.name(), **wanted.made())
        return {"default": cls(box, wanted)}

    @classmethod
    async def sample_cleanup(cls, task_name: str, config: Any, environments: Any, interrupted: bool) -> None:
        for environment in environments.values():
            await environment.as_type(cls).box.close()

    @classmethod
    async def task_cleanup(cls, task_name: str, config: Any, cleanup: bool) -> None:
        await close_shared(_config(config).state_dir)

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> SandboxOptions:
        return CrabConfig(**config)

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        **_: Any,
    ) -> ExecResult[str]:
        argv = ["/tmp/inspect-setup" if SETUP.fullmatch(word) else word for word in cmd]
        where: dict[str, Any] = {"cwd": self._path(cwd or ""), "env": env, "user": user or "", "timeout": timeout}
        data = input.encode() if isinstance(input, str) else input or b""
        limit = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
        try:
            result = await self.sandbox.run(argv, input=data, limit=limit, by_agent=True, **where)
        except CommandNotFound as error:
            return ExecResult(False, 127, "", error.message)
        except ExecFailed as error:
            if user and "user" in error.message:
                raise SandboxUserUnsupportedError(error.message) from error
            raise PermissionError(error.message) from error
        out, err = result.stdout.decode(errors="replace"), result.stderr.decode(errors="replace")
        if result.timed_out:
            late = TimeoutError(f"Command timed out after {timeout} seconds")
            late.truncated_output = out + err  # type: ignore[attr-defined]
            raise late
        if result.truncated:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, out)
        return ExecResult(result.ok, result.exit_code, out, err)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        path = "/tmp/inspect-setup" if SETUP.fullmatch(file) else self._path(file)
        await self.box.write(path, contents.encode() if isinstance(contents, str) else contents)

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        limit = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        data = await self.box.read(self._path(file), limit=limit + 1)
        if len(data) > limit:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
        return data.decode() if text else data

    async def connection(self, *, user: str | None = None) -> SandboxConnection:
        if (await self.sandbox.info()).state != State.RUNNING:
            raise ConnectionError(f"sandbox {self.sandbox.name} does not run")
        words = ["crab", "exec", "-it", *(["--user", user] if user else []), self.sandbox.name, "--", "bash", "-l"]
        return SandboxConnection(type="crab", command=shlex.join(words), container=self.sandbox.name)

    def _path(self, path: str) -> str:
        return path if path.startswith("/") else f"{self.config.workdir}/{path}".rstrip("/")


async def sample_model(name: str | None = None) -> Model:
    """A model (without a name: the sample's), asked through the sandbox of the sample: each question ends a turn, is
    recorded, and is not asked again when the sample is."""
    model = get_model(name)
    address = await sandbox().as_type(CrabSandbox).sandbox.model_address()
    base = address.env[ADDRESSES.get(str(model).partition("/")[0], "OPENAI_BASE_URL")]
    return get_model(str(model), base_url=base, config=model.config, memoize=False)
