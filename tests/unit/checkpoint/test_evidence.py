"""Comparing what was seen before a capture with what was seen after a restore."""

from __future__ import annotations

import msgspec
import pytest

from crab.checkpoint.compatible import check_host, check_image
from crab.checkpoint.difference import compare_processes
from crab.checkpoint.evidence import Evidence, ProcessEvidence, differences
from crab.errors import Incompatible
from crab.host.tuning import Tuning
from crab.model import HostPrint


def process(pid: int, **changes: object) -> ProcessEvidence:
    made = ProcessEvidence(pid=pid, parent=1, argv=("sleep", "9"), environment="e", cwd="/", executable="/bin/sleep", uids="0", gids="0",
                           threads=1, descriptors={0: "/dev/null", 3: "pipe"})  # fmt: skip
    return msgspec.structs.replace(made, **changes)


def seen(*processes: ProcessEvidence) -> Evidence:
    return Evidence(processes=processes)


def test_equal_states_have_no_differences() -> None:
    assert differences(seen(process(2)), seen(process(2))) == []


@pytest.mark.parametrize(
    ("changes", "word"),
    [({"cwd": "/tmp"}, "cwd"), ({"argv": ("x",)}, "argv"), ({"threads": 2}, "threads"), ({"uids": "33"}, "uids"), ({"umask": "0"}, "umask"),
     ({"descriptors": {0: "/dev/null"}}, "descriptor 3"), ({"descriptors": {0: "socket", 3: "pipe"}}, "descriptor 0"),
     ({"tuning": {2: Tuning(slack=9)}}, "tuning")],
)  # fmt: skip
def test_every_difference_is_named(changes: dict[str, object], word: str) -> None:
    (line,) = differences(seen(process(2)), seen(process(2, **changes)))
    assert word in line and "process 2" in line


def test_a_missing_and_a_new_process_are_differences() -> None:
    assert len(differences(seen(process(2)), seen(process(3)))) == 2


def test_processes_that_came_and_went_are_listed_by_pid() -> None:
    changes = compare_processes(seen(process(2), process(3)), seen(process(3, argv=("y",)), process(4)))
    assert [(c.pid, c.kind) for c in changes] == [(2, "ended"), (3, "changed"), (4, "started")]


HERE = HostPrint(kernel="6.18", architecture="x86_64", cpu="a", criu="4.1.1", boot_id="b")


@pytest.mark.parametrize("field", ["kernel", "architecture", "cpu", "criu"])
def test_another_host_is_refused_with_both_sides_named(field: str) -> None:
    with pytest.raises(Incompatible) as caught:
        check_host(HERE, msgspec.structs.replace(HERE, **{field: "other"}))
    assert "other" in caught.value.message and str(getattr(HERE, field)) in caught.value.message


def test_another_boot_of_the_same_host_is_fine() -> None:
    check_host(HERE, msgspec.structs.replace(HERE, boot_id="later"))


def test_another_image_of_the_same_name_is_refused() -> None:
    check_image("debian", "blake3:a", "blake3:a")
    with pytest.raises(Incompatible):
        check_image("debian", "blake3:a", "blake3:b")
