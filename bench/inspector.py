"""How well and at what cost the inspector sees: `python -m bench.inspector [--quick] [--json]`.

  ops_seen, ops_total     operations of `bench.operations` that change files, and those of which the kernel's set had an inode, by
                          file system (btrfs, overlay on btrfs, ext4, xfs, tmpfs)
  false_positives         operations that only read, and yet an inode was in the set; all file systems together
  sandbox_right, …_total  all operations, also those on processes and kernel objects, each as a turn of a sandbox: decided as labelled
  turns_correct, …_total  the same for the turns of `bench.labelled_turns`
  misses                  of `judged_total` turns those that the oracle says changed something that the decision left out (must be 0)
  false_alarms            those that would have captured something of which the oracle says that it was the same
  decide_ms_p50, _p99     a decision about a turn that left 50 files changed (not counting the time of its capture)
  us_per_dirty_file       what each further file costs, if all have to be compared
  overhead_traced         CPU time (user and system) of work in a tracked cgroup, relative to that without programs; the largest of:
                          tar of many files, git clone, fork and exec, writes of 4 KiB
  overhead_untraced       the same in a cgroup that is not tracked, while the programs are attached
  storm_…                 63 sandboxes beside one that changes files as fast as it can: events per second there, changes of the
                          others that are missing (0), changes that were lost without being counted (0)
  load_ms                 load and attach the programs, with the trial that proves them

`CRAB_INSPECTOR` chooses the tier, as for a daemon. Medians of at least five runs; runs that are compared with each other alternate.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import Queue

import click

import crab
from bench import operations
from bench.figures import median, quantile, report, say
from bench.filesystems import FileSystem, filesystems
from bench.labelled_turns import RESTS, SCENARIOS, Scenario, play
from bench.operations import OPERATIONS, Operation, Runner, lay_out
from crab.errors import CrabError
from crab.host.cgroups import CgroupRoots
from crab.inspector.inspector import SETTING
from crab.inspector.tracker import CALL, INODE, Tracker
from crab.model import Decision, PolicyName

IMAGE = "bench-turns"
SOURCE = "debian:bookworm+make,netcat-openbsd,perl,procps,python3-pip,sqlite3,tmux"
READERS = ("read", "stat", "list", "open")
"""Beginnings of the names of operations that touch nothing."""
AGENT = "agent:operations"
PIPES = 0x50495045
"""Magic number of the file system of pipes: of those by which an operation is told what to do."""
REST = 0.25
"""Seconds between a capture and the turn, as for a model: those who stood still for the capture come to rest."""


# ---------------------------------------------------------------- the kernel's part, on every file system


@contextlib.contextmanager
def tracked() -> Iterator[tuple[Tracker, Path, int]]:
    """A tracker of its own, a cgroup below it and its slot."""
    name = f"bench{os.getpid()}"
    roots = CgroupRoots(name)
    roots.prepare()
    parent = roots.unified / roots.owner
    tracker = Tracker.open(name, parent, Path(tempfile.gettempdir()), os.environ.get(SETTING, ""))
    group = parent / "one"
    group.mkdir(exist_ok=True)
    try:
        yield tracker, group, tracker.track(group.stat().st_ino, 0)
    finally:
        tracker.untrack(group.stat().st_ino)
        for _ in range(500):
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.002)
        tracker.remove()
        tracker.close()
        roots.remove()


def inodes(place: FileSystem, folder: str, targets: Sequence[str]) -> set[int]:
    """Numbers by which a change of those paths shows, in the layer that is written."""
    base = Path(folder) if place.upper is None else place.upper / place.path.name / Path(folder).name
    found: set[int] = set()
    for target in targets:
        with contextlib.suppress(OSError):
            found.add((base / target).lstat().st_ino)
    return found


def seen_by_the_kernel(tracker: Tracker, group: Path, slot: int, place: FileSystem, one: Operation) -> bool | None:
    """Whether an inode of the target is in the set (of one that changes nothing: any), or that something was called; None if it
    cannot be done there."""

    def enter() -> None:
        (group / "cgroup.procs").write_text("0")

    folder = str(place.path / "work")
    os.mkdir(folder)
    try:
        lay_out(folder)
        with Runner(one, folder, enter) as runner:
            try:
                runner.prepare()
                known = inodes(place, folder, one.target)
                # as before a checkpoint: the next change gets a finer stamp
                for path in Path(place.upper or place.path).rglob("*"):
                    with contextlib.suppress(OSError):
                        path.lstat()
                tracker.forget(slot, tracker.advance(slot))
                runner.act()
            except OSError:
                return None
            changes = tracker.changes(slot)
            numbers = {change.number for change in changes if change.kind == INODE and change.magic != PIPES}
            called = any(change.kind == CALL for change in changes)
            if not one.changes:
                return called or bool(numbers)
            return called or bool(numbers & (known | inodes(place, folder, one.target)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure_operations(figures: dict[str, float]) -> None:
    """`ops_*` and `false_positives`."""
    figures["false_positives"] = 0
    with tracked() as (tracker, group, slot), filesystems() as places:
        figures["load_ms"] = round(tracker.load_ms, 2)
        for name, place in places.items():
            seen = total = 0
            for one in OPERATIONS:
                # of one whose process lives on, the store into a writable page is no event: who ran counts as changed
                if (
                    one.kind != "files"
                    or one.lives
                    or one.needs - place.offers - {"uring"}
                    or any(t.startswith("/") for t in one.target)
                ):
                    continue
                if not one.changes and not one.name.startswith(READERS):
                    continue
                answer = seen_by_the_kernel(tracker, group, slot, place, one)
                if answer is None:
                    say(f"{name}: {one.name} cannot be done here")
                elif one.changes:
                    total += 1
                    seen += answer
                    if not answer:
                        say(f"{name}: {one.name} was not seen")
                elif answer:
                    figures["false_positives"] += 1
                    say(f"{name}: {one.name} changes nothing and was seen")
            figures[f"ops_seen_{name}"], figures[f"ops_total_{name}"] = seen, total


STORM = """
import os, sys, time
group, folder, files, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
open(f"{group}/cgroup.procs", "w").write("0")
for n in range(files):
    open(f"{folder}/{n}", "w").close()
