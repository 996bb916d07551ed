"""The domain types: plain, frozen data that every layer and both sides of the daemon's socket share.

Knows no behaviour beyond what a value can say about itself. Times are seconds since the epoch (float, UTC), durations
are milliseconds where a name ends in `_ms`, sizes are bytes. JSON is the wire form (msgspec), so fields may be added
but never change their meaning.
"""

from __future__ import annotations

import enum
from typing import Annotated, Literal

import msgspec

NetworkMode = Literal["none", "nat", "host"]
MountKind = Literal["bind", "copy"]
CheckpointKind = Literal["none", "files", "processes", "full"]
PolicyName = Literal["adaptive", "always", "files", "oracle"]
GateName = Literal["durable", "captured", "none"]
Judgement = Literal["right", "false alarm", "miss"]
Verdict = Literal["proven", "untested", "failed"]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
"""A length of time that somebody waits: neither infinite nor not-a-number, which no timer takes."""
Characters = Annotated[int, msgspec.Meta(ge=0, le=65535)]
"""Width or height of a terminal."""
Health = Literal["ok", "degraded", "missing"]


class Struct(msgspec.Struct, frozen=True):
    """Base of all domain types."""


class State(enum.StrEnum):
    """Life cycle of a sandbox; `lost` is one whose processes died without being stopped (crash, reboot), `damaged` one whose
    record in the registry cannot be read."""

    CREATED = "created"
    RUNNING = "running"
    PAUSED = "paused"
    STOPPED = "stopped"
    LOST = "lost"
    DAMAGED = "damaged"


# ---------------------------------------------------------------- images


class Image(Struct, kw_only=True):
    """A read-only root file system that sandboxes start from."""

    name: str
    source: str
    """Where it came from: `debian:bookworm`, `oci:…`, `dir:…`, `tar:…`, `host`, `sandbox:NAME`, `build:IMAGE`."""
    fingerprint: str
    """`blake3:…` of its content (paths, types, modes, owners, link targets, file contents, xattrs)."""
    architecture: str
    size: int
    created: float


# ---------------------------------------------------------------- sandboxes


class Limits(Struct, kw_only=True):
    """Upper bounds of one sandbox; None is no bound."""

    memory: int | None = None
    """Bytes of memory, swap included."""
    cpus: float | None = None
    """Processors' worth of time: 1.5 is one and a half."""
    pids: int | None = 4096
    """Processes and threads."""
    disk: int | None = None
    """Bytes that the sandbox may write above its image."""


class Mount(Struct, kw_only=True):
    """A folder of the host inside the sandbox."""

    source: str
    """Absolute path on the host."""
    target: str
    """Absolute path in the sandbox."""
    kind: MountKind = "copy"
    """`copy`: copy-on-write, part of checkpoints, rolled back. `bind`: the host's own folder, never rolled back."""
    read_only: bool = False


class ModelAccess(Struct, kw_only=True):
    """How an agent reaches its model: through Crab, which makes the sandbox safe at every turn (docs/turns.md)."""

    upstream: str = ""
    """Who answers: an address (`https://…`), `replay:FILE`, `mock`; empty or `api`: the API that the request speaks
    (api.openai.com, api.anthropic.com, generativelanguage.googleapis.com)."""
    gate: GateName = "durable"
    """How safe a turn must be before the agent gets the answer that makes it act: it would survive a crash of the host
    (`durable`), of the sandbox (`captured`), or whatever it is (`none`)."""
    hold: Seconds = 60.0
    """Longest time that a whole answer is kept back. Then it goes out, and the turn is marked `unprotected`."""
    tools: bool = False
    """An agent inside may save, compare, rewind and try things in forks by itself, over MCP (docs/mcp.md)."""


