"""The typed requests of the API: one struct for each operation, the same in-process and over the socket.

`operation` is the name on the wire, `returns` the type of the answer. `CALLS` lists all; the HTTP server, its OpenAPI
description and the clients are made from it.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec

from crab.model import (
    Checkpoint,
    Compaction,
    Conversation,
    Decision,
    Difference,
    Drained,
    EngineState,
    Exchange,
    ExecResult,
    ExecSpec,
    ExecStatus,
    Image,
    Limits,
    ModelAccess,
    Mount,
    NetworkMode,
    PolicyName,
    Probe,
    ProcessInfo,
    Sandbox,
    Seconds,
    ShellResult,
    ShellState,
    StoreCheck,
    StoreCollection,
    StoredCheckpoint,
    StoreInfo,
    StoreStats,
    Struct,
    Trial,
    Verification,
)
from crab.store.retention import Policy


class Request(Struct, kw_only=True):
    """Base of all requests."""

    operation: ClassVar[str]
    returns: ClassVar[Any]


class Version(Struct, kw_only=True):
    """Who answers."""

    crab: str
    api: int
    pid: int
    state_dir: str


class Removed(Struct, kw_only=True):
    """What was removed."""

    removed: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    """What stays because something else builds on it."""


class Pruned(Struct, kw_only=True):
    """What came of a retention policy."""

    removed: tuple[str, ...] = ()
    """Checkpoints that were removed (or would be)."""
    stays: dict[str, str] = {}
    """Those that could not be, and why."""


class Copied(Struct, kw_only=True):
    """What was copied."""

    files: int
    size: int
    skipped: tuple[str, ...] = ()
    """Sockets, devices and FIFOs, which are not copied."""


class About(Request, kw_only=True):
    """Who answers: version of Crab and of the API."""

    operation = "about"
    returns = Version


class Doctor(Request, kw_only=True):
    """What this host offers."""

    operation = "doctor"
    returns = tuple[Probe, ...]


class ImageAdd(Request, kw_only=True):
    """Make an image of a source."""

    operation = "image.add"
    returns = Image
    name: str
    source: str
    replace: bool = False
    if_missing: bool = False
    """Return the image if one of that name exists already."""


class ImageStep(Request, kw_only=True):
    """What is being done for an image of that name that is being made; empty if none is."""

    operation = "image.step"
    returns = str
    name: str


class ImageList(Request, kw_only=True):
    """All images."""

    operation = "image.list"
    returns = tuple[Image, ...]


class ImageShow(Request, kw_only=True):
    """One image."""

    operation = "image.show"
    returns = Image
    name: str


class ImageRemove(Request, kw_only=True):
    """Remove an image. Refused while a sandbox or checkpoint is based on it."""

    operation = "image.remove"
    returns = Removed
    name: str


class ImageBuild(Request, kw_only=True):
    """Run a set-up command (as root) on an image, with network, and keep the result as another image."""

    operation = "image.build"
    returns = Image
    name: str
    base: str
    command: tuple[str, ...]
    network: NetworkMode = "nat"
    env: dict[str, str] = {}
    """For the command only: nothing of it is kept in the image."""


class Commit(Request, kw_only=True):
    """Make an image of a sandbox's files."""

    operation = "commit"
    returns = Image
    sandbox: str
    name: str


class Create(Request, kw_only=True):
    """Make a sandbox, and start it unless told not to."""

    operation = "create"
    returns = Sandbox
    name: str = ""
    """Empty: one is made up."""
    image: str = "debian"
    hostname: str = ""
    env: dict[str, str] = {}
    workdir: str = ""
    """Empty: the image's, or the home of the user."""
    user: str = ""
    """Empty: the image's, or root."""
    network: NetworkMode = "none"
    limits: Limits = Limits()
    mounts: tuple[Mount, ...] = ()
    model: ModelAccess | None = None
    """None: it has no model."""
    exec_turns: bool = False
    """Each command that ends is a turn."""
    start: bool = True


class Start(Request, kw_only=True):
    """Start a stopped sandbox on its files (its processes are not brought back: that is `recover`)."""

    operation = "start"
    returns = Sandbox
    sandbox: str


class Stop(Request, kw_only=True):
    """SIGTERM to every process, SIGKILL after `grace` seconds; files and checkpoints stay."""

    operation = "stop"
    returns = Sandbox
    sandbox: str
    grace: Seconds = 2.0


class Kill(Request, kw_only=True):
    """SIGKILL to everything in the sandbox at once, as a crash would: it is `lost` afterwards, `recover` brings it back.

    Also while an operation is under way, which then fails (a rewind does not: it replaces what was killed)."""

    operation = "kill"
    returns = Sandbox
    sandbox: str


