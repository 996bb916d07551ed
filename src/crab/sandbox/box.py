"""Calls of `crab-box`: what it is told, as pure functions of plain data, and how its failures are reported."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from crab.errors import CrabError, LaunchFailed
from crab.host.clocks import Clocks
from crab.model import Mount, NetworkMode
from crab.native import program

IDS = 65536
FIRST_RANGE = 1_900_000_000
"""First host id of the first range: above what systemd-nspawn and subuid allocate, below 2^31 (systemd, UIDS-GIDS)."""
RANGES = 3000


class Layers(msgspec.Struct, frozen=True):
    """The parts of a root file system."""

    lower: tuple[Path, ...]
    """Read-only layers, uppermost first."""
    upper: Path
    """Folder with `u` and `k`."""
    mounts: tuple[Mount, ...] = ()
    """Further mounts; copy-on-write ones have `mN/u` and `mN/k` in `upper`, N being their place in this tuple."""


LOOPBACK_TIMEOUT = 60_000
"""Microseconds: more than an acknowledgement may be delayed (40 ms), or packets would be repeated for nothing."""


class Enclave(msgspec.Struct, frozen=True):
    """Where a sandbox lives: its ids, name, cgroup folders and kind of network."""

    slot: int
    """Number of its range of ids, 0 … RANGES - 1."""
    hostname: str
    cgroup: Path
    joins: tuple[Path, ...] = ()
    network: NetworkMode = "none"

    @property
    def first_id(self) -> int:
        """Host's number of the sandbox's root."""
        return FIRST_RANGE + self.slot * IDS


def mount_name(number: int) -> str:
    """Name under which CRIU knows a further mount (`--external mnt[…]`)."""
    return f"crab{number}"


def _common(enclave: Enclave, layers: Layers) -> list[str]:
    words = ["--range", str(enclave.first_id), "--cgroup", str(enclave.cgroup), "--hostname", enclave.hostname]
    for folder in enclave.joins:
        words += ["--join", str(folder)]
    for layer in layers.lower:
        words += ["--lower", str(layer)]
    words += ["--upper", str(layers.upper)]
    for number, mount in enumerate(layers.mounts):
        kind = f"overlay={layers.upper / f'm{number}'}" if mount.kind == "copy" else "ro" if mount.read_only else "rw"
        words += ["--mount", f"{kind}:{mount.source}:{mount.target}"]
    return words


def start_command(enclave: Enclave, layers: Layers) -> list[str]:
    """Words that start a sandbox; the pid of its init comes on standard output."""
    shared = ["--network", "host"] if enclave.network == "host" else []
    return [str(program("crab-box")), "start", *_common(enclave, layers), *shared, *_timeout(enclave)]


def restore_command(
    enclave: Enclave,
    layers: Layers,
    binds: Mapping[str, Path],
    command: Sequence[str],
    shift: Clocks | None = None,
    awaits: bool = False,
) -> list[str]:
    """Words that run `command` (criu restore) where the sandbox is to live; `binds` are folders it sees in /run, `shift` is
    how far its clocks are to be ahead of the host's.

    If it `awaits`, crab-box stops before the command until its network has been made: see `run`.
    """
    shown = [word for name, path in binds.items() for word in ("--bind", f"{path}:{name}")]
    if shift and shift != Clocks():
        shown += ["--clock", f"{shift.monotonic}:{shift.boottime}"]
    if awaits:
        shown += ["--network", "await"]
    return [str(program("crab-box")), "restore", *_common(enclave, layers), *shown, *_timeout(enclave), "--", *command]


def _timeout(enclave: Enclave) -> list[str]:
    """Where nothing is farther than loopback, a packet that was lost to a capture comes again soon."""
    return ["--timeout", str(LOOPBACK_TIMEOUT)] if enclave.network == "none" else []


def capture_command(
    init: int, cgroup: Path, cache: Path, command: Sequence[str] = (), images: Path | None = None
) -> list[str]:
    """Words that freeze a sandbox, run `command` (criu dump) in its network and uts namespace with `cache` as /run, and thaw
    it; without a command only the snapshot of the files is taken."""
    words = [
        str(program("crab-box")),
        "capture",
        "--target",
        str(init),
        "--cgroup",
        str(cgroup),
        "--bind",
        f"{cache}:run",
    ]
    if images:
        words += ["--images", str(images)]
    return [*words, "--", *command] if command else words


def unblock_command(init: int) -> list[str]:
    """Words that undo what a capture that was killed has left in the sandbox's network namespace."""
    return [str(program("crab-box")), "unblock", "--target", str(init)]


def snapshot_environment(source: Path, target: Path) -> dict[str, str]:
    """What crab-box reads when it takes a snapshot of a subvolume."""
    return {"CRAB_SNAPSHOT_OF": str(source), "CRAB_SNAPSHOT_IN": str(target.parent), "CRAB_SNAPSHOT_AS": target.name}


def run(
    words: Sequence[str],
    error: type[CrabError] = LaunchFailed,
    seconds: float = 60.0,
    network: Callable[[int], None] | None = None,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run a call of crab-box and return what it printed. Raises `error` with its own words if it fails.

    `network` is called with the pid of a process in the new network namespace, before anything runs there. What it
    raises passes through, and nothing of the call is left.
    """
    name = f"{Path(words[0]).name} {words[1]}"
    stdin = subprocess.PIPE if network else subprocess.DEVNULL
    variables = {**os.environ, **environment} if environment else None
    with subprocess.Popen(words, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=variables) as process:
        late = threading.Timer(seconds, process.kill)
        late.start()
        try:
            said = b""
            if network and process.stdin and process.stdout:
                said = process.stdout.readline()
                if said.startswith(b"network "):
                    network(int(said.split()[1]))
                    process.stdin.write(b"\n")
                    said = b""
            rest, complaint = process.communicate()
        except BaseException:
            process.kill()  # its child goes with it
            raise
        finally:
            over = not late.is_alive()
            late.cancel()
    if process.returncode == -signal.SIGKILL and over:
        raise error(f"{name} did not end within {seconds:.0f} s", remedy="see `crab doctor`")
    if process.returncode:
        text = complaint.decode(errors="replace").strip() or f"status {process.returncode}"
        raise error(f"{name}: {text}", remedy="`crab doctor` shows what this host lacks")
    return (said + rest).decode()
