"""The asynchronous facades: what a host, a sandbox and a running command can be asked for.

Each method makes a typed request and hands it to the transport; what it does is written at the request
(`crab.daemon.requests`). `sync.py` is made from this file by `python -m crab.sdk.twin`: change this one only.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from crab import model
from crab.daemon import requests as ask
from crab.errors import NotFound, SandboxGone
from crab.sdk import words
from crab.sdk.async_transport import AsyncEmbeddedTransport, AsyncRunningCommand, AsyncTransport

if TYPE_CHECKING:
    from crab.sandbox.command import Output


def aconnect(socket: Path | str | None = None) -> AsyncHost:
    """The host of a running daemon: `$CRAB_SOCKET` or /run/crab/crab.sock, if no socket is given.

    Entering it, `open`, or the first call raises `DaemonUnavailable` if it cannot be reached.
    """
    from crab.daemon.async_client import AsyncSocketTransport

    return AsyncHost(transport=AsyncSocketTransport(socket))


class AsyncHost:
    """All sandboxes and images of one state directory.

    Without a transport it is embedded: this process owns the state directory, from the first call to `close`. Sandboxes
    run on when it is closed.
    """

    def __init__(self, state_dir: Path | str | None = None, *, transport: AsyncTransport | None = None) -> None:
        self._transport: AsyncTransport = transport or AsyncEmbeddedTransport(state_dir)
        self.images = AsyncImages(self._transport)

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> None:
        """Own the state directory, or reach the daemon. Raises `Busy`, `HostUnsuitable`, `DaemonUnavailable`."""
        await self._transport.open()

    async def close(self) -> None:
        """Give the state directory or the connections up. Sandboxes run on."""
        await self._transport.close()

    async def call(self, request: ask.Request) -> Any:
        """The answer to any request of the API, of its type `returns`."""
        return await self._transport.call(request)

    async def about(self) -> ask.Version:
        """Who answers."""
        return await self.call(ask.About())

    async def doctor(self) -> tuple[model.Probe, ...]:
        """What this host offers."""
        return await self.call(ask.Doctor())

    async def create(
        self,
        name: str = "",
        image: str = "debian",
        *,
        env: Mapping[str, str] | None = None,
        workdir: str = "",
        user: str = "",
        network: model.NetworkMode = "none",
        limits: model.Limits | None = None,
        mounts: Sequence[model.Mount] = (),
        hostname: str = "",
        model_access: model.ModelAccess | None = None,
        exec_turns: bool = False,
        start: bool = True,
    ) -> AsyncSandbox:
        """Make a sandbox (a name is made up if none is given), and start it unless told not to. With `model_access` its agent
        reaches a model through Crab, which makes the sandbox safe at every turn; with `exec_turns` each command that ends
        is one.

        The sandbox is a context manager, which removes it at the end. Raises `NotFound` (no such image),
        `AlreadyExists`, `InvalidRequest`, `LaunchFailed`, `NoSpace`.
        """
        request = words.create_request(
            name,
            image,
            env=env,
            workdir=workdir,
            user=user,
            network=network,
            limits=limits,
            mounts=mounts,
            hostname=hostname,
            model_access=model_access,
            exec_turns=exec_turns,
            start=start,
        )
        return self._of(await self.call(request))

    async def sandbox(self, name: str) -> AsyncSandbox:
        """A sandbox by its name, id, or the beginning of its id. Raises `NotFound`."""
        return self._of(await self.call(ask.Inspect(sandbox=name)))

    async def sandboxes(self) -> list[AsyncSandbox]:
        """All sandboxes, oldest first."""
        return [self._of(found) for found in await self.call(ask.SandboxList())]

    async def jobs(self) -> model.EngineState:
        """What the host works on for checkpoints: what runs, what waits for its turn, and why."""
        return await self.call(ask.Jobs())

    async def drain(
        self, seconds: float = 30.0, *, pause: bool = False, store: str = "", key_file: str = ""
    ) -> tuple[model.Drained, ...]:
        """Make every running sandbox safe before the machine goes; with `pause` nothing runs in one from its capture on. With
        `store` (its URL) they are sent there too, as far as the time allows."""
        return await self.call(ask.Drain(seconds=seconds, pause=pause, store=store, key_file=key_file))

    async def compact(self) -> model.Compaction:
        """Keep on disk once what the process images of checkpoints have in common, now and of all; a daemon does it by itself
        while the host is idle."""
        return await self.call(ask.Compact())

    async def prune(self, policy: ask.Policy, sandbox: str = "", *, dry: bool = False) -> ask.Pruned:
        """Remove the checkpoints that the policy does not keep, of one sandbox or of all; `dry`: only say which."""
        return await self.call(ask.Prune(policy=policy, sandbox=sandbox, dry=dry))

    async def import_archive(
        self, path: words.Path, name: str = "", *, allow_host: bool = False, limit: int | None = None
    ) -> AsyncSandbox:
        """A sandbox from an archive that `export` wrote; it is stopped until `recover`. Raises `ArchiveRefused`.

        `allow_host`: also if it uses folders or the network of the host. `limit`: bytes that it may unpack to.
        """
        request = ask.Import(path=words.host_path(path), name=name, allow_host=allow_host, limit=limit)
        return self._of(await self.call(request))

    def store(self, url: str, key_file: words.Path = "") -> AsyncStore:
        """A store of checkpoints: `s3://BUCKET/PREFIX`, `file:///FOLDER`, or a path on the daemon's host. Asks nothing."""
        return AsyncStore(self._transport, words.store_url(url), words.host_path(key_file) if key_file else "")

    def _of(self, found: model.Sandbox) -> AsyncSandbox:
        return AsyncSandbox(self._transport, found.id, found.name)


