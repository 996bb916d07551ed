"""Which function answers which request."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

from crab.daemon.core import Core
from crab.daemon.requests import Request

R = TypeVar("R", bound=Request)
Answer = Callable[[Core, Any], Any]
_MARK = "answers_request"


def answers(kind: type[R]) -> Callable[[Callable[[Core, R], Any]], Callable[[Core, R], Any]]:
    """Mark the function below as the answer to a request; `collect` finds it."""

    def mark(function: Callable[[Core, R], Any]) -> Callable[[Core, R], Any]:
        setattr(function, _MARK, kind)
        return function

    return mark


def collect(*modules: ModuleType) -> dict[type[Request], Answer]:
    """All marked functions of the modules."""
    found: dict[type[Request], Answer] = {}
    for module in modules:
        for function in vars(module).values():
            kind = getattr(function, _MARK, None)
            if kind is not None:
                found[kind] = function
    return found
