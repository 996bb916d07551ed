"""An agent and its sandbox, kept alive together: followed to its end, brought back when one of them dies.

Knows two kinds of agents: one that lives in the sandbox, and one on the host that acts in it. What a user may ask for is
the verb's business (`crab.cli.run`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import click

from crab import model
from crab.cli.text import clean
from crab.errors import Busy, CrabError, DaemonUnavailable, InvalidRequest, NotFound, SandboxGone
from crab.host import processes
from crab.model import ExecStatus, State

if TYPE_CHECKING:
    from pathlib import Path

    from crab.cli.following import Terminal
    from crab.sdk.sync import Process, Sandbox

AGENT = "agent:main"
KEYS = {
    "anthropic": ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"),
    "gemini": ("GEMINI_API_KEY", "GOOGLE_API_KEY"),
    "openai": ("OPENAI_API_KEY", "CODEX_API_KEY"),
}
WATCH_SECONDS = 0.3
DAEMON_SECONDS = 300.0
"""How long to wait for a daemon that has gone. Its sandboxes run on; what starts it again needs a moment."""
DEATH_SECONDS = 30.0
MOST_RECOVERIES = 10
"""In a row, without a new turn between them."""
CRASHES = frozenset({signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE})
"""Signals by which an agent in a sandbox ends without wanting to."""
_RECOVER = "`crab recover` restores its newest checkpoint"


def survive(agent: Inside | Outside, box: Sandbox, recovers: bool) -> int:
    """Let the agent run to its end, through as many deaths as it takes. Returns its exit status."""
    deaths = Deaths(box, recovers)
    while True:
        try:
            try:
                if box.info().state == State.LOST:
                    raise SandboxGone(f"sandbox {box.name} has died", remedy=_RECOVER)
                return agent.follow()
            except (SandboxGone, AgentGone) as error:
                agent.say(deaths.after(agent, error))
        except DaemonUnavailable as error:
            agent.say(f"{error.message}; waiting for the daemon")
            _await_daemon(box)


class Deaths:
    """What is done about each death, and when it is given up."""

    def __init__(self, box: Sandbox, recovers: bool) -> None:
        self._box, self._recovers = box, recovers
        self._life = box.info().generation
        self._turn, self._tries = -1, 0

    def after(self, agent: Inside | Outside, error: SandboxGone | AgentGone) -> str:
        """Bring the sandbox back, if nobody has done it; says what was done. Raises `error` if that is not wanted, or
        useless."""
        box = self._box
        now = _settled(box, self._life) if isinstance(error, SandboxGone) else box.info()
        if now.generation != self._life:
            agent.end()
            self._life = now.generation
            return f"{box.name} is back at turn {now.turn}: somebody brought it back"
        if not self._recovers:
            raise error
        self._turn, self._tries = now.turn, self._tries + 1 if now.turn == self._turn else 1
        if now.head is None or self._tries > MOST_RECOVERIES:
            raise error
        agent.end()
        back = self._recovered()
        self._life = back.generation
        return f"{error.message}; {box.name} is back at turn {back.turn}"

    def _recovered(self) -> model.Sandbox:
        """The sandbox, brought back; by us, or by who was faster."""
        end = time.monotonic() + DEATH_SECONDS
        while True:
            try:
                return self._box.recover(force=True)
            except Busy:
                if time.monotonic() > end:
                    raise
                time.sleep(WATCH_SECONDS)
                now = self._box.info()
                if now.generation != self._life and now.state == State.RUNNING:
                    return now


def _settled(box: Sandbox, life: int) -> model.Sandbox:
    """The sandbox when it is known what has become of that life of it: it is lost (which takes a moment), or there is
    another."""
    end = time.monotonic() + DEATH_SECONDS
    while True:
        now = box.info()
        if now.state not in (State.RUNNING, State.PAUSED) or now.generation != life or time.monotonic() > end:
            return now
        time.sleep(0.05)


def _await_daemon(box: Sandbox) -> None:
    """Return when a daemon knows the sandbox. Raises `DaemonUnavailable` if none comes."""
    end = time.monotonic() + DAEMON_SECONDS
    while True:
        try:
            box.info()
            return
        except DaemonUnavailable:
            if time.monotonic() > end:
                raise
            time.sleep(WATCH_SECONDS)


class AgentGone(CrabError):
    """The agent was killed by a signal."""

    exit_status = 70


class Inside:
    """An agent that lives in the sandbox: it is captured and restored with it."""

    def __init__(self, box: Sandbox, argv: tuple[str, ...], env: Mapping[str, str]) -> None:
        self._box, self._argv, self._env = box, argv, dict(env)
        self._terminal: Terminal | None = None
        self._began = False
        self._asked = threading.Event()
        """The user wanted it to end."""

    def follow(self) -> int:
        """Start it, or attach to it, and be its terminal until it ends. Raises `SandboxGone`, `AgentGone` if it is killed."""
        from crab.cli.following import Terminal, follow

        own = sys.stdin.isatty() and sys.stdout.isatty()
        process = self._opened(own)
        if not own:
            give_input = not self._began and not sys.stdin.isatty()
            status = follow(process, give_input=give_input, asked=self._asked)
        elif self._terminal is not None:
            status = self._terminal.follow(process, redraw=True)
        else:
            with Terminal() as self._terminal:
                status = self._through(self._terminal, process)
        self._began = True
        if status.signal in CRASHES and not self._asked.is_set():
            raise AgentGone(f"the agent was killed by signal {status.signal}", remedy=_RECOVER)
        return status.exit_code or 0

    def _through(self, terminal: Terminal, process: Process) -> ExecStatus:
        try:
            return terminal.follow(process)
        finally:
            self._terminal = None

    def _opened(self, own: bool) -> Process:
        from crab.cli.following import terminal_size

        self._give_keys()  # a new daemon has none
        if any(one.id == AGENT for one in self._box.commands()):
            return self._box.attach(AGENT)
        if not self._argv:
            raise InvalidRequest(
                "the agent has ended, and no command was given", remedy="crab run --resume BOX -- COMMAND"
            )
        rows, columns = terminal_size() if own else (24, 80)
        env = self._box.model_address(inside=True).env | {"IS_SANDBOX": "1"} | self._env
        return self._box.spawn(self._argv, tty=own, stdin=True, name=AGENT, rows=rows, columns=columns, env=env)

    def _give_keys(self) -> None:
        keys = {
            api: os.environ[name] for api, names in KEYS.items() for name in reversed(names) if os.environ.get(name)
        }
        self._box.model_keys(keys)

    def end(self) -> None:
        """Nothing of it is left when its sandbox is gone."""

    def say(self, text: str) -> None:
        """Tell the user."""
        if self._terminal is not None:
            self._terminal.say(text)
        else:
            say(text)


class Outside:
    """An agent on the host, whose commands run in the sandbox."""

    def __init__(self, box: Sandbox, argv: tuple[str, ...], env: Mapping[str, str], socket: Path | None) -> None:
        self._box, self._argv = box, argv
        own = {"CRAB_SANDBOX": box.name, "CRAB_AGENT": "1"}
        if socket is not None:  # what it runs asks the same daemon
            own["CRAB_SOCKET"] = str(socket.absolute())
        self._env = {**os.environ, **box.model_address().env, **own, **env}
        self._process: subprocess.Popen[bytes] | None = None
        processes.adopt_orphans()

    def follow(self) -> int:
        """Run it to its end. Raises `SandboxGone` if its sandbox dies, `AgentGone` if it is killed."""
        if not self._argv:
            raise InvalidRequest("no command was given", remedy="crab run --outside -- COMMAND")
        try:
            process = self._process = subprocess.Popen(self._argv, env=self._env)
        except OSError as error:
            raise NotFound(
                f"{self._argv[0]} cannot be run: {error.strerror}", remedy="give a program of this host"
            ) from error
        gone = threading.Event()
        threading.Thread(target=self._watch, args=(process, gone), name="crab-watch", daemon=True).start()
        status = _waited(process)
        self._process = None
        if gone.is_set():
            raise SandboxGone(f"sandbox {self._box.name} has died", remedy=_RECOVER)
        if status in (-signal.SIGINT, -signal.SIGTERM, -signal.SIGHUP):
            return 128 - status  # somebody wanted it to end
        if status < 0:
            raise AgentGone(f"the agent was killed by signal {-status}", remedy="`crab run --resume` starts it again")
        return status

    def _watch(self, process: subprocess.Popen[bytes], gone: threading.Event) -> None:
        """End the agent when its sandbox has died: it could do nothing any more."""
        while process.poll() is None:
            try:
                if self._box.info().state == State.LOST:
                    gone.set()
                    _kill_all()
                    return
            except DaemonUnavailable:
                pass  # it comes back
            except CrabError:
                return
            gone.wait(WATCH_SECONDS)

    def end(self) -> None:
        """Nothing of it may run when its sandbox is brought back."""
        _kill_all()
        if self._process is not None:
            self._process.wait()

    def say(self, text: str) -> None:
        """Tell the user."""
        say(text)


def _kill_all() -> None:
    """An agent on the host and all that it has started: what it left would act in the sandbox that is brought back."""
    for _ in range(3):  # what is started meanwhile is found the next time
        for pid in list(processes.descendants(os.getpid()))[1:]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _waited(process: subprocess.Popen[bytes]) -> int:
    """Its status. Ctrl-C is the agent's own business: it gets it as we do."""
    before: dict[int, Callable[..., object] | int | None] = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN)
    }
    try:
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def say(text: str) -> None:
    """A line for the user, besides what the agent says."""
    click.echo(f"crab: {clean(text)}", err=True)