class AsyncStore:
    """Checkpoints that outlive their host (docs/store.md). Every call raises `StoreUnavailable`, `StoreRefused`, `WrongKey`,
    or `Incompatible` for a store of a newer version.
    """

    def __init__(self, transport: AsyncTransport, url: str, key_file: str) -> None:
        self._transport = transport
        self._url = url
        self._key = key_file

    async def init(self, grace: float = 24 * 3600.0) -> model.StoreInfo:
        """Make the store, encrypted if there is a key file. `grace`: seconds that what nothing needs stays, twice.

        Raises `AlreadyExists`.
        """
        return await self._transport.call(ask.StoreInit(url=self._url, key_file=self._key, grace=grace))

    async def put(self, sandbox: str, ref: words.Ref = "head") -> model.StoredCheckpoint:
        """Send a checkpoint of a sandbox; it is durable in the store when this returns."""
        request = ask.StorePut(url=self._url, key_file=self._key, sandbox=sandbox, ref=words.ref_of(ref))
        return await self._transport.call(request)

    async def get(
        self, checkpoint: str, name: str = "", *, allow_host: bool = False, limit: int | None = None
    ) -> AsyncSandbox:
        """A sandbox from a checkpoint (an id, or NAME@REF); it is stopped until `recover`. As `AsyncHost.import_archive`."""
        request = ask.StoreGet(
            url=self._url, key_file=self._key, checkpoint=checkpoint, name=name, allow_host=allow_host, limit=limit
        )
        found = await self._transport.call(request)
        return AsyncSandbox(self._transport, found.id, found.name)

    async def list(self) -> tuple[model.StoredCheckpoint, ...]:
        """The checkpoints, oldest first."""
        return await self._transport.call(ask.StoreList(url=self._url, key_file=self._key))

    async def remove(self, checkpoint: str) -> ask.Removed:
        """Take a checkpoint out; others keep all that they need."""
        return await self._transport.call(ask.StoreRemove(url=self._url, key_file=self._key, checkpoint=checkpoint))

    async def check(self, *, data: bool = False, repair: bool = False) -> model.StoreCheck:
        """Whether all is what was written, and which checkpoints are affected if not. With `data` every byte is read."""
        return await self._transport.call(ask.StoreLook(url=self._url, key_file=self._key, data=data, repair=repair))

    async def stats(self) -> model.StoreStats:
        """How much there is."""
        return await self._transport.call(ask.StoreFigures(url=self._url, key_file=self._key))

    async def collect(self, policy: ask.Policy | None = None) -> model.StoreCollection:
        """Remove what no checkpoint needs; with a policy, first take out what that does not keep."""
        return await self._transport.call(ask.StoreCollect(url=self._url, key_file=self._key, policy=policy))


