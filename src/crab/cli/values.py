"""Values on the command line: sizes, durations, mounts, variables, references; and the options that several commands have.
Pure parsing."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from crab.checkpoint import refs
from crab.errors import InvalidRequest
from crab.model import Mount

if TYPE_CHECKING:
    _ParamType = click.ParamType[Any]
else:
    _ParamType = click.ParamType  # generic since click 8.4 only

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SECONDS = {"": 1.0, "s": 1.0, "ms": 0.001, "m": 60.0, "min": 60.0, "h": 3600.0}


def parse_size(text: str) -> int:
    """`512M`, `2G`, `1.5GiB`, or bytes; units are powers of 1024. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if not match:
        raise ValueError(f"{text!r} is not a size: write 512M or 2G")
    return int(float(match[1]) * _UNITS[match[2]])


def parse_seconds(text: str) -> float:
    """`30`, `1.5s`, `500ms`, `2min`, `1h`. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if not match or match[2] not in _SECONDS:
        raise ValueError(f"{text!r} is not a duration: write 30s, 500ms, 2min or 1h")
    return float(match[1]) * _SECONDS[match[2]]


def parse_mount(text: str) -> Mount:
    """`SOURCE:TARGET[:copy|bind][:ro]`; the source is made absolute. Raises ValueError."""
    parts = text.split(":")
    words = parts[2:]
    kinds = [word for word in words if word in ("copy", "bind")]
    strange = [word for word in words if word not in ("copy", "bind", "ro", "rw")]
    if len(parts) < 2 or not parts[0] or not parts[1] or strange or len(kinds) > 1:
        raise ValueError(f"{text!r} is not a mount: write SOURCE:TARGET, with :copy or :bind, and :ro if wanted")
    source, target = os.path.abspath(os.path.expanduser(parts[0])), parts[1]
    return Mount(source=source, target=target, kind="bind" if kinds == ["bind"] else "copy", read_only="ro" in words)


class _Parsed(_ParamType):
    def __init__(self, name: str, parse: Any) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


SIZE = _Parsed("size", parse_size)
SECONDS = _Parsed("duration", parse_seconds)
MOUNT = _Parsed("mount", parse_mount)
GATE = click.option(
    "--gate",
    type=click.Choice(["durable", "captured", "none"]),
    default="durable",
    show_default=True,
    help="How safe a turn must be before the agent may act on the next answer.",
)
TOOLS = click.option(
    "--tools", is_flag=True, help="Let the agent save, compare, rewind and try by itself, over MCP (docs/mcp.md)."
)


class SandboxName(_ParamType):
    """A sandbox, completed by the shell if the daemon answers."""

    name = "sandbox"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        from crab.daemon.requests import SandboxList
        from crab.errors import CrabError
        from crab.sdk.sync import connect

        try:
            with connect() as host:
                found = host.call(SandboxList())
        except CrabError:
            return []
        return [CompletionItem(box.name, help=str(box.state)) for box in found if box.name.startswith(incomplete)]


SANDBOX = SandboxName()


def variables(words: Sequence[str], environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """`NAME=VALUE` each; `NAME` alone takes the value from the caller's environment. Raises `InvalidRequest`."""
    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name:
            raise InvalidRequest(f"{word!r} is not a variable", remedy="write NAME=VALUE")
        if not equals:
            source = os.environ if environment is None else environment
            if name not in source:
                raise InvalidRequest(f"your environment has no variable {name}", remedy="write NAME=VALUE")
            value = source[name]
        found[name] = value
    return found


def checkpoint_of(text: str) -> tuple[str, str]:
    """`SANDBOX@REF`, both given. Raises `InvalidRequest` if the checkpoint is not named."""
    sandbox, at, ref = text.partition("@")
    if not at or not ref or not sandbox:
        raise InvalidRequest(
            f"{text!r} names no checkpoint",
            remedy=f"write {sandbox or 'SANDBOX'}@REF; `crab turns {sandbox}` lists them",
        )
    return sandbox, ref


def checkpoint_or_head(text: str) -> tuple[str, str]:
    """`SANDBOX@REF`; without a ref it is `head`."""
    return refs.split(text)


def copy_ends(source: str, target: str) -> tuple[str, str, str, bool]:
    """(sandbox, path on the host, path in the sandbox, whether it goes in). Raises `InvalidRequest`.

    `NAME:/PATH` is in a sandbox. A path of the host that has a colon is written with a `/` before it (`./a:b`).
    """
    ends = [_end(source), _end(target)]
    inside = [end for end in ends if end[0]]
    if len(inside) != 1:
        what = "both are in sandboxes" if inside else "none of them is in a sandbox"
        raise InvalidRequest(
            f"cannot copy {source} to {target}: {what}",
            remedy="write crab cp FILE SANDBOX:/PATH or crab cp SANDBOX:/PATH FILE",
        )
    goes_in = bool(ends[1][0])
    return inside[0][0], (source if goes_in else target), inside[0][1], goes_in


def _end(text: str) -> tuple[str, str]:
    sandbox, colon, path = text.partition(":")
    if not colon or "/" in sandbox or not sandbox:
        return "", text
    return sandbox, path


def command_line(words: Sequence[str]) -> tuple[str, ...]:
    """The command after the options, without a `--` before it. Raises `InvalidRequest`."""
    command = tuple(words[1:] if words and words[0] == "--" else words)
    if not command:
        raise InvalidRequest("no command was given", remedy="crab exec SANDBOX COMMAND [ARGUMENT]…")
    return command