class SandboxSpec(Struct, kw_only=True):
    """All that is needed to make a sandbox; stored with every checkpoint."""

    image: str
    hostname: str = ""
    """Empty: the sandbox's name."""
    env: dict[str, str] = {}
    workdir: str = ""
    """Empty: the home of the user."""
    user: str = "root"
    """Name or number of the default user of commands."""
    network: NetworkMode = "none"
    limits: Limits = Limits()
    mounts: tuple[Mount, ...] = ()
    model: ModelAccess | None = None
    """None: it has no model."""
    exec_turns: bool = False
    """Each command that ends is a turn: it is made safe before anybody hears of its end."""


class Return(Struct, kw_only=True):
    """A rewind that happened: what the agent that is back at an earlier turn cannot know by itself."""

    when: float
    checkpoint: str
    """Id of the one that it was brought back to."""
    turn: int
    """Of that checkpoint."""
    left: int
    """Number of the newest turn that was given up."""
    generation: int
    """Of the incarnation that began with it."""
    note: str = ""
    """What whoever rewound it wanted to be known."""


class Sandbox(Struct, kw_only=True):
    """A sandbox as it is now."""

    id: str
    name: str
    spec: SandboxSpec
    state: State
    created: float
    image_fingerprint: str
    generation: int
    """Counts incarnations: every start, restore or rewind is a new one."""
    pid: int | None = None
    """Host's number of the sandbox's init, while it runs."""
    head: str | None = None
    """Id of the checkpoint that `recover` would restore."""
    turn: int = 0
    """Number of the newest turn on the current branch."""
    forked_from: str | None = None
    """Id of the checkpoint that it was forked from."""
    not_rolled_back: tuple[str, ...] = ()
    """Bind mounts: what rewind and recover leave as it is."""
    reason: str = ""
    """Why it is `lost` or failed, in words."""
    returns: tuple[Return, ...] = ()
    """The newest rewinds, oldest first."""
    unread: int = 0
    """Requests of its agent to a model that could not be read, since the daemon began: they were passed through as they
    came, and ended no turn."""
    unread_why: str = ""
    """Why the newest of them could not."""


class ProcessInfo(Struct, kw_only=True):
    """One process of a sandbox."""

    pid: int
    """Number inside the sandbox."""
    host_pid: int
    parent: int
    state: str
    uid: int
    """User id inside the sandbox."""
    memory: int
    """Resident bytes."""
    argv: tuple[str, ...]
    exec_id: str = ""
    """The exec that it descends from, if that is still known."""


# ---------------------------------------------------------------- commands


class ExecSpec(Struct, kw_only=True):
    """A command to run in a sandbox."""

    argv: tuple[str, ...]
    env: dict[str, str] = {}
    """Added to the sandbox's own."""
    cwd: str = ""
    """Empty: the sandbox's work directory."""
    user: str = ""
    """Empty: the sandbox's user."""
    tty: bool = False
    stdin: bool = False
    """Keep standard input open for the caller; else it is /dev/null."""
    rows: Characters = 24
    columns: Characters = 80
    timeout: Seconds | None = None
    """Seconds, then the whole tree of the command is killed."""
    name: str = ""
    """Empty: one is made. A name that is alive already: `AlreadyExists`. `shell:…` and `step:…` are Crab's own."""
    by_agent: bool = False
    """A step of the sandbox's agent: how it ended is recorded, and it is not run again by an agent that comes back."""


class ExecStatus(Struct, kw_only=True):
    """How a command ended, or that it has not."""

    id: str
    running: bool
    exit_code: int | None = None
    """0…255; 128 + signal if a signal ended it, 124 after a timeout."""
    signal: int | None = None
    timed_out: bool = False
    pid: int | None = None


