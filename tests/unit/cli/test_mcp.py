"""`crab mcp` as the official client sees it, and what is said where the SDK is missing."""

from __future__ import annotations

import asyncio
import importlib
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from unit.standin import StandIn, sample, served

from crab import errors, model
from crab.cli import mcp as verb
from crab.cli.app import run
from crab.cli.session import Session
from crab.daemon import requests as ask

BOX = msgspec.structs.replace(sample(model.Sandbox), returns=(), not_rolled_back=())


def test_without_the_sdk_it_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(verb.importlib, "import_module", missing)
    with pytest.raises(errors.HostUnsuitable, match=r"pip install 'crab-runtime\[mcp\]'"):
        verb._part("mcp.server.lowlevel")
    monkeypatch.undo()
    if importlib.util.find_spec("mcp") is None:
        assert run(["mcp", "x"], Session()) == errors.HostUnsuitable.exit_status
        assert "remedy: pip install" in capsys.readouterr().err


def test_the_official_client_lists_and_calls_the_tools_of_one_sandbox(tmp_path: Path) -> None:
    sdk = pytest.importorskip("mcp")
    stdio = pytest.importorskip("mcp.client.stdio")
    service = StandIn()
    service.answers |= {ask.Inspect: BOX, ask.Turns: ()}
    service.answers[ask.TakeCheckpoint] = errors.Busy("it is busy", remedy="wait")
    path = tmp_path / "crab.sock"

    async def talk() -> None:
        words = ["-m", "crab.cli", "--socket", str(path), "mcp", "x"]
        server = stdio.StdioServerParameters(command=sys.executable, args=words)
        async with stdio.stdio_client(server) as streams, sdk.ClientSession(*streams) as session:
            begun = await session.initialize()
            assert begun.instructions and "you go on" in begun.instructions
            listed = await session.list_tools()
            assert [tool.name for tool in listed.tools] == ["checkpoint", "list", "diff", "rewind", "fork_and_try"]
            said = await session.call_tool("list", {})
            assert said.content[0].text == "Nothing was saved yet."
            failed = (await session.call_tool("checkpoint", {})).model_dump(by_alias=True)
            assert failed["isError"] and failed["content"][0]["text"] == "it is busy\nremedy: wait"
            assert (await session.call_tool("rm", {})).model_dump(by_alias=True)["isError"]

    with served(service, path):
        asyncio.run(asyncio.wait_for(talk(), 30))
