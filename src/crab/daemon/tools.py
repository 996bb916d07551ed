"""The tools by which an agent saves and undoes its own work (docs/mcp.md): what they are called with, do and say.

Each tool is a struct: its fields are the arguments (their schema is made of it), its docstring is what the model reads. They
need nothing but a function that answers requests, so they work in the daemon (for an agent inside a sandbox) and over its
socket (for one on the host). An agent can name no other sandbox than its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from crab.checkpoint import refs
from crab.daemon import requests as ask
from crab.errors import CrabError, InvalidRequest
from crab.model import Checkpoint, Difference, ExecSpec, Return, Sandbox, Trial
from crab.turns.mcp import Told

LARGEST = 64 << 10
"""Bytes of text: of an answer, and of each fork in an answer."""
SHOWN = 50
"""Checkpoints of a list."""
SHOWN_FILES = 100
"""Changed files of a fork."""
SHOWN_RETURNS = 5
REF = "A turn number, a label, `head`, `head~N`, or the beginning of an id."
Ref = Annotated[str, Meta(description=REF, max_length=200)]

_INSIDE = """These tools act on the sandbox that you run in: its files and processes, you among them.
Before a risky step call `checkpoint`. If it fails, `rewind` brings everything back, you too: the `checkpoint` call then answers
a second time, with the note that you left to yourself. You remember nothing else of what came after. To compare ways
without risk use `fork_and_try`."""
_OUTSIDE = """These tools act on the sandbox that your commands run in: its files and processes.
Before a risky step call `checkpoint`. If it fails, `rewind` brings the sandbox back; you go on and remember everything,
but what you know of its later state is no longer so. To compare ways without risk use `fork_and_try`."""


class Work:
    """What tools work with, and whether the agent knows of the rewinds that were."""

    def __init__(self, call: Callable[[ask.Request], Any], sandbox: str, inside: bool) -> None:
        """`call` answers a request, and raises `CrabError`. `inside`: the agent is in the sandbox, and comes back with it."""
        self.call, self.sandbox, self.inside = call, sandbox, inside
        self._knows = -1
        """Generation of the sandbox whose agent was told. (An agent of another one has forgotten it, or may have.)"""

    def look(self) -> Sandbox:
        """The sandbox now."""
        return self.call(ask.Inspect(sandbox=self.sandbox))

    def tell(self, sandbox: Sandbox, most: int = SHOWN_RETURNS) -> str:
        """The notes of the newest rewinds. The agent knows of them from now on."""
        self._knows = sandbox.generation
        return notes(sandbox.returns, most)

    def is_ignorant(self, sandbox: Sandbox) -> bool:
        """There was a rewind that its agent may not know of."""
        return self.inside and bool(sandbox.returns) and self._knows != sandbox.generation


class Tool(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Base of the tools."""

    name: ClassVar[str]

    def use(self, work: Work) -> str:
        """Do it; returns what the model is told. Raises `CrabError`."""
        raise NotImplementedError


class Save(Tool, kw_only=True, frozen=True):
    """Save all files and processes as they are now. Costs milliseconds. `rewind` brings them back."""

    name = "checkpoint"
    label: Annotated[str, Meta(description="A name to find it by: letters, numbers, `-`, `_`.", max_length=63)] = ""

    def use(self, work: Work) -> str:
        # an agent inside is to come back to the middle of this call: its memory may not lag behind (docs/inspector.md)
        policy = "always" if work.inside else "adaptive"
        made: Checkpoint = work.call(ask.TakeCheckpoint(sandbox=work.sandbox, label=self.label, policy=policy))
        back = f"Saved as {_named(made)}. To come back here: rewind with ref {made.label or made.turn}."
        return _paragraphs(back, work.tell(work.look()))


class List(Tool, kw_only=True, frozen=True):
    """List what was saved, oldest first, and the notes that were left when the sandbox was rewound."""

    name = "list"

    def use(self, work: Work) -> str:
        sandbox = work.look()
        saved: Sequence[Checkpoint] = work.call(ask.Turns(sandbox=work.sandbox))
        lines = [f"{_named(one)}, {_when(one.created)}" for one in saved[-SHOWN:]]
        if len(saved) > SHOWN:
            lines.insert(0, f"({len(saved) - SHOWN} older ones)")
        return _paragraphs("\n".join(lines) or "Nothing was saved yet.", work.tell(sandbox, len(sandbox.returns)))


