"""SWE-ReX: deployment and runtime, driven by a loop that asks the scripted model, as SWE-agent drives them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("swerex")

import aiohttp
from integrations.conftest import IMAGE, LOG, Model, eventually, script
from swerex import exceptions
from swerex.runtime import abstract as rex

from crab.errors import CrabError
from crab.integrations.swerex import CrabDeployment, CrabDeploymentConfig
from crab.sdk.aio import AsyncHost

pytestmark = [pytest.mark.kernel, pytest.mark.criu]
TOOL = {
    "type": "function",
    "function": {"name": "bash", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}},
}


def with_host(state: Path, test: Callable[[AsyncHost], Awaitable[None]]) -> None:
    async def run() -> None:
        async with AsyncHost(state) as host:
            await test(host)

    asyncio.run(run())


async def agent(deployment: CrabDeployment, prompt: str) -> str:
    """A loop that remembers nothing; its commands go into one session."""
    runtime = deployment.runtime
    url = (await runtime.sandbox.model_address()).url
    await runtime.create_session(rex.CreateBashSessionRequest())
    messages: list[Any] = [{"role": "user", "content": prompt}]
    async with aiohttp.ClientSession() as session:
        while True:
            body = {"model": "m", "messages": messages, "tools": [TOOL]}
            async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
                message = (await answer.json())["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                return message["content"]
            for call in message["tool_calls"]:
                command = json.loads(call["function"]["arguments"])["command"]
                seen = await runtime.run_in_session(
                    rex.BashAction(command=f"export N=$((N + 1)); {command}", timeout=30)
                )
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": seen.output})


def deployment(host: AsyncHost, name: str = "") -> CrabDeployment:
    return CrabDeployment(host=host, sandbox=name, image=IMAGE, upstream="mock")


def test_a_loop_runs_in_one_session(state: Path, model: Model) -> None:
    async def test(host: AsyncHost) -> None:
        made = deployment(host)
        await made.start()
        assert await made.is_alive()
        assert await agent(made, script("$ echo $N >>/root/log", "> all done")) == "all done"
        content = (await made.runtime.read_file(rex.ReadFileRequest(path="/root/log"))).content
        assert content == f"{LOG}5\n", "the session kept its variables"
        await made.stop()
        assert await host.sandboxes() == []

    with_host(state, test)
    assert model.steps == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(("step", "after"), [(1, 0.0), (2, 0.5), (3, 0.0)])
def test_a_loop_whose_sandbox_was_killed_begins_again_and_nothing_is_done_twice(
    state: Path, model: Model, step: int, after: float
) -> None:
    async def kill(host: AsyncHost) -> None:
        await asyncio.to_thread(eventually, lambda: step in model.steps, f"question {step}")
        await asyncio.sleep(after)
        await (await host.sandbox("rex")).kill()

    async def test(host: AsyncHost) -> None:
        first = deployment(host, "rex")
        await first.start()
        dying = asyncio.create_task(kill(host))
        with pytest.raises(CrabError):
            await agent(first, script("$ echo $N >>/root/log", "> all done"))
        await dying
        await first.stop()
        again = deployment(host, "rex")
        await again.start()
        assert await agent(again, script("$ echo $N >>/root/log", "> all done")) == "all done"
        content = (await again.runtime.read_file(rex.ReadFileRequest(path="/root/log"))).content
        assert content == f"{LOG}5\n"
        await again.runtime.sandbox.remove(force=True)

    with_host(state, test)
    assert model.steps == [0, 1, 2, 3, 4, 5]


def test_what_goes_wrong_is_told_in_the_terms_of_swe_rex(state: Path, model: Model, tmp_path: Path) -> None:
    async def test(host: AsyncHost) -> None:
        made = CrabDeploymentConfig(image=IMAGE, upstream=None).get_deployment()
        with pytest.raises(exceptions.DeploymentNotStartedError):
            made.runtime  # noqa: B018
        made = CrabDeployment(host=host, image=IMAGE, upstream=None)
        await made.start()
        run = made.runtime
        await run.create_session(rex.CreateBashSessionRequest())
        with pytest.raises(exceptions.SessionExistsError):
            await run.create_session(rex.CreateBashSessionRequest())
        with pytest.raises(exceptions.SessionDoesNotExistError):
            await run.run_in_session(rex.BashAction(command="true", session="other"))
        assert (await run.run_in_session(rex.BashAction(command="cd /usr; false", check="silent"))).exit_code == 1
        assert (await run.run_in_session(rex.BashAction(command="pwd", check="ignore"))).output.strip() == "/usr"
        with pytest.raises(exceptions.NonZeroExitCodeError):
            await run.run_in_session(rex.BashAction(command="false"))
        with pytest.raises(exceptions.BashIncorrectSyntaxError):
            await run.run_in_session(rex.BashAction(command="if ("))
        with pytest.raises(exceptions.CommandTimeoutError):
            await run.run_in_session(rex.BashAction(command="sleep 60", timeout=0.5))
        await run.close_session(rex.CloseBashSessionRequest())
        done = await run.execute(
            rex.Command(command="echo a; echo b >&2; exit 3", shell=True, merge_output_streams=True)
        )
        assert (done.stdout, done.exit_code) == ("a\nb\n", 3)
        with pytest.raises(exceptions.NonZeroExitCodeError):
            await run.execute(rex.Command(command=["false"], check=True))
        with pytest.raises(exceptions.CommandTimeoutError):
            await run.execute(rex.Command(command=["sleep", "60"], timeout=0.5))
        await run.write_file(rex.WriteFileRequest(path="/new/file", content="ä"))
        assert (await run.read_file(rex.ReadFileRequest(path="/new/file"))).content == "ä"
        with pytest.raises(FileNotFoundError):
            await run.read_file(rex.ReadFileRequest(path="/nothing"))
        (tmp_path / "deep").mkdir()
        (tmp_path / "deep" / "file").write_text("up")
        await run.upload(rex.UploadRequest(source_path=str(tmp_path), target_path="/up"))
        assert (await run.read_file(rex.ReadFileRequest(path="/up/deep/file"))).content == "up"
        await run.sandbox.kill()
        assert not await made.is_alive()
        await made.stop()
        assert await host.sandboxes() == []

    with_host(state, test)
