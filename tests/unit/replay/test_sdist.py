"""Sources from the package index."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest

from crab.errors import Damaged, HostUnsuitable
from crab.replay import sdist
from crab.replay.sdist import Sdist, fetch

WANTED = Sdist(name="thing", version="1.0", sha256=hashlib.sha256(b"content").hexdigest())


def pip(monkeypatch: pytest.MonkeyPatch, content: bytes | None, said: str = "") -> list[list[str]]:
    """Something in place of pip that gives this content, or fails."""
    calls: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        calls.append(command)
        if content is None:
            return subprocess.CompletedProcess(command, 1, b"", said.encode())
        (Path(command[command.index("--dest") + 1]) / WANTED.filename).write_bytes(content)
        return subprocess.CompletedProcess(command, 0, b"", b"")

    monkeypatch.setattr(sdist.subprocess, "run", run)
    return calls


def test_it_is_fetched_once_with_its_digest_pinned_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = pip(monkeypatch, b"content")
    cache = tmp_path / "cache"
    assert fetch(WANTED, cache).read_bytes() == fetch(WANTED, cache).read_bytes() == b"content"
    assert len(calls) == 1
    assert "--require-hashes" in calls[0] and "--no-deps" in calls[0]
    assert list(cache.iterdir()) == [cache / WANTED.filename]


def test_other_content_is_refused_and_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip(monkeypatch, b"other")
    with pytest.raises(Damaged, match="SHA-256"):
        fetch(WANTED, tmp_path)
    assert not list(tmp_path.iterdir())
    (tmp_path / WANTED.filename).write_bytes(b"damaged")
    with pytest.raises(Damaged, match="SHA-256"):
        fetch(WANTED, tmp_path)


def test_a_failure_says_what_pip_said_and_what_else_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip(monkeypatch, None, "a\nERROR: no network")
    with pytest.raises(HostUnsuitable, match="ERROR: no network") as caught:
        fetch(WANTED, tmp_path)
    assert str(tmp_path) in caught.value.remedy