done, end, mode = 0, time.monotonic() + seconds, 0o600
while time.monotonic() < end or done == 0:
    mode ^= 0o100
    for n in range(files):
        os.chmod(f"{folder}/{n}", mode)
    done += files
print(done / seconds if seconds else done)
"""
QUIET = 'echo $$ >"$0/cgroup.procs"; for n in 0 1 2 3 4 5 6 7 8 9; do : >"$1/$n"; done'


def measure_storm(figures: dict[str, float], seconds: float) -> None:
    """`storm_*`: 64 sandboxes, in one of which events come as fast as they can."""
    with tracked() as (tracker, one, slot), tempfile.TemporaryDirectory(dir="/var/tmp") as base:
        groups = [one.parent / f"quiet{number}" for number in range(63)]
        slots: list[int] = []
        for number, group in enumerate(groups):
            group.mkdir(exist_ok=True)
            os.mkdir(f"{base}/{number}")
            slots.append(tracker.track(group.stat().st_ino, 0))
        os.mkdir(f"{base}/storm")
        words = ["python3", "-c", STORM, str(one), f"{base}/storm", "10000", str(seconds)]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as storm:
            for number, group in enumerate(groups):
                subprocess.run(["sh", "-c", QUIET, str(group), f"{base}/{number}"], check=True)
            figures["storm_events_per_s"] = round(float(storm.communicate()[0]))
        missing = 0
        for number, each in enumerate(slots):
            seen = {change.number for change in tracker.changes(each)}
            missing += sum(os.stat(f"{base}/{number}/{n}").st_ino not in seen for n in range(10))
            missing += tracker.counts(each).lost
        counts = tracker.counts(slot)
        held = {change.number for change in tracker.changes(slot) if change.kind == INODE}
        outside = sum(entry.inode() not in held for entry in os.scandir(f"{base}/storm"))
        figures["storm_others_missing"] = missing
        figures["storm_unseen_losses"] = 0 if counts.lost >= outside else outside - counts.lost
        for group in groups:
            tracker.untrack(group.stat().st_ino)
            group.rmdir()


# ---------------------------------------------------------------- decisions about sandboxes

DRIVER = """
import json, os, shutil, sys
sys.path.insert(0, "/opt")
from bench.operations import OPERATIONS, Runner, lay_out
known = {one.name: one for one in OPERATIONS}
runner = None
for line in sys.stdin:
    word, _, name = line.strip().partition(" ")
    try:
        if word == "prepare":
            shutil.rmtree("/root/work", ignore_errors=True)
            os.mkdir("/root/work")
            lay_out("/root/work")
            runner = Runner(known[name], "/root/work")
            runner.prepare()
        elif word == "act":
            runner.act()
        elif word == "close":
            runner.close()
        answer = "ok"
    except Exception as error:
        answer = f"{type(error).__name__} {error}".replace("\\n", " ")
    print(answer, flush=True)
