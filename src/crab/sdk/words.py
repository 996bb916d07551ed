"""From what callers of the SDK write to what a request states. Pure functions, shared by the facades.

Paths of the host are made absolute here, since the daemon does not run where the caller is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import msgspec

from crab.daemon.requests import Create
from crab.errors import CrabError, InvalidRequest
from crab.model import (
    Checkpoint,
    CheckpointKind,
    ExecResult,
    ExecSpec,
    Limits,
    ModelAccess,
    Mount,
    NetworkMode,
    Struct,
)

Argv = Sequence[str] | str
"""A program and its arguments; one text is a command line for `sh -c`."""
Ref = str | int | Checkpoint
"""A turn, `head`, `head~N`, a label, an id or its beginning, or a checkpoint itself."""
Kind = CheckpointKind
Path = str | os.PathLike[str]
LIMIT = 64 << 20
"""Bytes of each output stream that `run` keeps."""


class CommandFailed(CrabError):
    """`run(check=True)`: the command ended with another status than 0. `result` has its output."""

    exit_status = 1
    http_status = 422
    result: ExecResult


def argv_of(argv: Argv) -> tuple[str, ...]:
    """Program and arguments. Raises `InvalidRequest`."""
    words = ("sh", "-c", argv) if isinstance(argv, str) else tuple(os.fspath(word) for word in argv)
    if not words:
        raise InvalidRequest("the command is empty", remedy="give a program and its arguments")
    return words


def exec_spec(
    argv: Argv,
    *,
    env: Mapping[str, str] | None = None,
    cwd: str = "",
    user: str = "",
    timeout: float | None = None,
    tty: bool = False,
    stdin: bool = False,
    name: str = "",
    rows: int = 24,
    columns: int = 80,
    by_agent: bool = False,
) -> ExecSpec:
    """A command to run in a sandbox."""
    return ExecSpec(
        argv=argv_of(argv),
        env=dict(env or {}),
        cwd=cwd,
        user=user,
        timeout=timeout,
        tty=tty,
        stdin=stdin,
        name=name,
        rows=rows,
        columns=columns,
        by_agent=by_agent,
    )


class ShellStart(Struct, kw_only=True):
    """How a persistent shell is started, if it is not there yet."""

    env: dict[str, str] = {}
    cwd: str = ""
    user: str = ""
    by_agent: bool = False


def shell_start(*, env: Mapping[str, str] | None, cwd: str, user: str, by_agent: bool) -> ShellStart:
    """The same from what callers write."""
    return ShellStart(env=dict(env or {}), cwd=cwd, user=user, by_agent=by_agent)


def create_request(
    name: str,
    image: str,
    *,
    env: Mapping[str, str] | None,
    workdir: str,
    user: str,
    network: NetworkMode,
    limits: Limits | None,
    mounts: Sequence[Mount],
    hostname: str,
    model_access: ModelAccess | None,
    exec_turns: bool,
    start: bool,
) -> Create:
    """A sandbox to make."""
    return Create(
        name=name,
        image=image,
        env=dict(env or {}),
        workdir=workdir,
        user=user,
        network=network,
        limits=limits or Limits(),
        mounts=tuple(msgspec.structs.replace(mount, source=host_path(mount.source)) for mount in mounts),
        hostname=hostname,
        model=words_of_model(model_access),
        exec_turns=exec_turns,
        start=start,
    )


def words_of_model(access: ModelAccess | None) -> ModelAccess | None:
    """The same, the path of a file of answers absolute."""
    if access is None or not access.upstream.startswith("replay:"):
        return access
    path = os.path.abspath(access.upstream.removeprefix("replay:"))
    return msgspec.structs.replace(access, upstream=f"replay:{path}")


def ref_of(ref: Ref) -> str:
    """A reference as text."""
    return ref.id if isinstance(ref, Checkpoint) else str(ref)


def host_path(path: Path) -> str:
    """A path on the host, absolute; a slash at its end is kept, since it may say that a folder is meant."""
    text = os.fspath(path)
    return os.path.abspath(text) + ("/" if text.endswith("/") and os.path.abspath(text) != "/" else "")


def store_url(url: str) -> str:
    """The URL of a store; a path as an absolute one."""
    return url if "://" in url or not url else host_path(url)


def image_source(source: str) -> str:
    """The source of an image, its path absolute: `dir:root` becomes `dir:/here/root`."""
    kind, colon, rest = source.partition(":")
    if kind in ("dir", "tar") or (kind == "oci" and not rest.startswith("docker://")):
        return f"{kind}{colon}{os.path.abspath(rest)}" if rest else source
    return source


def checked(result: ExecResult, argv: Argv, check: bool) -> ExecResult:
    """The result. Raises `CommandFailed` if that is asked for."""
    if not check or result.ok:
        return result
    words = argv if isinstance(argv, str) else " ".join(argv)
    why = "ran out of time" if result.timed_out else f"ended with status {result.exit_code}"
    tail = result.stderr[-2000:].decode(errors="replace").strip()
    failure = CommandFailed(f"{words!r} {why}" + (f": {tail}" if tail else ""), remedy="see `result` for its output")
    failure.result = result
    raise failure