class ExecResult(Struct, kw_only=True):
    """A finished command with its output."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    signal: int | None = None
    timed_out: bool = False
    truncated: bool = False
    """More output came than the caller wanted to keep."""
    duration_ms: float = 0.0

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    def text(self) -> str:
        """Standard output as text (UTF-8, undecodable bytes replaced)."""
        return self.stdout.decode(errors="replace")


class ShellResult(Struct, kw_only=True):
    """What a command in a persistent shell came to."""

    exit_code: int
    """124 after a timeout."""
    output: str
    """What the terminal showed, the newest 8 MiB of it; undecodable bytes are written as `\\xff`."""
    timed_out: bool = False
    """It was interrupted (Ctrl-C) after its time."""
    ended: bool = False
    """The shell itself ended (`exit`, or it did not come back from an interrupt). The next command starts a new one."""


class ShellState(Struct, kw_only=True):
    """What a persistent shell holds in its memory, as digests: equal digests, equal state."""

    digest: str = ""
    """Of all together; empty if the state is not known."""
    parts: dict[str, str] = {}
    """A digest each: `variable:A`, `function:f`, `alias:q`, `trap:SIGUSR1`, `option:pipefail`, `cwd`, `umask`, `jobs`, …"""
    unknown: str = ""
    """Why the state is not known; empty if it is. An unknown state is to be taken for a changed one."""


# ---------------------------------------------------------------- checkpoints


class Artefact(Struct, kw_only=True):
    """One stored file of a checkpoint."""

    name: str
    size: int
    digest: str


class Timings(Struct, kw_only=True):
    """What a capture cost, in milliseconds."""

    frozen_ms: float = 0.0
    """No process of the sandbox ran for this long."""
    dump_ms: float = 0.0
    snapshot_ms: float = 0.0
    publish_ms: float = 0.0
    total_ms: float = 0.0
    attempts: int = 1
    queued_ms: float = 0.0
    """Before all this: it waited for its turn among the work of the host."""


class HostPrint(Struct, kw_only=True):
    """What a process image depends on; compared before a restore."""

    kernel: str
    architecture: str
    cpu: str
    """Vendor, family, model and a digest of the feature flags."""
    criu: str
    boot_id: str = ""


class Proof(Struct, kw_only=True):
    """Whether a checkpoint is known to be restorable."""

    verdict: Verdict = "untested"
    reason: str = ""
    when: float = 0.0


class FileChange(Struct, kw_only=True):
    """One path that differs. `kind` of a renamed file is `renamed`, with its old path in `before`."""

    path: str
    """Undecodable bytes are surrogate-escaped (PEP 383)."""
    kind: Literal["added", "changed", "removed", "renamed"]
    what: tuple[str, ...] = ()
    """Of a change: `content`, `mode`, `owner`, `xattr`, `type`, `target`, `times`."""
    before: str = ""
    size: int = 0
    diff: str = ""
    """If it was asked for: unified diff of a text file's content; why there is none for other files."""


class Decision(Struct, kw_only=True):
    """What a turn changed since the checkpoint before it, and how that is known."""

    kind: CheckpointKind
    reasons: tuple[str, ...] = ()
    """One sentence each; those that made it more than `none`, or else why nothing counts."""
    notes: tuple[str, ...] = ()
    """What was seen and did not count."""
    files: tuple[FileChange, ...] = ()
    """Some of the files that changed; bytes of their names that are no UTF-8 as `\\xff`."""
    tier: str = ""
    """How the kernel was watched: `A`, `B` or `C` (docs/inspector.md); empty: it was not."""
    cost_ms: float = 0.0
    judged: Judgement | None = None
    """Of a turn taken with policy `oracle`: whether the decision was right. A miss would have lost state."""
    truth: tuple[str, ...] = ()
    """What the oracle found to be different, one line each."""


class Checkpoint(Struct, kw_only=True):
    """A published checkpoint (the part of the manifest that users see)."""

    id: str
    sandbox: str
    """Id of the sandbox that it was taken of."""
    turn: int
    kind: CheckpointKind
    """What was captured: `full` files and processes of one freeze, `processes` the same while the files were proven unchanged,
    `files` a snapshot of the files while the processes were proven unchanged, `none` nothing: all was proven unchanged."""
    created: float
    parent: str | None = None
    label: str = ""
    processes_from: str | None = None
    """Id of the checkpoint that holds the process images; None: there are no processes."""
    files_from: str = ""
    """Id of the checkpoint that holds the files; empty: this one."""
    process_bytes: int = 0
    process_count: int = 0
    timings: Timings = Timings()
    proof: Proof = Proof()
    image: str = ""
    image_fingerprint: str = ""
    decision: Decision | None = None
    """None: nobody asked what had changed (policy `always` or `files`)."""


