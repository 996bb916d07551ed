"""Many sandboxes on one host, whose agents think like recorded ones: `python -m bench.density [--quick] [--json]`.

Each agent asks its model, waits as long as recorded agents waited, and runs a command in its sandbox. The same agents with the
same waits and commands go through all ways, one after the other, in the same sandboxes:
  direct   the agent asks the model itself, nothing is captured: what the others are compared with
  crab     through Crab: what a turn changed is captured while the model thinks, scheduled by the engine
  unordered   the same with as many captures at once as want to: no engine
  full     every turn is captured whole, as without an inspector
Of every way and number of sandboxes, in milliseconds where it says so:
  slowdown              median over the agents of their time, to their time with `direct`
  exposed_wait_ms_p50, _p99   how long a whole answer was kept back
  frozen_ms_p50, _p99   how long nothing ran in a sandbox, of the turns that were captured whole
  queued_ms_p99         how long a capture waited for its turn
  captured              turns of which something was captured, of all
  unprotected           turns that were not safe when the agent acted
  daemon_cpu_ms         processor time of the daemon itself for each turn (not of CRIU), as bench.simulation needs it
The mix is that of recorded work: 62 of 100 turns change nothing, 8 start a process that stays, 2 in 5 sandboxes have a program
with 30 MB of memory running, a changing turn writes 5 kB, one in twenty of them 4 MB.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shlex
import statistics
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click

import crab
from bench.asking import cpu_seconds, daemon, process
from bench.figures import quantile, report, say
from bench.latency import IMAGE, SOURCE
from bench.waiting import waits
from crab.model import ModelAccess

WAYS: dict[str, dict[str, str]] = {
    "direct": {},
    "crab": {},
    "unordered": {"CRAB_SLOTS": "100000"},
    "full": {"CRAB_INSPECTOR": "none"},
}
"""What the daemon's environment is for each."""
HEAP = "import os, time; heap = os.urandom(30 << 20); open('/tmp/up', 'w').close(); time.sleep(100000)"
TOOL = {
    "name": "bash",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}


def script(number: int, turns: int, lowest: float, highest: float) -> str:
    """What the model of an agent says: a command after each wait."""
    draw = random.Random(number)
    lines: list[str] = []
    last, *seconds = waits(turns + 1, lowest, highest, number)
    for turn, wait in enumerate(seconds):
        kind = draw.choices(("look", "write", "start"), (62, 30, 8))[0]
        size = 4 << 20 if draw.random() < 0.05 else 5000
        command = {
            "look": "ls -R /etc >/dev/null; cat /root/log 2>/dev/null",
            "write": f"head -c {size} /dev/urandom >/root/work{turn}; echo turn {turn} >>/root/log",
            "start": f"sleep {100_000 + turn} >/dev/null 2>&1 & echo turn {turn} >>/root/log",
        }[kind]
        lines += [f"~ {wait:.3f}", f"$ {command}"]
    return "\n".join([*lines, f"~ {last:.3f}", "> done"])


def agent(url: str, sandbox: crab.Sandbox, prompt: str) -> float:
    """Run an agent to its end; its seconds."""
    begun = time.perf_counter()
    messages: list[dict[str, object]] = [{"role": "user", "content": prompt}]
    while True:
        body = {"model": "m", "messages": messages, "tools": [{"type": "function", "function": TOOL}], "stream": False}
        asked = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=120) as answer:
            message = json.load(answer)["choices"][0]["message"]
        messages.append(message)
        if not message.get("tool_calls"):
            return time.perf_counter() - begun
        for call in message["tool_calls"]:
            done = sandbox.run(["sh", "-c", json.loads(call["function"]["arguments"])["command"]])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": f"status {done.exit_code}"})


def run(
    host: crab.Host, names: Sequence[str], prompts: Sequence[str], direct: str | None
) -> tuple[list[float], dict[str, float]]:
    """All agents at once; seconds of each, and the figures of what Crab did. `direct`: the model that they ask themselves."""
    boxes = [host.sandbox(name) for name in names]
    before = {box.id: max((one.number for one in box.exchanges()), default=0) for box in boxes}
    turns = {box.id: box.info().turn for box in boxes}
    urls = [direct or box.model_address().url for box in boxes]
    with ThreadPoolExecutor(len(boxes)) as pool:
        seconds = list(pool.map(agent, urls, boxes, prompts))
    if direct:
        return seconds, {}
    exchanges = [one for box in boxes for one in box.exchanges() if one.kind == "main" and one.number > before[box.id]]
    taken = [one for box in boxes for one in box.turns() if one.turn > turns[box.id]]
    held = [one.held_ms for one in exchanges]
    frozen = [one.timings.frozen_ms for one in taken if one.kind in ("full", "processes")] or [0.0]
    return seconds, {
        "exposed_wait_ms_p50": quantile(held, 0.5),
        "exposed_wait_ms_p99": quantile(held, 0.99),
        "frozen_ms_p50": quantile(frozen, 0.5),
        "frozen_ms_p99": quantile(frozen, 0.99),
        "queued_ms_p99": quantile([one.timings.queued_ms for one in taken], 0.99),
        "captured": round(sum(one.kind != "none" for one in taken) / len(taken), 3),
        "unprotected": sum(one.protection == "unprotected" for one in exchanges),
    }


