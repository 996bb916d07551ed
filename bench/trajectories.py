"""What the inspector decides on recorded work of agents that repair code:
`python -m bench.trajectories FILE --repos DIR [--pythons DIR] [--quick] [--rest SECONDS] [--only NAME]`.

FILE holds JSON Lines, one run a line (other fields are ignored):

  instance_id    its name
  repo           `OWNER/NAME`; a git repository, bare or not, lies in `--repos` as OWNER/NAME, OWNER+NAME or OWNER+NAME/repo
  base_commit    what is checked out in /testbed before the first turn
  python         version that the work was done with: the image's own python3 if that is of the same series, else taken from
                 `--pythons` (a whole installation in a folder of that name, as pyenv's `versions`)
  pip            requirements that are installed before the first turn, then the project itself (editable)
  turns          objects with `command` (run by a `bash -c` of its own in /testbed), `rc` (exit status when it was recorded, or
                 null) and maybe `assistant`: what the model said. If it has one block of bash, that is what ran, whatever
                 `command` says (recorders take another block for it); if several, the agent refused them and nothing ran.

The host's pip fetches the wheels; the turns have no network. Each turn is followed by a checkpoint with policy `oracle` (some
seconds), so that every decision is judged, with `--quick` by one with policy `adaptive`. What cannot be set up is left out, and
why is said. A table with a line for each run, then one JSON object on the last line:

  turns                        that were played
  none, files, processes, full what was decided
  right, alarms, misses        judged by the oracle (0 of `misses` is the promise): each that is not right is told with its reasons
  calm                         turns that change nothing but cache files of tools (CACHES), `none` included
  rc_same, rc_known            exit statuses that were as recorded, of those that were recorded
  timeouts                     commands that were killed after LONGEST seconds
  decide_ms_p50, _p99          the decision alone
  adaptive_mb, full_mb         process images: those of the turns that need them, and one for every turn
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

import click
import msgspec

import crab
from bench.figures import median, quantile, say
from crab.errors import CrabError, NotFound
from crab.model import Checkpoint, CheckpointKind, FileChange

IMAGE = "bench-trajectories"
SOURCE = "debian:bookworm+python3-pip,python3-venv,procps"
WORK = "/testbed"
WHEELS = "/opt/wheels"
VENV = "/opt/venv"
LONGEST = 120.0
"""Seconds of a command."""
SETTLE = 0.3
"""Seconds between the captures of the set-up and after them: who stood still for a capture comes to rest."""
ENVIRONMENT = {
    "PATH": f"{VENV}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "TERM": "dumb",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
}
CACHES = (
    *("__pycache__", "*.pyc", "*.pyo", ".cache", ".pylint.d"),
    *(".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".benchmarks"),
)
"""Names of files and folders that a tool makes again by itself; what lies below one is meant too."""
BLOCK = re.compile(r"```bash\s*\n(.*?)\n?```", re.DOTALL)
"""A command in what a model says."""
BUILDING = ("setuptools<70", "wheel")
"""What a project needs to be installed that says nothing about it (PEP 518)."""
UNNEEDED = ("site-packages", "test", "tests", "config-3*", "*.a")
"""Of an installation of Python: what no run uses, and that is most of it."""
NAMED = 16
"""Files that a decision names at most (docs/inspector.md)."""
PROCESSES: tuple[CheckpointKind, ...] = ("processes", "full")


class Turn(msgspec.Struct, frozen=True):
    """One action of the agent."""

    command: str
    rc: int | None = None
    assistant: str = ""


class Run(msgspec.Struct, frozen=True):
    """A line of FILE."""

    instance_id: str
    repo: str
    base_commit: str
    turns: tuple[Turn, ...]
    python: str = ""
    pip: tuple[str, ...] = ()


class CannotRunError(Exception):
    """Why the world of a run cannot be made here."""


@dataclass
class Played:
    """What was seen of one run."""

    kinds: Counter[str] = field(default_factory=Counter[str])
    judged: Counter[str] = field(default_factory=Counter[str])
    calm: int = 0
    rc_same: int = 0
    rc_known: int = 0
    timeouts: int = 0
    costs: list[float] = field(default_factory=list[float])
    adaptive_bytes: int = 0
    full_bytes: int = 0

    def add(self, other: Played) -> None:
        """Take those of another run as well."""
        self.kinds += other.kinds
        self.judged += other.judged
        self.costs += other.costs
        for name in ("calm", "rc_same", "rc_known", "timeouts", "adaptive_bytes", "full_bytes"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def figures(self) -> dict[str, float]:
        """As in the docstring of this module."""
        return {
            "turns": self.kinds.total(),
            **{kind: self.kinds[kind] for kind in ("none", "files", "processes", "full")},
            "right": self.judged["right"],
            "alarms": self.judged["false alarm"],
            "misses": self.judged["miss"],
            "calm": self.calm,
            "rc_same": self.rc_same,
            "rc_known": self.rc_known,
            "timeouts": self.timeouts,
            "decide_ms_p50": median(self.costs),
            "decide_ms_p99": quantile(self.costs, 0.99),
            "adaptive_mb": round(self.adaptive_bytes / 1e6, 1),
            "full_mb": round(self.full_bytes / 1e6, 1),
        }


# ---------------------------------------------------------------- the world of a run


def call(*words: str | Path) -> str:
    """Output of a program of the host; CannotRunError with the end of what it said if it fails."""
    done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise CannotRunError(f"{Path(words[0]).name} {' '.join(map(str, words[1:4]))} …: {last_line(done.stderr)}")
    return done.stdout


def last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "error" in line.lower()), lines[-1] if lines else "")


def repository(repos: Path, run: Run) -> Path:
    """Where its history lies."""
    joined = run.repo.replace("/", "+")
    for path in (repos / run.repo, repos / joined / "repo", repos / joined):
        if (path / "HEAD").exists() or (path / ".git").exists():
            return path
    raise CannotRunError(f"{repos} has no {run.repo}")


def check_out(source: Path, commit: str, target: Path) -> None:
    """The base commit with its history and the tags in it (versions are made of them), and nothing that came later."""
    call("git", "init", "-q", "-b", "main", target)
    call("git", "-C", target, "fetch", "-q", source.absolute(), f"+{commit}:refs/remotes/base/main")
    call("git", "-C", target, "-c", "advice.detachedHead=false", "reset", "-q", "--hard", commit)


def wheels(python: Path, run: Run, checkout: Path, folder: Path) -> bool:
    """Fetch and build everything that will be installed; whether the project itself could be built too."""
    venv = folder / "venv"
    call(python, "-m", "venv", venv)
    pip = (venv / "bin" / "python", "-m", "pip")
    call(*pip, "install", "-q", *BUILDING)
    get = (*pip, "wheel", "-q", "-w", folder / "wheels")
    project = checkout / "pyproject.toml"
    told = tomllib.loads(project.read_text()) if project.exists() else {}
    call(*get, *BUILDING, *told.get("build-system", {}).get("requires", ()))
    if run.pip:
        call(*get, *run.pip)
    try:
        call(*get, checkout)
    except CannotRunError as error:
        say(f"{run.instance_id}: the project cannot be built, its folder goes onto Python's path instead: {error}")
        return False
    finally:
        call("git", "-C", checkout, "clean", "-qfdx")
    return True


def prepare(sandbox: crab.Sandbox, run: Run, repos: Path, pythons: Path | None) -> None:
    """Make the world as it was before the first turn."""
    interpreter = Path(sys.executable)
    if pythons:
        interpreter = pythons.absolute() / run.python / "bin" / "python3"
        if not interpreter.exists():
            raise CannotRunError(f"{pythons} has no Python {run.python}")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        folder = Path(name)
        checkout = folder / "checkout"
        check_out(repository(repos, run), run.base_commit, checkout)
        whole = wheels(interpreter, run, checkout, folder)
        sandbox.copy_in(str(checkout), WORK)
        sandbox.copy_in(str(folder / "wheels"), WHEELS)
        inside = "/usr/bin/python3"
        own = (
            sandbox.run([inside, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], check=True).text().strip()
        )
        if pythons and not run.python.startswith(f"{own}."):  # at its own path: it knows the one of its library
            home = interpreter.parent.parent
            shutil.copytree(home, folder / "python", symlinks=True, ignore=shutil.ignore_patterns(*UNNEEDED))
            sandbox.run(["mkdir", "-p", str(home.parent)], check=True)
            sandbox.copy_in(str(folder / "python"), str(home))
            inside = str(interpreter)

    def do(*words: str) -> None:
        done = sandbox.run(list(words), cwd="/", timeout=600)
        if not done.ok:
            raise CannotRunError(f"{' '.join(words[:5])} …: {last_line(done.stderr.decode(errors='replace'))}")

    do(inside, "-m", "venv", VENV)
    install = (f"{VENV}/bin/python", "-m", "pip", "install", "-q", "--no-index", "--find-links", WHEELS)
    if run.pip:
        do(*install, *run.pip)
    try:
        if not whole:
            raise CannotRunError("no wheel of it")
        do(*install, "-e", WORK)
    except CannotRunError as error:
        say(f"{run.instance_id}: not installed, on Python's path instead: {error}")
        path = f"printf '{WORK}\\n{WORK}/src\\n' >\"$(echo {VENV}/lib/python3*/site-packages)\"/work.pth"
        do("bash", "-c", path)
    do("rm", "-rf", WHEELS)
    do("git", "config", "--system", "user.name", "Agent")
    do("git", "config", "--system", "user.email", "agent@example.org")


@contextlib.contextmanager
def world(host: crab.Host, run: Run, repos: Path, pythons: Path | None) -> Iterator[str]:
    """An image of the world of a run, for as long as it is needed: what agents are given is an image, too."""
    name = f"{IMAGE}-{run.instance_id.replace('__', '-')}"
    with host.create(image=IMAGE, env=ENVIRONMENT, workdir=WORK) as sandbox:
        prepare(sandbox, run, repos, pythons)
        with contextlib.suppress(NotFound):  # of a run that was killed
            host.images.remove(name)
        sandbox.commit(name)
    try:
        yield name
    finally:
        host.images.remove(name)


# ---------------------------------------------------------------- the turns


def is_cache(change: FileChange) -> bool:
    """Whether a tool makes that file again by itself."""
    return all(
        any(fnmatch(part, pattern) for part in path.split("/") for pattern in CACHES)
        for path in (change.path, change.before)
        if path
    )


def is_calm(sandbox: crab.Sandbox, before: Checkpoint, after: Checkpoint) -> bool:
    """Whether a turn changed nothing but cache files."""
    decision = after.decision
    if not decision or decision.kind in PROCESSES:
        return False
    if decision.kind == "files" and all(map(is_cache, decision.files)) and not 0 < len(decision.files) < NAMED:
        different = sandbox.diff(before.id, after.id).files  # of all files: takes seconds
        return all(is_cache(change) for change in different if change.what != ("times",))
    return all(map(is_cache, decision.files))


def commands(run: Run) -> Iterator[tuple[int, str, int | None]]:
    """Number, command and recorded exit status of each turn in which something ran."""
    for number, turn in enumerate(run.turns):
        blocks = BLOCK.findall(turn.assistant)
        if len(blocks) < 2:
            yield number, blocks[0] if blocks else turn.command, turn.rc


def play(sandbox: crab.Sandbox, run: Run, quick: bool, rest: float) -> Played:
    """All turns, each with its checkpoint."""
    for _ in range(2):  # the first interruption of a call may lead another way than the ones that follow
        before = sandbox.checkpoint(policy="always", durable=False)
        time.sleep(SETTLE)
    played = Played()
    size = before.process_bytes
    for number, command, status in commands(run):
        done = sandbox.run(["bash", "-c", command], timeout=LONGEST, limit=0)
        played.timeouts += done.timed_out
        played.rc_known += status is not None
        played.rc_same += done.exit_code == status
        if status is not None and done.exit_code != status:
            say(f"  turn {number} ended with {done.exit_code}, not {status}: {command[:200]!r}")
        time.sleep(rest)
        taken = sandbox.checkpoint(policy="adaptive" if quick else "oracle", durable=False)
        decision = taken.decision
        assert decision
        if taken.kind in PROCESSES:
            size = taken.process_bytes
        played.kinds[decision.kind] += 1
        played.judged[decision.judged or ""] += 1
        played.costs.append(decision.cost_ms)
        played.full_bytes += size
        played.adaptive_bytes += size if decision.kind in PROCESSES else 0
        played.calm += is_calm(sandbox, before, taken)
        if (decision.judged != "right" and (decision.judged or not quick)) or decision.kind in PROCESSES:
            told = "; ".join((*decision.reasons, *decision.notes))
            say(
                f"{run.instance_id}, turn {number}: {decision.judged or 'not judged'}: {command!r} was decided {decision.kind}"
            )
            say(f"  because: {told}")
            say(f"  in truth: {'; '.join(decision.truth) or 'nothing'}")
        before = taken
    return played


def table(rows: dict[str, dict[str, float]]) -> None:
    """A line for each run."""
    names = list(next(iter(rows.values())))
    wide = max(map(len, rows))
    print(f"{'':{wide}}" + "".join(f" {name:>{len(name)}}" for name in names))
    for title, row in rows.items():
        print(f"{title:{wide}}" + "".join(f" {row[name]:>{len(name)}g}" for name in names))


def chosen(runs: Sequence[Run], only: str) -> Iterator[Run]:
    return (run for run in runs if only in run.instance_id)


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--repos", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True)
@click.option("--pythons", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--quick", is_flag=True, help="Policy adaptive: nothing is judged.")
@click.option("--rest", default=0.3, show_default=True, help="Seconds between the end of a command and its checkpoint.")
@click.option("--only", default="", help="Runs whose name has this in it.")
@click.option(
    "--state", default=lambda: os.environ.get("CRAB_BENCH_STATE", "/var/lib/crab-bench"), help="State directory."
)
def main(file: Path, repos: Path, pythons: Path | None, quick: bool, rest: float, only: str, state: str) -> None:
    """Measure what the inspector decides on recorded work."""
    runs = [msgspec.json.decode(line, type=Run) for line in file.read_bytes().splitlines() if line.strip()]
    rows: dict[str, dict[str, float]] = {}
    left_out: dict[str, str] = {}
    everything = Played()
    with crab.Host(state) as host:
        host.images.add(IMAGE, SOURCE, if_missing=True)
        for run in chosen(runs, only):
            say(f"{run.instance_id}: {len(run.turns)} turns")
            start = time.monotonic()
            try:
                with world(host, run, repos, pythons) as image, host.create(image=image) as sandbox:
                    say(f"  ready after {time.monotonic() - start:.0f} s")
                    played = play(sandbox, run, quick, rest)
            except (CannotRunError, CrabError) as error:
                left_out[run.instance_id] = str(error)
                say(f"{run.instance_id}: left out: {error}")
                continue
            rows[run.instance_id] = played.figures()
            everything.add(played)
            say(f"  {time.monotonic() - start:.0f} s: {json.dumps(rows[run.instance_id])}")
    if rows:
        rows["all"] = everything.figures()
        table(rows)
    print(json.dumps({"runs": rows, "left_out": left_out}))


if __name__ == "__main__":
    main()