class Pause(Request, kw_only=True):
    """Freeze every process."""

    operation = "pause"
    returns = Sandbox
    sandbox: str


class Resume(Request, kw_only=True):
    """Let a paused sandbox run again."""

    operation = "resume"
    returns = Sandbox
    sandbox: str


class Remove(Request, kw_only=True):
    """Remove a sandbox and those of its checkpoints that nothing else needs."""

    operation = "remove"
    returns = Removed
    sandbox: str
    force: bool = False
    """Also if it runs."""


class Inspect(Request, kw_only=True):
    """One sandbox."""

    operation = "inspect"
    returns = Sandbox
    sandbox: str


class SandboxList(Request, kw_only=True):
    """All sandboxes."""

    operation = "list"
    returns = tuple[Sandbox, ...]


class ProcessList(Request, kw_only=True):
    """The processes of a sandbox."""

    operation = "processes"
    returns = tuple[ProcessInfo, ...]
    sandbox: str


class Run(Request, kw_only=True):
    """Run a command to its end and return its output."""

    operation = "run"
    returns = ExecResult
    sandbox: str
    spec: ExecSpec
    input: bytes = b""
    limit: Annotated[int, msgspec.Meta(ge=0)] = 64 << 20
    """Bytes that are kept of each output stream."""


class ShellRun(Request, kw_only=True):
    """Run a command in a persistent shell of the sandbox. The first one starts the shell (bash).

    Work directory, variables, functions and background jobs of one command are there for the next, also after a rewind, in
    a fork, and with another daemon. One command at a time: a second one is refused as `Busy`.
    """

    operation = "shell-run"
    returns = ShellResult
    sandbox: str
    command: str
    """Shell text, any number of lines."""
    shell: str = "main"
    """Another name is another shell."""
    timeout: float | None = None
    """Seconds, then the command is interrupted (Ctrl-C). A shell that does not come back from that is killed."""
    user: str = ""
    """Who the shell belongs to, if it is started now. Empty: the sandbox's user."""
    cwd: str = ""
    """Where the shell begins, if it is started now."""
    env: dict[str, str] = {}
    """Added to the sandbox's environment, if the shell is started now."""
    by_agent: bool = False
    """A step of the sandbox's agent: see `ExecSpec.by_agent`."""


class ShellInterrupt(Request, kw_only=True):
    """Interrupt (Ctrl-C) the command that runs in a persistent shell. The answer says whether one did."""

    operation = "shell-interrupt"
    returns = bool
    sandbox: str
    shell: str = "main"


class ShellLook(Request, kw_only=True):
    """What a persistent shell holds in its memory, as digests. Asking for it changes nothing in the shell."""

    operation = "shell-state"
    returns = ShellState
    sandbox: str
    shell: str = "main"


class CommandList(Request, kw_only=True):
    """The commands that a sandbox's init knows: those that run, and those that ended unread."""

    operation = "commands"
    returns = tuple[ExecStatus, ...]
    sandbox: str


class TakeCheckpoint(Request, kw_only=True):
    """Capture the sandbox as the end of a turn."""

    operation = "checkpoint"
    returns = Checkpoint
    sandbox: str
    label: str = ""
    policy: PolicyName = "adaptive"
    """`adaptive`: what changed since the checkpoint before (docs/inspector.md); `always`: files and processes; `files`: without
    the processes; `oracle`: everything, and the decision is judged by a comparison of everything (seconds)."""
    durable: bool = True
    """Return only when the checkpoint would survive a crash of the host."""


class Address(Struct, kw_only=True):
    """Where an agent finds the models of a sandbox."""

    url: str
    """Of the proxy; the paths of the APIs follow (`/v1/messages`, `/v1/chat/completions`, …)."""
    env: dict[str, str]
    """Variables by which the clients of the APIs find it."""


class ModelAddress(Request, kw_only=True):
    """Where an agent finds the models of a sandbox: one that lives in it (`inside`), or one on the host."""

    operation = "model-address"
    returns = Address
    sandbox: str
    inside: bool = False


class ModelKeys(Request, kw_only=True):
    """The keys for models that an agent inside a sandbox is not to have. Kept in the daemon's memory only; an agent sends
    a placeholder, which is replaced on the way."""

    operation = "model-keys"
    returns = bool
    sandbox: str
    keys: dict[str, str]
    """By API: `anthropic`, `openai`, `gemini`."""


