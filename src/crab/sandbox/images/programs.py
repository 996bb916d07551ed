"""Run the host's programs (mmdebstrap, skopeo, cp) for a recipe: nothing they start outlives the recipe.

Knows how to find, run and end a program and how to report its failure; not what the programs do.
"""

from __future__ import annotations

import collections
import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from crab.errors import CrabError, HostUnsuitable
from crab.host import btrfs
from crab.sandbox.images.source import Progress

_TAIL = 15
"""Lines of output that an error quotes."""


def find(name: str) -> str | None:
    """Path of a program of the host; root's folders count even if a daemon's PATH lacks them."""
    return shutil.which(name, path=os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin")


def require(name: str, package: str = "") -> str:
    """Path of a program, or HostUnsuitable with what to install."""
    path = find(name)
    if path is None:
        raise HostUnsuitable(
            f"the program {name} is not installed",
            remedy=f"`crab doctor --fix`, or install the package {package or name}",
        )
    return path


def isolated(root: Path) -> list[str | Path]:
    """Prefix for programs that install a system into `root`.

    Own mount and pid namespace: what they mount and start is gone when they are killed. In there, `root` allows device
    nodes and setuid programs, which the pool does not.
    """
    allow = 'mount --bind "$0" "$0" && mount -o remount,bind,suid,dev "$0" && exec "$@"'
    unshare = [
        require("unshare", "util-linux"),
        "--mount",
        "--propagation",
        "private",
        "--pid",
        "--fork",
        "--kill-child",
    ]
    return [*unshare, "sh", "-c", allow, root]


def run(
    command: Sequence[str | Path],
    purpose: str,
    *,
    place: Path,
    remedy: str = "",
    progress: Progress | None = None,
    explain: Callable[[str], CrabError | None] | None = None,
    env: Mapping[str, str] | None = None,
) -> None:
    """Run a program to its end.

    If it fails: NoSpace for the file system of `place` if that was full, else the error that `explain` makes of its
    last lines, else a CrabError that quotes them.
    """
    tail: collections.deque[str] = collections.deque(maxlen=_TAIL)
    with _started(command, env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        for line in process.stdout:
            text = line.decode(errors="replace").strip()
            if text:
                tail.append(text)
                if progress is not None:
                    progress(text)
        code = process.wait()
    if code == 0:
        return
    output = "\n".join(tail)
    if "No space left on device" in output or "Disk quota exceeded" in output:
        raise btrfs.no_space(place)
    known = explain(output) if explain is not None else None
    if known is not None:
        raise known
    ended = f"exit status {code}" if code > 0 else f"signal {-code}"
    raise CrabError(f"{purpose} failed ({ended}):\n{output or '(no output)'}", remedy=remedy)


@contextlib.contextmanager
def piped(command: Sequence[str | Path], stdin: IO[bytes] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A running program whose standard output is read by the caller; killed if the caller leaves early."""
    source = subprocess.DEVNULL if stdin is None else stdin
    with _started(command, None, stdin=source, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        yield process


@contextlib.contextmanager
def _started(
    command: Sequence[str | Path],
    env: Mapping[str, str] | None,
    *,
    stdin: IO[bytes] | int = subprocess.DEVNULL,
    stdout: int,
    stderr: int,
) -> Iterator[subprocess.Popen[bytes]]:
    # A session of its own: a Ctrl-C in the user's terminal reaches Crab, which then ends the whole group in order.
    process = subprocess.Popen(
        [os.fspath(part) for part in command],
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env={**os.environ, "LC_ALL": "C.UTF-8", **(env or {})},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