class Diff(Tool, kw_only=True, frozen=True):
    """Show which files and processes differ between something saved and now, or two things saved."""

    name = "diff"
    ref: Ref
    to: Annotated[str, Meta(description=f"{REF} Empty: now.", max_length=200)] = ""
    content: Annotated[bool, Meta(description="Also show the changed lines of text files.")] = False

    def use(self, work: Work) -> str:
        request = ask.Diff(sandbox=work.sandbox, ref=self.ref, to=self.to, content=self.content)
        return changes(work.call(request)) or "Nothing differs."


class Rewind(Tool, kw_only=True, frozen=True):
    """Bring all files and processes back to something saved. What was done since is given up. A note is required: who is
    back there knows nothing of what came after but that note."""

    name = "rewind"
    ref: Ref
    note: Annotated[
        str,
        Meta(
            description="What was tried, why it failed, and what to do instead. Write it for somebody who was not there.",
            min_length=1,
            max_length=4000,
        ),
    ]

    def use(self, work: Work) -> str:
        sandbox = work.look()
        if work.is_ignorant(sandbox):  # else an agent that forgets what it tried would try it for ever
            raise InvalidRequest(
                f"nothing was rewound, as you may not know this yet:\n\n{work.tell(sandbox)}",
                remedy="do what no note has tried; to rewind all the same, call again",
            )
        saved: list[Checkpoint] = [
            *work.call(ask.Turns(sandbox=work.sandbox)),
            *work.call(ask.Turns(sandbox=work.sandbox, every=True)),
        ]
        target = refs.resolve(self.ref, saved, sandbox.head, sandbox.name)
        request = ask.Rewind(sandbox=work.sandbox, ref=target.id, note=self.note, by_agent=not work.inside)
        back: Sandbox = work.call(request)
        kept = "".join(f"\nNot brought back: {one}." for one in back.not_rolled_back)
        return (
            f"The sandbox is back at {_named(target)}; what came after it is given up. You were not brought back.{kept}"
        )


class ForkAndTry(Tool, kw_only=True, frozen=True):
    """Run a shell command in throw-away copies of the sandbox, processes included, and return its output and what it
    changed. Nothing of it stays. To compare ways, ask for several copies and let the command do another thing in each by
    $CRAB_TRY, which is 1, 2, … there. What goes over the network is not undone."""

    name = "fork_and_try"
    command: Annotated[str, Meta(description="Run by `sh -c`.", min_length=1, max_length=LARGEST)]
    ref: Annotated[str, Meta(description=f"What to copy. {REF} Empty: now.", max_length=200)] = ""
    count: Annotated[int, Meta(description="How many copies.", ge=1, le=8)] = 1
    timeout: Annotated[float, Meta(description="Seconds, then the command is killed.", gt=0, le=600)] = 60.0
    cwd: Annotated[str, Meta(description="Work directory. Empty: that of the sandbox.", max_length=4000)] = ""

    def use(self, work: Work) -> str:
        spec = ExecSpec(argv=("sh", "-c", self.command), cwd=self.cwd, timeout=self.timeout)
        request = ask.Try(sandbox=work.sandbox, spec=spec, ref=self.ref, count=self.count, limit=LARGEST)
        return "\n\n".join(cut(trial(one)) for one in work.call(request))


TOOLS: dict[str, type[Tool]] = {tool.name: tool for tool in (Save, List, Diff, Rewind, ForkAndTry)}
_TEXTS = ("ref", "to", "label")


