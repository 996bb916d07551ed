"""`crab mcp`: the tools of `crab.daemon.tools` over standard input and output, for an agent on the host.

The protocol is the official SDK's (PyPI `mcp`), which is an extra: it is imported here only, and only when it is used.
"""

from __future__ import annotations

import asyncio
import importlib
from typing import Any

import click

from crab import __version__
from crab.cli.session import Session
from crab.cli.values import SANDBOX
from crab.daemon.tools import Kit
from crab.errors import HostUnsuitable
from crab.turns.mcp import Told


@click.command()
@click.argument("sandbox", type=SANDBOX)
@click.pass_obj
def mcp(session: Session, sandbox: str) -> None:
    """Give an agent on the host tools to save, rewind and try, over MCP.

    For an agent whose commands run in SANDBOX (`crab exec`, the SDK). Speaks MCP on standard input and output, so it stands in
    the agent's configuration: command `crab`, arguments `mcp SANDBOX`. Needs the extra: pip install 'crab-runtime[mcp]'.

    An agent that lives in its sandbox has these tools at its door if the sandbox was made with --tools (docs/mcp.md).
    """
    sdk, stdio, types = (_part(name) for name in ("mcp.server.lowlevel", "mcp.server.stdio", "mcp.types"))
    with session.host() as host:
        kit = Kit(host.call, host.sandbox(sandbox).id, inside=False)
        asyncio.run(_serve(kit, sdk, stdio, types))


def _part(name: str) -> Any:
    """A module of the SDK. Raises `HostUnsuitable`."""
    remedy = "pip install 'crab-runtime[mcp]', into the environment of this crab"
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise HostUnsuitable(f"the MCP SDK for Python is not installed here: {error}", remedy=remedy) from error
    return module


async def _serve(kit: Kit, sdk: Any, stdio: Any, types: Any) -> None:
    """Answer until the end of the input."""

    async def listed(*_: Any) -> Any:
        return types.ListToolsResult.model_validate({"tools": kit.described()})

    async def called(_: Any, params: Any) -> Any:
        try:
            said = await asyncio.to_thread(kit.use, params.name, params.arguments or {})
        except LookupError as error:
            said = Told(text=str(error), failed=True)
        content = [types.TextContent(type="text", text=said.text)]
        return types.CallToolResult.model_validate({"content": content, "isError": said.failed})

    server = sdk.Server(
        "crab", version=__version__, instructions=kit.instructions, on_list_tools=listed, on_call_tool=called
    )
    async with stdio.stdio_server() as (reading, writing):
        await server.run(reading, writing, server.create_initialization_options())
