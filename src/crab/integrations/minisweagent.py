"""mini-swe-agent: an environment whose commands run in a sandbox.

    mini --environment-class crab.integrations.minisweagent.CrabEnvironment …

What cannot be told the model as the outcome of a command (the sandbox is gone, the daemon is away) is raised, and ends the run:
an agent that is started again from its beginning, on the sandbox that was brought back, gets what was recorded.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportIncompatibleMethodOverride=false
from __future__ import annotations

import contextlib
import subprocess
import weakref
from typing import Any

from minisweagent.environments.local import LocalEnvironment
from minisweagent.utils.serialize import recursive_merge

from crab.errors import CrabError, ExecFailed, NotFound
from crab.integrations.box import access
from crab.integrations.options import SandboxOptions
from crab.model import State
from crab.sdk.sync import Host, Sandbox, connect


class CrabEnvironmentConfig(SandboxOptions):
    """What can be written under `environment` of a configuration."""

    cwd: str = ""
    timeout: int = 30
    """Seconds of a command."""
    interpreter: list[str] = ["bash", "-c"]


class CrabEnvironment:
    """See the module. A context manager; without that the sandbox goes when the object does."""

    def __init__(self, *, host: Host | None = None, config_class: type = CrabEnvironmentConfig, **kwargs: Any) -> None:
        self.config: CrabEnvironmentConfig = config_class(**kwargs)
        own = host is None
        self.host = host or (Host(self.config.state_dir) if self.config.state_dir else connect())
        try:
            self.sandbox = self._found()
        except BaseException:
            if own:
                self.host.close()
            raise
        self._end = weakref.finalize(self, _end, self.host if own else None, self.sandbox, bool(self.config.sandbox))

    def _found(self) -> Sandbox:
        wanted = self.config
        try:
            sandbox = self.host.sandbox(wanted.sandbox) if wanted.sandbox else None
        except NotFound:
            sandbox = None
        if sandbox is None:
            options = wanted.made()
            sandbox = self.host.create(wanted.sandbox, model_access=access(options.pop("upstream")), **options)
            if wanted.workdir:  # images do not have it, as a rule
                sandbox.run(["mkdir", "-p", wanted.workdir], cwd="/", user="0", check=True)
            return sandbox
        if sandbox.info().state == State.LOST:
            sandbox.recover()
        return sandbox

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
        """Run a command of the agent. Raises `Submitted` if it says that the work is done, `CrabError` if nobody can tell."""
        command, wanted = str(action.get("command", "")), self.config
        seconds = timeout or wanted.timeout
        # Both streams into one, as their bytes came.
        argv = ["sh", "-c", 'exec "$@" 2>&1', "sh", *wanted.interpreter, command]
        try:
            result = self.sandbox.run(
                argv, env=wanted.env, cwd=cwd or wanted.cwd, user=wanted.user, timeout=seconds, by_agent=True
            )
        except ExecFailed as error:
            output = _failed("", error)
        else:
            output = {"output": result.text(), "returncode": result.exit_code, "exception_info": ""}
            if result.timed_out:
                output = _failed(result.text(), subprocess.TimeoutExpired(command, seconds))
        LocalEnvironment._check_finished(self, output)  # type: ignore[arg-type]
        return output

    def get_template_vars(self, **kwargs: Any) -> dict[str, Any]:
        """The configuration, what `uname` says in the sandbox, and the sandbox's variables."""
        names = ("system", "node", "release", "version", "machine")
        script = "for word in s n r v m; do uname -$word; done"
        found = dict(zip(names, self.sandbox.run(script, check=True).text().splitlines(), strict=True))
        return recursive_merge(self.config.model_dump(), found, self.sandbox.info().spec.env, kwargs)

    def serialize(self) -> dict[str, Any]:
        """What a trajectory says of its environment."""
        kind = f"{type(self).__module__}.{type(self).__name__}"
        config = self.config.model_dump(mode="json") | {"sandbox": self.sandbox.name}
        return {"info": {"config": {"environment": config, "environment_type": kind}}}

    def cleanup(self) -> None:
        """Remove the sandbox, unless it has a name of its own."""
        self._end()

    def __enter__(self) -> CrabEnvironment:
        return self

    def __exit__(self, *_: object) -> None:
        self.cleanup()


def _failed(output: str, error: Exception) -> dict[str, Any]:
    """What the framework's own environments answer then."""
    extra = {"exception_type": type(error).__name__, "exception": str(error)}
    info = f"An error occurred while executing the command: {error}"
    return {"output": output, "returncode": -1, "exception_info": info, "extra": extra}


def _end(host: Host | None, sandbox: Sandbox, stays: bool) -> None:
    with contextlib.suppress(CrabError):
        if not stays:
            sandbox.remove(force=True)
    if host is not None:
        host.close()
