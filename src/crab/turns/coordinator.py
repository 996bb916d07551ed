"""The coordinator of a state directory: every sandbox's way to its model, served by one event loop in a thread of its own.

Agents inside a sandbox come through its door (`crab.sandbox.door`); agents on the host come to an address of the host with a
path that only they know. What happens to a sandbox when a turn ends is the keeper's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import os
import secrets
import socket
import threading
from collections.abc import Collection, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

import aiohttp
import msgspec
from aiohttp import web

from crab.errors import CrabError, InvalidRequest, WrongState
from crab.model import ModelAccess, Struct
from crab.turns import proxy
from crab.turns.channel import Channel
from crab.turns.mcp import Desk, Tools
from crab.turns.mock import Mock
from crab.turns.place import Place
from crab.turns.protection import Haste, Protection, Safety
from crab.turns.record import Record
from crab.turns.upstream import Real, Replay, Upstream, session

T = TypeVar("T")
MOST_THREADS = 128
"""Threads for what blocks. Captures do for seconds, and those of some sandboxes must not stop the others."""
LARGEST_HEADER = 1 << 16
"""Bytes of a header or a path: tokens of some gateways are longer than what aiohttp takes by itself."""
DAYS, BYTES = "CRAB_RECORD_DAYS", "CRAB_RECORD_BYTES"
"""How long, and how much, is kept of what agents asked (docs/turns.md)."""
KEPT_DAYS, KEPT_BYTES = 90.0, 8 << 30
DRAIN_SECONDS = 5.0
"""How long answers that are under way may take to arrive when the daemon ends."""
log = logging.getLogger("crab.turns")


class Keeper(Protocol):
    """Who owns the sandboxes. Its methods block, and are called from threads."""

    def access(self, sandbox: str) -> ModelAccess | None:
        """How a sandbox reaches its model; None if it has none, or is gone."""
        ...

    def exists(self, sandbox: str) -> bool:
        """Whether there is such a sandbox, be it damaged."""
        ...

    def protect(self, sandbox: str) -> Safety:
        """Make it safe as it is now."""
        ...

    def haste(self, sandbox: str) -> Haste:
        """Where to say how urgent that is."""
        ...

    def bring_back(self, sandbox: str, checkpoint: str) -> None:
        """Restore a checkpoint of it, whose question is to be asked anew. Raises `CrabError`."""
        ...

    def tools(self, sandbox: str) -> Tools:
        """What an agent inside may do with its sandbox."""
        ...


class Endpoint(Struct, kw_only=True):
    """Where agents on the host find their models. Kept, so that it is the same for the next daemon."""

    port: int
    secret: str


class Coordinator:
    """See the module. Methods are safe from any thread; it is a `crab.sandbox.door.Porter`."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(MOST_THREADS, "crab-turns"))
        self._record: Record | None = None
        self._keeper: Keeper | None = None
        self._places: dict[str, Place] = {}
        self._channels: dict[str, Channel] = {}
        self._keys: dict[str, dict[str, str]] = {}
        self._doors: dict[str, web.AppRunner] = {}
        self._host: web.AppRunner | None = None
        self._endpoint: Endpoint | None = None
        self._session: aiohttp.ClientSession | None = None
        self._lock = threading.Lock()
        self._opening = asyncio.Lock()
        self._ending = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="crab-turns", daemon=True)

    def begin(self, keeper: Keeper) -> None:
        """Open the record and serve. Raises `CrabError` if the record cannot be opened."""
        self._record, self._keeper = Record.open(self._state_dir / "turns.db"), keeper
        for sandbox in self._record.sandboxes():
            if not keeper.exists(sandbox):  # of a daemon that died in the middle
                self._record.forget(sandbox)

    def tidy(self) -> None:
        """Let go of what is old, once it is known what counts: when the daemon begins, and nobody waits for it."""
        threading.Thread(target=self._retain, args=(self.record,), name="crab-retain", daemon=True).start()

    def _retain(self, record: Record) -> None:
        """By the environment's word for what is old."""
        days, size = (os.environ.get(name, "") for name in (DAYS, BYTES))
        try:
            record.retain(float(days or KEPT_DAYS) * 86400, int(size or KEPT_BYTES))
        except (ValueError, CrabError) as error:
            if not self._ending:  # else it was closed meanwhile, and the next owner does it
                log.error("the record is not made smaller: %s", error)

    def end(self) -> None:
        """Let answers that are under way arrive, then close every way. The record is kept."""
        self._ending = True
        if self._thread.is_alive():
            with contextlib.suppress(TimeoutError):
                self._do(self._ended()).result(DRAIN_SECONDS + 5)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(5)
        if not self._loop.is_running():
            self._loop.close()
        if self._record:
            self._record.close()

    def _do(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        with self._lock:  # whoever has no model needs no thread
            if self._thread.ident is None:
                self._thread.start()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _ended(self) -> None:
        for runner in (*self._doors.values(), *([self._host] if self._host else [])):
            for site in list(runner.sites):
                await site.stop()
        await asyncio.gather(*(channel.drain(DRAIN_SECONDS) for channel in self._channels.values()))
        runners = (*self._doors.values(), *([self._host] if self._host else []))
        await asyncio.gather(*(runner.cleanup() for runner in runners), return_exceptions=True)
        if self._session:
            await self._session.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    # ---- doors (`Porter`)

    def admit(self, sandbox: str, key: str, door: socket.socket) -> None:
        """Serve a listening socket, whose owner this is now."""
        self._do(self._admitted(sandbox, key, door)).result()

    async def _admitted(self, sandbox: str, key: str, door: socket.socket) -> None:
        await self._closed(key)
        found = self._find_inside(sandbox)
        self._doors[key] = runner = _runner(proxy.application(found, inside=True))
        await runner.setup()
        await web.SockSite(runner, door).start()

    def _find_inside(self, sandbox: str) -> proxy.Find:
        async def find(request: web.Request) -> tuple[Channel, str] | None:
            channel = await self._channel(sandbox)
            return None if channel is None else (channel, _target(request))

        return find

    def dismiss(self, key: str) -> None:
        """Close the door of an incarnation that has ended; answers under way are recorded all the same."""
        if self._thread.is_alive():
            self._do(self._closed(key)).result()

    async def _closed(self, key: str) -> None:
        if runner := self._doors.pop(key, None):
            await runner.cleanup()

    # ---- the host's own address

    def address(self, sandbox: str) -> str:
        """Where an agent on the host reaches the models of a sandbox. Raises `WrongState` if it has no model."""
        assert self._keeper
        if self._keeper.access(sandbox) is None:
            raise WrongState(
                f"sandbox {sandbox} was made without a model",
                remedy="create it with --model (or `crab run` does it all)",
            )
        endpoint = self._do(self._listening()).result()
        return f"http://127.0.0.1:{endpoint.port}/{sandbox}/{_token(endpoint, sandbox)}"

    def resume(self) -> None:
        """Listen again where an earlier daemon did, if one did."""
        if (self._state_dir / "turns.json").exists():
            self._do(self._listening()).result()

    async def _listening(self) -> Endpoint:
        async with self._opening:
            return await self._opened()

    async def _opened(self) -> Endpoint:
        if self._endpoint is None:
            path = self._state_dir / "turns.json"
            known: Endpoint | None = None
            with contextlib.suppress(OSError, msgspec.DecodeError):
                known = msgspec.json.decode(path.read_bytes(), type=Endpoint)
            listener = _listener(known.port if known else 0)
            endpoint = Endpoint(port=listener.getsockname()[1], secret=known.secret if known else secrets.token_hex(16))
            if endpoint != known:
                _write(path, msgspec.json.encode(endpoint))
            self._host = _runner(proxy.application(self._find_outside, inside=False))
            await self._host.setup()
            await web.SockSite(self._host, listener).start()
            self._endpoint = endpoint
        return self._endpoint

    async def _find_outside(self, request: web.Request) -> tuple[Channel, str] | None:
        whole = _target(request)
        _, sandbox, token, *_ = (*whole.partition("?")[0].split("/", 3), "", "")
        known = "" if self._endpoint is None else _token(self._endpoint, sandbox)
        if not known or not hmac.compare_digest(token.encode(errors="surrogateescape"), known.encode()):
            return None
        channel = await self._channel(sandbox)
        target = whole[len(f"/{sandbox}/{token}") :]
        return None if channel is None else (channel, target if target.startswith("/") else f"/{target}")

    # ---- channels

    async def _channel(self, sandbox: str) -> Channel | None:
        """Within the loop: the channel of a sandbox, for as long as it has the same model."""
        assert self._keeper and self._record
        access = await asyncio.to_thread(self._keeper.access, sandbox)
        known = self._channels.get(sandbox)
        if access is None or (known is not None and known.access == access):
            return known if access is not None else None
        keeper = self._keeper
        self._channels[sandbox] = channel = Channel(
            sandbox,
            access,
            self._record,
            self.place(sandbox),
            self._upstream(sandbox, access),
            Protection(lambda: keeper.protect(sandbox), keeper.haste(sandbox)),
            lambda checkpoint: keeper.bring_back(sandbox, checkpoint),
            Desk(keeper.tools(sandbox), self.place(sandbox)) if access.tools else None,
        )
        return channel

    def _upstream(self, sandbox: str, access: ModelAccess) -> Upstream:
        kind, _, rest = access.upstream.partition(":")
        if kind == "replay":
            return Replay(Path(rest))
        if access.upstream == "mock":
            return Mock()
        if self._session is None:
            self._session = session()
        return Real(self._session, access.upstream, self._keys.setdefault(sandbox, {}))

    def credentials(self, sandbox: str, keys: dict[str, str]) -> None:
        """The keys to fill in for placeholders, by API (`anthropic`, `openai`, `gemini`). Kept in memory only."""
        with self._lock:
            self._keys.setdefault(sandbox, {}).update(keys)

    # ---- the past

    @property
    def record(self) -> Record:
        """What was asked and answered."""
        assert self._record
        return self._record

    def place(self, sandbox: str) -> Place:
        """Where the agent of a sandbox stands in its past."""
        with self._lock:
            if sandbox not in self._places:
                self._places[sandbox] = Place(self.record, sandbox)
            return self._places[sandbox]

    def unread(self, sandbox: str) -> tuple[int, str]:
        """How many requests of its agent could not be read, and why the newest could not."""
        channel = self._channels.get(sandbox)
        return (channel.unread, channel.unread_why) if channel else (0, "")

    def has_past(self, sandbox: str) -> bool:
        """Whether anything was recorded of a sandbox."""
        return self.record.knows(sandbox)

    def brought_back(self, sandbox: str, kept: Collection[str], head: str, ask_again: bool) -> None:
        """A sandbox is at checkpoint `head` again, whose ancestors (and itself) are `kept`."""
        self.place(sandbox).brought_back(kept, head, ask_again)

    def forked(self, source: str, target: str, kept: Collection[str], head: str) -> None:
        """A new sandbox has the past of another up to a checkpoint."""
        self.record.forked(source, target, set(kept), head)
        self.place(target).brought_back(kept, head, ask_again=True)

    def forget(self, sandbox: str) -> None:
        """A sandbox is gone, and its past with it."""
        with self._lock:
            self._places.pop(sandbox, None)
            self._keys.pop(sandbox, None)
        if channel := self._channels.pop(sandbox, None):
            self._do(channel.drain(0.0)).result()  # nobody wants what it still waits for
        with contextlib.suppress(CrabError):
            if self.record.knows(sandbox):
                self.record.forget(sandbox)


def check_upstream(text: str) -> str:
    """The name of an upstream, if it is one; `api` is a word for the empty one. Raises `InvalidRequest`."""
    if text == "api":
        return ""
    if text in ("", "mock") or text.startswith(("http://", "https://")):
        return text
    if text.startswith("replay:"):
        Replay(Path(text.removeprefix("replay:")))
        return text
    raise InvalidRequest(
        f"{text!r} is no upstream",
        remedy="give an address (https://…), replay:FILE, mock, or api (or nothing) for the real ones",
    )


def _runner(app: web.Application) -> web.AppRunner:
    return web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        auto_decompress=False,
        shutdown_timeout=0.5,
        keepalive_timeout=900,
        max_line_size=LARGEST_HEADER,
        max_field_size=LARGEST_HEADER,
    )


def _target(request: web.Request) -> str:
    """Path and query as they came, whatever they are written with."""
    raw = request.raw_path
    return raw.partition("#")[0] if raw.startswith("/") else str(request.rel_url)


def _token(endpoint: Endpoint, sandbox: str) -> str:
    return hmac.new(endpoint.secret.encode(), sandbox.encode(errors="surrogateescape"), hashlib.sha256).hexdigest()[:32]


def _listener(port: int) -> socket.socket:
    """A listening socket of the host at that port, or at any if somebody else has it."""
    for wanted in (port, 0):
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", wanted))
            listener.listen(256)
            listener.setblocking(False)
            return listener
        except OSError as error:
            listener.close()
            if not wanted:
                raise
            log.warning("port %d is taken (%s): agents on the host need the new address", wanted, error)
    raise AssertionError("unreachable")


def _write(path: Path, data: bytes) -> None:
    new = path.with_suffix(".new")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as f:
        f.write(data)
    new.rename(path)