class AsyncImages:
    """The images of a host."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def add(self, name: str, source: str, *, replace: bool = False, if_missing: bool = False) -> model.Image:
        """Make an image of a source: `debian:SUITE`, `oci:…`, `dir:…`, `tar:…` or `host`."""
        request = ask.ImageAdd(name=name, source=words.image_source(source), replace=replace, if_missing=if_missing)
        return await self._transport.call(request)

    async def step(self, name: str) -> str:
        """What is being done for an image of that name that is being made (by somebody else's `add`); empty if none is."""
        return await self._transport.call(ask.ImageStep(name=name))

    async def build(
        self,
        name: str,
        base: str,
        command: words.Argv,
        *,
        network: model.NetworkMode = "nat",
        env: Mapping[str, str] | None = None,
    ) -> model.Image:
        """Run a set-up command (as root) on an image and keep the result as another image, but not `env`."""
        request = ask.ImageBuild(
            name=name, base=base, command=words.argv_of(command), network=network, env=dict(env or {})
        )
        return await self._transport.call(request)

    async def show(self, name: str) -> model.Image:
        """One image. Raises `NotFound`."""
        return await self._transport.call(ask.ImageShow(name=name))

    async def remove(self, name: str) -> ask.Removed:
        """Remove an image. Raises `InUse` while a sandbox or checkpoint is based on it."""
        return await self._transport.call(ask.ImageRemove(name=name))

    async def list(self) -> tuple[model.Image, ...]:
        """All images."""
        return await self._transport.call(ask.ImageList())


class AsyncSandbox:
    """One sandbox. As a context manager it removes the sandbox at the end, also if it runs.

    Every method may raise `NotFound` (the sandbox was removed), `SandboxGone`, and in a client `DaemonUnavailable`; those
    that change its life also `Busy` (another such operation is under way) and `WrongState`.
    """

    def __init__(self, transport: AsyncTransport, identity: str, name: str) -> None:
        self._transport = transport
        self.id = identity
        self.name = name

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} ({self.id})>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        with contextlib.suppress(NotFound):  # removed already
            await self.remove(force=True)

    async def _call(self, request: ask.Request) -> Any:
        return await self._transport.call(request)

    async def info(self) -> model.Sandbox:
        """The sandbox as it is now."""
        return await self._call(ask.Inspect(sandbox=self.id))

    # ---- commands

    async def run(
        self,
        argv: words.Argv,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = "",
        user: str = "",
        timeout: float | None = None,
        input: bytes = b"",
        check: bool = False,
        limit: int = words.LIMIT,
        by_agent: bool = False,
    ) -> model.ExecResult:
        """Run a command to its end and return its output; of each stream the first `limit` bytes are kept. One `by_agent`
        is recorded, and not run again by an agent that comes back.

        After `timeout` seconds it is killed with all that it has started (`timed_out`, status 124); so it is if the
        caller goes away. Raises `CommandNotFound`, `ExecFailed`, and with `check` `CommandFailed` if its status is not 0.
        """
        spec = words.exec_spec(argv, env=env, cwd=cwd, user=user, timeout=timeout, stdin=bool(input), by_agent=by_agent)
        result = await self._call(ask.Run(sandbox=self.id, spec=spec, input=input, limit=limit))
        return words.checked(result, argv, check)

    async def spawn(
        self,
        argv: words.Argv,
        *,
        tty: bool = False,
        stdin: bool = False,
        name: str = "",
        rows: int = 24,
        columns: int = 80,
        env: Mapping[str, str] | None = None,
        cwd: str = "",
        user: str = "",
        timeout: float | None = None,
        by_agent: bool = False,
    ) -> AsyncProcess:
        """Start a command and read its output as it comes. Raises `CommandNotFound`, `ExecFailed`, `AlreadyExists` (name)."""
        spec = words.exec_spec(
            argv,
            env=env,
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
        return AsyncProcess(await self._transport.spawn(self.id, spec))

    async def attach(self, name: str) -> AsyncProcess:
        """A command that runs already, by its name or number. Raises `NotFound`, and `Busy` if another client reads it."""
        return AsyncProcess(await self._transport.attach(self.id, name))

    def shell(
        self,
        name: str = "main",
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = "",
        user: str = "",
        by_agent: bool = False,
    ) -> AsyncShell:
        """A persistent shell of the sandbox. Its first command starts it: as that user, there, with that environment."""
        start = words.shell_start(env=env, cwd=cwd, user=user, by_agent=by_agent)
        return AsyncShell(self._transport, self.id, name, start)

    async def commands(self) -> tuple[model.ExecStatus, ...]:
        """The commands that run, and those that ended unread."""
        return await self._call(ask.CommandList(sandbox=self.id))

    async def processes(self) -> tuple[model.ProcessInfo, ...]:
        """All processes in the sandbox."""
        return await self._call(ask.ProcessList(sandbox=self.id))

    # ---- life

    async def start(self) -> model.Sandbox:
        """Start it on its files; processes of before are not brought back."""
        return await self._call(ask.Start(sandbox=self.id))

    async def stop(self, grace: float = 2.0) -> model.Sandbox:
        """SIGTERM to every process, SIGKILL after `grace` seconds."""
        return await self._call(ask.Stop(sandbox=self.id, grace=grace))

    async def kill(self) -> model.Sandbox:
        """SIGKILL to everything at once, as a crash would; `recover` brings it back."""
        return await self._call(ask.Kill(sandbox=self.id))

    async def pause(self) -> model.Sandbox:
        """Freeze every process."""
        return await self._call(ask.Pause(sandbox=self.id))

    async def resume(self) -> model.Sandbox:
        """Let it run again after `pause`."""
        return await self._call(ask.Resume(sandbox=self.id))

    async def remove(self, force: bool = False) -> ask.Removed:
        """Remove it, with `force` also if it runs, and those of its checkpoints that nothing else needs."""
        return await self._call(ask.Remove(sandbox=self.id, force=force))

    # ---- checkpoints

    async def checkpoint(
        self, label: str = "", policy: model.PolicyName = "adaptive", durable: bool = True
    ) -> model.Checkpoint:
        """Capture it as the end of a turn. Raises `CaptureFailed`, `NotCapturable`; then it runs on as before."""
        return await self._call(ask.TakeCheckpoint(sandbox=self.id, label=label, policy=policy, durable=durable))

    async def explain(self, ref: words.Ref = "") -> model.Decision:
        """Why a checkpoint captured what it did; without `ref`, what one taken now would capture."""
        return await self._call(ask.Explain(sandbox=self.id, ref=words.ref_of(ref)))

    async def turns(self, every: bool = False) -> tuple[model.Checkpoint, ...]:
        """The checkpoints on the current branch, oldest first; with `every` those that were rewound away as well."""
        return await self._call(ask.Turns(sandbox=self.id, every=every))

    async def rewind(
        self, ref: words.Ref, files_only: bool = False, *, note: str = "", by_agent: bool = False
    ) -> model.Sandbox:
        """Bring it back to a checkpoint. Raises `RestoreFailed`, `Incompatible`, `Damaged`; then it runs on as before.

        `note` is kept outside of it (`Sandbox.returns`), for an agent that has the tools of docs/mcp.md. `by_agent`: the caller
        is the sandbox's agent on the host, which goes on: what it does next was not done before.
        """
        request = ask.Rewind(
            sandbox=self.id, ref=words.ref_of(ref), files_only=files_only, note=note, by_agent=by_agent
        )
        return await self._call(request)

    async def recover(self, force: bool = False) -> model.Sandbox:
        """Restore it from its newest checkpoint after it was lost; with `force` also if it runs or was stopped: what it is
        now is given up. Its agent gets recorded answers and outcomes until it is where the sandbox is."""
        return await self._call(ask.Recover(sandbox=self.id, force=force))

    async def fork(self, ref: words.Ref = "", count: int = 1, names: Sequence[str] = ()) -> list[AsyncSandbox]:
        """New sandboxes from a checkpoint, `count` or as many as there are names; without `ref` one is taken first."""
        count = len(names) if names and count == 1 else count
        request = ask.Fork(sandbox=self.id, ref=words.ref_of(ref), count=count, names=tuple(names))
        return [AsyncSandbox(self._transport, found.id, found.name) for found in await self._call(request)]

    async def try_in_forks(
        self,
        argv: words.Argv,
        ref: words.Ref = "",
        count: int = 1,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = "",
        user: str = "",
        timeout: float | None = None,
        limit: int = 1 << 16,
    ) -> tuple[model.Trial, ...]:
        """Run a command in `count` (at most 8) forks that are gone when it has ended; without `ref` they are made of the
        sandbox as it is now. The command finds the number of its fork in `$CRAB_TRY`."""
        spec = words.exec_spec(argv, env=env, cwd=cwd, user=user, timeout=timeout)
        request = ask.Try(sandbox=self.id, spec=spec, ref=words.ref_of(ref), count=count, limit=limit)
        return await self._call(request)

    async def diff(self, ref: words.Ref, to: words.Ref = "", content: bool = False) -> model.Difference:
        """What differs between a checkpoint and another one, or the sandbox as it is now; `content` adds unified diffs."""
        request = ask.Diff(sandbox=self.id, ref=words.ref_of(ref), to=words.ref_of(to), content=content)
        return await self._call(request)

    async def verify(self, ref: words.Ref = "head") -> model.Verification:
        """Restore a checkpoint into a scratch sandbox and compare."""
        return await self._call(ask.Verify(sandbox=self.id, ref=words.ref_of(ref)))

    async def label(self, ref: words.Ref, label: str) -> model.Checkpoint:
        """Give a checkpoint a label, or take it away (empty)."""
        return await self._call(ask.Label(sandbox=self.id, ref=words.ref_of(ref), label=label))

    async def remove_checkpoint(self, ref: words.Ref) -> ask.Removed:
        """Remove a checkpoint. Raises `InUse`."""
        return await self._call(ask.RemoveCheckpoint(sandbox=self.id, ref=words.ref_of(ref)))

    # ---- turns

    @contextlib.asynccontextmanager
    async def turn(self, label: str = "") -> AsyncIterator[None]:
        """A turn of an agent whose model is not reached through Crab: at the end of the block the sandbox is made safe,
        also if the block raises."""
        try:
            yield
        finally:
            await self.checkpoint(label)

    async def model_address(self, inside: bool = False) -> ask.Address:
        """Where its agent finds its models: one on the host, or one that lives `inside`. Raises `WrongState` if it has none."""
        return await self._call(ask.ModelAddress(sandbox=self.id, inside=inside))

    async def model_keys(self, keys: Mapping[str, str]) -> None:
        """Keys by API (`anthropic`, `openai`, `gemini`), for an agent inside that is not to have them."""
        await self._call(ask.ModelKeys(sandbox=self.id, keys=dict(keys)))

    async def exchanges(self, limit: int = 1000) -> tuple[model.Exchange, ...]:
        """What its agent asked its model, oldest first."""
        return await self._call(ask.Exchanges(sandbox=self.id, limit=limit))

    async def exchange(self, number: int) -> model.Conversation:
        """One of them, with what was said. Raises `NotFound`."""
        return await self._call(ask.ExchangeText(sandbox=self.id, number=number))

    # ---- files

    async def copy_in(self, source: words.Path, target: str) -> ask.Copied:
        """Copy a file or folder of the daemon's host into the sandbox."""
        return await self._call(ask.CopyIn(sandbox=self.id, source=words.host_path(source), target=target))

    async def copy_out(self, source: str, target: words.Path) -> ask.Copied:
        """Copy a file or folder of the sandbox to the daemon's host."""
        return await self._call(ask.CopyOut(sandbox=self.id, source=source, target=words.host_path(target)))

    async def apply(self, target: str, dry_run: bool = False) -> model.Difference:
        """Copy the result of a copy-on-write mount back to the host's folder; returns what is changed by it."""
        return await self._call(ask.Apply(sandbox=self.id, target=target, dry_run=dry_run))

    async def export(self, path: words.Path, ref: words.Ref = "head", with_image: bool = True) -> model.Checkpoint:
        """Write a checkpoint into one archive on the daemon's host."""
        request = ask.Export(sandbox=self.id, ref=words.ref_of(ref), path=words.host_path(path), with_image=with_image)
        return await self._call(request)

    async def commit(self, name: str) -> model.Image:
        """Make an image of its files."""
        return await self._call(ask.Commit(sandbox=self.id, name=name))


class AsyncShell:
    """A persistent shell (bash) in a sandbox: what one command leaves (work directory, variables, jobs) the next one finds.

    It lives in the sandbox, not in this object: it comes back with a rewind, is there in a fork, and any object of the same
    name is the same shell.
    """

    def __init__(self, transport: AsyncTransport, sandbox: str, name: str, start: words.ShellStart) -> None:
        self._transport = transport
        self._sandbox = sandbox
        self._start = start
        self.name = name

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    async def run(self, command: str, timeout: float | None = None) -> model.ShellResult:
        """Run shell text to its end; after `timeout` seconds it is interrupted (`timed_out`, status 124).

        Raises `Busy` while another command runs in it, `CommandNotFound` if the image has no bash.
        """
        request = ask.ShellRun(
            sandbox=self._sandbox,
            shell=self.name,
            command=command,
            timeout=timeout,
            env=self._start.env,
            cwd=self._start.cwd,
            user=self._start.user,
            by_agent=self._start.by_agent,
        )
        return await self._transport.call(request)

    async def interrupt(self) -> bool:
        """Interrupt (Ctrl-C) the command that runs in it; says whether one did. Raises `NotFound` if there is no shell."""
        return await self._transport.call(ask.ShellInterrupt(sandbox=self._sandbox, shell=self.name))

    async def state(self) -> model.ShellState:
        """What it holds in its memory, as digests. Asking changes nothing. Raises `NotFound` if there is no such shell."""
        return await self._transport.call(ask.ShellLook(sandbox=self._sandbox, shell=self.name))


class AsyncProcess:
    """A running command: iterate over it for its output (`Output`: stream 1 or 2, data) until it has ended.

    One thread or task iterates; the other calls may come from any. What nobody reads is held up to about a megabyte,
    then the command waits, as with a pipe. As a context manager it kills the command at the end if it still runs.
    """

    def __init__(self, command: AsyncRunningCommand) -> None:
        self._command = command
        self._events = command.events()
        self._left = False

    @property
    def name(self) -> str:
        """Name to attach to it; its number if it was given none."""
        return self._command.name or self._command.status().id

    @property
    def pid(self) -> int:
        """Its process number in the sandbox."""
        return self._command.pid

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} (pid {self.pid})>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.status().running and not self._left:
            with contextlib.suppress(SandboxGone, NotFound):  # then it is dead already
                await self.kill()
                await self.wait()

    def __aiter__(self) -> AsyncIterator[Output]:
        return self._events

    def status(self) -> model.ExecStatus:
        """How it ended, or that it runs (as far as its output was read)."""
        return self._command.status()

    async def wait(self) -> model.ExecStatus:
        """Wait for its end; output that was not iterated is thrown away. Says `running` if it was detached."""
        async for _ in self._events:
            pass
        return self._command.status()

    async def write(self, data: bytes) -> None:
        """Give it input; returns when it has taken all. Raises `WrongState` if it takes no more."""
        await self._command.write(data)

    async def close_input(self) -> None:
        """End of input."""
        await self._command.close_input()

    async def signal(self, number: int) -> None:
        """Send a signal to its process group, or to the foreground group of its terminal."""
        await self._command.signal(number)

    async def resize(self, rows: int, columns: int) -> None:
        """New size of its terminal, in characters."""
        await self._command.resize(rows, columns)

    async def kill(self) -> None:
        """SIGKILL it and everything that it has started."""
        await self._command.kill()

    async def detach(self) -> None:
        """Leave it alone: iteration ends with what is under way, further output waits in the sandbox for `attach`."""
        self._left = True
        await self._command.detach()