class Exchanges(Request, kw_only=True):
    """What the agent of a sandbox asked its model, oldest first; the newest `limit` of it."""

    operation = "exchanges"
    returns = tuple[Exchange, ...]
    sandbox: str
    limit: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 1000


class ExchangeText(Request, kw_only=True):
    """One exchange as it was recorded."""

    operation = "exchange"
    returns = Conversation
    sandbox: str
    number: int


class Explain(Request, kw_only=True):
    """Why a checkpoint captured what it did; without `ref`, what one taken now would capture (nothing is captured)."""

    operation = "explain"
    returns = Decision
    sandbox: str
    ref: str = ""


class Jobs(Request, kw_only=True):
    """What the host works on for checkpoints: what runs, what waits for its turn, and why."""

    operation = "jobs"
    returns = EngineState


class Drain(Request, kw_only=True):
    """Make every running sandbox safe before the machine goes: as many as the time allows, and say which are not."""

    operation = "drain"
    returns = tuple[Drained, ...]
    seconds: Seconds = 30.0
    """What has not begun by then is not done."""
    pause: bool = False
    """Let nothing run in a sandbox from its capture on."""
    store: str = ""
    """Also send them to that store, as far as the time allows (`StoreRequest.url`)."""
    key_file: str = ""


class Compact(Request, kw_only=True):
    """Keep on disk once what the process images of checkpoints have in common, now and of all. A daemon does it by itself,
    while the host is idle, with those that are no more the newest."""

    operation = "compact"
    returns = Compaction


class Prune(Request, kw_only=True):
    """Remove the checkpoints that a policy does not keep, of one sandbox or (empty) of all. What others need of them they
    get."""

    operation = "prune"
    returns = Pruned
    policy: Policy
    sandbox: str = ""
    dry: bool = False
    """Say what would be removed, and remove nothing."""


class Turns(Request, kw_only=True):
    """The checkpoints on the current branch, oldest first; all of the sandbox's with `every`."""

    operation = "turns"
    returns = tuple[Checkpoint, ...]
    sandbox: str
    every: bool = False


class Rewind(Request, kw_only=True):
    """Bring the sandbox back to a checkpoint, under the same id."""

    operation = "rewind"
    returns = Sandbox
    sandbox: str
    ref: str
    files_only: bool = False
    """Restore the files and start anew, without the processes."""
    note: Annotated[str, msgspec.Meta(max_length=4000)] = ""
    """Kept outside of the sandbox, for whoever is back there (`Sandbox.returns`)."""
    by_agent: bool = False
    """By its agent, which lives on the host and is not brought back: it is not behind the sandbox afterwards."""


class Recover(Request, kw_only=True):
    """Restore a lost sandbox from its head. Its agent gets the recorded answers and outcomes until it is where the sandbox
    is."""

    operation = "recover"
    returns = Sandbox
    sandbox: str
    force: bool = False
    """Also if it runs or was stopped: what it is now is given up. For an agent outside of it that died alone."""


class Fork(Request, kw_only=True):
    """New sandboxes from a checkpoint. Without `ref`, one is taken of the running source first."""

    operation = "fork"
    returns = tuple[Sandbox, ...]
    sandbox: str
    ref: str = ""
    count: int = 1
    names: tuple[str, ...] = ()


class Try(Request, kw_only=True):
    """Run a command in forks that are gone when it has ended. Without `ref` they are made of the sandbox as it is now.

    An agent inside stands still in them, and none of them has a model. What reaches the outside (network, bind mounts) is
    not undone.
    """

    operation = "try"
    returns = tuple[Trial, ...]
    sandbox: str
    spec: ExecSpec
    """Its `timeout` is 600 s at most, and that if there is none. The command finds the number of its fork in `$CRAB_TRY`."""
    ref: str = ""
    count: Annotated[int, msgspec.Meta(ge=1, le=8)] = 1
    limit: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 1 << 16
    """Bytes that are kept of each output stream."""


class Diff(Request, kw_only=True):
    """What differs between a checkpoint and another one, or the live sandbox (`to` empty)."""

    operation = "diff"
    returns = Difference
    sandbox: str
    ref: str
    to: str = ""
    content: bool = False
    """Also a unified diff of every text file."""


class Verify(Request, kw_only=True):
    """Restore a checkpoint into a scratch sandbox, compare, and remember the result."""

    operation = "verify"
    returns = Verification
    sandbox: str
    ref: str = "head"


class Label(Request, kw_only=True):
    """Give a checkpoint a label, or take it away (empty)."""

    operation = "label"
    returns = Checkpoint
    sandbox: str
    ref: str
    label: str


