"""Crab: checkpoint, rewind, fork and recover the sandboxes of AI agents.

`crab.Host` is a host in this process, `crab.connect` one behind the daemon's socket; `AsyncHost` and `aconnect` are their
asynchronous twins. `crab.model` has the types of the answers, `crab.errors` the errors. All are loaded when they are
used, so that importing `crab` costs nothing.
"""

import importlib
import logging
from typing import Any

__version__ = "0.1.0"

logging.getLogger("crab").addHandler(logging.NullHandler())  # what a library logs is for who asks for it

# Beside the names for the type checker in __init__.pyi. Texts, not imports: every layer imports this package for its
# version, and none but the uppermost may import the SDK.
_HOMES = {
    "AsyncHost": "crab.sdk.aio",
    "AsyncProcess": "crab.sdk.aio",
    "AsyncSandbox": "crab.sdk.aio",
    "CommandFailed": "crab.sdk.words",
    "Host": "crab.sdk.sync",
    "Process": "crab.sdk.sync",
    "Sandbox": "crab.sdk.sync",
    "aconnect": "crab.sdk.aio",
    "connect": "crab.sdk.sync",
}
_MODULES = ("errors", "model")

__all__ = [*_HOMES, *_MODULES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"crab.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'crab' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
