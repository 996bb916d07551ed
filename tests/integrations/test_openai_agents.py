"""OpenAI Agents SDK: its runner, its sandbox agent and its shell tool; its snapshots are checkpoints."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("agents.sandbox")

from agents import AgentsException, RunConfig, Runner, set_tracing_disabled
from agents.models.openai_provider import OpenAIProvider
from agents.sandbox import SandboxAgent, SandboxRunConfig
from agents.sandbox.capabilities import Shell
from agents.sandbox.errors import ExecTimeoutError, ExecTransportError, WorkspaceReadNotFoundError
from agents.sandbox.snapshot import LocalSnapshotSpec
from integrations.conftest import IMAGE, LOG, Model, eventually, script
from openai import AsyncOpenAI

from crab.errors import NotFound
from crab.integrations.openai_agents import (
    CrabSandboxClient,
    CrabSandboxClientOptions,
    CrabSession,
    CrabSnapshot,
    CrabSnapshotSpec,
)
from crab.sdk.aio import AsyncHost, AsyncSandbox

pytestmark = [pytest.mark.kernel, pytest.mark.criu]
set_tracing_disabled(True)


def options(name: str = "", upstream: str | None = "mock") -> CrabSandboxClientOptions:
    return CrabSandboxClientOptions(sandbox=name, image=IMAGE, upstream=upstream)


def box_of(session: Any) -> AsyncSandbox:
    inner = session._inner
    assert isinstance(inner, CrabSession)
    return inner.sandbox


async def work(client: CrabSandboxClient, session: Any, prompt: str, chat: bool = False) -> str:
    """One run of an agent that remembers nothing."""
    url = (await box_of(session).model_address()).url
    asking = AsyncOpenAI(base_url=f"{url}/v1", api_key="dummy")  # the SDK's own would outlive the loop of a test
    provider = OpenAIProvider(openai_client=asking, use_responses=not chat)
    config = RunConfig(sandbox=SandboxRunConfig(client=client, session=session), model_provider=provider)
    agent = SandboxAgent(name="worker", instructions="You act by commands.", model="gpt-5", capabilities=[Shell()])
    async with asking:
        return (await Runner.run(agent, prompt, run_config=config)).final_output


def with_client(state: Path, test: Callable[[AsyncHost, CrabSandboxClient], Awaitable[None]]) -> None:
    async def run() -> None:
        async with AsyncHost(state) as host:
            await test(host, CrabSandboxClient(host))

    asyncio.run(run())


@pytest.mark.parametrize("chat", [False, True])
def test_a_run_leaves_nothing_but_its_answer(state: Path, model: Model, chat: bool) -> None:
    async def test(host: AsyncHost, client: CrabSandboxClient) -> None:
        session = await client.create(options=options())
        async with session:
            assert await work(client, session, script("> all done"), chat) == "all done"
            assert (await box_of(session).run(["cat", "/root/log"])).text() == LOG
            assert {one.protection for one in await box_of(session).exchanges()} == {"durable"}
        await client.delete(session)
        assert await host.sandboxes() == []

    with_client(state, test)
    assert model.steps == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("way", ["create", "resume"])
@pytest.mark.parametrize(("step", "after"), [(1, 0.0), (1, 0.5), (2, 0.5), (3, 0.0)])
def test_an_agent_whose_sandbox_was_killed_begins_again_and_nothing_is_done_twice(
    state: Path, model: Model, step: int, after: float, way: str, chat: bool
) -> None:
    async def kill(host: AsyncHost) -> None:
        await asyncio.to_thread(eventually, lambda: step in model.steps, f"question {step}")
        await asyncio.sleep(after)
        await (await host.sandbox("sdk")).kill()

    async def test(host: AsyncHost, client: CrabSandboxClient) -> None:
        session = await client.create(options=options("sdk"))
        await session.start()
        kept = client.serialize_session_state(session.state)
        dying = asyncio.create_task(kill(host))
        with pytest.raises(AgentsException):
            await work(client, session, script("> all done"), chat)
        await dying
        if way == "create":
            again = await client.create(options=options("sdk"))
        else:
            again = await client.resume(client.deserialize_session_state(kept))
        async with again:
            assert await work(client, again, script("> all done"), chat) == "all done"
            assert (await box_of(again).run(["cat", "/root/log"])).text() == LOG
        await box_of(again).remove(force=True)

    with_client(state, test)
    assert model.steps == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("asks", [False, True])
def test_a_new_session_from_a_snapshot_is_a_fork_with_its_processes(state: Path, model: Model, asks: bool) -> None:
    begin = "$ echo kept >file; (sleep 1000 >/dev/null 2>&1 & echo $! >pid)\n> done"

    async def test(host: AsyncHost, client: CrabSandboxClient) -> None:
        first = await client.create(options=options(), snapshot=CrabSnapshotSpec())
        async with first:
            await work(client, first, begin)
        snapshot = first.state.snapshot
        assert isinstance(snapshot, CrabSnapshot) and snapshot.checkpoint
        await client.delete(first)
        second = await client.create(options=options(), snapshot=snapshot)
        async with second:  # another task, which is not taken back to where the first one began
            if asks:
                assert await work(client, second, "$ echo more >>file\n> done too") == "done too"
            wanted = b"kept\nmore\nalive\n" if asks else b"kept\nalive\n"
            assert (await second.exec("cat file; kill -0 $(cat pid) && echo alive")).stdout == wanted
        for session in (first, second):
            await box_of(session).remove(force=True)

    with_client(state, test)


def test_a_session_that_is_resumed_stands_at_its_snapshot(state: Path, model: Model) -> None:
    async def test(host: AsyncHost, client: CrabSandboxClient) -> None:
        session = await client.create(options=options("sdk", upstream=None), snapshot=CrabSnapshotSpec())
        async with session:
            await session.exec("echo good >/workspace/file")
        kept = client.serialize_session_state(session.state)
        await box_of(session).run("echo bad >/workspace/file")
        again = await client.resume(client.deserialize_session_state(kept))
        async with again:
            assert (await again.read(Path("file"))).read() == b"good\n"
        await box_of(again).remove(force=True)
        with pytest.raises(NotFound):
            await client.resume(client.deserialize_session_state(kept))

    with_client(state, test)


def test_snapshots_of_the_sdk_go_from_sandbox_to_sandbox(state: Path, model: Model, tmp_path: Path) -> None:
    async def test(host: AsyncHost, client: CrabSandboxClient) -> None:
        first = await client.create(options=options(upstream=None), snapshot=LocalSnapshotSpec(base_path=tmp_path))
        async with first:
            await first.write(Path("deep/file"), io.BytesIO(b"kept"))
        await client.delete(first)
        second = await client.create(options=options(upstream=None), snapshot=first.state.snapshot)
        async with second:
            assert (await second.read(Path("deep/file"))).read() == b"kept"
        await client.delete(second)

    with_client(state, test)


def test_what_goes_wrong_is_told_in_the_terms_of_the_sdk(state: Path, model: Model) -> None:
    async def test(host: AsyncHost, client: CrabSandboxClient) -> None:
        session = await client.create(options=options(upstream=None))
        async with session:
            assert (await session.exec("exit 3")).exit_code == 3
            assert (await session.exec("id", "-un", shell=False, user="nobody")).stdout == b"nobody\n"
            with pytest.raises(ExecTimeoutError):
                await session.exec("sleep 60", timeout=0.5)
            with pytest.raises(WorkspaceReadNotFoundError):
                await session.read(Path("nothing"))
            await box_of(session).kill()
            assert not await session.running()
            with pytest.raises(ExecTransportError):
                await session.exec("true")
        await client.delete(session)
        assert await host.sandboxes() == []

    with_client(state, test)