"""


class Driver:
    """Does operations in a sandbox. It is the agent there: that it runs itself counts for nothing."""

    def __init__(self, sandbox: crab.Sandbox) -> None:
        sandbox.run("mkdir -p /root/work", check=True)
        sandbox.copy_in(str(Path(operations.__file__).parent.parent), "/opt/bench")
        self._process = sandbox.spawn(["python3", "-c", DRIVER], stdin=True, name=AGENT)
        self._answers: Queue[str] = Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        begun = b""
        with contextlib.suppress(CrabError):
            for piece in self._process:
                *lines, begun = (begun + piece.data).split(b"\n")
                for line in lines:
                    self._answers.put(line.decode())

    def say(self, text: str) -> str:
        """`ok` or what went wrong."""
        self._process.write(f"{text}\n".encode())
        return self._answers.get(timeout=30)


def expected(one: Operation) -> tuple[str, ...]:
    """Kinds of decision that are right: what is captured besides a file's own half is told by the rules, not by the change."""
    if not one.changes:
        return ("none",)
    return ("files", "full") if one.kind == "files" else ("processes", "full")


def measure_sandbox(host: crab.Host, figures: dict[str, float], step: int) -> None:
    """`sandbox_*`: every `step`-th operation as a turn."""
    right = total = 0
    with host.create(image=IMAGE) as sandbox:
        driver = Driver(sandbox)
        for one in OPERATIONS[::step]:
            said = driver.say(f"prepare {one.name}")
            if said == "ok":
                sandbox.checkpoint(policy="always", durable=False)
                time.sleep(REST)
                said = driver.say("act")
            if said != "ok":  # denied there, or a file system of another kind
                driver.say("close")
                continue
            time.sleep(0.02)
            decision = sandbox.explain()
            driver.say("close")
            total += 1
            if decision.kind in expected(one):
                right += 1
            else:
                say(f"sandbox: {one.name} was decided {decision.kind}, not {expected(one)[0]}: {told(decision)}")
    figures["sandbox_right"], figures["sandbox_total"] = right, total


PARTS = {"none": set(), "files": {"files"}, "processes": {"processes"}, "full": {"files", "processes"}}


def measure_turns(
    host: crab.Host, figures: dict[str, float], scenarios: Sequence[Scenario], policy: PolicyName
) -> None:
    """`turns_*` with policy adaptive, `misses` and `false_alarms` with policy oracle."""
    correct = total = missed = alarms = 0
    for scenario in scenarios:
        with host.create(image=IMAGE) as sandbox:
            if any(sandbox.run(["sh", "-c", f"command -v {name}"]).exit_code for name in scenario.needs):
                continue
            sandbox.run(["bash", "-c", f"set -e\n{RESTS}\n{scenario.setup}"], check=True)
            shell = sandbox.shell("main", cwd="/work")
            if scenario.has_shell:
                shell.run(":")
            for _ in range(2):  # the first interruption of a call may lead another way than the ones that follow
                sandbox.checkpoint(policy="always", durable=False)
                time.sleep(REST)

            def run(command: str, sandbox: crab.Sandbox = sandbox) -> None:
                sandbox.run(["bash", "-c", command], cwd="/work")

            for turn in play(scenario, run, shell.run):
                decision = sandbox.checkpoint(policy=policy, durable=False).decision
                assert decision
                total += 1
                correct += decision.kind == turn.label
                missed += decision.judged == "miss"
                alarms += decision.judged == "false alarm"
                left_out = not PARTS[turn.label] <= PARTS[decision.kind]
                if decision.judged == "miss" or (left_out and not decision.judged):
                    say(
                        f"{scenario.name}: {turn.command!r} is {turn.label}, decided {decision.kind}: {told(decision)} {decision.truth}"
                    )
                time.sleep(REST)
    if policy == "oracle":
        figures["judged_total"], figures["misses"], figures["false_alarms"] = total, missed, alarms
    else:
        figures["turns_correct"], figures["turns_total"] = correct, total


def told(decision: Decision) -> str:
    return "; ".join((*decision.reasons, *decision.notes))


def measure_decisions(host: crab.Host, figures: dict[str, float], runs: int) -> None:
    """`decide_ms_*`, `us_per_dirty_file`."""
    with host.create(image=IMAGE) as sandbox:
        sandbox.run(
            "mkdir /root/few /root/many; cd /root/few; seq 50 | xargs touch; cd ../many; seq 4000 | xargs touch",
            check=True,
        )
        sandbox.run("setsid sleep 100000 >/dev/null 2>&1 </dev/null &", check=True)
        sandbox.checkpoint(policy="always", durable=False)
        time.sleep(REST)
        costs: list[float] = []
        for number in range(runs):
            content = "x" if number % 2 else ""
            sandbox.run(f"cd /root/few; for i in $(seq 50); do printf '{content}' >$i; done", check=True)
            costs += [sandbox.explain().cost_ms for _ in range(4)]
        figures["decide_ms_p50"], figures["decide_ms_p99"] = median(costs), quantile(costs, 0.99)
        sandbox.run("cd /root/few; for i in $(seq 50); do : >$i; done", check=True)
        few = statistics.median(sandbox.explain().cost_ms for _ in range(5))
        every: list[float] = []
        for _ in range(5):
            sandbox.run("cd /root/many; seq 4000 | xargs touch", check=True)  # so that each has to be compared again
            every.append(sandbox.explain().cost_ms)
        many = statistics.median(every)
        figures["us_per_dirty_file"] = round((many - few) * 1e3 / 4000, 1)


