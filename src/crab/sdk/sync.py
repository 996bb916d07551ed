"""The synchronous facades. Made from `aio.py` by `python -m crab.sdk.twin`: change that file, not this one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from crab import model
from crab.daemon import requests as ask
from crab.errors import NotFound, SandboxGone
from crab.sdk import words
from crab.sdk.transport import EmbeddedTransport, RunningCommand, Transport

if TYPE_CHECKING:
    from crab.sandbox.command import Output


def connect(socket: Path | str | None = None) -> Host:
    """The host of a running daemon: `$CRAB_SOCKET` or /run/crab/crab.sock, if no socket is given.

    Entering it, `open`, or the first call raises `DaemonUnavailable` if it cannot be reached.
    """
    from crab.daemon.client import SocketTransport

    return Host(transport=SocketTransport(socket))


class Host:
    """All sandboxes and images of one state directory.

    Without a transport it is embedded: this process owns the state directory, from the first call to `close`. Sandboxes
    run on when it is closed.
    """

    def __init__(self, state_dir: Path | str | None = None, *, transport: Transport | None = None) -> None:
        self._transport: Transport = transport or EmbeddedTransport(state_dir)
        self.images = Images(self._transport)

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> None:
        """Own the state directory, or reach the daemon. Raises `Busy`, `HostUnsuitable`, `DaemonUnavailable`."""
        self._transport.open()

    def close(self) -> None:
        """Give the state directory or the connections up. Sandboxes run on."""
        self._transport.close()

    def call(self, request: ask.Request) -> Any:
        """The answer to any request of the API, of its type `returns`."""
        return self._transport.call(request)

    def about(self) -> ask.Version:
        """Who answers."""
        return self.call(ask.About())

    def doctor(self) -> tuple[model.Probe, ...]:
        """What this host offers."""
        return self.call(ask.Doctor())

    def create(
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
    ) -> Sandbox:
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
        return self._of(self.call(request))

    def sandbox(self, name: str) -> Sandbox:
        """A sandbox by its name, id, or the beginning of its id. Raises `NotFound`."""
        return self._of(self.call(ask.Inspect(sandbox=name)))

    def sandboxes(self) -> list[Sandbox]:
        """All sandboxes, oldest first."""
        return [self._of(found) for found in self.call(ask.SandboxList())]

    def jobs(self) -> model.EngineState:
        """What the host works on for checkpoints: what runs, what waits for its turn, and why."""
        return self.call(ask.Jobs())

    def drain(
        self, seconds: float = 30.0, *, pause: bool = False, store: str = "", key_file: str = ""
    ) -> tuple[model.Drained, ...]:
        """Make every running sandbox safe before the machine goes; with `pause` nothing runs in one from its capture on. With
        `store` (its URL) they are sent there too, as far as the time allows."""
        return self.call(ask.Drain(seconds=seconds, pause=pause, store=store, key_file=key_file))

    def compact(self) -> model.Compaction:
        """Keep on disk once what the process images of checkpoints have in common, now and of all; a daemon does it by itself
        while the host is idle."""
        return self.call(ask.Compact())

    def prune(self, policy: ask.Policy, sandbox: str = "", *, dry: bool = False) -> ask.Pruned:
        """Remove the checkpoints that the policy does not keep, of one sandbox or of all; `dry`: only say which."""
        return self.call(ask.Prune(policy=policy, sandbox=sandbox, dry=dry))

    def import_archive(
        self, path: words.Path, name: str = "", *, allow_host: bool = False, limit: int | None = None
    ) -> Sandbox:
        """A sandbox from an archive that `export` wrote; it is stopped until `recover`. Raises `ArchiveRefused`.

        `allow_host`: also if it uses folders or the network of the host. `limit`: bytes that it may unpack to.
        """
        request = ask.Import(path=words.host_path(path), name=name, allow_host=allow_host, limit=limit)
        return self._of(self.call(request))

    def store(self, url: str, key_file: words.Path = "") -> Store:
        """A store of checkpoints: `s3://BUCKET/PREFIX`, `file:///FOLDER`, or a path on the daemon's host. Asks nothing."""
        return Store(self._transport, words.store_url(url), words.host_path(key_file) if key_file else "")

    def _of(self, found: model.Sandbox) -> Sandbox:
        return Sandbox(self._transport, found.id, found.name)


