"""What it costs to send checkpoints to a store in a folder: `python -m bench.store [--quick] [--json]`.

For three workloads (python with 60 MB of objects of which some change all the time, redis, a heap of 100 MB that nothing reads):
  mib                   process images of one checkpoint
  first_mb_s            sending it when the store knows the image, but no checkpoint of the sandbox: MB of process images a second
  next_mb_s             the same for later checkpoints of the same sandbox
  copy_mb_s             a plain copy of the same files to the same file system, flushed, interleaved with the others
  first_over_copy       median of the ratios of neighbours: time to send the first to that of the copy
  next_over_copy        the same for later ones
  compression           bytes of process images for each that the first took in the store
  next_ratio            the same for later ones: deduplication and compression
  dedupe_ratio          bytes of all checkpoints of the run (images and files included) for each in the store
  get_ms                making a sandbox of a stored checkpoint, the image being there
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import click

import crab
from bench.figures import median, report, say, timed
from bench.latency import IMAGE, SOURCE, WORKLOADS, bench_host

BUSY = """
import os, random, time
r = random.Random(1)
words = ("alpha", "beta", "gamma", "delta", "epsilon")
things = [{"text": " ".join(r.choice(words) for _ in range(12)), "v": [r.random() for _ in range(6)]} for _ in range(60000)]
noise = os.urandom(20 << 20)
open("/tmp/up", "w").close()
while True:
    for _ in range(200):
        r.choice(things)["v"][r.randrange(6)] = r.random()
    time.sleep(0.05)
"""
WORK = {
    "busy": f"cat >/tmp/busy.py <<'END'\n{BUSY}\nEND\npython3 /tmp/busy.py & until [ -e /tmp/up ]; do sleep 0.05; done",
    "redis": WORKLOADS["redis"][0],
    "heap100": WORKLOADS["heap100"][0],
}


def copied(source: Path, target: Path) -> float:
    """Seconds that a plain copy of a folder takes, flushed."""
    begin = time.perf_counter()
    target.mkdir()
    for name in os.listdir(source):
        shutil.copyfile(source / name, target / name)
        with open(target / name, "rb") as file:
            os.fsync(file.fileno())
    spent = time.perf_counter() - begin
    shutil.rmtree(target)
    return spent


def measure(host: crab.Host, state: Path, folder: Path, work: str, runs: int) -> dict[str, float]:
    """All figures of one workload."""
    first, later, copies, first_ratio, next_ratio, packed, next_packed = [], [], [], [], [], [], []
    with host.create(image=IMAGE) as plain, host.create(image=IMAGE) as sandbox:
        plain.checkpoint(policy="files")
        sandbox.run(WORK[work], check=True)
        time.sleep(1)
        for run in range(runs):
            store = host.store(str(folder / f"{work}-{run}"))
            store.init()
            store.put(plain.name)  # the image
            taken = sandbox.checkpoint(policy="always")
            size = taken.process_bytes
            images = state / "process" / taken.id
            copy = copied(images, folder / "copy")
            spent = timed(lambda store=store: packed.append(store.put(sandbox.name).added)) / 1e3
            copies.append(size / copy / 1e6)
            first.append(size / spent / 1e6)
            first_ratio.append(spent / copy)
            if run < runs - 1:
                shutil.rmtree(folder / f"{work}-{run}")
        compression = statistics.median(size / added for added in packed)
        for _ in range(runs):
            time.sleep(1)
            taken = sandbox.checkpoint(policy="always")
            size = taken.process_bytes
            copy = copied(state / "process" / taken.id, folder / "copy")
            spent = timed(lambda: next_packed.append(store.put(sandbox.name).added)) / 1e3
            later.append(size / spent / 1e6)
            next_ratio.append(spent / copy)
        gets = []
        for _ in range(3):
            made: list[crab.Sandbox] = []
            gets.append(timed(lambda made=made: made.append(store.get(taken.id, "bench-got"))))
            made[0].remove()
        ratio = store.stats().ratio
    return {
        "mib": round(size / (1 << 20), 1),
        "first_mb_s": median(first),
        "next_mb_s": median(later),
        "copy_mb_s": median(copies),
        "first_over_copy": round(statistics.median(first_ratio), 2),
        "next_over_copy": round(statistics.median(next_ratio), 2),
        "compression": round(compression, 2),
        "next_ratio": round(statistics.median(size / added for added in next_packed), 1),
        "dedupe_ratio": round(ratio, 1),
        "get_ms": median(gets),
    }


@click.command(help=__doc__.splitlines()[0] if __doc__ else "")
@click.option("--quick", is_flag=True, help="Five runs instead of nine.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on the last line.")
def main(quick: bool, as_json: bool) -> None:
    with bench_host() as host:
        say(f"image {IMAGE} ({SOURCE}); made once")
        host.images.add(IMAGE, SOURCE, if_missing=True)
        state = Path(host.about().state_dir)
        figures = {}
        for work in WORK:
            say(f"measuring {work}")
            with tempfile.TemporaryDirectory(dir=state.parent, prefix="crab-bench-store-") as folder:
                figures[work] = measure(host, state, Path(folder), work, 5 if quick else 9)
    report("medians", figures, as_json)


if __name__ == "__main__":
    main()
