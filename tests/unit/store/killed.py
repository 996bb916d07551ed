"""Stores, removes and collects until it is killed: `python -m unit.store.killed FOLDER NUMBER`. Says what is durable."""

from __future__ import annotations

import contextlib
import random
import sys
from pathlib import Path

from unit.store.stores import put

from crab.errors import Busy
from crab.store import gc
from crab.store.folder import FolderObjects
from crab.store.repository import Repository


def main(folder: Path, number: int) -> None:
    repository = Repository.open(FolderObjects(folder))
    rng, mine = random.Random(number), list[str]()
    for turn in range(10_000):
        seeds = [rng.randrange(12) for _ in range(3)] + [number * 10_000 + turn]
        identity = f"c{number}x{turn}"
        with contextlib.suppress(Busy):  # the machine was too slow for so short a grace period
            put(repository, identity, *contents(seeds))
            print("put", identity, *seeds, flush=True)
            mine.append(identity)
        if len(mine) > 2:
            leaving = mine.pop(rng.randrange(len(mine)))
            print("removing", leaving, flush=True)
            repository.remove(leaving)
        if turn % 4 == 3:
            print("collecting", gc.collect(repository).removed, flush=True)


def contents(seeds: list[int]) -> list[bytes]:
    return [random.Random(seed).randbytes(3000 + 1000 * (seed % 9)) for seed in seeds]


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
