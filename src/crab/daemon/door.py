"""What comes in is checked here, once: types, bounds, and texts that no system call could take. Pure functions.

A struct made in Python was never checked, unlike one that came over the socket; and a zero byte would end a path or an
environment entry too early instead of being refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, cast

import msgspec

from crab.errors import InvalidRequest
from crab.model import ExecSpec, Struct

S = TypeVar("S", bound=Struct)
_RAW = (bytes, bytearray, memoryview)
_REMEDY = "see docs/api.json for what can be asked"


def checked(asked: S, what: str) -> S:
    """The same, if its fields have the types and bounds that they say and its texts can be texts of the system. Raises
    `InvalidRequest`, which names `what`."""
    try:
        plain = msgspec.to_builtins(asked, builtin_types=_RAW)
        asked = msgspec.convert(plain, type(asked), builtin_types=_RAW)
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        raise InvalidRequest(f"{what}: {error}", remedy=_REMEDY) from error
    for text in _texts(plain):
        if "\0" in text:
            raise InvalidRequest(f"{what}: {text[:200]!r} has a zero byte in it", remedy="leave it out")
        try:
            os.fsencode(text)
        except UnicodeEncodeError:
            raise InvalidRequest(
                f"{what}: {text[:200]!r} stands for no bytes",
                remedy="use os.fsdecode for names that are not UTF-8",
            ) from None
    return asked


def checked_command(spec: ExecSpec) -> ExecSpec:
    """The same for a command."""
    spec = checked(spec, "command")
    if not spec.argv:
        raise InvalidRequest("the command is empty", remedy="give a program and its arguments")
    if len(os.fsencode(spec.name)) > 63:
        raise InvalidRequest(f"{spec.name!r} is too long for a command's name", remedy="use at most 63 bytes")
    check_variables(spec.env)
    return spec


def check_variables(env: Mapping[str, str]) -> None:
    """Raises `InvalidRequest` for names of variables that no environment can hold."""
    for name in env:
        if not name or "=" in name:
            raise InvalidRequest(f"the environment cannot hold {name!r}", remedy="give a name without '='")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for item in cast("list[Any]", value):
            yield from _texts(item)
    elif isinstance(value, dict):
        for pair in cast("dict[Any, Any]", value).items():
            yield from _texts(pair)