class RemoveCheckpoint(Request, kw_only=True):
    """Remove a checkpoint that nothing else needs. Its children become those of its parent."""

    operation = "rm-checkpoint"
    returns = Removed
    sandbox: str
    ref: str


class Export(Request, kw_only=True):
    """Write a checkpoint (with its image, if wanted) into one archive on the daemon's host."""

    operation = "export"
    returns = Checkpoint
    sandbox: str
    ref: str
    path: str
    """Absolute, and not there yet; compressed if it ends in `.zst`."""
    with_image: bool = True


class Import(Request, kw_only=True):
    """Make a sandbox from an archive; it is stopped until `recover`."""

    operation = "import"
    returns = Sandbox
    path: str
    name: str = ""
    """Empty: the name it had, or a free one like it."""
    allow_host: bool = False
    """Also if the sandbox uses folders or the network of the host: those of this host, then."""
    limit: int | None = None
    """Bytes that the archive may unpack to; None: 32 GiB."""


class StoreRequest(Request, kw_only=True):
    """What all requests to a store say."""

    url: str
    """`s3://BUCKET/PREFIX`, `file:///FOLDER`, or an absolute path on the daemon's host. Endpoint and keys of S3 are those of
    the daemon's AWS_… variables."""
    key_file: str = ""
    """Of an encrypted store: absolute path on the daemon's host."""


class StoreInit(StoreRequest, kw_only=True):
    """Make a store where none is; encrypted if a key file is given."""

    operation = "store-init"
    returns = StoreInfo
    grace: Seconds = 24 * 3600.0
    """Seconds that what is no longer needed stays at least, twice. No checkpoint may take half of it to be sent."""


class StorePut(StoreRequest, kw_only=True):
    """Send a checkpoint to a store, with all that it stands on. When this returns it is durable there."""

    operation = "store-put"
    returns = StoredCheckpoint
    sandbox: str
    ref: str


class StoreGet(StoreRequest, kw_only=True):
    """Make a sandbox from a checkpoint of a store; it is stopped until `recover`."""

    operation = "store-get"
    returns = Sandbox
    checkpoint: str
    """NAME of a sandbox (the newest), NAME@REF, or an id or its beginning."""
    name: str = ""
    """Empty: the name it had, or a free one like it."""
    allow_host: bool = False
    """Also if the sandbox uses folders or the network of the host: those of this host, then."""
    limit: int | None = None
    """Bytes that the checkpoint may have; None: 32 GiB."""


class StoreList(StoreRequest, kw_only=True):
    """The checkpoints in a store, oldest first."""

    operation = "store-list"
    returns = tuple[StoredCheckpoint, ...]


class StoreRemove(StoreRequest, kw_only=True):
    """Take a checkpoint out of a store. Others keep all that they need."""

    operation = "store-remove"
    returns = Removed
    checkpoint: str
    """As of `StoreGet`, or the id of one whose record is damaged."""


class StoreLook(StoreRequest, kw_only=True):
    """Whether all that is in a store is what was written."""

    operation = "store-check"
    returns = StoreCheck
    data: bool = False
    """Read every byte; else the sizes of packs and all lists."""
    repair: bool = False
    """Make indexes again of packs that are in none, and give up damaged ones, so that what they had can be sent again."""


class StoreFigures(StoreRequest, kw_only=True):
    """How much is in a store."""

    operation = "store-stats"
    returns = StoreStats


class StoreCollect(StoreRequest, kw_only=True):
    """Remove what no checkpoint of a store needs. With `policy`, first take out what that does not keep."""

    operation = "store-gc"
    returns = StoreCollection
    policy: Policy | None = None


class CopyIn(Request, kw_only=True):
    """Copy a file or folder of the daemon's host into the sandbox."""

    operation = "copy-in"
    returns = Copied
    sandbox: str
    source: str
    target: str


class CopyOut(Request, kw_only=True):
    """Copy a file or folder of the sandbox to the daemon's host."""

    operation = "copy-out"
    returns = Copied
    sandbox: str
    source: str
    target: str


class Apply(Request, kw_only=True):
    """Copy the result of a copy-on-write mount back to the host's folder."""

    operation = "apply"
    returns = Difference
    sandbox: str
    target: str
    dry_run: bool = False


def _subclasses(base: type[Request]) -> list[type[Request]]:
    children = base.__subclasses__()
    return [child for child in children if child.__dict__.get("operation")] + [
        found for child in children for found in _subclasses(child)
    ]


CALLS: dict[str, type[Request]] = {call.operation: call for call in _subclasses(Request)}
