"""SIGKILL at random instants of put, index, record and collection, two writers at a time: what was called durable is there."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

from unit.store.killed import contents
from unit.store.stores import read

from crab.store.check import check
from crab.store.folder import FolderObjects
from crab.store.repository import Repository

ROUNDS = int(os.environ.get("CRAB_TEST_KILLS", "8"))
TESTS = Path(__file__).parents[2]


def test_nothing_that_was_called_durable_is_lost(tmp_path: Path, figures) -> None:
    folder = tmp_path / "s"
    folder.mkdir()
    Repository.create(FolderObjects(folder), grace=1.0)
    rng = random.Random()
    durable: dict[str, list[int]] = {}
    puts = removed = 0
    for number in range(ROUNDS):
        children = [
            subprocess.Popen(
                [sys.executable, "-m", "unit.store.killed", str(folder), str(2 * number + side)],
                stdout=subprocess.PIPE,
                text=True,
                cwd=TESTS,
            )
            for side in range(2)
        ]
        begun = [child.stdout.readline() if child.stdout else "" for child in children]  # it takes a while to start
        time.sleep(rng.random())
        for child in children:
            child.kill()
            time.sleep(rng.random() * 0.05)
        for child, first in zip(children, begun, strict=True):
            text, _ = child.communicate()
            for line in (first + text).splitlines():
                what, *words = line.split()
                if what == "put":
                    durable[words[0]] = [int(word) for word in words[1:]]
                    puts += 1
                elif what == "removing":
                    durable.pop(words[0])
                else:
                    removed += int(words[0])
        repository = Repository.open(FolderObjects(folder))
        repository.refresh()
        there = set(repository.names())
        assert durable.keys() <= there
        for identity in rng.sample(sorted(durable), min(6, len(durable))):
            assert read(repository, identity) == contents(durable[identity])
    found = check(Repository.open(FolderObjects(folder)), data=True)
    assert not found.problems, found
    repository = Repository.open(FolderObjects(folder))
    repository.refresh()
    for identity, seeds in durable.items():
        assert read(repository, identity) == contents(seeds)
    assert puts
    figures(f"store: {puts} checkpoints durable, {removed} packs collected, {2 * ROUNDS} writers killed, none lost")