class Store:
    """Checkpoints that outlive their host (docs/store.md). Every call raises `StoreUnavailable`, `StoreRefused`, `WrongKey`,
    or `Incompatible` for a store of a newer version.
    """

    def __init__(self, transport: Transport, url: str, key_file: str) -> None:
        self._transport = transport
        self._url = url
        self._key = key_file

    def init(self, grace: float = 24 * 3600.0) -> model.StoreInfo:
        """Make the store, encrypted if there is a key file. `grace`: seconds that what nothing needs stays, twice.

        Raises `AlreadyExists`.
        """
        return self._transport.call(ask.StoreInit(url=self._url, key_file=self._key, grace=grace))

    def put(self, sandbox: str, ref: words.Ref = "head") -> model.StoredCheckpoint:
        """Send a checkpoint of a sandbox; it is durable in the store when this returns."""
        request = ask.StorePut(url=self._url, key_file=self._key, sandbox=sandbox, ref=words.ref_of(ref))
        return self._transport.call(request)

    def get(self, checkpoint: str, name: str = "", *, allow_host: bool = False, limit: int | None = None) -> Sandbox:
        """A sandbox from a checkpoint (an id, or NAME@REF); it is stopped until `recover`. As `Host.import_archive`."""
        request = ask.StoreGet(
            url=self._url, key_file=self._key, checkpoint=checkpoint, name=name, allow_host=allow_host, limit=limit
        )
        found = self._transport.call(request)
        return Sandbox(self._transport, found.id, found.name)

    def list(self) -> tuple[model.StoredCheckpoint, ...]:
        """The checkpoints, oldest first."""
        return self._transport.call(ask.StoreList(url=self._url, key_file=self._key))

    def remove(self, checkpoint: str) -> ask.Removed:
        """Take a checkpoint out; others keep all that they need."""
        return self._transport.call(ask.StoreRemove(url=self._url, key_file=self._key, checkpoint=checkpoint))

    def check(self, *, data: bool = False, repair: bool = False) -> model.StoreCheck:
        """Whether all is what was written, and which checkpoints are affected if not. With `data` every byte is read."""
        return self._transport.call(ask.StoreLook(url=self._url, key_file=self._key, data=data, repair=repair))

    def stats(self) -> model.StoreStats:
        """How much there is."""
        return self._transport.call(ask.StoreFigures(url=self._url, key_file=self._key))

    def collect(self, policy: ask.Policy | None = None) -> model.StoreCollection:
        """Remove what no checkpoint needs; with a policy, first take out what that does not keep."""
        return self._transport.call(ask.StoreCollect(url=self._url, key_file=self._key, policy=policy))


