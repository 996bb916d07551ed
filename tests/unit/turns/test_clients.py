"""Who asks: the recorded requests of real clients, and the rules one by one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from crab.turns import wires
from crab.turns.clients import Caller, classify, known
from crab.turns.wires.wire import Ask

REQUESTS = Path(__file__).with_name("requests")
SAMPLES = sorted(path.stem for path in REQUESTS.glob("*.json"))
CLAUDE = {"User-Agent": "claude-cli/2.1.332 (external, cli)", "X-Claude-Code-Session-Id": "s"}
OPENCODE = {"User-Agent": "opencode/1.18.33 ai-sdk"}
RESULT = b'{"content":[{"result_of":1,"type":"tool_result"}],"role":"user"}'


def asks(*items: bytes, tools: tuple[str, ...] = (), wire: str = "anthropic") -> Ask:
    return Ask(wire=wire, model="m", stream=True, items=items or (b'"hi"',), tools=tools)


def recorded(name: str) -> Caller:
    sample = json.loads((REQUESTS / f"{name}.json").read_text())
    path = sample["path"].partition("?")[0]
    wire = wires.find("POST", path)
    assert wire
    return classify(sample["headers"], wire.read(path, json.dumps(sample["body"]).encode()))


@pytest.mark.parametrize("name", SAMPLES)
def test_each_recorded_request_is_known_for_what_it_is(name: str) -> None:
    caller = recorded(name)
    assert caller.kind == json.loads((REQUESTS / f"{name}.json").read_text())["kind"]
    assert caller.why.endswith(".")
    if name == "inspect-ai-responses-probe":
        assert caller.client == "unknown", "it sends no header that would tell"
    else:
        assert name.startswith(caller.client)


def test_a_sub_agent_is_a_main_loop_with_a_name_of_its_own() -> None:
    main, sub = (classify({**CLAUDE, **more}, asks(tools=("Bash",))) for more in ({}, {"x-claude-code-agent-id": "a1"}))
    assert (main.kind, main.session, main.agent) == ("main", "s", "")
    assert (sub.kind, sub.session, sub.agent) == ("main", "s", "a1")


def test_a_session_with_a_parent_is_a_sub_agent_of_it() -> None:
    one = classify({**OPENCODE, "X-Session-Id": "s"}, asks(tools=("bash",)))
    sub = classify({**OPENCODE, "X-Session-Id": "t", "x-parent-session-id": "s"}, asks(tools=("bash",)))
    assert [(c.session, c.agent) for c in (one, sub)] == [("s", ""), ("s", "t")]
    headers = {"user-agent": "codex_exec/0.171.0", "session-id": "s"}
    threads = [classify({**headers, "thread-id": thread}, asks(tools=("f",))).agent for thread in ("s", "t")]
    assert threads == ["", "t"]


def test_names_of_headers_may_be_written_in_any_way() -> None:
    shouted = {name.upper(): value for name, value in CLAUDE.items()}
    assert classify(shouted, asks()) == classify(CLAUDE, asks())


@pytest.mark.parametrize(
    ("headers", "ask", "kind"),
    [
        (CLAUDE, asks(tools=("Bash", "web_search")), "main"),
        (CLAUDE, asks(tools=("web_search",)), "helper"),
        (CLAUDE, asks(), "helper"),
        (CLAUDE, asks(b'"hi"', RESULT), "main"),
        (OPENCODE, asks(b'"hi"', RESULT, b'"summarize"'), "helper"),
        ({}, asks(), "main"),
        ({"User-Agent": "curl/8"}, asks(tools=("web_search",)), "main"),
        ({"User-Agent": "OpenAI/Python 3", "x-stainless-raw-response": "true"}, asks(), "main"),
        ({"User-Agent": "OpenAI/Python 3", "x-stainless-raw-response": "true"}, asks(b'{"content":"*Briefly* summarize this partial conversation"}'), "helper"),
        ({"User-Agent": "OpenAI/Python 3"}, asks(b'{"content":"Please say \'hello, world\'"}'), "helper"),
        ({"User-Agent": "OpenAI/Python 3"}, asks(b'"hi"', b'{"content":"Please say \'hello, world\'"}'), "main"),
        ({"User-Agent": "OpenAI/Python 3"}, asks(b'{"content":"Please say \'hello, world\'"}', tools=("bash",)), "main"),
        ({"User-Agent": "Agents/Python 0.24.0"}, asks(), "helper"),
        ({"User-Agent": "GeminiCLI/0.61.0/gemini-2.5-flash (linux)"}, asks(), "helper"),
        ({"User-Agent": "GeminiCLI/0.61.0"}, asks(b'{"parts":[{"functionResponse":{}}]}'), "main"),
        ({"x-litellm-session-id": "s"}, asks(), "helper"),
    ],
)  # fmt: skip
def test_a_request_is_the_main_loops_unless_it_is_plain_that_it_is_not(
    headers: dict[str, str], ask: Ask, kind: str
) -> None:
    assert classify(headers, ask).kind == kind


def test_a_text_that_speaks_of_results_is_none() -> None:
    said = json.dumps({"content": 'say "result_of":1 and "functionResponse":{}'}, separators=(",", ":")).encode()
    assert classify(CLAUDE, asks(said)).kind == "helper"


def test_the_rules_are_read_and_the_last_one_fits_everybody() -> None:
    rules = known()
    names = [client.name for client in rules]
    assert len(set(names)) == len(names)
    last = rules[-1]
    assert not (last.user_agent or last.headers or last.only_tools or last.declares_tools or last.keep_alive)
    assert all(client.user_agent or client.headers for client in rules[:-1])
    assert all(name == name.lower() for c in rules for name in (*c.headers, *c.session, *c.agent))
