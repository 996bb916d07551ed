"""What single operations cost: `python -m bench.latency [--quick] [--json]`.

For three workloads (a shell with a sleeping child, redis, a 100 MB heap) in milliseconds:
  start_ms_p50          create a sandbox from a ready image, until it takes commands
  exec_ms_p50           `true`, from the call to the exit status
  files_frozen_ms_p50   no process ran for this long, snapshot of the files alone
  full_frozen_ms_p50    the same for files and processes
  full_total_ms_p50     the whole checkpoint, digests and publishing included
  full_durable_ms_p50   … until it would survive a crash of the host
  criu_total_ms_p50     plain `criu dump` of the same processes, interleaved with ours (see baseline.py)
  total_over_criu       median of the ratios of neighbours: ours (files and processes) to plain CRIU (processes)
  frozen_over_criu      the same for how long nothing ran, to plain CRIU and the snapshot of the files alone
  restore_ms_p50        recover after SIGKILL
  rewind_ms_p50         back to a checkpoint while it runs
  compact_rewind_ms_p50 the same after `crab compact`, which put it together of parts of the one before
  compact_over_rewind   ratio of the two
  fork8_ms              eight new sandboxes from one checkpoint, until all run
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click

import crab
from bench.baseline import BareCriu
from bench.figures import median, report, say, timed
from crab.store.retention import Policy

IMAGE = "bench-latency"
SOURCE = "debian:bookworm+redis-server"
WORKLOADS = {
    "small": ("sleep 100000 & echo ready", "true"),
    "redis": ("redis-server --save '' --daemonize yes >/dev/null; until redis-cli ping; do sleep 0.05; done; "
              "redis-cli debug populate 20000 >/dev/null", "redis-cli ping"),
    "heap100": ("python3 -c 'import os, time; heap = os.urandom(100 << 20); open(\"/tmp/up\", \"w\").close(); time.sleep(100000)' & "
                "until [ -e /tmp/up ]; do sleep 0.05; done", "true"),
}  # fmt: skip


def measure(host: crab.Host, work: str, runs: int, criu: BareCriu) -> dict[str, float]:
    """All figures of one workload; every operation `runs` times (forks a third of that, at least three times)."""
    prepare, check = WORKLOADS[work]
    starts: list[float] = []
    for _ in range(runs):
        with contextlib.ExitStack() as stack:
            starts.append(timed(lambda stack=stack: stack.enter_context(host.create(image=IMAGE))))
    with host.create(image=IMAGE) as sandbox:
        sandbox.run(prepare, check=True)
        execs = [timed(lambda: sandbox.run(["true"], check=True)) for _ in range(runs * 4)]
        sandbox.checkpoint(policy="always", durable=False)  # cold files
        criu.dump(sandbox.info().pid or 0)
        ours, bare, frozen, durable, files = [], [], [], [], []
        for _ in range(runs):
            taken = sandbox.checkpoint(policy="always", durable=False)
            ours.append(taken.timings.total_ms)
            frozen.append(taken.timings.frozen_ms)
            bare.append(criu.dump(sandbox.info().pid or 0))
            durable.append(timed(sandbox.checkpoint))
            files.append(sandbox.checkpoint(policy="files", durable=False).timings.frozen_ms)
        taken = sandbox.checkpoint()
        rewinds = [timed(lambda: sandbox.rewind(taken.turn)) for _ in range(runs)]
        host.prune(Policy(last=2), sandbox.name)
        host.compact()
        compact = [timed(lambda: sandbox.rewind(taken.turn)) for _ in range(runs)]
        restores = []
        for _ in range(runs):
            sandbox.kill()
            restores.append(timed(sandbox.recover))
        sandbox.run(check, check=True)
        forks = []
        for _ in range(max(3, runs // 3)):
            made: list[crab.Sandbox] = []
            forks.append(timed(lambda made=made: made.extend(sandbox.fork(taken.turn, count=8))))
            for fork in made:
                fork.run(check, check=True)
                fork.remove(force=True)
    return {
        "start_ms_p50": median(starts),
        "exec_ms_p50": median(execs),
        "files_frozen_ms_p50": median(files),
        "full_frozen_ms_p50": median(frozen),
        "full_total_ms_p50": median(ours),
        "full_durable_ms_p50": median(durable),
        "criu_total_ms_p50": median(bare),
        "total_over_criu": round(statistics.median(a / b for a, b in zip(ours, bare, strict=True)), 3),
        "frozen_over_criu": round(
            statistics.median(a / (b + c) for a, b, c in zip(frozen, bare, files, strict=True)), 3
        ),
        "restore_ms_p50": median(restores),
        "rewind_ms_p50": median(rewinds),
        "compact_rewind_ms_p50": median(compact),
        "compact_over_rewind": round(statistics.median(compact) / statistics.median(rewinds), 3),
        "fork8_ms": median(forks),
    }


@contextlib.contextmanager
def bench_host() -> Iterator[crab.Host]:
    """A host of our own: `$CRAB_BENCH_STATE`, or a folder beside the others that is kept for the next run."""
    with crab.Host(Path(os.environ.get("CRAB_BENCH_STATE", "/var/lib/crab-bench"))) as host:
        for left in host.sandboxes():  # of a run that was killed
            left.remove(force=True)
        yield host


@click.command(help=__doc__.splitlines()[0] if __doc__ else "")
@click.option("--quick", is_flag=True, help="Fewer runs: below 50 seconds once the image is there.")
@click.option("--runs", type=int, default=None, help="Runs of each operation (15; 7 with --quick).")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on the last line.")
def main(quick: bool, runs: int | None, as_json: bool) -> None:
    with bench_host() as host, tempfile.TemporaryDirectory() as folder:
        say(f"image {IMAGE} ({SOURCE}); made once")
        host.images.add(IMAGE, SOURCE, if_missing=True)
        with BareCriu(Path(folder) / "dump") as criu:
            figures = {}
            for work in WORKLOADS:
                say(f"measuring {work}")
                figures[work] = measure(host, work, runs or (7 if quick else 15), criu)
    report("milliseconds, medians", figures, as_json)


if __name__ == "__main__":
    main()
