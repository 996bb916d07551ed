"""Real agents in sandboxes that are killed: each comes back, does nothing twice, and is answered from the record.

They need the image `agents` in the state directory of the tests, which is not made by itself: docs/clients.md says how.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from e2e.box import Box
from e2e.clients import CLIENTS, LOG, STEPS, Client, Model, Run

from crab.daemon import requests as ask
from crab.daemon.service import Service
from crab.model import ModelAccess

pytestmark = [pytest.mark.kernel, pytest.mark.criu, pytest.mark.slow, pytest.mark.timeout(300)]
IMAGE = "agents"


@pytest.fixture
def run(service: Service, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """A client that has just been started."""
    if not any(image.name == IMAGE for image in service.handle(ask.ImageList())):
        pytest.skip("there is no image `agents` in the state directory of the tests (CRAB_TEST_CLIENTS=1 makes it)")
    client: Client = request.param
    model = Model(1)
    monkeypatch.setattr("crab.turns.coordinator.Mock", lambda: model)
    made = service.handle(ask.Create(image=IMAGE, model=ModelAccess(upstream="mock")))
    try:
        yield Run(Box(service, made.name), client, model, wait=0.0)
    finally:
        service.handle(ask.Remove(sandbox=made.name, force=True))


@pytest.mark.parametrize("run", CLIENTS, ids=lambda client: client.name, indirect=True)
def test_a_real_agent_goes_on_where_it_was_when_its_sandbox_is_killed(run: Run) -> None:
    for moment, step in (("model thinking", 1), ("tool running", 2)):
        run.until(moment, step)
        run.box.ask(ask.Kill)
        run.box.ask(ask.Recover)
        run.model.thinks.clear()
    run.all_done()
    assert run.box.read("/work/log") == LOG, "each command was run once"
    assert run.model.steps == list(range(len(STEPS) + 1)), "the model was asked once for each"
    assert [one.protection for one in run.mains()] == ["durable"] * (len(STEPS) + 1)
    turns = [one.turn for one in run.mains()]
    assert turns == sorted(set(turns)), "each question of the main loop ended a turn of its own"
