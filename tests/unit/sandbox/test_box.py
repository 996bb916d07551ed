"""What crab-box is told, and the frames for init."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from crab import native
from crab.model import Mount
from crab.sandbox import box
from crab.sandbox.wire import Kind, StartRequest

pytestmark = pytest.mark.skipif(not native.is_built(), reason="the C programs are not built: python -m crab.native")

LAYERS = box.Layers(
    lower=(Path("/p/ground"),),
    upper=Path("/p/live/s.1"),
    mounts=(Mount(source="/src", target="/w"), Mount(source="/d", target="/e", kind="bind", read_only=True)),
)
ENCLAVE = box.Enclave(slot=2, hostname="h", cgroup=Path("/cg/s.1"), joins=(Path("/v1/pids/s.1"),))


def test_every_sandbox_has_a_range_of_its_own() -> None:
    ranges = [box.Enclave(slot=slot, hostname="", cgroup=Path("/")).first_id for slot in range(box.RANGES + 1)]
    assert all(b - a == box.IDS for a, b in itertools.pairwise(ranges))
    assert ranges[-1] + box.IDS < 2**31


def test_mounts_say_how_they_are_made() -> None:
    words = box.start_command(ENCLAVE, LAYERS)
    found = [words[i + 1] for i, word in enumerate(words) if word == "--mount"]
    assert found == ["overlay=/p/live/s.1/m0:/src:/w", "ro:/d:/e"]


def test_a_restore_shows_its_folders_and_ends_with_the_command() -> None:
    words = box.restore_command(ENCLAVE, LAYERS, {"images": Path("/i")}, ["criu", "restore"])
    assert words[-3:] == ["--", "criu", "restore"] and "/i:images" in words


def test_a_capture_without_a_command_takes_the_snapshot_alone() -> None:
    assert "--" not in box.capture_command(7, Path("/cg"), Path("/c"))


def test_a_start_frame_carries_names_that_are_not_utf8() -> None:
    frame = StartRequest(name="n", cwd="/", argv=("a", "\udcff"), env=("X=1",), tty=True, stdin=True).frame()
    assert frame.kind == Kind.START and frame.value == 3
    assert frame.payload.endswith(b"n\0/\0a\0\xff\0X=1\0")
