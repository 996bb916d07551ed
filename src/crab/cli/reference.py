"""Writes the references in docs/ from the code: `python -m crab.cli.reference`; with `--check` it compares instead.

docs/cli.md is made from the commands themselves, docs/errors.md from the error tree, docs/api.json from the typed
requests. So they cannot be wrong, and `--check` sees to it that they are not old.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from crab import errors
from crab.cli.app import SECTIONS, cli
from crab.daemon import openapi
from crab.errors import CrabError

_MADE = "<!-- Made by `python -m crab.cli.reference`. Do not edit. -->"
_INTRODUCTION = f"""{_MADE}
# The command line

`crab` talks to the daemon (`crab daemon run`, or the systemd unit in `packaging/crab.service`) over its socket. With
`--embedded` it works without one, in its own process, which must be root's.

`SANDBOX` is the name of a sandbox, its id, or the beginning of its id. `SANDBOX@REF` is one of its checkpoints:

| REF | which |
|---|---|
| `head` | the newest on the branch that is alive; what `crab recover` restores |
| `head~N` | N checkpoints before it |
| a number | the turn of that number, on the branch that is alive |
| a label | the newest with that label |
| an id | that one; its beginning is enough, from four characters on |

Every command that prints data prints it as one JSON document with `--json`: the types of `crab.model` and
`crab.daemon.requests`, sizes in bytes, times in seconds since 1970, bytes as base64. On a terminal tables are in colour (unless
`NO_COLOR` is set), elsewhere they are plain text. Errors go to standard error, with a remedy; with `--json` the document is the
error (`error`, `message`, `remedy`, `details`). [errors.md](errors.md) lists the exit statuses.

| variable | |
|---|---|
| `CRAB_SOCKET` | socket of the daemon, instead of /run/crab/crab.sock |
| `CRAB_STATE` | state directory of the daemon and of `--embedded`, instead of /var/lib/crab |
| `CRAB_PRIVATE` | where a private CRIU lies, instead of /var/lib/crab/private |

## Completion in the shell

```console
eval "$(_CRAB_COMPLETE=bash_source crab)"    # bash, in ~/.bashrc
eval "$(_CRAB_COMPLETE=zsh_source crab)"     # zsh, in ~/.zshrc
_CRAB_COMPLETE=fish_source crab | source     # fish, in ~/.config/fish/completions/crab.fish
```

Names of sandboxes are completed if the daemon answers.
"""


def cli_text() -> str:
    """docs/cli.md."""
    parts = [
        _INTRODUCTION,
        "## Global options\n\nBefore the verb.\n",
        _options(cli, click.Context(cli, info_name="crab")),
    ]
    root = click.Context(cli, info_name="crab")
    for title, verbs in SECTIONS.items():
        parts.append(f"## {title}\n")
        for name in verbs:
            command = cli.get_command(root, name)
            if command is not None:
                parts += _command(command, name, root)
    return "\n".join(parts).rstrip() + "\n"


def _command(command: click.Command, name: str, parent: click.Context) -> Iterator[str]:
    context = click.Context(command, info_name=name, parent=parent)
    if isinstance(command, click.Group):
        for below in command.list_commands(context):
            found = command.get_command(context, below)
            assert found is not None
            yield from _command(found, below, context)
        return
    pieces = command.collect_usage_pieces(context)
    yield f"### {context.command_path}\n"
    yield f"```console\n{' '.join([context.command_path, *pieces])}\n```\n"
    yield _paragraphs(command)
    if table := _options(command, context):
        yield table


def _paragraphs(command: click.Command) -> str:
    """The help text; a block after \\b is kept as it stands."""
    shown: list[str] = []
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        if paragraph.startswith("\b"):
            shown.append("```text\n" + paragraph.removeprefix("\b\n") + "\n```")
        else:
            shown.append(" ".join(paragraph.split()))
    return "\n\n".join(shown) + "\n"


def _options(command: click.Command, context: click.Context) -> str:
    """A table; `--help`, which all have, and arguments, which the usage shows, are left out."""
    options = [option for option in command.params if isinstance(option, click.Option)]
    records = [record for option in options if (record := option.get_help_record(context))]
    if not records:
        return ""
    rows = [f"| `{_cell(names)}` | {_cell(text)} |" for names, text in records]
    return "\n".join(["| option | |", "|---|---|", *rows]) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def errors_text() -> str:
    """docs/errors.md."""
    usage = errors.InvalidRequest.exit_status
    return f"""{_MADE}
# Errors and exit statuses

Every error of Crab says what happened and what to do about it. It is the same class in the Python SDK, in the answers of
the daemon (`error`), and behind the exit status of `crab`. A class that is indented is a kind of the one above it.

| error | exit status | HTTP status | when |
|---|---|---|---|
{chr(10).join(_error_rows(CrabError, 0))}

`crab exec` and `crab shell` end with the status of their command: 128 + N if signal N ended it, 124 if its time limit
did; 126 and 127 as above. `crab verify` ends with 0 only if the checkpoint is proven, `crab doctor` only if nothing is
missing. The others end with 0, with {usage} if the command line makes no sense, with 130 after Ctrl-C, or with one of the
statuses above. With several sandboxes on one command line all are tried, and the last failure gives the status.
"""


def _error_rows(kind: type[CrabError], depth: int) -> Iterator[str]:
    text = " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())
    yield f"| {'&emsp;' * depth}`{kind.__name__}` | {kind.exit_status} | {kind.http_status} | {_cell(text)} |"
    for child in kind.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from _error_rows(child, depth + 1)


def api_text() -> str:
    """docs/api.json."""
    return json.dumps(openapi.description(), indent=2, ensure_ascii=False) + "\n"


DOCUMENTS: dict[str, Callable[[], str]] = {"cli.md": cli_text, "errors.md": errors_text, "api.json": api_text}


def main(arguments: list[str]) -> int:
    """Write the documents into docs/ (or the folder that is named), or check them."""
    check = "--check" in arguments
    folders = [Path(word) for word in arguments if word != "--check"]
    folder = folders[0] if folders else Path(__file__).parents[3] / "docs"
    old = []
    for name, make in DOCUMENTS.items():
        path = folder / name
        text = make()
        if check:
            if not path.exists() or path.read_text() != text:
                old.append(str(path))
        else:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    if old:
        print(f"out of date: {', '.join(old)}; run python -m crab.cli.reference", file=sys.stderr)
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
