"""What Crab costs between an agent and its model: `python -m bench.proxy [--quick] [--json]`.

first_byte_added_ms_p50, _p99   text: from where the upstream wrote a delta to its first byte at the client, through Crab, less
                                the same directly. Client, Crab and upstream are processes of this machine; what is compared
                                alternates; medians of at least five rounds
answer_begun_added_ms_…         the same from the question (30 kB) to the first byte of the answer
bytes_identical                 recorded answers of every API, as streams and whole, came as they were sent (cut ones: a
                                beginning of them, without an end); identical_total of them
exposed_wait_ms_p50, _p99       how long a whole answer was kept back: one sandbox, whose turns change files and processes, a
                                model that waits like recorded ones (wait_shares: which of their quantiles)
exposed_wait_ms_…_crowd         the same with crowd_sandboxes at once
exposed_wait_ms_…_at_once       one sandbox, a model that answers at once: the whole capture is waited for
streams_…                       64 streams at once: requests and MB a second, with many events each and with few; CPU seconds
                                of 1000 events (the daemon alone, and all processes: with Crab and directly)
memory_added_mb, _kept_mb       growth of the daemon's memory while 64 long streams run, and a second after them
client_matrix                   real clients in the image `agents`: ran, not installed, or why not
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path

import click

import crab
from bench import clients, waiting
from bench.asking import (
    PATHS,
    STREAMS,
    Line,
    body,
    cpu_seconds,
    crowd,
    daemon,
    fetched,
    memory_mb,
    process,
    watch_memory,
)
from bench.figures import median, quantile, report, say
from bench.latency import IMAGE, SOURCE
from crab.model import ModelAccess

BROKEN = ("-cut", "-error", "-overloaded", "-failed")
"""In the names of recorded answers that are not whole: what was held of them is never given out."""
CROWD = 64


def measure_delays(figures: dict[str, float], direct: str, via: str, rounds: int, pairs: int) -> None:
    """`first_byte_added_*`, `answer_begun_added_*`."""
    target = "/v1/messages?count=6&gap=0.003&first=0.02"
    added: dict[str, list[float]] = {}
    with Line(direct) as straight, Line(via) as through:
        for line in (straight, through):
            line.deltas(target)
        for _ in range(rounds):
            found = {line: ([], []) for line in (straight, through)}
            for _ in range(pairs):
                for line, (begun, deltas) in found.items():
                    first, delays = line.deltas(target)
                    begun.append(first)
                    deltas += delays
            for name, which in (("answer_begun", 0), ("first_byte", 1)):
                for share in (0.5, 0.99):
                    difference = quantile(found[through][which], share) - quantile(found[straight][which], share)
                    added.setdefault(f"{name}_added_ms_p{share * 100:.0f}", []).append(difference)
    figures.update({name: median(values) for name, values in added.items()})


def measure_bytes(figures: dict[str, float], via: str, sizes: Iterable[int]) -> None:
    """`bytes_identical`."""
    right = total = 0
    for path in sorted(STREAMS.iterdir()):
        sent = path.read_bytes()
        wire, streamed = path.name.partition("-")[0], path.suffix == ".sse"
        for size in sizes:
            target = f"{PATHS[wire]}?play={path.name}&size={size}"
            status, kind, got, ended = fetched(via, target, body(wire, streamed))
            if any(word in path.name for word in BROKEN):
                same = sent.startswith(got) and (got == sent or not ended)
            else:
                same = status == 200 and got == sent and ended and kind.startswith("text/event-stream") == streamed
            total += 1
            right += same
            if not same:
                say(
                    f"{path.name} in pieces of {size}: {status} {kind}, {len(got)} of {len(sent)} bytes, ended: {ended}"
                )
    figures["bytes_identical"], figures["identical_total"] = right == total, total


def measure_streams(
    figures: dict[str, float], ways: dict[str, str], daemon_pid: int, upstream: int, quick: bool
) -> None:
    """`streams_*`, `memory_*`."""
    before = memory_mb(daemon_pid)
    watch_memory(daemon_pid)
    for shape, events, each in (("long", 150 if quick else 300, 1), ("short", 3, 2 if quick else 4)):
        found: dict[str, list[tuple[float, float, float, float]]] = {way: [] for way in ways}
        for _ in range(3 if quick else 7):
            for way, base in ways.items():
                told = cpu_seconds(daemon_pid), cpu_seconds(upstream), time.process_time(), time.perf_counter()
                size = asyncio.run(crowd(base, f"/v1/messages?count={events}&gap=0", CROWD, each))
                seconds = time.perf_counter() - told[3]
                ours = cpu_seconds(daemon_pid) - told[0]
                all_of_them = ours + cpu_seconds(upstream) - told[1] + time.process_time() - told[2]
                thousands = CROWD * each * events / 1e3
                found[way].append(
                    (CROWD * each / seconds, size / seconds / 1e6, ours / thousands, all_of_them / thousands)
                )
        for way, rows in found.items():
            requests, megabytes, ours, everything = (
                sorted(values)[len(rows) // 2] for values in zip(*rows, strict=True)
            )
            figures[f"streams_{shape}_requests_per_s_{way}"] = round(requests, 1)
            figures[f"streams_{shape}_mb_per_s_{way}"] = round(megabytes, 2)
            if shape == "long":
                figures[f"streams_cpu_s_per_1000_events_{way}"] = round(everything, 4)
                if way == "crab":
                    figures["streams_cpu_s_per_1000_events_daemon"] = round(ours, 4)
        if shape == "long":
            figures["memory_added_mb"] = round(memory_mb(daemon_pid, "VmHWM") - before, 1)
    time.sleep(1)
    figures["memory_kept_mb"] = round(memory_mb(daemon_pid) - before, 1)


def measure(host: crab.Host, daemon_pid: int, quick: bool) -> dict[str, float]:
    figures: dict[str, float] = {}
    with process("-m", "bench.answering", str(STREAMS)) as (upstream, port):
        direct = f"http://127.0.0.1:{port}"
        with host.create(image=IMAGE, model_access=ModelAccess(upstream=direct)) as sandbox:
            via = sandbox.model_address().url
            say("delays")
            measure_delays(figures, direct, via, *((5, 12) if quick else (9, 60)))
            say("bytes")
            measure_bytes(figures, via, (7, 1 << 16) if quick else (1, 7, 100, 1 << 16))
            say(f"{CROWD} streams")
            measure_streams(figures, {"direct": direct, "crab": via}, daemon_pid, upstream, quick)
    shares, turns, count = ((0.05, 0.25), 3, 4) if quick else ((0.05, 0.99), 40, 8)
    with process("-m", "crab.turns.mock", "0") as (_, model):
        say("waits, one sandbox")
        waiting.exposed("", figures, waiting.held(host, IMAGE, model, 1, turns, *shares))
        say(f"waits, {count} sandboxes")
        waiting.exposed("_crowd", figures, waiting.held(host, IMAGE, model, count, 1 if quick else turns, *shares))
        say("waits for a model that answers at once")
        waiting.exposed("_at_once", figures, waiting.held(host, IMAGE, model, 1, 12, 0, 0))
    return figures | {"crowd_sandboxes": count, "wait_shares_from": shares[0], "wait_shares_to": shares[1]}


@click.command(help=__doc__.splitlines()[0] if __doc__ else "")
@click.option("--quick", is_flag=True, help="Fewer runs, waits from the low end: below 50 s once the image is there.")
@click.option("--clients", "only", default="", help="Names of the real clients to run, with commas (all).")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on the last line.")
def main(quick: bool, only: str, as_json: bool) -> None:
    state = Path(os.environ.get("CRAB_BENCH_STATE", "/var/lib/crab-bench"))
    with crab.Host(state) as host:
        host.images.add(IMAGE, SOURCE, if_missing=True)
    with daemon(state) as (pid, host):
        figures = measure(host, pid, quick)
        found = clients.matrix(
            host,
            state / "bench.sock",
            only.split(",") if only else [name for name in clients.CLIENTS if not quick or name not in clients.SLOW],
        )
    if as_json:
        print(json.dumps(figures | {"client_matrix": found}))
    else:
        report("proxy", {"proxy": figures}, as_json=False)
        print(f"client_matrix {found}")


if __name__ == "__main__":
    main()
