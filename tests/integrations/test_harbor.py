"""Harbor: its own job, trials, agents and verifier, without Docker."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("harbor")

import aiohttp
from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment
from harbor.job import Job
from harbor.models.job.config import JobConfig
from integrations.conftest import IMAGE, LOG, Model, script

from crab.integrations.harbor import CrabEnvironment
from crab.sdk.aio import AsyncHost
from crab.sdk.sync import Host

pytestmark = [pytest.mark.kernel, pytest.mark.criu]
LOOP = Path(__file__).parents[2] / "examples" / "agents" / "loop.py"
TASK = """
version = "1.0"
[environment]
workdir = "/app"
network_mode = "no-network"
"""
TEST = 'printf "%s" "$(cat /root/log)" | cmp - /tests/wanted && echo 1 >/logs/verifier/reward.txt || echo 0 >/logs/verifier/reward.txt'


class Outside(BaseAgent):
    """An agent on the host: asks through the sandbox's address, acts by `exec`."""

    @staticmethod
    def name() -> str:
        return "outside"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: BaseEnvironment) -> None: ...

    async def run(self, instruction: str, environment: BaseEnvironment, context: Any) -> None:
        assert isinstance(environment, CrabEnvironment)
        url = (await environment.sandbox.model_address()).url
        tool = {
            "type": "function",
            "function": {
                "name": "bash",
                "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
            },
        }
        messages: list[Any] = [{"role": "user", "content": instruction}]
        async with aiohttp.ClientSession() as session:
            while True:
                body = {"model": "m", "messages": messages, "tools": [tool]}
                async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
                    message = (await answer.json())["choices"][0]["message"]
                messages.append(message)
                if not message.get("tool_calls"):
                    return
                for call in message["tool_calls"]:
                    result = await environment.exec(json.loads(call["function"]["arguments"])["command"])
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": result.stdout or ""})


class Inside(Outside):
    """An agent in the sandbox, which finds its model by the variables that it has there."""

    async def setup(self, environment: BaseEnvironment) -> None:
        await environment.upload_file(LOOP, "/opt/loop.py")

    async def run(self, instruction: str, environment: BaseEnvironment, context: Any) -> None:
        result = await environment.exec(f'python3 /opt/loop.py "${{OPENAI_BASE_URL%/v1}}" {shlex.quote(instruction)}')
        assert result.return_code == 0, result.stderr


def task(folder: Path) -> Path:
    for name, content in {
        "task.toml": TASK,
        "instruction.md": script("> all done"),
        "environment/Dockerfile": "FROM scratch\n",
        "solution/solve.sh": "#!/bin/bash\n" + "".join(f"echo {line} >>/root/log\n" for line in LOG.split()),
        "tests/test.sh": f"#!/bin/bash\n{TEST}\n",
        "tests/wanted": LOG.strip(),
    }.items():
        path = folder / "task" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder / "task"


@pytest.mark.parametrize("who", ["oracle", "Outside", "Inside"])
def test_a_job_runs_to_its_reward(state: Path, model: Model, tmp_path: Path, who: str) -> None:
    agent = {"name": "oracle"} if who == "oracle" else {"import_path": f"{__name__}:{who}"}
    config = JobConfig.model_validate(
        {
            "jobs_dir": tmp_path / "jobs",
            "tasks": [{"path": task(tmp_path)}],
            "agents": [agent],
            "environment": {
                "import_path": "crab.integrations.harbor:CrabEnvironment",
                "kwargs": {"image": IMAGE, "upstream": "mock", "state_dir": str(state)},
            },
        }
    )

    async def run() -> Any:
        return await (await Job.create(config)).run()

    result = asyncio.run(run())
    (trial,) = [json.loads(path.read_text()) for path in (tmp_path / "jobs").glob("*/*/result.json")]
    assert trial["exception_info"] is None, trial["exception_info"]
    assert trial["verifier_result"]["rewards"] == {"reward": 1.0}
    assert result.n_total_trials == 1
    assert model.steps == ([] if who == "oracle" else [0, 1, 2, 3, 4])
    with Host(state) as host:
        assert host.sandboxes() == []


def test_files_go_in_and_out_and_commands_end_as_they_do(state: Path, model: Model, tmp_path: Path) -> None:
    async def test(made: CrabEnvironment) -> None:
        source = tmp_path / "source"
        (source / "deep").mkdir(parents=True)
        (source / "deep" / "file").write_text("content")
        await made.upload_dir(source, "/data/in")
        await made.upload_file(source / "deep" / "file", "/data/new/name")
        assert (await made.exec("cat /data/in/deep/file /data/new/name")).stdout == "contentcontent"
        await made.upload_dir(source, "/data/in")  # into what is there already
        await made.download_dir("/data", tmp_path / "back")
        assert (tmp_path / "back" / "in" / "deep" / "file").read_text() == "content"
        await made.download_file("/data/new/name", tmp_path / "one" / "name")
        assert (tmp_path / "one" / "name").read_text() == "content"
        assert await made.is_dir("/data") and await made.is_file("/data/new/name")
        done = await made.exec("pwd; echo $A >&2; exit 3", cwd="/usr", env={"A": "b"})
        assert (done.stdout, done.stderr, done.return_code) == ("/usr\n", "b\n", 3)
        assert (await made.exec("id -un", user="nobody")).stdout == "nobody\n"
        with pytest.raises(RuntimeError, match="timed out"):
            await made.exec("sleep 60", timeout_sec=1)

    with_environment(state, tmp_path, test)


def with_environment(state: Path, folder: Path, test: Callable[[CrabEnvironment], Awaitable[None]]) -> None:
    from harbor.models.task.config import EnvironmentConfig
    from harbor.models.trial.paths import TrialPaths

    async def run() -> None:
        made = CrabEnvironment(
            environment_dir=folder, environment_name="e", session_id="s", trial_paths=TrialPaths(trial_dir=folder),
            task_env_config=EnvironmentConfig(), image=IMAGE, upstream=None, state_dir=str(state),
        )  # fmt: skip
        await made.start(force_build=False)
        try:
            await test(made)
        finally:
            await made.stop(delete=True)
        async with AsyncHost(state) as host:
            assert await host.sandboxes() == []

    asyncio.run(run())
