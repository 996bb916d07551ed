"""An agent and its model: where it finds it, and what was said."""

from __future__ import annotations

from crab.daemon import requests as ask
from crab.daemon.core import Core
from crab.daemon.dispatch import answers
from crab.errors import InvalidRequest, NotFound, WrongState
from crab.model import Conversation, Exchange
from crab.sandbox import door
from crab.turns import environment, mcp
from crab.turns.exchange import Exchange as Recorded
from crab.turns.upstream import DEFAULTS


@answers(ask.ModelAddress)
def model_address(core: Core, request: ask.ModelAddress) -> ask.Address:
    """Where the models are."""
    record = core.registry.find(request.sandbox)
    if record.spec.model is None:
        raise WrongState(
            f"sandbox {record.name} was made without a model",
            remedy="create it with --model; `crab run` does it by itself",
        )
    url = f"http://{door.ADDRESS}:{door.PORT}" if request.inside else core.coordinator.address(record.id)
    env = environment.variables(url, placeholder=request.inside)
    if request.inside and record.spec.model.tools:
        env[environment.TOOLS] = f"{url}{mcp.PATH}"
    return ask.Address(url=url, env=env)


@answers(ask.ModelKeys)
def model_keys(core: Core, request: ask.ModelKeys) -> bool:
    """Keep keys in memory."""
    if unknown := request.keys.keys() - DEFAULTS.keys():
        raise InvalidRequest(f"there is no API {sorted(unknown)[0]!r}", remedy=f"use {', '.join(DEFAULTS)}")
    core.coordinator.credentials(core.registry.find(request.sandbox).id, request.keys)
    return True


@answers(ask.Exchanges)
def exchanges(core: Core, request: ask.Exchanges) -> tuple[Exchange, ...]:
    """What was asked."""
    record = core.registry.find(request.sandbox)
    return tuple(map(_shown, core.coordinator.record.exchanges(record.id, request.limit)))


@answers(ask.ExchangeText)
def exchange(core: Core, request: ask.ExchangeText) -> Conversation:
    """What was said."""
    sandbox, record = core.registry.find(request.sandbox), core.coordinator.record
    found = next((one for one in record.exchanges(sandbox.id) if one.id == request.number), None)
    if found is None:
        raise NotFound(f"sandbox {sandbox.name} has no exchange {request.number}", remedy="`crab record` lists them")
    return Conversation(
        exchange=_shown(found),
        items=tuple(item.decode(errors="replace") for item in record.conversation(found.id)),
        answer=record.answer(found.id).decode(errors="replace") if found.complete else "",
    )


def _shown(one: Recorded) -> Exchange:
    return Exchange(
        number=one.id,
        turn=one.turn,
        checkpoint=one.checkpoint,
        client=one.client,
        kind=one.kind,
        state=one.state,
        protection=one.protection or "",
        why=one.why or one.note,
        asked=one.asked,
        wait_ms=one.wait_ms or 0.0,
        held_ms=one.held_ms or 0.0,
        calls=one.calls,
        abandoned=one.abandoned,
    )
