"""What agents of `bench.proxy` wait for: sandboxes at work, whose model takes as long as recorded models took.

The agent is the smallest there is (`examples/agents/loop.py`), inside its sandbox; the model is scripted, a process of its own.
Each turn changes something: most write files, every fourth also starts a process that stays.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import crab
from bench.figures import quantile
from crab.model import ModelAccess

AGENT = Path(__file__).parents[1] / "examples" / "agents" / "loop.py"
RECORDED = {0.05: 1.9, 0.25: 2.5, 0.5: 3.3, 0.75: 5.4, 0.9: 11.7, 0.95: 20.2, 0.99: 30.5}
"""Seconds that 3484 questions of mini-swe-agent to Claude Sonnet 4 waited for an answer: quantiles."""
FILES = "head -c {size} /dev/urandom >/root/work{turn}; echo turn {turn} >>/root/log"
PROCESS = "sleep {number} >/dev/null 2>&1 & "


def drawn(quantiles: dict[float, float], share: float) -> float:
    """The value at a share of a distribution that is known by some quantiles; between them it is interpolated."""
    shares = list(quantiles)
    after = next((n for n, known in enumerate(shares) if known >= share), len(shares) - 1)
    if after == 0:
        return quantiles[shares[0]] * (share / shares[0]) ** 0.5
    low, high = shares[after - 1], shares[after]
    portion = min((share - low) / (high - low), 1.0)
    return quantiles[low] + (quantiles[high] - quantiles[low]) * portion


def waits(count: int, lowest: float, highest: float, seed: int) -> list[float]:
    """Draws from the recorded quantiles, those between two shares only."""
    draw = random.Random(seed)
    return [drawn(RECORDED, draw.uniform(lowest, highest)) for _ in range(count)]


def script(seconds: Sequence[float], seed: int) -> str:
    """What the model says: a command after each wait. 5 kB is the median of what a turn changes, some change megabytes."""
    lines: list[str] = []
    for turn, wait in enumerate(seconds):
        size = 4 << 20 if turn % 6 == 5 else 5000
        started = PROCESS.format(number=100_000 + seed * 1000 + turn) if turn % 4 == 3 else ""
        lines += [f"~ {wait:.3f}", "$ " + started + FILES.format(size=size, turn=turn)]
    return "\n".join([*lines, f"~ {seconds[-1]:.3f}", "> done"])


def held(host: crab.Host, image: str, model: str, count: int, turns: int, lowest: float, highest: float) -> list[float]:
    """Milliseconds for which answers were kept back from `count` agents at once. With `highest` 0 the model does not think."""

    def one(number: int) -> list[float]:
        seconds = waits(turns, lowest, highest, number) if highest else [0.0] * turns
        with host.create(image=image, model_access=ModelAccess(upstream=model)) as sandbox:
            sandbox.copy_in(str(AGENT), "/root/agent.py")
            sandbox.checkpoint(policy="always")
            address = sandbox.model_address(inside=True)
            words = ["python3", "/root/agent.py", address.url, script(seconds, number)]
            done = sandbox.run(words, env=address.env)
            found = [exchange for exchange in sandbox.exchanges() if exchange.kind == "main"]
            if done.exit_code or len(found) != turns + 1 or any(one.protection != "durable" for one in found):
                raise SystemExit(f"an agent failed: {done.stdout!r} {found}")
            return [exchange.held_ms for exchange in found]

    with ThreadPoolExecutor(count) as pool:
        return [ms for answers in pool.map(one, range(count)) for ms in answers]


def exposed(name: str, figures: dict[str, float], milliseconds: Sequence[float]) -> None:
    """`exposed_wait_ms_*`, with a name behind it."""
    figures[f"exposed_wait_ms_p50{name}"] = quantile(milliseconds, 0.5)
    figures[f"exposed_wait_ms_p99{name}"] = quantile(milliseconds, 0.99)
