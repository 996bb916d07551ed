"""Trying something in forks that are gone again when it has ended: `try`."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from crab.checkpoint.manifest import Manifest
from crab.checkpoint.restore import restore
from crab.daemon import comparing, history, lifecycle
from crab.daemon import requests as ask
from crab.daemon.core import TEMPORARY, Core, new_id
from crab.daemon.door import checked_command
from crab.daemon.registry import Record
from crab.errors import CrabError, InvalidRequest
from crab.host import processes
from crab.model import Checkpoint, ExecResult, ExecSpec, State, Trial
from crab.sandbox import box, door, settle
from crab.sandbox.incarnation import Incarnation

LONGEST = 600.0
"""Seconds that a command may take."""
AT_ONCE = 4
NUMBER = "CRAB_TRY"
_SOCKET = re.compile(r"socket:\[(\d+)\]")


def tried(core: Core, request: ask.Try, run: Callable[[str, ExecSpec], ExecResult]) -> tuple[Trial, ...]:
    """What a command came to in each fork; `run` runs one in a sandbox to its end. All of them, or none."""
    spec = checked_command(request.spec)
    if spec.tty or spec.stdin or spec.name or spec.by_agent:
        raise InvalidRequest("a command that is tried has no terminal, no input and no name", remedy="leave them out")
    timeout = LONGEST if spec.timeout is None else spec.timeout
    if not 0 < timeout <= LONGEST:
        raise InvalidRequest(f"a command cannot be tried for {timeout:g} s", remedy=f"give at most {LONGEST:g}")
    with core.operation(request.sandbox, "try") as source:
        if request.ref:
            checkpoint = history.find(core, source, request.ref)
        else:
            checkpoint = history.checkpoint_of(core, source, "", "adaptive", durable=False)
        manifest, with_processes = history.checked(core, checkpoint)
        agents = _agents(core.life(source))

    def one(number: int) -> Trial:
        own = msgspec.structs.replace(spec, timeout=timeout, env={**spec.env, NUMBER: str(number)})
        record = core.registry.add(_record(manifest, checkpoint), box.RANGES)
        try:
            life = core.life(record)
            _bring_up(core, record, life, (manifest, with_processes), agents)
            result = run(record.id, own)
            difference = comparing.diff(core, ask.Diff(sandbox=record.id, ref=checkpoint.id))
            return Trial(number=number, result=result, difference=difference)
        finally:
            lifecycle.remove(core, ask.Remove(sandbox=record.id, force=True))

    with ThreadPoolExecutor(min(request.count, AT_ONCE), thread_name_prefix="crab-try") as pool:
        return tuple(pool.map(one, range(1, request.count + 1)))


def _record(manifest: Manifest, checkpoint: Checkpoint) -> Record:
    """A sandbox that the sweep takes for left over. It has no model: what it would say there is nobody's."""
    identity = new_id(TEMPORARY)
    return Record(
        id=identity,
        name=f"try-{identity[1:7]}",
        generation=1,
        spec=msgspec.structs.replace(manifest.spec, model=None, exec_turns=False),
        created=time.time(),
        image_fingerprint=manifest.checkpoint.image_fingerprint,
        runtime=manifest.runtime,
        wanted=State.CREATED,
        head=checkpoint.id,
        turn=checkpoint.turn,
        forked_from=checkpoint.id,
    )


def _bring_up(
    core: Core, record: Record, life: Incarnation, saved: tuple[Manifest, Manifest | None], agents: Set[int]
) -> None:
    """Restore it without its agent running: that would take the fork for its sandbox. (It keeps the name and the machine id of
    its source, so that nothing but the command changes a file.)"""
    manifest, with_processes = saved
    with core.engine.job("restore", record.id):
        restore(core.ground, manifest, with_processes, life, stopped=bool(agents))
    for pid in life.host_pids() if agents else ():
        with contextlib.suppress(ProcessLookupError):
            if processes.inner_pid(pid) not in agents:
                os.kill(pid, signal.SIGCONT)
    for pid in life.agents():  # of a sandbox that does not run itself, nothing was known before
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    core.inspector.restored(life, manifest.checkpoint, alone=history.is_alone(with_processes))
    settle.network(life)
    core.registry.save(msgspec.structs.replace(record, wanted=State.RUNNING, process=life.process))


def _agents(life: Incarnation) -> set[int]:
    """Numbers inside of the agents: commands of that name, and who has a connection to the way to its model."""
    found: set[int] = set()
    with contextlib.suppress(CrabError, OSError):  # it does not run
        found |= {processes.inner_pid(pid) for pid in life.agents()}
        wanted = _connections(life.pid)
        for pid in life.host_pids() if wanted else ():
            with contextlib.suppress(OSError):
                for entry in os.scandir(f"/proc/{pid}/fd"):
                    match = _SOCKET.fullmatch(os.readlink(entry.path))
                    if match and match[1] in wanted:
                        found.add(processes.inner_pid(pid))
    return found - {1}


def _connections(pid: int) -> set[str]:
    """Inodes of the sockets in a process's network that lead to the door (proc_net_tcp(5))."""
    found: set[str] = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[2].endswith(f":{door.PORT:04X}"):
                found.add(fields[9])
    return found