# ---------------------------------------------------------------- what it costs the work itself


def works(folder: Path, files: int) -> dict[str, Callable[[], list[str]]]:
    """Commands that do real work, each with fresh ground."""
    source = folder / "source"
    for number in range(files):
        path = source / f"{number % 100}" / f"{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"%d" % number * 300)
    subprocess.run(["tar", "-cf", folder / "all.tar", "-C", source, "."], check=True)
    git = ["git", "-C", source, "-c", "user.name=x", "-c", "user.email=x"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "x"], check=True)

    def fresh() -> Path:
        place = folder / "made"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        return place

    loop = "import os\nfor _ in range({}): os.waitpid(os.posix_spawn('/bin/true', ['true'], {{}}), 0)"
    write = "f = open({!r}, 'wb', buffering=0)\nfor _ in range({}): f.write(b'x' * 4096)"
    return {
        "tar": lambda: ["tar", "-xf", str(folder / "all.tar"), "-C", str(fresh())],
        "clone": lambda: ["git", "clone", "-q", "--no-hardlinks", str(source), str(fresh() / "clone")],
        "exec": lambda: ["python3", "-c", loop.format(files // 10)],
        "write": lambda: ["python3", "-c", write.format(str(fresh() / "file"), files * 2)],
    }


def cpu(words: list[str], group: Path | None) -> float:
    """Seconds of CPU time of a command and its children, in a cgroup."""

    def enter() -> None:
        if group:
            (group / "cgroup.procs").write_text("0")

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(words, check=True, preexec_fn=enter, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def measure_overhead(figures: dict[str, float], files: int, runs: int) -> None:
    """`overhead_*`: ratios of neighbouring runs."""
    ratios: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        for name, work in works(Path(folder), files).items():
            cpu(work(), None)
            found = ratios[name] = {"traced": [], "untraced": []}
            for _ in range(runs):
                plain = cpu(work(), None)
                with tracked() as (tracker, group, slot):
                    other = group.parent / "two"
                    other.mkdir(exist_ok=True)
                    found["untraced"].append(cpu(work(), other) / plain)
                    found["traced"].append(cpu(work(), group) / plain)
                    del tracker, slot
                    time.sleep(0.02)
                    other.rmdir()
    for kind in ("traced", "untraced"):
        for name, found in ratios.items():
            figures[f"overhead_{kind}_{name}"] = round(statistics.median(found[kind]), 3)
        figures[f"overhead_{kind}"] = max(figures[f"overhead_{kind}_{name}"] for name in ratios)


@click.command()
@click.option("--quick", is_flag=True, help="Fewer operations and runs: below 50 s once the image is there.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on the last line.")
@click.option(
    "--state", default=lambda: os.environ.get("CRAB_BENCH_STATE", "/var/lib/crab-bench"), help="State directory."
)
def main(quick: bool, as_json: bool, state: str) -> None:
    """Measure the inspector."""
    figures: dict[str, float] = {}
    say("operations on file systems")
    measure_operations(figures)
    say("a storm beside 63 others")
    measure_storm(figures, 1 if quick else 10)
    with crab.Host(state) as host:
        host.images.add(IMAGE, SOURCE, if_missing=True)
        say("operations as turns of a sandbox")
        measure_sandbox(host, figures, 12 if quick else 1)
        say("labelled turns")
        few = [
            one for one in SCENARIOS if one.name in ("testing", "sqlite", "a shell beside commands", "temporary files")
        ]
        measure_turns(host, figures, few if quick else SCENARIOS, "adaptive")
        say("turns judged by the oracle")
        calm = [one for one in SCENARIOS if not one.restless]
        measure_turns(host, figures, [one for one in calm if one.name == "an interpreter"] if quick else calm, "oracle")
        say("the cost of decisions")
        measure_decisions(host, figures, 5 if quick else 25)
    say("the cost to the work")
    measure_overhead(figures, 1500 if quick else 20000, 5 if quick else 9)
    report("inspector", {"inspector": figures}, as_json)


if __name__ == "__main__":
    main()
