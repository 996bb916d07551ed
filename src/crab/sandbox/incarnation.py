"""One life of a sandbox: from a start or a restore to its end.

It owns everything that lives only as long: the writable files (a subvolume), the cgroup, the processes, the way to
the network. A rewind or a recovery makes a new incarnation beside the old one and switches over when it runs, so a failure
costs nothing. A name (`SANDBOX.GENERATION`) is on all its resources, so a sweep can tell whose they are.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import msgspec

from crab.errors import LaunchFailed, NoSpace, NotFound, SandboxGone
from crab.host import btrfs, processes
from crab.host.cgroups import Cgroup, CgroupRoots
from crab.host.network import Nat
from crab.host.pool import Pool
from crab.host.processes import ProcessId
from crab.model import ExecSpec, ProcessInfo, SandboxSpec
from crab.sandbox import box, inside, runtime, users
from crab.sandbox.command import Command
from crab.sandbox.door import Door, Porter
from crab.sandbox.gate import Gate
from crab.sandbox.layers import renew_work
from crab.sandbox.network import Way
from crab.sandbox.shells import Shells
from crab.sandbox.wire import Entry, InitLine, StartRequest

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
EXEC_PREFIX = "x"
LINE_TRIES = 20
AGENT_PREFIX = "agent:"
"""Of the name of a command that is the agent itself, living in the sandbox (docs/inspector.md)."""


class Watcher(Protocol):
    """Who wants to know of the life of incarnations: it sees everything from before the first process."""

    def begin(self, group: Path) -> None:
        """The cgroup exists and is empty."""
        ...

    def end(self, key: str, group: Path) -> None:
        """Nothing runs in it any more, or ever will."""
        ...


def environment(spec: SandboxSpec, exec_spec: ExecSpec, identity: users.Identity) -> tuple[str, ...]:
    """Environment of a command, `NAME=value` each: defaults, then the sandbox's, then the command's own."""
    values = {"PATH": PATH, "HOME": identity.home, "USER": identity.name, "LOGNAME": identity.name, "LANG": "C.UTF-8"}
    if exec_spec.tty:
        values["TERM"] = "xterm-256color"
    values |= spec.env | exec_spec.env
    return tuple(f"{name}={value}" for name, value in values.items())


class Incarnation:
    """See the module. Not safe for concurrent `start`/`destroy`: callers hold the sandbox's operation."""

    def __init__(
        self,
        pool: Pool,
        cgroups: CgroupRoots,
        sandbox: str,
        generation: int,
        spec: SandboxSpec,
        slot: int,
        ground: str,
        name: str,
        nat: Nat,
        watcher: Watcher | None = None,
        porter: Porter | None = None,
    ) -> None:
        """`ground` is the name of what it stands on (`runtime.ensure`), `name` the sandbox's own. Raises `NotFound`."""
        self.key = f"{sandbox}.{generation}"
        self.name = name
        self.generation = generation
        self.spec = spec
        self.files = pool.root / "live" / self.key
        self.group = cgroups.group(self.key)
        self.enclave = box.Enclave(
            slot=slot,
            hostname=spec.hostname or name,
            cgroup=self.group.path,
            joins=tuple(self.group.joins),
            network=spec.network,
        )
        self.way = Way(nat, spec.network, slot, generation)
        self.door = Door(sandbox, self.key, porter) if porter and spec.model else None
        self.layers = box.Layers(lower=(runtime.path(pool, ground),), upper=self.files, mounts=spec.mounts)
        self._blank = runtime.blank(pool, ground)
        self.gate = Gate()
        self.process: ProcessId | None = None
        self.shells = Shells(self)
        self._pool = pool
        self._watcher = watcher
        self._agents: dict[int, str] | None = None
        self._had_agent = False
        self._serial = 0
        self._capturing: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    # ---- files

    def make_files(self) -> None:
        """Empty writable layers."""
        btrfs.snapshot(self._blank, self.files, read_only=False)
        for folder in list(self._writable())[1:]:
            (folder / "u").mkdir(parents=True, mode=0o755)
            (folder / "k").mkdir(mode=0o755)
        self._limit_disk()

    def clone_files(self, snapshot: Path) -> None:
        """Writable layers as they are in a snapshot."""
        btrfs.snapshot(snapshot, self.files, read_only=False)
        self._renew_work()
        self._limit_disk()

    def _renew_work(self) -> None:
        for folder, lower in self._writable().items():
            renew_work(folder / "k", lower)

    def _writable(self) -> dict[Path, Path]:
        """Folders that have a `u` and a `k`, the root's first, each with the layer below it."""
        mounts = {self.files / f"m{n}": Path(m.source) for n, m in enumerate(self.spec.mounts) if m.kind == "copy"}
        return {self.files: self.layers.lower[0], **mounts}

    def _limit_disk(self) -> None:
        if self.spec.limits.disk:
            btrfs.set_limit(self.files, self.spec.limits.disk)

    # ---- life

    def make_group(self, restoring: bool = False) -> None:
        """The cgroup with its limits, empty. `restoring` leaves out the limit of processes until `end_restoring`: CRIU has some
        of its own in the group."""
        limits = self.spec.limits
        self.group.create(msgspec.structs.replace(limits, pids=None) if restoring else limits)
        self.group.delegate(self.enclave.first_id)
        if self._watcher:
            self._watcher.begin(self.group.path)

    def end_restoring(self) -> None:
        """All limits as they should be."""
        self.group.limit(self.spec.limits)

    def start(self) -> None:
        """Start init on the writable layers. Raises `LaunchFailed`; then nothing of it runs."""
        try:
            runtime.uncover(self.files / "u")
            self._renew_work()
            self.make_group()
            said = box.run(box.start_command(self.enclave, self.layers))
            self.adopt(int(said))
            if self.door:
                self.door.open(self.pid)
        except OSError as error:
            self.group.kill()
            if error.errno in (28, 122):
                raise NoSpace(
                    f"no space for sandbox {self.key}: {error}", remedy="free space in the state directory"
                ) from error
            raise LaunchFailed(f"sandbox {self.key} cannot be started: {error}", remedy="see `crab doctor`") from error
        except BaseException:
            self.group.kill()
            raise

    def adopt(self, pid: int) -> None:
        """Take over a running init (started, restored, or found by a new daemon). Raises `LaunchFailed` if it died."""
        try:
            if not processes.is_foreign(pid) or processes.inner_pid(pid) != 1:
                raise LaunchFailed(
                    f"process {pid} is not the init of a sandbox", remedy="this is a defect of Crab; please report it"
                )
            self.process = processes.identify(pid)
        except ProcessLookupError:
            raise LaunchFailed(
                f"the init of sandbox {self.key} died at once",
                remedy="see `crab doctor`, and the limits of the sandbox",
            ) from None

    @property
    def pid(self) -> int:
        """Host pid of init. Raises `SandboxGone` if it does not run."""
        if self.process is None or not processes.is_alive(self.process):
            raise SandboxGone(self.why_gone(), remedy="`crab recover` restores the newest checkpoint")
        return self.process.pid

    def is_alive(self) -> bool:
        return self.process is not None and processes.is_alive(self.process)

    def why_gone(self) -> str:
        """In words, what is known of the end of its processes."""
        if self.process is not None and self.process.boot != processes.boot_id():
            return "the host was rebooted"
        if self.group.was_out_of_memory():
            return "its processes were killed: the memory limit was reached"
        return "its init is gone"

    def kill(self, reason: str = "the sandbox was stopped") -> None:
        """SIGKILL everything in it. Returns when nothing is left."""
        self.gate.destroy(reason)
        with self._lock:
            if self._capturing is not None:
                self._capturing.terminate()  # CRIU may wait for ever for tasks that are killed in the middle
        if self.process is not None:
            processes.kill(self.process)
        if self.door:
            self.door.close()
        # an empty group is not yet the end: a task leaves it before it is a zombie
        if not self.group.kill() or (self.process is not None and not processes.wait_gone(self.process, 10.0)):
            raise LaunchFailed(
                f"processes of {self.key} do not die: {self.group.members()}",
                remedy="they hang in the kernel; see dmesg",
            )
        if self._watcher:
            self._watcher.end(self.key, self.group.path)

    def destroy(self, reason: str = "the sandbox was removed") -> None:
        """Kill it and give back everything that it owns, its files too. Can be repeated."""
        self.kill(reason)
        self.way.close()
        self.group.remove()
        if self.files.exists():
            self._pool.discard(self.files)

    def release_processes(self, reason: str = "the sandbox was stopped") -> None:
        """Kill it, remove the cgroup and its way to the network, but keep the files."""
        self.kill(reason)
        self.way.close()
        self.group.remove()

    # ---- commands

    def identity(self, user: str) -> users.Identity:
        """Who a command of that user is. Raises `ExecFailed` for an unknown one."""
        wanted = user or self.spec.user
        if wanted in ("root", "0", ""):
            return users.ROOT
        return users.resolve(
            wanted, inside.read_text(self.pid, "/etc/passwd"), inside.read_text(self.pid, "/etc/group")
        )

    def _home(self, identity: users.Identity) -> str:
        """Where a command starts that was told no folder: the user's home, or the root if there is none."""
        if identity != users.ROOT:
            try:
                with inside.opened(self.pid, identity.home, os.O_PATH | os.O_DIRECTORY):
                    pass
            except OSError:
                return "/"
        return identity.home

    def execute(self, spec: ExecSpec) -> Command:
        """Start a command in a cgroup of its own. Raises `ExecFailed`, `CommandNotFound`, `AlreadyExists`, `SandboxGone`."""
        self.way.keep()
        identity = self.identity(spec.user)
        request = StartRequest(
            name=spec.name,
            cwd=spec.cwd or self.spec.workdir or self._home(identity),
            argv=spec.argv,
            env=environment(self.spec, spec, identity),
            uid=identity.uid,
            gid=identity.gid,
            groups=identity.groups,
            tty=spec.tty,
            stdin=spec.stdin,
            rows=spec.rows,
            columns=spec.columns,
        )
        group = self._new_group()
        if spec.name.startswith(AGENT_PREFIX):
            self._agents = None
        try:
            command = Command.start(lambda: self.pid, self.gate, request, group)
            command.keeps_output = spec.by_agent
            return command
        except BaseException:
            group.kill()
            group.remove(0.1)
            raise

    def _new_group(self) -> Cgroup:
        while True:
            with self._lock:
                self._serial += 1
                group = self.group.child(f"{EXEC_PREFIX}{self._serial}")
            try:
                group.path.mkdir()
                group.delegate(self.enclave.first_id)
                return group
            except FileExistsError:
                continue  # of before a daemon's restart
            except FileNotFoundError:
                raise SandboxGone(self.why_gone(), remedy="`crab recover` restores the newest checkpoint") from None

    def entries(self) -> list[Entry]:
        """The commands that init knows. Raises `SandboxGone`."""
        for _ in range(LINE_TRIES):
            with self.gate.enter(), InitLine.connect(self.pid) as line:
                if (found := line.entries()) is not None:
                    return found  # else a capture began just then
        raise SandboxGone("the sandbox's init does not answer", remedy="`crab inspect` says how it is now")

    def agents(self) -> dict[int, str]:
        """Names of the commands that are agents, by host number of their process."""
        if self._agents is not None and any(not processes.is_foreign(pid) for pid in self._agents):
            self._agents = None  # one has ended: its number may be given to another
        if self._agents is None:
            inner = {e.pid: e.name for e in self.entries() if e.name.startswith(AGENT_PREFIX) and not e.exited}
            self._agents = {}
            for pid in self.host_pids() if inner else ():
                with contextlib.suppress(ProcessLookupError):
                    if name := inner.get(processes.inner_pid(pid)):
                        self._agents[pid] = name.removeprefix(AGENT_PREFIX)
        self._had_agent |= bool(self._agents)
        return self._agents

    def agent_pids(self) -> set[int] | None:
        """Their numbers in the sandbox; None if one was seen earlier, and none runs any more. Raises `SandboxGone`."""
        found: set[int] = set()
        for pid in self.agents():
            with contextlib.suppress(ProcessLookupError):
                found.add(processes.inner_pid(pid))
        return None if self._had_agent and not found else found

    def attach(self, entry: Entry) -> Command:
        """A handle on a command that runs already."""
        group = next((g for g in self._exec_groups() if self._holds(g, entry.pid)), None)
        return Command(lambda: self.pid, self.gate, entry, group)

    def host_pid(self, command: Command) -> int:
        """The host's number of a command's own process. Raises `NotFound` if it has ended."""
        members = command.group.members() if command.group is not None else []
        for pid in [*members, *self.host_pids()]:  # a restored one may have left its group
            with contextlib.suppress(ProcessLookupError):
                if processes.inner_pid(pid) == command.pid:
                    return pid
        raise NotFound(f"command {command.name or command.id} has ended", remedy="`crab ps -c` lists what runs")

    def _exec_groups(self) -> list[Cgroup]:
        with contextlib.suppress(FileNotFoundError):
            return [
                self.group.child(p.name)
                for p in self.group.path.iterdir()
                if p.is_dir() and p.name.startswith(EXEC_PREFIX)
            ]
        return []

    def _holds(self, group: Cgroup, inner: int) -> bool:
        for pid in group.members():
            with contextlib.suppress(ProcessLookupError):
                if processes.inner_pid(pid) == inner:
                    return True
        return False

    # ---- what runs

    def host_pids(self) -> list[int]:
        """Host pids of all its processes, init first."""
        return [pid for pid in processes.descendants(self.pid) if processes.is_foreign(pid)]

    def processes(self) -> list[ProcessInfo]:
        """All its processes; those that end meanwhile are left out."""
        found: list[ProcessInfo] = []
        inner: dict[int, int] = {}
        for pid in self.host_pids():
            with contextlib.suppress(ProcessLookupError, FileNotFoundError, PermissionError):
                inner[pid] = processes.inner_pid(pid)
                found.append(self._process(pid, inner))
        return found

    def _process(self, pid: int, inner: dict[int, int]) -> ProcessInfo:
        fields = processes.stat_fields(pid)
        argv = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]
        uid = os.stat(f"/proc/{pid}").st_uid - self.enclave.first_id
        group = Path(f"/proc/{pid}/cgroup").read_text().rpartition(":")[2].strip().rpartition("/")[2]
        return ProcessInfo(
            pid=inner[pid],
            host_pid=pid,
            parent=inner.get(int(fields[1]), 0),
            state=fields[0],
            uid=uid,
            memory=int(fields[21]) * os.sysconf("SC_PAGE_SIZE"),
            argv=tuple(os.fsdecode(word) for word in argv),
            exec_id=group if group.startswith(EXEC_PREFIX) else "",
        )

    # ---- standing still

    @contextlib.contextmanager
    def capturing(self, process: subprocess.Popen[bytes]) -> Iterator[None]:
        """For the length of the block that process captures it, and is ended if the sandbox is killed."""
        with self._lock:
            self._capturing = process
        try:
            yield
        finally:
            with self._lock:
                self._capturing = None

    @contextlib.contextmanager
    def unattended(self) -> Iterator[None]:
        """Run the block while no line leads out of the sandbox: what a capture needs before it freezes."""

        def detach() -> None:
            with InitLine.connect(self.pid) as line:
                line.detach()

        with self.gate.closed(detach):
            yield
