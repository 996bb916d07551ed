"""Recorded runs of agents: the format, and how a file of them is read.

A file holds JSON Lines, one run a line (a file whose name ends in `.json` holds a single run over as many lines as it
likes). The format is described in docs/replay.md. Lines in the manner of recorded SWE-bench runs (`instance_id` in place
of `id`) are read too. Knows nothing of sandboxes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import msgspec
from msgspec import Meta

from crab.errors import CrabError, InvalidRequest, NotFound
from crab.model import Struct

TurnKind = Literal["exec", "shell", "background"]
LONGEST_COMMAND = 128 * 1024 - 1
"""Bytes: what Linux takes as one argument of a program (MAX_ARG_STRLEN, execve(2)), less the zero at its end."""


class Turn(Struct, kw_only=True):
    """One action of the agent."""

    command: str
    """Shell text."""
    kind: TurnKind = "exec"
    """`exec`: a fresh `bash -c`. `shell`: typed into the run's one persistent shell. `background`: started, not waited for."""
    rc: int | None = None
    """Exit status when it was recorded; None: not known, or of no interest."""
    wait_s: float = 0.0
    """Seconds that the model thought before this turn."""
    cwd: str = ""
    """Work directory of `exec` and `background`; empty: the sandbox's."""


class Trajectory(Struct, kw_only=True):
    """One recorded run."""

    id: str
    turns: tuple[Turn, ...]
    image: str = ""
    """Empty: the caller's choice."""
    workdir: str = ""
    """Where commands start; empty: the image's own."""
    files: dict[str, str] = {}
    """Copied in before the set-up: path in the sandbox, path on the host (made absolute when the file was read)."""
    setup: tuple[str, ...] = ()
    """Commands that make the world in which the agent starts. Not turns: every fresh sandbox gets them. They run in `/`."""
    check: str = ""
    """Command that must end with 0 after the last turn if the work was done."""
    observe: tuple[str, ...] = ()
    """Commands whose output and exit status belong to the final state."""
    volatile: tuple[str, ...] = ()
    """Patterns (as in `crab.replay.volatile.PATHS`) of files that differ between any two runs of this very trajectory."""


_Text = str | list[str]


class _TurnLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A turn as it stands in a file."""

    command: _Text
    kind: TurnKind = "exec"
    rc: Annotated[int, Meta(ge=0, le=255)] | None = None
    wait_s: Annotated[float, Meta(ge=0, le=86400)] | None = None
    cwd: str = ""


class _RunLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run as it stands in a file. A field too many is refused: it is most likely a misspelt one."""

    id: Annotated[str, Meta(min_length=1)]
    turns: Annotated[list[_TurnLine], Meta(min_length=1)]
    image: str = ""
    workdir: str = ""
    files: dict[str, str] = {}
    setup: list[_Text] = []
    check: _Text = ""
    observe: list[str] = []
    volatile: list[str] = []


class _RecordedTurn(msgspec.Struct, frozen=True):
    """A turn of a SWE-bench run: the other fields (the model's words, token counts) do not matter here."""

    command: str
    rc: int | None = None


class _RecordedRun(msgspec.Struct, frozen=True):
    """A SWE-bench run. What the image must hold (`repo` at `base_commit`, `python`, `pip`) is its maker's business."""

    instance_id: Annotated[str, Meta(min_length=1)]
    turns: Annotated[list[_RecordedTurn], Meta(min_length=1)]


def read(path: str | Path) -> tuple[Trajectory, ...]:
    """All runs of a file. NotFound if there is no such file; InvalidRequest names the line and what was expected there."""
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise NotFound(
            f"{path} cannot be read: {error.strerror}",
            remedy="give the path of a file of trajectories (docs/replay.md)",
        ) from error
    found: dict[str, Trajectory] = {}
    for number, data in _objects(path, content):
        run = parse(data, where=f"{path}, line {number}", folder=path.parent)
        if run.id in found:
            raise InvalidRequest(
                f"{path}, line {number}: there is a run {run.id!r} further up already",
                remedy="give every run its own id",
            )
        found[run.id] = run
    if not found:
        raise InvalidRequest(f"{path} holds no run", remedy="expected one JSON object a line (docs/replay.md)")
    return tuple(found.values())


def select(runs: tuple[Trajectory, ...], wanted: str) -> Trajectory:
    """The run with that id. NotFound says which there are."""
    for run in runs:
        if run.id == wanted:
            return run
    raise NotFound(f"there is no run {wanted!r}", remedy="choose one of " + ", ".join(run.id for run in runs))