class Images:
    """The images of a host."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def add(self, name: str, source: str, *, replace: bool = False, if_missing: bool = False) -> model.Image:
        """Make an image of a source: `debian:SUITE`, `oci:…`, `dir:…`, `tar:…` or `host`."""
        request = ask.ImageAdd(name=name, source=words.image_source(source), replace=replace, if_missing=if_missing)
        return self._transport.call(request)

    def step(self, name: str) -> str:
        """What is being done for an image of that name that is being made (by somebody else's `add`); empty if none is."""
        return self._transport.call(ask.ImageStep(name=name))

    def build(
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
        return self._transport.call(request)

    def show(self, name: str) -> model.Image:
        """One image. Raises `NotFound`."""
        return self._transport.call(ask.ImageShow(name=name))

    def remove(self, name: str) -> ask.Removed:
        """Remove an image. Raises `InUse` while a sandbox or checkpoint is based on it."""
        return self._transport.call(ask.ImageRemove(name=name))

    def list(self) -> tuple[model.Image, ...]:
        """All images."""
        return self._transport.call(ask.ImageList())


class Sandbox:
    """One sandbox. As a context manager it removes the sandbox at the end, also if it runs.

    Every method may raise `NotFound` (the sandbox was removed), `SandboxGone`, and in a client `DaemonUnavailable`; those
    that change its life also `Busy` (another such operation is under way) and `WrongState`.
    """

    def __init__(self, transport: Transport, identity: str, name: str) -> None:
        self._transport = transport
        self.id = identity
        self.name = name

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} ({self.id})>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(NotFound):  # removed already
            self.remove(force=True)

    def _call(self, request: ask.Request) -> Any:
        return self._transport.call(request)

    def info(self) -> model.Sandbox:
        """The sandbox as it is now."""
        return self._call(ask.Inspect(sandbox=self.id))

    # ---- commands

    def run(
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
        result = self._call(ask.Run(sandbox=self.id, spec=spec, input=input, limit=limit))
        return words.checked(result, argv, check)

    def spawn(
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
    ) -> Process:
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
        return Process(self._transport.spawn(self.id, spec))

    def attach(self, name: str) -> Process:
        """A command that runs already, by its name or number. Raises `NotFound`, and `Busy` if another client reads it."""
        return Process(self._transport.attach(self.id, name))

    def shell(
        self,
        name: str = "main",
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = "",
        user: str = "",
        by_agent: bool = False,
    ) -> Shell:
        """A persistent shell of the sandbox. Its first command starts it: as that user, there, with that environment."""
        start = words.shell_start(env=env, cwd=cwd, user=user, by_agent=by_agent)
        return Shell(self._transport, self.id, name, start)

    def commands(self) -> tuple[model.ExecStatus, ...]:
        """The commands that run, and those that ended unread."""
        return self._call(ask.CommandList(sandbox=self.id))

    def processes(self) -> tuple[model.ProcessInfo, ...]:
        """All processes in the sandbox."""
        return self._call(ask.ProcessList(sandbox=self.id))

    # ---- life

    def start(self) -> model.Sandbox:
        """Start it on its files; processes of before are not brought back."""
        return self._call(ask.Start(sandbox=self.id))

    def stop(self, grace: float = 2.0) -> model.Sandbox:
        """SIGTERM to every process, SIGKILL after `grace` seconds."""
        return self._call(ask.Stop(sandbox=self.id, grace=grace))

    def kill(self) -> model.Sandbox:
        """SIGKILL to everything at once, as a crash would; `recover` brings it back."""
        return self._call(ask.Kill(sandbox=self.id))

    def pause(self) -> model.Sandbox:
        """Freeze every process."""
        return self._call(ask.Pause(sandbox=self.id))

    def resume(self) -> model.Sandbox:
        """Let it run again after `pause`."""
        return self._call(ask.Resume(sandbox=self.id))

    def remove(self, force: bool = False) -> ask.Removed:
        """Remove it, with `force` also if it runs, and those of its checkpoints that nothing else needs."""
        return self._call(ask.Remove(sandbox=self.id, force=force))

    # ---- checkpoints

    def checkpoint(
        self, label: str = "", policy: model.PolicyName = "adaptive", durable: bool = True
    ) -> model.Checkpoint:
        """Capture it as the end of a turn. Raises `CaptureFailed`, `NotCapturable`; then it runs on as before."""
        return self._call(ask.TakeCheckpoint(sandbox=self.id, label=label, policy=policy, durable=durable))

    def explain(self, ref: words.Ref = "") -> model.Decision:
        """Why a checkpoint captured what it did; without `ref`, what one taken now would capture."""
        return self._call(ask.Explain(sandbox=self.id, ref=words.ref_of(ref)))

    def turns(self, every: bool = False) -> tuple[model.Checkpoint, ...]:
        """The checkpoints on the current branch, oldest first; with `every` those that were rewound away as well."""
        return self._call(ask.Turns(sandbox=self.id, every=every))

    def rewind(
        self, ref: words.Ref, files_only: bool = False, *, note: str = "", by_agent: bool = False
    ) -> model.Sandbox:
        """Bring it back to a checkpoint. Raises `RestoreFailed`, `Incompatible`, `Damaged`; then it runs on as before.

        `note` is kept outside of it (`Sandbox.returns`), for an agent that has the tools of docs/mcp.md. `by_agent`: the caller
        is the sandbox's agent on the host, which goes on: what it does next was not done before.
        """
        request = ask.Rewind(
            sandbox=self.id, ref=words.ref_of(ref), files_only=files_only, note=note, by_agent=by_agent
        )
        return self._call(request)

    def recover(self, force: bool = False) -> model.Sandbox:
        """Restore it from its newest checkpoint after it was lost; with `force` also if it runs or was stopped: what it is
        now is given up. Its agent gets recorded answers and outcomes until it is where the sandbox is."""
        return self._call(ask.Recover(sandbox=self.id, force=force))

    def fork(self, ref: words.Ref = "", count: int = 1, names: Sequence[str] = ()) -> list[Sandbox]:
        """New sandboxes from a checkpoint, `count` or as many as there are names; without `ref` one is taken first."""
        count = len(names) if names and count == 1 else count
        request = ask.Fork(sandbox=self.id, ref=words.ref_of(ref), count=count, names=tuple(names))
        return [Sandbox(self._transport, found.id, found.name) for found in self._call(request)]

    def try_in_forks(
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
        return self._call(request)

    def diff(self, ref: words.Ref, to: words.Ref = "", content: bool = False) -> model.Difference:
        """What differs between a checkpoint and another one, or the sandbox as it is now; `content` adds unified diffs."""
        request = ask.Diff(sandbox=self.id, ref=words.ref_of(ref), to=words.ref_of(to), content=content)
        return self._call(request)

    def verify(self, ref: words.Ref = "head") -> model.Verification:
        """Restore a checkpoint into a scratch sandbox and compare."""
        return self._call(ask.Verify(sandbox=self.id, ref=words.ref_of(ref)))

    def label(self, ref: words.Ref, label: str) -> model.Checkpoint:
        """Give a checkpoint a label, or take it away (empty)."""
        return self._call(ask.Label(sandbox=self.id, ref=words.ref_of(ref), label=label))

    def remove_checkpoint(self, ref: words.Ref) -> ask.Removed:
        """Remove a checkpoint. Raises `InUse`."""
        return self._call(ask.RemoveCheckpoint(sandbox=self.id, ref=words.ref_of(ref)))

    # ---- turns

    @contextlib.contextmanager
    def turn(self, label: str = "") -> Iterator[None]:
        """A turn of an agent whose model is not reached through Crab: at the end of the block the sandbox is made safe,
        also if the block raises."""
        try:
            yield
        finally:
            self.checkpoint(label)

    def model_address(self, inside: bool = False) -> ask.Address:
        """Where its agent finds its models: one on the host, or one that lives `inside`. Raises `WrongState` if it has none."""
        return self._call(ask.ModelAddress(sandbox=self.id, inside=inside))

    def model_keys(self, keys: Mapping[str, str]) -> None:
        """Keys by API (`anthropic`, `openai`, `gemini`), for an agent inside that is not to have them."""
        self._call(ask.ModelKeys(sandbox=self.id, keys=dict(keys)))

    def exchanges(self, limit: int = 1000) -> tuple[model.Exchange, ...]:
        """What its agent asked its model, oldest first."""
        return self._call(ask.Exchanges(sandbox=self.id, limit=limit))

    def exchange(self, number: int) -> model.Conversation:
        """One of them, with what was said. Raises `NotFound`."""
        return self._call(ask.ExchangeText(sandbox=self.id, number=number))

    # ---- files

    def copy_in(self, source: words.Path, target: str) -> ask.Copied:
        """Copy a file or folder of the daemon's host into the sandbox."""
        return self._call(ask.CopyIn(sandbox=self.id, source=words.host_path(source), target=target))

    def copy_out(self, source: str, target: words.Path) -> ask.Copied:
        """Copy a file or folder of the sandbox to the daemon's host."""
        return self._call(ask.CopyOut(sandbox=self.id, source=source, target=words.host_path(target)))

    def apply(self, target: str, dry_run: bool = False) -> model.Difference:
        """Copy the result of a copy-on-write mount back to the host's folder; returns what is changed by it."""
        return self._call(ask.Apply(sandbox=self.id, target=target, dry_run=dry_run))

    def export(self, path: words.Path, ref: words.Ref = "head", with_image: bool = True) -> model.Checkpoint:
        """Write a checkpoint into one archive on the daemon's host."""
        request = ask.Export(sandbox=self.id, ref=words.ref_of(ref), path=words.host_path(path), with_image=with_image)
        return self._call(request)

    def commit(self, name: str) -> model.Image:
        """Make an image of its files."""
        return self._call(ask.Commit(sandbox=self.id, name=name))


class Shell:
    """A persistent shell (bash) in a sandbox: what one command leaves (work directory, variables, jobs) the next one finds.

    It lives in the sandbox, not in this object: it comes back with a rewind, is there in a fork, and any object of the same
    name is the same shell.
    """

    def __init__(self, transport: Transport, sandbox: str, name: str, start: words.ShellStart) -> None:
        self._transport = transport
        self._sandbox = sandbox
        self._start = start
        self.name = name

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    def run(self, command: str, timeout: float | None = None) -> model.ShellResult:
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
        return self._transport.call(request)

    def interrupt(self) -> bool:
        """Interrupt (Ctrl-C) the command that runs in it; says whether one did. Raises `NotFound` if there is no shell."""
        return self._transport.call(ask.ShellInterrupt(sandbox=self._sandbox, shell=self.name))

    def state(self) -> model.ShellState:
        """What it holds in its memory, as digests. Asking changes nothing. Raises `NotFound` if there is no such shell."""
        return self._transport.call(ask.ShellLook(sandbox=self._sandbox, shell=self.name))


class Process:
    """A running command: iterate over it for its output (`Output`: stream 1 or 2, data) until it has ended.

    One thread or task iterates; the other calls may come from any. What nobody reads is held up to about a megabyte,
    then the command waits, as with a pipe. As a context manager it kills the command at the end if it still runs.
    """

    def __init__(self, command: RunningCommand) -> None:
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.status().running and not self._left:
            with contextlib.suppress(SandboxGone, NotFound):  # then it is dead already
                self.kill()
                self.wait()

    def __iter__(self) -> Iterator[Output]:
        return self._events

    def status(self) -> model.ExecStatus:
        """How it ended, or that it runs (as far as its output was read)."""
        return self._command.status()

    def wait(self) -> model.ExecStatus:
        """Wait for its end; output that was not iterated is thrown away. Says `running` if it was detached."""
        for _ in self._events:
            pass
        return self._command.status()

    def write(self, data: bytes) -> None:
        """Give it input; returns when it has taken all. Raises `WrongState` if it takes no more."""
        self._command.write(data)

    def close_input(self) -> None:
        """End of input."""
        self._command.close_input()

    def signal(self, number: int) -> None:
        """Send a signal to its process group, or to the foreground group of its terminal."""
        self._command.signal(number)

    def resize(self, rows: int, columns: int) -> None:
        """New size of its terminal, in characters."""
        self._command.resize(rows, columns)

    def kill(self) -> None:
        """SIGKILL it and everything that it has started."""
        self._command.kill()

    def detach(self) -> None:
        """Leave it alone: iteration ends with what is under way, further output waits in the sandbox for `attach`."""
        self._left = True
        self._command.detach()
