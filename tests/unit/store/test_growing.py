"""Digests of files that are being written are those of the whole files, however they grew."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from crab.host.fingerprint import file_digest
from crab.store.growing import Growing
from crab.store.local import Staging


@pytest.mark.parametrize("pieces", [[1 << 20], [3, 1 << 20, 5], [5 << 20, 7], [(1 << 20) - 1, 1, 1 << 20]])
def test_the_digest_is_that_of_the_whole_file(tmp_path: Path, pieces: list[int]) -> None:
    path = tmp_path / "pages-1.img"
    with Growing(tmp_path, "pages-") as growing, open(path, "ab", buffering=0) as file:
        for size in pieces:
            file.write(os.urandom(size))
            time.sleep(0.01)
    assert growing.digests == {path.name: (sum(pieces), file_digest(path))}


def test_what_is_small_or_has_another_name_is_left_to_others(tmp_path: Path) -> None:
    with Growing(tmp_path, "pages-") as growing:
        (tmp_path / "pages-1.img").write_bytes(b"small")
        (tmp_path / "core-1.img").write_bytes(bytes(2 << 20))
        time.sleep(0.02)
    assert growing.digests == {}


def test_a_folder_that_goes_away_is_no_error_here(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    with Growing(folder, "pages-") as growing:
        shutil.rmtree(folder)
        time.sleep(0.01)
    assert growing.digests == {}


def test_a_file_that_grew_after_the_dump_is_read_again(tmp_path: Path) -> None:
    staging = Staging(tmp_path / "files", tmp_path)
    path = tmp_path / "pages-1.img"
    with staging.hashing():
        path.write_bytes(os.urandom(2 << 20))
        time.sleep(0.02)
    with open(path, "ab") as file:
        file.write(b"more")
    assert [(one.name, one.size, one.digest) for one in staging.artefacts()] == [
        (path.name, (2 << 20) + 4, file_digest(path))
    ]
