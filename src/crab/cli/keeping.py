"""Options that say which checkpoints are kept: of `crab prune`, `crab store gc` and `crab daemon run`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import click

from crab.errors import InvalidRequest
from crab.store.retention import Policy

F = TypeVar("F", bound=Callable[..., Any])


def keeping(command: F) -> F:
    """Give a command a parameter `policy`: None if no option says what to keep."""

    @click.option(
        "--keep-last", type=click.IntRange(0), default=None, metavar="N", help="Keep the newest N of each sandbox."
    )
    @click.option("--keep-every", type=click.IntRange(0), default=None, metavar="K", help="Keep every K-th turn.")
    @click.option("--drop-labelled", is_flag=True, help="Do not keep a checkpoint because it has a label.")
    @click.option("--drop-heads", is_flag=True, help="Do not keep a checkpoint because nothing was taken after it.")
    @functools.wraps(command)
    def wrapped(
        *arguments: Any,
        keep_last: int | None,
        keep_every: int | None,
        drop_labelled: bool,
        drop_heads: bool,
        **options: Any,
    ) -> Any:
        policy = None
        if keep_last is not None or keep_every is not None:
            policy = Policy(
                last=keep_last or 0, every=keep_every or 0, labelled=not drop_labelled, heads=not drop_heads
            )
        elif drop_labelled or drop_heads:
            raise InvalidRequest("nothing says what is to be kept", remedy="give --keep-last or --keep-every, too")
        return command(*arguments, policy=policy, **options)

    return wrapped  # type: ignore[return-value]
