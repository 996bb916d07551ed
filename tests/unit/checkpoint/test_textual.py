"""Unified diffs of files."""

from __future__ import annotations

import os
from pathlib import Path

from crab.checkpoint.textual import LARGEST, unified, with_diff
from crab.model import FileChange


def test_a_changed_line_is_shown_with_its_neighbours() -> None:
    text = unified(b"a\nb\nc\n", b"a\nB\nc\n", "f", "f")
    assert "--- a/f" in text and "-b\n+B\n" in text


def test_a_missing_end_of_line_is_told() -> None:
    assert "No newline at end of file" in unified(b"", b"x", "f", "f")


def test_binary_content_is_named_and_not_shown() -> None:
    assert unified(b"\0a", b"\0b", "f", "f") == "binary files differ\n"


def test_bytes_that_are_no_text_are_escaped() -> None:
    assert "\\xff" in unified(b"", b"\xff\n", "f", "f")


def tree(path: Path, **files: bytes) -> Path:
    path.mkdir()
    for name, content in files.items():
        (path / name).write_bytes(content)
    return path


def test_only_content_that_changed_is_compared(tmp_path: Path) -> None:
    old, new = tree(tmp_path / "old", a=b"1\n", m=b"x"), tree(tmp_path / "new", a=b"2\n", m=b"x", n=b"3\n")
    changed = with_diff(FileChange(path="a", kind="changed", what=("content",)), old, new)
    assert "-1\n+2\n" in changed.diff
    assert with_diff(FileChange(path="m", kind="changed", what=("mode",)), old, new).diff == ""
    assert "+3\n" in with_diff(FileChange(path="n", kind="added"), old, new).diff
    assert "-x" in with_diff(FileChange(path="m", kind="removed"), old, new).diff


def test_links_and_huge_files_have_no_diff(tmp_path: Path) -> None:
    old, new = tree(tmp_path / "old"), tree(tmp_path / "new", huge=b"a" * (LARGEST + 1))
    os.symlink("/etc/passwd", new / "link")
    for name in ("huge", "link"):
        assert with_diff(FileChange(path=name, kind="added"), old, new).diff == ""
