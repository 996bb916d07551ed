"""What all verbs share: which host they talk to, and how they print."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from crab import lenient
from crab.errors import CrabError

if TYPE_CHECKING:
    from crab.cli.text import Table
    from crab.sdk.sync import Host
    from crab.sdk.transport import Transport

F = TypeVar("F", bound=Callable[..., Any])


@dataclass
class Session:
    """The global options."""

    embedded: bool = False
    state: Path | None = None
    socket: Path | None = None
    json: bool = False
    transport: Transport | None = None
    """Another way to a service than the options name."""

    def host(self) -> Host:
        """The host to talk to; a context manager."""
        from crab.sdk.sync import Host, connect

        if self.transport is not None:
            return Host(transport=self.transport)
        return Host(self.state) if self.embedded else connect(self.socket)

    def show(self, data: Any, text: Callable[[], Table | str]) -> None:
        """Print data: as one JSON document if that is wanted, else as text."""
        if self.json:
            click.echo(json_text(data))
            return
        shown = text()
        if isinstance(shown, str):
            if shown:
                click.echo(shown)
        elif sys.stdout.isatty():
            from crab.cli.pretty import print_table

            print_table(shown)
        else:
            from crab.cli.text import plain

            click.echo(plain(shown))

    def note(self, text: str) -> None:
        """Say what is being done, on standard error; nothing to a program."""
        if not self.json:
            click.echo(f"crab: {text}", err=True)


def json_text(data: Any) -> bytes:
    """Data as indented JSON. Bytes are base64, names of files that are no UTF-8 have surrogate escapes."""
    import msgspec

    encoded = lenient.encode(data)
    try:
        return msgspec.json.format(encoded)
    except msgspec.DecodeError:
        return encoded


def json_option(function: F) -> F:
    """Adds `--json`."""

    def remember(ctx: click.Context, _: click.Parameter, value: bool) -> None:
        if value:
            ctx.ensure_object(Session).json = True

    option = click.option(
        "--json", is_flag=True, expose_value=False, callback=remember, help="Print one JSON document."
    )
    return option(function)


def each(session: Session, names: Iterable[str], action: Callable[[str], Any]) -> tuple[list[Any], int]:
    """Do something for each name, the later ones also if one fails; returns the results and the exit status.

    With `--json` an error stands among the results, else it is said at once.
    """
    from crab.cli.app import say

    results: list[Any] = []
    status = 0
    for name in names:
        try:
            results.append(action(name))
        except CrabError as error:
            if session.json:
                results.append(error.to_wire())
            else:
                say(error)
            status = error.exit_status
    return results, status
