"""How a plug-in comes by its sandbox, and the files in it. Knows no framework.

A sandbox with a name is made if it is not there, brought back if it was lost, and left alone at the end: its agent may be
started again from its beginning, and gets what was recorded. One without a name is removed at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import Mapping
from typing import Any, TypeVar

from crab.errors import AlreadyExists, NotFound
from crab.model import ExecResult, ModelAccess, NetworkMode, State
from crab.sdk.aio import AsyncHost, AsyncSandbox, aconnect
from crab.sdk.words import LIMIT

T = TypeVar("T")
WRITE = 'mkdir -p "$(dirname "$1")" && cat >"$1"'
_REASONS = {
    errno.ENOENT: ("No such file", "nonexistent"),
    errno.EISDIR: ("Is a directory", "directory"),
    errno.EACCES: ("Permission denied",),
}
_shared: dict[tuple[asyncio.AbstractEventLoop, str], AsyncHost] = {}


def named() -> str:
    """The sandbox that `crab run --outside` made for this process; empty without it."""
    return os.environ.get("CRAB_SANDBOX", "")


def access(upstream: str | None) -> ModelAccess | None:
    """How the agent reaches its model: `api` the real one, an address, `replay:FILE` or `mock`; None: by itself."""
    return None if upstream is None else ModelAccess(upstream=upstream)


def shared_host(state_dir: str = "") -> AsyncHost:
    """The host of this event loop: the daemon's, or an embedded one (a process can own a state directory only once)."""
    for known in [key for key in _shared if key[0].is_closed()]:
        del _shared[known]
    key = (asyncio.get_running_loop(), state_dir)
    if key not in _shared:
        _shared[key] = AsyncHost(state_dir) if state_dir else aconnect()
    return _shared[key]


async def close_shared(state_dir: str = "") -> None:
    """Give it up. Sandboxes run on."""
    if host := _shared.pop((asyncio.get_running_loop(), state_dir), None):
        await host.close()


async def find(host: AsyncHost, name: str) -> AsyncSandbox | None:
    """The sandbox of that name, alive; None if there is none."""
    try:
        sandbox = await host.sandbox(name)
    except NotFound:
        return None
    state = (await sandbox.info()).state
    if state == State.LOST:
        await sandbox.recover()
    elif state == State.STOPPED:
        await sandbox.start()
    return sandbox


class Box:
    """A sandbox of a framework's run, and whether it goes with it."""

    def __init__(self, sandbox: AsyncSandbox, stays: bool) -> None:
        self.sandbox = sandbox
        self.stays = stays

    @classmethod
    async def open(
        cls,
        host: AsyncHost,
        name: str = "",
        *,
        image: str = "debian",
        env: Mapping[str, str] | None = None,
        workdir: str = "",
        user: str = "",
        network: NetworkMode = "none",
        upstream: str | None = "api",
    ) -> Box:
        """The sandbox of that name, or a new one. `upstream`: see `access`. Raises what `AsyncHost.create` does."""
        if name and (sandbox := await find(host, name)):
            return cls(sandbox, stays=True)
        options: dict[str, Any] = {"env": env, "workdir": workdir, "user": user, "network": network}
        try:
            sandbox = await host.create(name, image, model_access=access(upstream), **options)
        except AlreadyExists:  # somebody else was faster
            sandbox = await host.sandbox(name)
        if workdir:  # images do not have it, as a rule
            await sandbox.run(["mkdir", "-p", workdir], cwd="/", user="0", check=True)
        return cls(sandbox, stays=bool(name))

    async def close(self) -> None:
        """Remove it, unless it stays."""
        if not self.stays:
            with contextlib.suppress(NotFound):
                await self.sandbox.remove(force=True)

    async def read(self, path: str, *, user: str = "", limit: int = LIMIT, by_agent: bool = True) -> bytes:
        """The content of a file; of a long one, `limit` bytes. Raises `OSError` as `open` would."""
        argv = ["cat", "--", path]
        return checked(
            path, await self.sandbox.run(argv, env={"LC_ALL": "C"}, user=user, limit=limit, by_agent=by_agent)
        ).stdout

    async def write(self, path: str, data: bytes, *, user: str = "", by_agent: bool = True) -> None:
        """Write a file, and make the folders above it. Raises `OSError` as `open` would."""
        argv = ["sh", "-c", WRITE, "sh", path]
        checked(path, await self.sandbox.run(argv, env={"LC_ALL": "C"}, user=user, input=data, by_agent=by_agent))

    async def upload(self, source: str, target: str) -> None:
        """Copy a file of the daemon's host to a path, or the content of a folder into a folder. Raises `CrabError`."""
        folder = os.path.isdir(source)
        await self.sandbox.run(["mkdir", "-p", target if folder else os.path.dirname(target) or "/"], check=True)
        for one in sorted(os.listdir(source)) if folder else [""]:
            await self.sandbox.copy_in(os.path.join(source, one) if one else source, target)

    async def download(self, source: str, target: str) -> None:
        """The way back. Raises `CrabError`."""
        listed = await self.sandbox.run(["sh", "-c", 'cd "$1" && find . -mindepth 1 -maxdepth 1 -print0', "sh", source])
        os.makedirs(target if listed.ok else os.path.dirname(os.path.abspath(target)), exist_ok=True)
        for one in listed.stdout.split(b"\0")[:-1] if listed.ok else [b""]:
            await self.sandbox.copy_out(os.path.join(source, os.fsdecode(one)) if one else source, target)


def checked(path: str, result: ExecResult) -> ExecResult:
    """The result. Raises the `OSError` that its message tells of, if it failed."""
    if result.ok:
        return result
    said = result.stderr.decode(errors="replace").strip()
    number = next((code for code, words in _REASONS.items() if any(word in said for word in words)), errno.EIO)
    raise OSError(number, said or f"status {result.exit_code}", path)