def parse(data: Any, *, where: str = "run", folder: Path = Path()) -> Trajectory:
    """One run of decoded JSON. `where` begins the messages of InvalidRequest, `folder` is where its `files` lie."""
    if not isinstance(data, dict):
        _refuse(where, f"expected a JSON object, found {_kind(data)}")
    try:
        if "instance_id" in data and "id" not in data:
            recorded = msgspec.convert(data, _RecordedRun)
            turns = [_TurnLine(command=turn.command, rc=_status(turn.rc)) for turn in recorded.turns]
            line = _RunLine(id=recorded.instance_id, turns=turns)
        else:
            line = msgspec.convert(data, _RunLine)
        return Trajectory(
            id=line.id,
            turns=tuple(_turn(turn, number) for number, turn in enumerate(line.turns, 1)),
            image=line.image,
            workdir=_absolute(line.workdir, "workdir"),
            files={_absolute(target, "files"): _beside(folder, source) for target, source in line.files.items()},
            setup=tuple(_command(text, f"command {number} of setup") for number, text in enumerate(line.setup, 1)),
            check=_command(line.check, "check") if line.check else "",
            observe=tuple(
                _command(text, f"command {number} of observe") for number, text in enumerate(line.observe, 1)
            ),
            volatile=tuple(_absolute(pattern, "volatile") for pattern in line.volatile),
        )
    except msgspec.ValidationError as error:
        _refuse(where, str(error).replace("`", "'").replace("$.", "").replace(" - at '$'", ""))
    except InvalidRequest as error:
        _refuse(where, error.message)


def _objects(path: Path, content: bytes) -> Iterator[tuple[int, Any]]:
    """Line number and decoded value of each run."""
    if path.suffix == ".json":
        yield 1, _decode(content, str(path), 1)
        return
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip():
            yield number, _decode(line, str(path), number)


def _decode(text: bytes, path: str, first: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        _refuse(f"{path}, line {first + error.lineno - 1}, column {error.colno}", f"this is not JSON: {error.msg}")
    except UnicodeDecodeError as error:
        line = first + text.count(b"\n", 0, error.start)
        _refuse(f"{path}, line {line}", f"byte {error.start + 1} is not UTF-8")
    except RecursionError:
        _refuse(f"{path}, line {first}", "nested too deeply")


def _turn(line: _TurnLine, number: int) -> Turn:
    what = f"turn {number}"
    if line.kind == "shell" and line.cwd:
        raise InvalidRequest(f"{what}: a persistent shell has its own work directory, expected no cwd (use `cd`)")
    return Turn(
        command=_command(line.command, f"the command of {what}"),
        kind=line.kind,
        rc=line.rc,
        wait_s=line.wait_s or 0.0,
        cwd=_absolute(line.cwd, f"cwd of {what}"),
    )


def _command(text: _Text, what: str) -> str:
    command = text if isinstance(text, str) else "\n".join(text)
    if not command.strip():
        raise InvalidRequest(f"{what} is empty, expected shell text")
    if "\0" in command:
        raise InvalidRequest(f"{what} contains a zero byte, which no shell takes")
    try:
        size = len(command.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(f"{what} contains half of a surrogate pair, expected Unicode text") from None
    if size > LONGEST_COMMAND:
        raise InvalidRequest(f"{what} has {size} bytes, expected at most {LONGEST_COMMAND} (what execve takes)")
    return command


def _absolute(path: str, what: str) -> str:
    if path and not path.startswith("/"):
        raise InvalidRequest(f"{what}: expected a path from the sandbox's root, like /root/work, found {path!r}")
    return path


def _beside(folder: Path, source: str) -> str:
    """A host path that lies in or below the folder of the trajectory: whoever writes one must not reach other files."""
    path = (folder / source).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise InvalidRequest(f"files: {source!r} leads out of the folder of the trajectory")
    if not path.exists():
        raise InvalidRequest(f"files: there is no {path}")
    return str(path)


def _status(value: int | None) -> int | None:
    """Recorders write -1 or worse for a command that never ended: then nothing is expected of it."""
    return value if value is not None and 0 <= value <= 255 else None


def _kind(value: Any) -> str:
    names: dict[type, str] = {list: "an array", str: "a string", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")


def _refuse(where: str, message: str) -> NoReturn:
    error: CrabError = InvalidRequest(f"{where}: {message}", remedy="the format is described in docs/replay.md")
    raise error from None