class Kit:
    """All tools on one sandbox (`crab.turns.mcp.Tools`)."""

    def __init__(self, call: Callable[[ask.Request], Any], sandbox: str, inside: bool) -> None:
        self._work = Work(call, sandbox, inside)
        self.instructions = _INSIDE if inside else _OUTSIDE

    def described(self) -> list[dict[str, Any]]:
        """Each with `name`, `description` and `inputSchema`."""
        return [described(tool) for tool in TOOLS.values()]

    def use(self, name: str, arguments: dict[str, Any]) -> Told:
        """Call one. What goes wrong is told; raises `LookupError` if there is none of that name."""
        if name not in TOOLS:
            raise LookupError(f"there is no tool {name[:100]!r}; there are {', '.join(TOOLS)}")
        plain = {key: str(value) if key in _TEXTS and type(value) is int else value for key, value in arguments.items()}
        try:
            tool = msgspec.convert(plain, TOOLS[name], strict=False)
        except msgspec.ValidationError as error:
            return Told(text=f"{error}\nremedy: see the schema of {name}; nothing was done", failed=True)
        try:
            return Told(text=clean(tool.use(self._work)) if name == ForkAndTry.name else cut(tool.use(self._work)))
        except CrabError as error:
            return failure(error)

    def lost(self) -> Told:
        """What to say to who has lost the answer of a call: it was brought back to the middle of that call, most likely."""
        try:
            sandbox = self._work.look()
        except CrabError as error:
            return failure(error)
        if sandbox.returns and sandbox.returns[-1].generation == sandbox.generation:
            back = f"You are back at turn {sandbox.returns[-1].turn}, in the middle of this call. Do not make it again."
            return Told(text=cut(_paragraphs(back, self._work.tell(sandbox))))
        why = "The answer was lost: the sandbox was brought back after a crash, is a fork, or Crab was started anew."
        return Told(text=f"{why}\nremedy: see with `list` whether it was done, else call again", failed=True)


def described(tool: type[Tool]) -> dict[str, Any]:
    """A tool as MCP lists it."""
    schema = msgspec.json.schema(tool)["$defs"][tool.__name__]
    schema = {key: value for key, value in schema.items() if key not in ("title", "description")}
    return {"name": tool.name, "description": " ".join((tool.__doc__ or "").split()), "inputSchema": schema}


# ---------------------------------------------------------------- what they say


def notes(returns: Sequence[Return], most: int = SHOWN_RETURNS) -> str:
    """The newest rewinds, in words; empty if there was none."""
    shown = returns[-most:] if most else ()
    return "\n".join(
        f"Rewound at {_when(one.when)} from turn {one.left} to turn {one.turn} ({one.checkpoint}). "
        + (f"The note: {one.note}" if one.note else "Nobody left a note.")
        for one in shown
    )


def changes(found: Difference, most: int = 10_000) -> str:
    """A line for each file and process; empty if nothing differs."""
    lines: list[str] = []
    for change in found.files[:most]:
        what = f" ({', '.join(change.what)})" if change.what else f" from {change.before}" if change.before else ""
        lines.append(f"{change.kind}: /{change.path}{what}")
        lines += [change.diff] if change.diff else []
    if len(found.files) > most:
        lines.append(f"and {len(found.files) - most} more files")
    lines += [f"process {one.kind}: {one.pid} {' '.join(one.argv)}" for one in found.processes[:most]]
    return "\n".join(lines)


def trial(one: Trial) -> str:
    """What came of a fork: the end of its command first, its output last, so that a cut takes of that."""
    result = one.result
    end = "killed: its time was over" if result.timed_out else f"exit status {result.exit_code}"
    changed = changes(one.difference, SHOWN_FILES) or "nothing"
    parts = [f"Copy {one.number}: {end}. It changed:\n{changed}"]
    for name, data in (("output", result.stdout), ("errors", result.stderr)):
        if data:
            parts.append(f"{name}:\n{data.decode(errors='replace')}")
    return "\n".join([*parts, *(["(there was more output)"] if result.truncated else [])])


def failure(error: CrabError) -> Told:
    """An error in words."""
    return Told(text=cut(error.message + (f"\nremedy: {error.remedy}" if error.remedy else "")), failed=True)


def clean(text: str) -> str:
    """Text that is UTF-8: bytes of names that are none are written as `\\udcff`."""
    return text.encode(errors="backslashreplace").decode()


def cut(text: str) -> str:
    """At most `LARGEST` bytes of a text."""
    data = clean(text).encode()
    if len(data) <= LARGEST:
        return data.decode()
    return f"{data[:LARGEST].decode(errors='ignore')}\n({len(data) - LARGEST} more bytes are left out)"


def _named(one: Checkpoint) -> str:
    label = f" {one.label!r}" if one.label else ""
    return f"turn {one.turn}{label} ({one.id})"


def _when(when: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(when))


def _paragraphs(*parts: str) -> str:
    return "\n\n".join(filter(None, parts))