@contextlib.contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """For the length of the block these are set; a daemon that begins in it has them."""
    before = {name: os.environ.pop(name, None) for name in ("CRAB_SLOTS", "CRAB_INSPECTOR")}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def measure(
    state: Path, ways: Sequence[str], counts: Sequence[int], turns: int, rounds: int, shares: tuple[float, float]
) -> dict[str, dict[str, float]]:
    """Figures by way and number of sandboxes."""
    figures: dict[str, dict[str, list[float]]] = {}
    with process("-m", "crab.turns.mock", "0") as (_, model):
        names = [f"density-{number}" for number in range(max(counts))]
        base: dict[tuple[int, int], list[float]] = {}
        try:
            with daemon(state) as (_, host), ThreadPoolExecutor(8) as pool:
                list(pool.map(lambda item: make(host, model, *item), enumerate(names)))
            for number in range(rounds):
                for way in ways if number % 2 == 0 else [ways[0], *reversed(ways[1:])]:
                    with environment(WAYS[way]), daemon(state, keep=True) as (pid, host):
                        for name in names:  # where the inspector of this daemon begins
                            host.sandbox(name).checkpoint(durable=False)
                        for count in counts:
                            say(f"round {number + 1}: {way}, {count} sandboxes")
                            prompts = [
                                f"{script(one * 100 + number, turns, *shares)}\n({way} {number} {count} {one})"
                                for one in range(count)
                            ]
                            spent = cpu_seconds(pid)
                            seconds, found = run(host, names[:count], prompts, model if way == "direct" else None)
                            spent = cpu_seconds(pid) - spent
                            if way == "direct":
                                base[number, count] = seconds
                                continue
                            ratios = [mine / plain for mine, plain in zip(seconds, base[number, count], strict=True)]
                            found["daemon_cpu_ms"] = spent * 1e3 / count / (turns + 1)
                            found["slowdown"] = statistics.median(ratios)
                            for name, value in found.items():
                                figures.setdefault(f"{way}_{count}", {}).setdefault(name, []).append(value)
        finally:
            with daemon(state):
                pass  # it removes what is left
    return {
        column: {name: round(statistics.median(values), 3) for name, values in found.items()}
        for column, found in figures.items()
    }


def make(host: crab.Host, model: str, number: int, name: str) -> None:
    """A sandbox; two in five have a program that holds memory."""
    box = host.create(name, IMAGE, model_access=ModelAccess(upstream=model))
    if number % 5 in (1, 3):
        box.run(
            f"python3 -c {shlex.quote(HEAP)} >/dev/null 2>&1 & until [ -e /tmp/up ]; do sleep 0.05; done", check=True
        )


@click.command(help=__doc__.splitlines()[0] if __doc__ else "")
@click.option("--quick", is_flag=True, help="1, 8 and 32 sandboxes, one round of few turns.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on the last line.")
@click.option("--counts", default="", help="Numbers of sandboxes, with commas.")
@click.option("--turns", type=int, default=0, help="Turns of each agent.")
@click.option("--rounds", type=int, default=0, help="Medians are over so many.")
def main(quick: bool, as_json: bool, counts: str, turns: int, rounds: int) -> None:
    state = Path(os.environ.get("CRAB_BENCH_STATE", "/var/lib/crab-bench"))
    with crab.Host(state) as host:
        host.images.add(IMAGE, SOURCE, if_missing=True)
    sizes = [int(word) for word in counts.split(",")] if counts else [1, 8, 32] if quick else [1, 8, 32, 96]
    ways = ["direct", "crab", "full"] if quick else list(WAYS)
    shares = (0.05, 0.25) if quick else (0.05, 0.95)
    found = measure(state, ways, sizes, turns or (2 if quick else 8), rounds or (1 if quick else 5), shares)
    report("density", found, as_json)


if __name__ == "__main__":
    main()