# ---------------------------------------------------------------- the engine


class JobView(Struct, kw_only=True):
    """Work on the checkpoints of one sandbox."""

    kind: str
    """`capture`, `restore` or `verify`."""
    sandbox: str
    urgency: str
    """`urgent`: somebody waits for it; `normal`: somebody will; `background`: nobody will."""
    waited_ms: float
    runs_ms: float = 0.0
    """0 if it has not begun."""
    expected_ms: float = 0.0
    """How long such a job of this sandbox took before."""
    expected_bytes: int = 0
    reason: str = ""
    """Why it has not begun."""


class EngineState(Struct, kw_only=True):
    """What the host works on for checkpoints (docs/engine.md)."""

    slots: int
    """Jobs at once."""
    unwritten: int
    """Bytes that wait for the disk."""
    most_unwritten: int
    """Above that, jobs that write wait."""
    running: tuple[JobView, ...] = ()
    waiting: tuple[JobView, ...] = ()
    done: dict[str, int] = {}
    """Jobs by kind since the daemon began."""
    queued_ms_p50: float = 0.0
    """How long the last jobs waited for their turn."""
    queued_ms_p99: float = 0.0


class Drained(Struct, kw_only=True):
    """What became of a sandbox when the host was drained."""

    sandbox: str
    """Its name."""
    safe: bool
    """Its newest checkpoint is durable, and was taken for this."""
    checkpoint: str | None = None
    """The newest one that there is."""
    turn: int = 0
    age_s: float = 0.0
    """Of one that is not safe: how old its newest checkpoint is; 0 if it has none."""
    paused: bool = False
    stored: bool = False
    """It is in the store, so that it outlives this host."""
    why: str = ""
    """Why it is not safe, or not in the store that was wanted."""


class Compaction(Struct, kw_only=True):
    """What came of putting together what checkpoints have in common."""

    checkpoints: int = 0
    """Whose process images were written anew."""
    size: int = 0
    """Bytes that their images have."""
    own: int = 0
    """Bytes of those that no checkpoint before had, before they were compressed."""
    failed: dict[str, str] = {}
    """Ids of checkpoints that were left as they are, and why: damaged, being read, no room."""


# ---------------------------------------------------------------- models


class Exchange(Struct, kw_only=True):
    """A question of an agent to its model, and what became of it."""

    number: int
    turn: int | None = None
    """The turn that it ended; None until that was made safe, and for helpers."""
    checkpoint: str | None = None
    client: str = ""
    kind: str = "main"
    """`main`: of the loop in which the agent acts; `helper`: titles, summaries and the like, which end no turn."""
    state: str = ""
    """`asked`, `answered`, `released` (the agent has it), or `failed` (it will ask again)."""
    protection: str = ""
    """`durable`, `captured`, `none`, or `unprotected`: how safe the turn was when the agent got the answer."""
    why: str = ""
    """Of one that is not as safe as it should be, or failed."""
    asked: float = 0.0
    wait_ms: float = 0.0
    """How long the model took."""
    held_ms: float = 0.0
    """How long the whole answer was kept back from the agent: what Crab cost."""
    calls: int = 0
    """Calls of tools in the answer."""
    abandoned: bool = False
    """The sandbox was brought back to before it."""


class Conversation(Struct, kw_only=True):
    """One exchange, as it was recorded."""

    exchange: Exchange
    items: tuple[str, ...] = ()
    """What was said before, as canonical JSON, one text for each item; credentials are `[redacted]`."""
    answer: str = ""


# ---------------------------------------------------------------- comparisons


