"""mini-swe-agent: its own loop, its own model class, its commands in a sandbox."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.update(MSWEA_SILENT_STARTUP="1", MSWEA_CONFIGURED="true", LITELLM_LOCAL_MODEL_COST_MAP="True")
pytest.importorskip("minisweagent")

from integrations.conftest import LOG, Model, kill_when, script
from minisweagent.agents.default import DefaultAgent
from minisweagent.config import get_config_from_spec
from minisweagent.models.litellm_model import LitellmModel

from crab.errors import CrabError
from crab.integrations.minisweagent import CrabEnvironment
from crab.sdk.sync import Host

END = "$ echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; cat /root/log"
pytestmark = [pytest.mark.kernel, pytest.mark.criu]


def agent(environment: CrabEnvironment) -> DefaultAgent:
    """A new one, that remembers nothing."""
    url = f"{environment.sandbox.model_address().url}/v1"
    model = LitellmModel(model_name="openai/gpt-4o", model_kwargs={"api_base": url}, cost_tracking="ignore_errors")
    texts = {name: get_config_from_spec("mini")["agent"][name] for name in ("system_template", "instance_template")}
    return DefaultAgent(model, environment, **texts)


def environment(host: Host, name: str = "") -> CrabEnvironment:
    return CrabEnvironment(host=host, sandbox=name, upstream="mock", timeout=20)


def test_a_run_ends_with_what_its_last_command_said(host: Host, model: Model) -> None:
    with environment(host) as made:
        assert agent(made).run(script(END)) == {"exit_status": "Submitted", "submission": LOG}
        turns = [one.protection for one in made.sandbox.exchanges()]
        assert turns == ["durable"] * 5
        assert made.serialize()["info"]["config"]["environment"]["sandbox"] == made.sandbox.name
        assert made.get_template_vars()["system"] == "Linux"
    assert model.steps == [0, 1, 2, 3, 4]
    assert host.sandboxes() == [], "it had no name, so it is gone"


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("after", [0.0, 0.3, 1.0])
def test_an_agent_whose_sandbox_was_killed_begins_again_and_nothing_is_done_twice(
    host: Host, model: Model, step: int, after: float
) -> None:
    with host.create("mini", model_access=None, start=False):
        pass
    with environment(host, "mini") as made:
        killer = kill_when(host, "mini", lambda: step in model.steps, f"question {step}", after)
        with pytest.raises(CrabError):
            agent(made).run(script(END))
        killer.join()
    asked = model.steps
    with environment(host, "mini") as again:  # brings it back
        assert agent(again).run(script(END)) == {"exit_status": "Submitted", "submission": LOG}
        assert again.sandbox.run(["cat", "/root/log"]).text() == LOG
        again.sandbox.remove(force=True)
    assert sorted(set(model.steps)) == [0, 1, 2, 3, 4]
    assert len(model.steps) == 5, f"asked again: {model.steps[len(asked) :]} after {asked}"


def test_what_a_command_came_to_is_told_as_by_the_other_environments(host: Host, tmp_path: Path) -> None:
    with environment(host) as made:
        assert made.execute({"command": "echo out; echo err >&2; exit 3"}) == {
            "output": "out\nerr\n",
            "returncode": 3,
            "exception_info": "",
        }
        late = made.execute({"command": "echo begun; sleep 60"}, timeout=1)
        assert late["output"] == "begun\n" and late["returncode"] == -1
        assert late["extra"]["exception_type"] == "TimeoutExpired"
        assert made.execute({"command": "pwd"}, "/usr")["output"] == "/usr\n"
        assert made.execute({"command": "true"}, "/none")["extra"]["exception_type"] == "ExecFailed"
        made.sandbox.kill()
        with pytest.raises(CrabError):
            made.execute({"command": "true"})
