"""Real agents as the tests use them: how each is called in the image `agents`, what it is told to do, and when it is killed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import msgspec
from e2e.box import Box, eventually

from crab.daemon import requests as ask
from crab.model import Exchange, ExecSpec
from crab.turns.mock import Asked, Mock
from crab.turns.upstream import Answer, Headers

STEPS = ("one", "two", "three", "four")
LOG = "".join(f"{step}\n" for step in STEPS)
AGENT = "agent:main"


def prompt(wait: float) -> str:
    """A script whose model thinks that many seconds before each answer."""
    lines = [f"~ {wait}\n$ echo {step} >>/work/log; sleep 0.5; echo {step} >/work/last" for step in STEPS]
    return "\n".join([*lines, "> all done"])


class Client(msgspec.Struct, frozen=True):
    """A program, and the arguments that make it do what a prompt says, alone."""

    name: str
    before: tuple[str, ...]
    after: tuple[str, ...] = ()
    env: Mapping[str, str] = {}

    def argv(self, text: str) -> tuple[str, ...]:
        return (*self.before, text, *self.after)


CLIENTS = (
    Client("claude", ("claude", "-p"), ("--dangerously-skip-permissions", "--output-format", "json")),
    Client(
        "codex",
        ("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json"),
    ),
    Client(
        "opencode",
        ("opencode", "run"),
        ("--format", "json"),
        {f"OPENCODE_DISABLE_{what}": "1" for what in ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD")},
    ),
    Client("gemini", ("gemini", "-p"), ("--yolo", "--skip-trust", "--model", "gemini-2.5-pro")),
)


class Model(Mock):
    """A scripted model that counts its questions, and thinks about some steps until it is told to answer."""

    def __init__(self, *thinks: int) -> None:
        self.asked: list[Asked] = []
        self.thinks = set(thinks)
        super().__init__(told=self.asked.append)

    @asynccontextmanager
    async def ask(
        self, method: str, target: str, headers: Headers, body: bytes | AsyncIterator[bytes] | None
    ) -> AsyncIterator[Answer]:
        async with super().ask(method, target, headers, body) as answer:
            while self.thinks & set(self.steps):
                await asyncio.sleep(0.02)
            yield answer

    @property
    def steps(self) -> list[int]:
        """Which steps of the script were asked for, in order."""
        return [one.step for one in self.asked if one.kind == "main"]


class Run:
    """One client at work in a sandbox."""

    def __init__(self, box: Box, client: Client, model: Model, wait: float = 1.0) -> None:
        self.box, self.client, self.model = box, client, model
        env = {**box.ask(ask.ModelAddress, inside=True).env, "IS_SANDBOX": "1", "HOME": "/root", **client.env}
        script = 'exec "$@" </dev/null >/root/out 2>&1'
        argv = ("sh", "-c", script, "sh", *client.argv(prompt(wait)))
        box.service.spawn(box.name, ExecSpec(argv=argv, name=AGENT, env=env, cwd="/work")).detach()

    @property
    def ended(self) -> bool:
        return any(one.id == AGENT and not one.running for one in self.box.ask(ask.CommandList))

    def mains(self) -> list[Exchange]:
        """The main loop's questions that count."""
        return [one for one in self.box.ask(ask.Exchanges) if one.kind == "main" and not one.abandoned]

    def all_done(self, seconds: float = 90.0) -> None:
        eventually(lambda: self.ended, self.told, seconds)

    def told(self) -> str:
        """What can be said of a run that does not end."""
        out = self.box.read("/root/out")[-1500:]
        return f"the end of {self.client.name}: asked {self.model.steps}, {self.box.read('/work/log')!r}, {out}"

    def until(self, moment: str, step: int) -> None:
        """Wait for a moment of a step of the script."""
        eventually(lambda: MOMENTS[moment](self, step), lambda: f"{moment} of step {step}; {self.told()}", 30.0)


def _asked(run: Run, step: int) -> bool:
    return step in run.model.steps


def _thinking(run: Run, step: int) -> bool:
    """Its turn is safe, and no answer is there."""
    found = run.mains()
    return (
        step in run.model.steps
        and len(found) == step + 1
        and bool(found[step].protection)
        and found[step].state == "open"
    )


def _answered(run: Run, step: int) -> bool:
    found = run.mains()
    return len(found) > step and found[step].state == "answered"


def _running(run: Run, step: int) -> bool:
    return STEPS[step] in run.box.read("/work/log").split()


def _between(run: Run, step: int) -> bool:
    return run.box.read("/work/last").strip() == STEPS[step]


MOMENTS: dict[str, Callable[[Run, int], bool]] = {
    "request seen": _asked,
    "model thinking": _thinking,
    "answer held": _answered,
    "tool running": _running,
    "tool has ended": _between,
}
"""When something is killed. Of the last ones not each is met exactly: who looks may be late."""
