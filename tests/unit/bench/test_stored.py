from __future__ import annotations

from pathlib import Path

from bench.stored import Stored, stored, united


def test_what_is_shared_counts_once() -> None:
    assert united([]) == 0
    assert united([(100, 10), (100, 10)]) == 10
    assert united([(100, 10), (105, 10), (200, 1)]) == 16
    assert united([(0, 100), (10, 20)]) == 100


def test_process_images_count_by_their_blocks(tmp_path: Path) -> None:
    folder = tmp_path / "process" / "one"
    folder.mkdir(parents=True)
    (folder / "pages.img").write_bytes(b"x" * 10000)
    with (folder / "sparse.img").open("wb") as file:
        file.truncate(1 << 20)
    found = stored(tmp_path, ["one", "two"])
    assert found.logical == 10000 + (1 << 20)
    assert 10000 <= found.stored < 64 << 10
    assert stored(tmp_path, []) == Stored()
