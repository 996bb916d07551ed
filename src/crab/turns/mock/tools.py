"""Which of a client's tools runs a command or takes the final text, and with which arguments.

Knows the tools of the common agents by name, others by the shape of their arguments. Knows no API.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from crab.model import Struct
from crab.turns.mock.conversation import Json, Tool
from crab.turns.wires.shape import record, records

SHELLS = (
    *("Bash", "bash", "exec_command", "shell_command", "shell", "local_shell", "run_shell_command"),
    *("execute_bash", "terminal", "bash_session", "run_command", "execute_command", "container.exec"),
)
"""Claude Code; mini-swe-agent, opencode and inspect_ai; Codex in its versions; Gemini CLI; OpenHands; and others."""
FINISHES = ("submit", "finish", "final_answer", "complete_task", "attempt_completion")
COMMAND = ("command", "cmd", "commands", "script")
"""Names of the argument that takes a command."""
MESSAGE = ("message", "answer", "result", "text")
"""Names of the argument that takes a final text."""
SECONDS = 60
_WORDS = {"title": "A scripted session", "cwd": ".", "workdir": ".", "path": "."}
_FILLED = "scripted"


class Call(Struct, kw_only=True):
    """A call of a tool."""

    tool: str
    kind: Literal["function", "custom", "local_shell", "shell"] = "function"
    arguments: Json = {}
    """Of a function."""
    text: str = ""
    """Of everything else: the command."""


def shell(tools: Iterable[Tool]) -> Tool | None:
    """The tool that runs commands."""
    usable = [tool for tool in tools if tool.kind != "other"]
    named = {tool.name: tool for tool in usable}
    for name in SHELLS:
        if name in named:
            return named[name]
    built_in = [tool for tool in usable if tool.kind in ("local_shell", "shell")]
    fitting = [tool for tool in usable if tool.kind == "function" and tool.name not in FINISHES and _takes_a_text(tool)]
    fitting.sort(key=lambda tool: _argument(tool.schema, COMMAND) not in COMMAND)
    return next(iter(built_in + fitting), None)


def command(tool: Tool, line: str) -> Call:
    """The call of a shell tool that runs a line."""
    if tool.kind == "function":
        return Call(tool=tool.name, arguments=_arguments(tool.schema, _argument(tool.schema, COMMAND), line))
    assert tool.kind != "other"
    return Call(tool=tool.name, kind=tool.kind, text=line)


def finish(tools: Iterable[Tool], text: str) -> Call | None:
    """The call that hands over the final text, if there is a tool for it."""
    named = {tool.name: tool for tool in tools if tool.kind == "function"}
    for name in FINISHES:
        if name in named:
            schema = named[name].schema
            takes = bool(record(schema.get("properties")))
            return Call(tool=name, arguments=_arguments(schema, _argument(schema, MESSAGE), text) if takes else {})
    return None


def value(name: str, schema: Json) -> Any:
    """Something that a schema takes."""
    for fixed in ("default", "const"):
        if fixed in schema:
            return schema[fixed]
    choices = schema.get("enum")
    if isinstance(choices, list) and choices:
        return "LOW" if "LOW" in choices else choices[0]
    kinds = _kinds(schema)
    if "null" in kinds or schema.get("nullable") is True:
        return None
    kind = kinds[0] if kinds else "string"
    if kind in ("integer", "number"):
        return schema.get("minimum", SECONDS * 1000 if name.endswith("ms") else SECONDS)
    if kind == "object":
        properties = record(schema.get("properties"))
        return {key: value(key, record(properties.get(key))) for key in _required(schema)}
    return {"boolean": False, "array": []}.get(kind, _WORDS.get(name, _FILLED))


def _arguments(schema: Json, takes: str, line: str) -> Json:
    """Arguments of which `takes` is the line and the other required ones are filled."""
    properties = record(schema.get("properties"))
    given: Any = line
    if "array" in _kinds(record(properties.get(takes))):
        given = [line] if takes == "commands" else ["bash", "-lc", line]
    others = [key for key in _required(schema) if key != takes]
    return {takes: given} | {key: value(key, record(properties.get(key))) for key in others}


def _argument(schema: Json, names: tuple[str, ...]) -> str:
    """Name of the argument that takes a text: a known one, else the first that fits."""
    properties = record(schema.get("properties"))
    texts = [key for key, inner in properties.items() if "string" in _kinds(record(inner))]
    required = [key for key in texts if key in _required(schema)]
    return next((name for name in names if name in properties), (required + texts + [names[0]])[0])


def _takes_a_text(tool: Tool) -> bool:
    """It can be called with one text and nothing else."""
    properties = record(tool.schema.get("properties"))
    needed = _required(tool.schema) or list(properties)
    return len(needed) == 1 and "string" in _kinds(record(properties.get(needed[0])))


def _required(schema: Json) -> list[str]:
    names = schema.get("required")
    return [str(name) for name in names] if isinstance(names, list) else []


def _kinds(schema: Json) -> list[str]:
    """Types that a schema takes; Gemini writes them in capitals."""
    kinds = schema.get("type")
    found = [str(kind).lower() for kind in (kinds if isinstance(kinds, list) else [kinds]) if kind]
    for either in ("anyOf", "oneOf"):
        found += [kind for inner in records(schema.get(either)) for kind in _kinds(inner)]
    return found
