"""inspect_ai: its own evaluation, its react agent and its bash tool, in sandboxes of type `crab`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("inspect_ai")

from inspect_ai import Task, eval
from inspect_ai.agent import Agent, AgentState, agent, react
from inspect_ai.dataset import Sample
from inspect_ai.log import EvalLog
from inspect_ai.scorer import includes
from inspect_ai.tool import bash
from inspect_ai.util import SandboxEnvironmentSpec, sandbox
from integrations.conftest import IMAGE, LOG, SLOW, Model, eventually, script

from crab.integrations.box import shared_host
from crab.integrations.inspect_ai import CrabConfig, CrabSandbox, sample_model
from crab.sdk.sync import Host

pytestmark = [pytest.mark.kernel, pytest.mark.criu]
END = "> all done"
MODELS = ["openai/gpt-4o", "openai/gpt-5", "anthropic/claude-sonnet-4-5"]


@agent
def through_crab(kill: tuple[Model, int, float] | None = None) -> Agent:
    """The react agent, asking through the sample's sandbox; with `kill` that sandbox dies meanwhile, once."""

    async def execute(state: AgentState) -> AgentState:
        loop = react(tools=[bash(timeout=60)], model=await sample_model())
        if kill is None or getattr(kill[0], "killed", False):
            return await loop(state)
        dying = asyncio.create_task(_kill(*kill))
        try:
            return await loop(state)
        finally:
            await dying

    return execute


async def _kill(model: Model, step: int, after: float) -> None:
    box = sandbox().as_type(CrabSandbox).sandbox
    await asyncio.to_thread(eventually, lambda: step in model.steps, f"question {step}")
    await asyncio.sleep(after)
    model.killed = True  # type: ignore[attr-defined]
    await box.kill()


def evaluate(state: Path, name: str, solver: Agent, tmp_path: Path, samples: int = 1, **options: Any) -> EvalLog:
    config = CrabConfig(sandbox="ai-{sample}-{epoch}", image=IMAGE, upstream="mock", state_dir=str(state))
    dataset = [
        Sample(
            id=f"n{n}",
            input=script(END),
            target="all done",
            files={"/root/given": "something"},
            setup="echo set >>/root/setup",
        )
        for n in range(samples)
    ]
    task = Task(dataset=dataset, solver=solver, scorer=includes(), sandbox=SandboxEnvironmentSpec("crab", config))
    (log,) = eval(task, model=name, display="none", log_dir=str(tmp_path), **options)
    assert log.status == "success", log.error
    return log


def check(state: Path, samples: int = 1) -> None:
    """What is in the sandboxes, and away with them."""
    with Host(state) as host:
        boxes = host.sandboxes()
        assert sorted(box.name for box in boxes) == [f"ai-n{n}-1" for n in range(samples)]
        for box in boxes:
            assert box.run("cat /root/log /root/setup /root/given").text() == f"{LOG}set\nsomething"
            box.remove(force=True)


@pytest.mark.parametrize("name", MODELS)
def test_an_evaluation_of_two_samples_has_two_sandboxes(state: Path, model: Model, name: str, tmp_path: Path) -> None:
    log = evaluate(state, name, through_crab(), tmp_path, samples=2)
    assert log.results and log.results.scores[0].metrics["accuracy"].value == 1.0
    check(state, samples=2)
    assert sorted(model.steps) == sorted([0, 1, 2, 3, 4] * 2)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("step", "after"), [(1, 0.0), (2, 0.5), (3, 0.0)])
def test_a_sample_whose_sandbox_was_killed_is_run_again_and_nothing_is_done_twice(
    state: Path, model: Model, name: str, step: int, after: float, tmp_path: Path
) -> None:
    assert after < SLOW
    evaluate(state, name, through_crab((model, step, after)), tmp_path, retry_on_error=1)
    assert model.killed  # type: ignore[attr-defined]
    check(state)
    assert model.steps == [0, 1, 2, 3, 4]


def test_what_goes_wrong_is_told_in_the_terms_of_inspect(state: Path, model: Model) -> None:
    async def work() -> None:
        config = CrabConfig(image=IMAGE, upstream=None, state_dir=str(state))
        made = await CrabSandbox.sample_init("t", config, {})
        box = made["default"].as_type(CrabSandbox)
        try:
            done = await box.exec(["sh", "-c", "cat; pwd; echo err >&2; exit 3"], input="in\n", cwd=".", env={"A": "b"})
            assert not done.success
            assert (await box.exec(["no-such-program"])).returncode == 127
            with pytest.raises(TimeoutError) as late:
                await box.exec(["sh", "-c", "echo begun; sleep 60"], timeout=1)
            assert late.value.truncated_output == "begun\n"  # type: ignore[attr-defined]
            await box.write_file("deep/er/file", "ä\r\n")
            assert await box.read_file("deep/er/file") == "ä\r\n"
            await box.write_file("/root/bytes", b"\xff\x00")
            assert await box.read_file("bytes", text=False) == b"\xff\x00"
            with pytest.raises(UnicodeDecodeError):
                await box.read_file("bytes")
            with pytest.raises(FileNotFoundError):
                await box.read_file("nothing")
            with pytest.raises(IsADirectoryError):
                await box.read_file("deep")
            with pytest.raises(IsADirectoryError):
                await box.write_file("deep", "x")
            await box.exec(["chmod", "700", "/root"])
            assert box.sandbox.name in (await box.connection()).command
            await box.sandbox.kill()
            with pytest.raises(ConnectionError):
                await box.connection()
        finally:
            await CrabSandbox.sample_cleanup("t", config, made, False)
            assert await shared_host(str(state)).sandboxes() == []
            await CrabSandbox.task_cleanup("t", config, True)

    asyncio.run(work())