class ProcessChange(Struct, kw_only=True):
    """A process that came, went or runs another program."""

    pid: int
    kind: Literal["started", "ended", "changed"]
    argv: tuple[str, ...]


class Difference(Struct, kw_only=True):
    """What differs between two states of a sandbox's file system and process tree."""

    files: tuple[FileChange, ...] = ()
    processes: tuple[ProcessChange, ...] = ()


class Trial(Struct, kw_only=True):
    """What a command came to in a fork that is gone again."""

    number: int
    """1 for the first fork."""
    result: ExecResult
    difference: Difference
    """From the checkpoint to the end of the command."""


class Verification(Struct, kw_only=True):
    """Result of restoring a checkpoint into a scratch sandbox and comparing it with what was captured."""

    checkpoint: str
    proof: Proof
    compared: dict[str, int] = {}
    """How many things of each kind were compared: files, processes, descriptors, pages, …"""
    differences: tuple[str, ...] = ()


# ---------------------------------------------------------------- stores


class StoreInfo(Struct, kw_only=True):
    """A store, as it was made."""

    url: str
    id: str
    version: int
    created: float
    encrypted: bool
    grace: Seconds
    """What is no longer needed stays at least that long, twice: docs/store.md says why."""


class StoredCheckpoint(Struct, kw_only=True):
    """A checkpoint in a store: what can be known of it without reading it."""

    id: str
    sandbox: str
    """Id of the sandbox that it was taken of."""
    sandbox_name: str
    turn: int
    kind: CheckpointKind
    created: float
    stored: float = 0.0
    """When it was sent, by the clock of who sent it."""
    parent: str | None = None
    label: str = ""
    image: str = ""
    image_fingerprint: str = ""
    architecture: str = ""
    processes: bool = False
    logical: int = 0
    """Bytes of its image, files and process images."""
    added: int = 0
    """Bytes that it made the store larger, when it was sent."""


class StoreStats(Struct, kw_only=True):
    """How much is in a store."""

    checkpoints: int
    logical: int
    """Bytes of all checkpoints, each as if it were alone."""
    distinct: int
    """Bytes of all different contents, not compressed."""
    stored: int
    """Bytes that the store takes."""
    packs: int
    blobs: int
    condemned: int
    """Bytes of packs that `gc` will remove when their time has come."""

    @property
    def ratio(self) -> float:
        """Bytes that are kept for each that is stored."""
        return self.logical / self.stored if self.stored else 0.0


class StoreProblem(Struct, kw_only=True):
    """Something in a store that is not as it was written."""

    what: str
    checkpoints: tuple[str, ...] = ()
    """Ids of those that cannot be read because of it; none: nothing needs it."""


class StoreCheck(Struct, kw_only=True):
    """What a look at everything in a store found."""

    checkpoints: int
    packs: int
    read: int
    """Bytes of packs that were read and compared with their digests."""
    problems: tuple[StoreProblem, ...] = ()
    affected: tuple[str, ...] = ()
    """Ids of all checkpoints that cannot be read."""
    notes: tuple[str, ...] = ()
    """What is no problem: rests of writers that were killed."""
    repaired: tuple[str, ...] = ()


class StoreCollection(Struct, kw_only=True):
    """What a collection of what nobody needs did."""

    removed_checkpoints: tuple[str, ...] = ()
    """Those that the policy did not keep; their contents stay for the grace period."""
    condemned: int = 0
    """Packs that nothing needs, found now: they are removed by a collection after the grace period."""
    condemned_bytes: int = 0
    removed: int = 0
    """Packs that were removed."""
    removed_bytes: int = 0
    rewritten: int = 0
    """Packs that were mostly unneeded: what is needed of them was copied."""


# ---------------------------------------------------------------- the host


class Probe(Struct, kw_only=True):
    """One row of `crab doctor`."""

    name: str
    health: Health
    found: str
    """What the machine has."""
    loses: str = ""
    """Of a degraded row: what does not work or is slower."""
    remedy: str = ""
    """Of a row that is not ok: how to get it."""
