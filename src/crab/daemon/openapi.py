"""The OpenAPI 3.1 description of the daemon's API, made from the typed requests.

Descriptions come from the docstrings of the structs and of their fields. `docs/api.json` is this text;
`python -m crab.cli.reference` writes and checks it.
"""

from __future__ import annotations

import ast
import functools
import inspect
from types import ModuleType
from typing import Any

import msgspec

from crab import __version__, model
from crab.daemon import requests, wire
from crab.daemon.requests import CALLS, Version
from crab.model import ExecStatus

_REFERENCE = "#/components/schemas/{name}"


@functools.cache
def description() -> dict[str, Any]:
    """The whole document. Do not change it: it is made once."""
    types = [t for call in CALLS.values() for t in (call, call.returns)] + [
        wire.Spawn,
        wire.Started,
        wire.Signal,
        wire.Resize,
        ExecStatus,
    ]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REFERENCE)
    schema_of = dict(zip(map(repr, types), schemas, strict=True))

    def schema(kind: Any) -> dict[str, Any]:
        return schema_of[repr(kind)]

    paths: dict[str, Any] = {}
    for name, call in CALLS.items():
        paths[f"/v1/call/{name}"] = {
            "post": {
                "operationId": name,
                "summary": _first_line(call),
                "description": inspect.getdoc(call) or "",
                "parameters": [_version_header()],
                "requestBody": {"required": True, "content": _json(schema(call))},
                "responses": {"200": _said("The answer", _json(schema(call.returns))), "default": _error()},
            }
        }
    paths["/v1/turns"] = {
        "post": paths[f"/v1/call/{requests.TakeCheckpoint.operation}"]["post"]
        | {"operationId": "endTurn", "summary": "End a turn, for agents whose model is not reached through Crab."}
    }
    paths |= _commands(schema)
    paths["/v1/about"] = {
        "get": {
            "operationId": "getAbout",
            "summary": _first_line(requests.About),
            "responses": {"200": _said("The answer", _json(schema(Version))), "default": _error()},
        }
    }
    paths["/v1/openapi.json"] = {
        "get": {
            "operationId": "getOpenapi",
            "summary": "This description.",
            "responses": {"200": _said("OpenAPI 3.1", _json({"type": "object"}))},
        }
    }
    for name, fields in _field_docs().items():
        for field, text in fields.items():
            properties = components.get(name, {}).get("properties", {})
            if field in properties:
                properties[field] = {"description": text, **properties[field]}
    components["Error"] = _error_schema()
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Crab",
            "version": __version__,
            "description": (
                "Checkpoint, rewind, fork and recover the sandboxes of AI agents. Served on a unix socket "
                "(/run/crab/crab.sock). Bytes in JSON are base64. Every refusal is an Error."
            ),
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "http://crab", "description": "over the unix socket; the host name does not matter"}],
        "paths": dict(sorted(paths.items())),
        "components": {"schemas": dict(sorted(components.items()))},
    }


def _commands(schema: Any) -> dict[str, Any]:
    """The streams of commands, which are no calls."""
    where = [
        {"name": "sandbox", "in": "path", "required": True, "schema": {"type": "string"}, "description": "Name or id."},
        {
            "name": "command",
            "in": "path",
            "required": True,
            "schema": {"type": "string"},
            "description": "Name or number.",
        },
        _version_header(),
    ]
    done = {"200": _said("Done", _json({"type": "object"})), "default": _error()}

    def post(
        identity: str, summary: str, body: dict[str, Any] | None = None, extra: tuple[Any, ...] = ()
    ) -> dict[str, Any]:
        operation: dict[str, Any] = {
            "operationId": identity,
            "summary": summary,
            "parameters": [*where, *extra],
            "responses": done,
        }
        if body is not None:
            operation["requestBody"] = {"required": True, "content": body}
        return {"post": operation}

    raw = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    end = {
        "name": "eof",
        "in": "query",
        "schema": {"type": "string", "enum": ["1"]},
        "description": "No more input comes after it.",
    }
    base = "/v1/commands/{sandbox}/{command}"
    return {
        "/v1/commands": {
            "post": {
                "operationId": "spawn",
                "summary": "Start a command whose output is read as a stream.",
                "parameters": [_version_header()],
                "requestBody": {"required": True, "content": _json(schema(wire.Spawn))},
                "responses": {"200": _said("It runs", _json(schema(wire.Started))), "default": _error()},
            }
        },
        f"{base}/events": {
            "get": {
                "operationId": "events",
                "summary": "The output of a command, as it comes.",
                "description": (
                    "A sequence of frames: one byte for the stream (1 standard output and terminals, 2 standard error), "
                    "four bytes for the length (big endian), the data. The last frame has stream "
                    f"{wire.STATUS} and the JSON of an ExecStatus (one that says `running` after a detach), or stream "
                    f"{wire.ERROR} and the JSON of an Error. When the reader disconnects, the command goes on and its "
                    "further output waits in the sandbox for the next reader; what was sent counts as read. One reader "
                    "at a time, another is refused as Busy."
                ),
                "parameters": where,
                "responses": {
                    "200": {
                        **_said("Frames", {wire.FRAMES: {"schema": {"type": "string", "format": "binary"}}}),
                        "headers": {
                            wire.COMMAND_HEADER: {
                                "description": "JSON of Started, percent-encoded.",
                                "schema": {"type": "string"},
                            }
                        },
                    },
                    "default": _error(),
                },
            }
        },
        f"{base}/input": post(
            "input", "Give input to a command whose events are being read; answered when it has taken it.", raw, (end,)
        ),
        f"{base}/signal": post("signal", "Send a signal to the command's process group.", _json(schema(wire.Signal))),
        f"{base}/resize": post("resize", "Change the size of the command's terminal.", _json(schema(wire.Resize))),
        f"{base}/kill": post("killCommand", "SIGKILL the command and everything that it has started."),
        f"{base}/detach": post("detach", "End the stream of events; the command goes on and its output waits."),
    }


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _said(description: str, content: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": content}


def _error() -> dict[str, Any]:
    return _said("Refused or failed", _json({"$ref": _REFERENCE.format(name="Error")}))


def _version_header() -> dict[str, Any]:
    return {
        "name": wire.API_HEADER,
        "in": "header",
        "schema": {"type": "string", "const": str(wire.API)},
        "description": "Version of the API that the client speaks; another one is refused.",
    }


def _error_schema() -> dict[str, Any]:
    return {
        "title": "Error",
        "type": "object",
        "description": "What happened and what to do about it. docs/errors.md lists the classes with their HTTP statuses.",
        "properties": {
            "error": {"type": "string", "description": "Name of the class."},
            "message": {"type": "string"},
            "remedy": {"type": "string"},
            "details": {"type": "object"},
        },
        "required": ["error", "message", "remedy", "details"],
    }


def _first_line(kind: type) -> str:
    return (inspect.getdoc(kind) or "").partition("\n")[0]


def _field_docs() -> dict[str, dict[str, str]]:
    """For each struct the texts that stand under its fields. Python forgets them; the source does not."""
    found: dict[str, dict[str, str]] = {}
    for module in (model, requests, wire):
        found |= _docs_of(module)
    return found


def _docs_of(module: ModuleType) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(module)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field, text in zip(node.body, node.body[1:], strict=False):
            match field, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                    found.setdefault(node.name, {})[name] = inspect.cleandoc(words)
                case _:
                    pass
    return found
