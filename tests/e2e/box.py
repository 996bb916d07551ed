"""A sandbox as the tests use it: short words for the requests, workloads and their heartbeats, and patient waiting."""

from __future__ import annotations

import io
import shlex
import tarfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from crab.daemon import requests as ask
from crab.daemon.service import Service
from crab.model import Checkpoint, ExecResult, ExecSpec, Sandbox
from crab.sandbox.command import Command

T = TypeVar("T")
WORKLOADS = Path(__file__).parent.parent / "workloads"
INSIDE = "/opt/workloads"


def eventually(condition: Callable[[], T], what: str | Callable[[], object] = "it", seconds: float = 60.0) -> T:
    """Poll until the condition holds and return what it gave. The bound only ends a test that hangs."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > end:
            raise AssertionError(f"{what() if callable(what) else what} did not happen within {seconds:.0f} s")
        time.sleep(0.01)
    return found


class Beat(tuple[int, str]):
    """One heartbeat: (counter, "ok" or what is wrong)."""

    @property
    def counter(self) -> int:
        return self[0]

    @property
    def state(self) -> str:
        return self[1]


class Box:
    """See the module."""

    def __init__(self, service: Service, name: str) -> None:
        self.service = service
        self.name = name

    def ask(self, request: type[ask.Request], **fields: Any) -> Any:
        """The answer to a request about this sandbox."""
        return self.service.handle(request(sandbox=self.name, **fields))

    # ---- commands

    def result(self, script: str, **spec: Any) -> ExecResult:
        """Run a shell script to its end."""
        return self.ask(ask.Run, spec=ExecSpec(argv=("sh", "-c", script), **spec))

    def run(self, script: str, **spec: Any) -> str:
        """Output of a shell script that must succeed."""
        done = self.result(script, **spec)
        assert done.ok, f"{script!r} ended with {done.exit_code}: {done.stderr.decode(errors='replace')}"
        return done.text()

    def python(self, source: str, *arguments: str) -> str:
        """Output of a Python program that must succeed."""
        done = self.ask(ask.Run, spec=ExecSpec(argv=("python3", "-c", source, *arguments)))
        assert done.ok, f"exit status {done.exit_code}: {done.stderr.decode(errors='replace')}"
        return done.text()

    def spawn(self, *argv: str, **spec: Any) -> Command:
        """Start a command."""
        return self.service.spawn(self.name, ExecSpec(argv=argv, **spec))

    def background(self, script: str) -> None:
        """Start a shell script that goes on by itself."""
        self.run(f"setsid sh -c {shlex.quote(script)} </dev/null >/dev/null 2>&1 &")

    def put(self, path: str, data: bytes) -> None:
        """Write a file in a folder of the sandbox."""
        spec = ExecSpec(argv=("sh", "-c", 'cat >"$0"', path), stdin=True)
        assert self.ask(ask.Run, spec=spec, input=data).ok

    def read(self, path: str) -> str:
        """Content of a file in the sandbox; empty if there is none."""
        return self.result(f"cat {shlex.quote(path)}").text()

    # ---- life

    def look(self) -> Sandbox:
        return self.ask(ask.Inspect)

    def checkpoint(self, label: str = "", **fields: Any) -> Checkpoint:
        return self.ask(ask.TakeCheckpoint, label=label, **fields)

    def rewind(self, ref: str = "head") -> Sandbox:
        return self.ask(ask.Rewind, ref=ref)

    def fork(self, count: int = 1, ref: str = "") -> list[Box]:
        return [Box(self.service, made.name) for made in self.ask(ask.Fork, count=count, ref=ref)]

    def host_pids(self) -> list[int]:
        """Pids on the host of all its processes, init first."""
        return [info.host_pid for info in self.ask(ask.ProcessList)]

    def frozen(self) -> bool:
        """Whether its control group is frozen or one of its processes is held by a tracer from outside."""
        core = self.service._core
        group = core.life(core.registry.find(self.name)).group
        if (
            "frozen 1" in (group.path / "cgroup.events").read_text()
            or "1" in (group.path / "cgroup.freeze").read_text()
        ):
            return True
        members = group.members()
        for pid in members:
            try:
                status = Path(f"/proc/{pid}/status").read_text()
                if int(status.partition("TracerPid:")[2].split()[0]) not in (0, *members):
                    return True
            except (FileNotFoundError, ProcessLookupError):
                continue
        return False

    # ---- workloads

    def begin(self, names: Iterable[str], **env: str) -> None:
        """Start workloads and wait until each has said three times that all is well."""
        names = list(names)
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            tar.add(WORKLOADS, arcname=".", filter=lambda entry: None if "__pycache__" in entry.name else entry)
        unpack = f"mkdir -p {INSIDE} /tmp/hb /tmp/log && tar -x -C {INSIDE}"
        assert self.ask(ask.Run, spec=ExecSpec(argv=("sh", "-c", unpack), stdin=True), input=packed.getvalue()).ok
        for name in names:
            script = f"exec python3 {INSIDE}/{name}.py >/tmp/log/{name} 2>&1"
            self.spawn("sh", "-c", script, name=name, env={"PYTHONDONTWRITEBYTECODE": "1"} | env).detach()
        self.healthy(names, beats=3)

    def beats(self, names: Iterable[str]) -> dict[str, Beat]:
        """The newest heartbeat of each of these workloads that has one.

        The files are opened by name: a listing that races with the rename of a new heartbeat over the old one may show
        neither (btrfs gives the new entry a place behind the end that the reader has taken).
        """
        found: dict[str, Beat] = {}
        for line in self.result(f"cd /tmp/hb && grep -Hs '' {shlex.join(names)}").text().splitlines():
            name, _, rest = line.partition(":")
            counter, _, state = rest.partition(" ")
            found[name] = Beat((int(counter), state))
        return found

    def healthy(self, names: Iterable[str], beats: int = 2) -> dict[str, Beat]:
        """Wait until each workload has told that many times from now on that all is well; returns the last of them."""
        names = list(names)
        first = self.beats(names)
        now: dict[str, Beat] = {}

        def behind() -> list[str]:
            old = {name: first[name].counter if name in first else 0 for name in names}
            return [name for name in names if name not in now or now[name].counter < old[name] + beats]

        def done() -> bool:
            now.update(self.beats(names))
            wrong = {name: now[name].state for name in names if name in now and now[name].state != "ok"}
            assert not wrong, f"{self.name}: " + "; ".join(f"{name}: {state}" for name, state in wrong.items())
            return not behind()

        eventually(done, lambda: f"in {self.name}: progress of {self._stuck(behind())}", 90)
        return now

    def _stuck(self, names: list[str]) -> dict[str, object]:
        """What can be said about workloads that stand still."""
        return {name: (self.beats([name]).get(name), self.read(f"/tmp/log/{name}")[-500:]) for name in names}
