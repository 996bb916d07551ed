"""`crab run`, as people use it: a daemon, an agent, a model, each a process of its own, and each killed in turn."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.box import eventually

from crab.daemon import requests as ask
from crab.daemon.service import Service

pytestmark = [pytest.mark.kernel, pytest.mark.criu]
AGENTS = Path(__file__).parents[2] / "examples" / "agents"
STEPS = ["one", "two", "three", "four", "five"]
PROMPT = "\n".join([*(f"~ 0.15\n$ echo {step} >>/root/log" for step in STEPS), "> all done"])
LOG = "".join(f"{step}\n" for step in STEPS)
CRAB = [sys.executable, "-m", "crab.cli"]


class Home:
    """A state directory of its own, with a daemon that can be killed and started again, and a model."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        self.folder, self.scratch, self.socket = folder, scratch, scratch / "crab.sock"
        self.daemon: subprocess.Popen[bytes] | None = None
        words = [sys.executable, "-m", "crab.turns.mock", "0", "--log", str(scratch / "asked")]
        self.model = subprocess.Popen(words, stdout=subprocess.PIPE)
        assert self.model.stdout
        self.upstream = self.model.stdout.readline().decode().split()[-1]

    def start(self, *options: str) -> None:
        words = [*CRAB, "--state", str(self.folder), "--socket", str(self.socket), "daemon", "run", *options]
        with open(self.scratch / "daemon.log", "ab") as log:
            self.daemon = subprocess.Popen(words, stdout=log, stderr=log)
        eventually(lambda: self.crab("daemon", "status", check=False).returncode == 0, "the daemon", 60)

    def kill_daemon(self) -> None:
        assert self.daemon
        self.daemon.kill()
        self.daemon.wait()

    def crab(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        found = subprocess.run(
            [*CRAB, "--socket", str(self.socket), *words], capture_output=True, text=True, check=False
        )
        assert found.returncode == 0 or not check, found.stderr
        return found

    def run(self, *words: str) -> subprocess.Popen[str]:
        """`crab run` with these words, in the background."""
        argv = [*CRAB, "--socket", str(self.socket), "run", "--image", "workloads", "--upstream", self.upstream, *words]
        pipe = subprocess.PIPE
        return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)

    @property
    def steps(self) -> list[int]:
        """Which steps of the script the model was asked for."""
        lines = (self.scratch / "asked").read_text().splitlines() if (self.scratch / "asked").exists() else []
        return [one["step"] for one in map(json.loads, lines) if one["kind"] == "main"]

    def told(self) -> str:
        return (self.scratch / "daemon.log").read_text()[-2000:]

    def close(self) -> None:
        self.model.kill()
        self.model.wait()
        if self.daemon and self.daemon.poll() is None:
            self.daemon.send_signal(signal.SIGTERM)
            self.daemon.wait(60)
        with Service.open(self.folder) as service:
            for sandbox in service.handle(ask.SandboxList()):
                service.handle(ask.Remove(sandbox=sandbox.name, force=True))
            service.close_down()


@pytest.fixture
def home(state_dir: Path, tmp_path: Path) -> Iterator[Home]:
    folder = state_dir.parent / f"{state_dir.name}-other"
    with Service.open(folder) as service:
        if not any(image.name == "workloads" for image in service.handle(ask.ImageList())):
            service.handle(ask.ImageAdd(name="workloads", source="debian:bookworm"))
    home = Home(folder, tmp_path)
    try:
        home.start()
        yield home
    finally:
        home.close()


INSIDE = ["--mount", f"{AGENTS}:/agents", "--", "python3", "/agents/loop.py", "http://127.0.0.1:2722", PROMPT]


def ended(home: Home, running: subprocess.Popen[str]) -> str:
    """What it said in the end."""
    out, said = running.communicate(timeout=120)
    assert running.returncode == 0, f"{out}\n{said}\n{home.told()}"
    assert "all done" in out
    return said


