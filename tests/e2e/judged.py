"""A sandbox of which captures are compared by the oracle, and commands that rest before they are captured."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

from e2e.box import Box, eventually

from crab.checkpoint import oracle
from crab.checkpoint.oracle import Capture, Noise, Truth
from crab.daemon.requests import ProcessList
from crab.errors import CrabError
from crab.sandbox.command import Command
from crab.store.local import FILES


class Judged:
    """See the module."""

    def __init__(self, box: Box) -> None:
        self.box = box
        self.core = box.service._core
        self.noise: Noise | None = None

    def capture(self) -> Capture:
        """Take a full checkpoint."""
        identity = self.box.checkpoint(policy="always", durable=False).id
        life = self.core.life(self.core.registry.find(self.box.name))
        store = self.core.ground.store
        return Capture(
            manifest=self.core.manifest(identity),
            images=self.core.state_dir / "process" / identity,
            files=store.path(identity) / FILES,
            lower=life.layers.lower,
        )

    def compare(self, before: Capture, after: Capture) -> Truth:
        return oracle.compare(self.core.pool, before, after, self.noise)

    def learn(self) -> None:
        """Three captures with nothing in between: what they do by themselves."""
        first, second, third = self.capture(), self.capture(), self.capture()
        self.noise = oracle.learn(self.core.pool, first, second) | oracle.learn(self.core.pool, second, third)

    def around(self, turn: Callable[[], object]) -> Truth:
        """What a turn changes."""
        before = self.capture()
        turn()
        return self.compare(before, self.capture())

    def host_pid(self, command: Command) -> int:
        """Of the process that a command became."""
        pid = command.status().pid
        return next(info.host_pid for info in self.box.ask(ProcessList) if info.pid == pid)

    def rests(self, *commands: Command) -> None:
        """Wait until none of these commands has run for a while."""
        host_pids = [self.host_pid(command) for command in commands]

        def switches() -> list[list[str]]:
            found = [Path(f"/proc/{host_pid}/status").read_text() for host_pid in host_pids]
            return [re.findall(r"ctxt_switches:\t(\d+)", one) + re.findall(r"State:\t(\w)", one) for one in found]

        def unmoved() -> bool:
            before = switches()
            time.sleep(0.4)
            return before == switches() and all(one[-1] == "S" for one in before)

        eventually(unmoved, f"the rest of {[command.id for command in commands]}")

    def still(self, *words: str, **spec: object) -> Command:
        """A command that runs once this returns and has nothing more to do: it sleeps, and goes on to."""
        command = self.box.spawn(*words, **spec)
        self.rests(command)
        return command

    def shell(self, cwd: str = "") -> Callable[[str], None]:
        """A persistent bash; what is returned gives it a command and waits for its end."""
        command = self.box.spawn("bash", stdin=True, name="shell", cwd=cwd)
        ends = threading.Semaphore(0)

        def read() -> None:
            with contextlib.suppress(CrabError):  # the sandbox goes before the shell ends
                for piece in command.events():
                    for _ in range(piece.data.count(b"\0")):
                        ends.release()

        threading.Thread(target=read, daemon=True).start()
        self.rests(command)

        def tell(words: str) -> None:
            command.write(f"{words}\nprintf '\\0'\n".encode())
            assert ends.acquire(timeout=60), words
            self.rests(command)

        tell(":")
        return tell