def test_an_agent_inside_runs_to_its_end_and_the_status_is_its_own(home: Home) -> None:
    said = ended(home, home.run("--name", "one", *INSIDE))
    assert "6 turns" in said and "crab run --resume one" in said
    assert home.crab("exec", "one", "--", "cat", "/root/log").stdout == LOG
    assert "durable" in home.crab("record", "one").stdout
    failing = home.run("--rm", "--name", "two", "--", "sh", "-c", "exit 7")
    assert (failing.wait(60), home.crab("inspect", "two", check=False).returncode) == (7, 66)


@pytest.mark.parametrize("victim", ["sandbox", "daemon", "both"])
def test_whoever_is_killed_the_agent_inside_goes_on_and_nothing_is_done_twice(home: Home, victim: str) -> None:
    running = home.run("--name", "one", *INSIDE)
    for turns in (2, 4):
        eventually(lambda turns=turns: len(home.steps) >= turns, "turns", 60)
        if victim != "daemon":
            home.crab("kill", "one")
        if victim != "sandbox":
            home.kill_daemon()
            time.sleep(0.2)
            home.start()
    ended(home, running)
    assert home.crab("exec", "one", "--", "cat", "/root/log").stdout == LOG
    repeated = [step for step, times in Counter(home.steps).items() if times > 1]
    assert len(repeated) <= 2, "what was under way when somebody died, and nothing else"


def test_a_rewind_from_another_terminal_takes_the_agent_with_it(home: Home) -> None:
    running = home.run("--name", "one", *INSIDE)
    eventually(lambda: len(home.steps) >= 4, "turns", 60)
    home.crab("rewind", "one@2")
    said = ended(home, running)
    assert "somebody brought it back" in said
    assert home.crab("exec", "one", "--", "cat", "/root/log").stdout == LOG


@pytest.mark.parametrize("victim", ["agent", "sandbox"])
def test_an_agent_outside_that_dies_or_whose_sandbox_dies_starts_again_and_repeats_nothing(
    home: Home, victim: str
) -> None:
    pid = home.scratch / "pid"
    script = (
        f'echo $$ >{pid}; exec {sys.executable} {AGENTS}/loop.py "${{OPENAI_BASE_URL%/v1}}" "$0" '
        f'{" ".join(CRAB)} --socket {home.socket} exec "$CRAB_SANDBOX" -- sh -c'
    )
    running = home.run("--name", "one", "--outside", "--", "sh", "-c", script, PROMPT)
    eventually(lambda: len(home.steps) >= 3, "turns", 60)
    if victim == "agent":
        os.kill(int(pid.read_text()), signal.SIGKILL)
    else:
        home.crab("kill", "one")
    ended(home, running)
    assert home.crab("exec", "--no-agent", "one", "--", "cat", "/root/log").stdout == LOG
    repeated = [step for step, times in Counter(home.steps).items() if times > 1]
    assert len(repeated) <= 1, home.steps


def test_a_daemon_that_drains_makes_sandboxes_safe_when_it_is_told_to_end(home: Home) -> None:
    home.kill_daemon()
    home.start("--drain", "60")
    home.crab("create", "one", "--image", "workloads")
    home.crab("exec", "one", "--", "sh", "-c", "echo kept >/root/kept; sleep 100000 >/dev/null 2>&1 &")
    assert home.daemon
    home.daemon.send_signal(signal.SIGTERM)
    assert home.daemon.wait(120) == 0
    assert "1 of 1 sandboxes are safe" in home.told()
    home.start()
    home.crab("kill", "one")
    home.crab("recover", "one")
    assert home.crab("exec", "one", "--", "cat", "/root/kept").stdout == "kept\n"
    assert "sleep 100000" in home.crab("ps", "one").stdout
    assert json.loads(home.crab("drain", "--json").stdout)[0]["safe"]
    assert "done: 1 capture" in home.crab("jobs").stdout
