"""What two process images are compared by: names instead of numbers, threads in their calls, words of memory."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from crab.checkpoint import imagefacts, imagememory, oracle, threads
from crab.checkpoint.imagefacts import Image
from crab.checkpoint.imagefiles import Field, serialize
from crab.checkpoint.imagememory import PAGE, Memory
from crab.checkpoint.imagenames import _TABLES, read
from crab.checkpoint.oracle import Judgement, Kind, Truth, judge
from crab.model import FileChange

CHANGED = FileChange(path="a", kind="changed", what=("content",))


# ---------------------------------------------------------------- verdicts


@pytest.mark.parametrize(
    ("truth", "decision", "expected"),
    [
        (Truth(), "none", "right"),
        (Truth(times_only=3), "none", "right"),
        (Truth(), "files", "false alarm"),
        (Truth(), "full", "false alarm"),
        (Truth(files=(CHANGED,)), "none", "miss"),
        (Truth(files=(CHANGED,)), "files", "right"),
        (Truth(files=(CHANGED,)), "processes", "miss"),
        (Truth(files=(CHANGED,)), "full", "false alarm"),
        (Truth(processes=("x",)), "files", "miss"),
        (Truth(processes=("x",)), "processes", "right"),
        (Truth(files=(CHANGED,), processes=("x",)), "processes", "miss"),
        (Truth(files=(CHANGED,), processes=("x",)), "full", "right"),
    ],
)
def test_a_decision_that_keeps_less_than_what_changed_is_a_miss(
    truth: Truth, decision: Kind, expected: Judgement
) -> None:
    assert judge(truth, decision) == expected


# ---------------------------------------------------------------- names


def test_every_table_that_a_field_points_to_is_there() -> None:
    for text in _TABLES.values():
        assert {word.partition(":")[2] for word in text.split()} - {""} <= _TABLES.keys()


def test_a_field_that_no_table_knows_counts_as_state() -> None:
    assert read(serialize([(1, 0, 5), (44, 0, 7), (44, 0, 8)]), "eventfd") == {"44": (7, 8)}
    assert read(serialize([(15, 0, 2**64 - 1)]), "task") == {"actions": -1}


# ---------------------------------------------------------------- threads

IN_CALL = {"ip": 100, "ax": 7, "orig_ax": 7, "cx": 1, "r11": 2, "di": 3, "sp": 9000, "fs_base": 0}


def standing(**registers: int) -> dict[str, int]:
    return threads.thread(1, {"x86": {"registers": {**IN_CALL, **registers}}}).registers


def test_a_call_that_begins_anew_and_one_that_was_interrupted_are_the_same_place() -> None:
    restarted = standing()
    assert (
        restarted == standing(ax=threads.EINTR, ip=102) == standing(ax=threads.EINTR, ip=102, orig_ax=threads.RESTART)
    )
    assert restarted == standing(cx=5, r11=6)
    assert "ax" not in restarted and restarted["di"] == 3


def test_a_thread_outside_of_a_call_is_compared_by_all_registers() -> None:
    assert standing(orig_ax=-1, ax=7) != standing(orig_ax=-1, ax=8)
    assert standing(ax=5) != standing(ax=6)  # it has just come back from it
    assert standing(di=4) != standing()


def test_only_the_time_of_a_relative_sleep_passes_by_itself() -> None:
    def sleep(call: int, **registers: int) -> tuple[int, ...]:
        made = {**IN_CALL, "ax": call, "orig_ax": call, "dx": 64, "r10": 0, "si": 0, **registers}
        return threads.thread(1, {"x86": {"registers": made}}).sleep

    assert sleep(230) == (64,) and sleep(230, r10=96) == (64, 96)
    assert sleep(230, si=1) == ()  # until a time
    assert sleep(7) == ()


# ---------------------------------------------------------------- image sets


class Made:
    """A set of images of two processes, 1 (init) and 5, with numbers that begin somewhere."""

    def __init__(self, folder: Path, base: int, **changes: Any) -> None:
        folder.mkdir()
        self.folder = folder
        options = {"bytes": b"", "pages": {}, "sp": 0x7FF0_0000_0F00, "umask": 18, "vmas": []} | changes
        task = [(1, 0, 1), (6, 2, b"sleep")]
        registers = {17: 100, 11: 7, 16: 7, 20: options["sp"], 22: 0x1000}
        rseq = [(1, 0, 0x2000_0100), (2, 0, 32), (3, 0, 1)]
        for pid in (1, 5):
            self.write(f"core-{pid}.img", [(1, 0, 1), (2, 2, serialize([(2, 2, serialize([(n, 0, v) for n, v in registers.items()]))])),
                                           (3, 2, serialize(task)), (5, 2, serialize([(15, 2, serialize(rseq))]))])  # fmt: skip
            self.write(
                f"ids-{pid}.img", [(1, 0, base + pid), (2, 0, base + pid), (3, 0, base + pid), (4, 0, base + pid)]
            )
            self.write(f"fs-{pid}.img", [(1, 0, base + 1), (2, 0, base + 1), (3, 0, options["umask"])])
            stack = (0x7FF0_0000_0000 - PAGE * 4, 0x7FF0_0000_1000, 0x122, 0x201, 0)
            vmas = [
                (0x1000_0000, 0x2000_0000, 0x22, 0x201, 0),
                (0x2000_0000, 0x3000_0000, 0x22, 0x201, 0),
                *options["vmas"],
                stack,
            ]
            mm = [(12, 0, base + 1), *((14, 2, vma(*one, base)) for one in vmas)]
            self.write(f"mm-{pid}.img", mm)
            self.write(f"pagemap-{pid}.img", [(1, 0, base + pid)],
                       *([(1, 0, at), (2, 0, 1), (4, 0, 4), (5, 0, 1)] for at in sorted(options["pages"])))  # fmt: skip
            (folder / f"pages-{base + pid}.img").write_bytes(
                b"".join(options["pages"][at] for at in sorted(options["pages"]))
            )
        self.write("pstree.img", *([(1, 0, pid), (2, 0, 0), (3, 0, pid), (4, 0, pid), (5, 0, pid)] for pid in (1, 5)))
        pipe = [(1, 0, base + 2), (2, 0, base * 7), (3, 0, 1)]
        self.write("files.img", [(1, 0, 1), (2, 0, base + 1), (3, 2, serialize([(1, 0, base + 1), (2, 0, 0), (3, 0, 0), (6, 2, b"/bin/x"), (8, 0, base)]))],
                   [(1, 0, 2), (2, 0, base + 2), (18, 2, serialize(pipe))],
                   [(1, 0, 2), (2, 0, base + 3), (18, 2, serialize([(1, 0, base + 3), (2, 0, base * 7), (3, 0, 0)]))])  # fmt: skip
        self.write(f"fdinfo-{base + 5}.img", [(1, 0, base + 2), (2, 0, 0), (3, 0, 2), (4, 0, 1)])
        self.write(
            f"fdinfo-{base + 1}.img",
            [(1, 0, base + 3), (2, 0, 0), (3, 0, 2), (4, 0, base)],
            [(1, 0, base + 1), (2, 0, 0), (3, 0, 1), (4, 0, 9)],
        )
        self.write("pipes-data.img", [(1, 0, base * 7), (2, 0, len(options["bytes"])), (3, 0, 65536)])
        with open(folder / "pipes-data.img", "ab") as images:
            images.write(options["bytes"])

    def write(self, name: str, *messages: list[Field]) -> None:
        packed = b"".join(struct.pack("<I", len(data)) + data for data in map(serialize, messages))
        (self.folder / name).write_bytes(struct.pack("<II", 1, 2) + packed)


def vma(start: int, end: int, flags: int, status: int, file: int, base: int) -> bytes:
    return serialize(
        [(1, 0, start), (2, 0, end), (3, 0, 0), (4, 0, file and base + 1), (5, 0, 3), (6, 0, flags), (7, 0, status)]
    )


def told(tmp_path: Path, **changes: Any) -> list[str]:
    """Places that differ between an image and one with other numbers and these changes."""
    old, new = (Image(Made(tmp_path / str(base), base, **made).folder) for base, made in ((10, {}), (30, changes)))
    return [" ".join(place) for place, _, _ in imagefacts.differences(old.facts, new.facts)]


def test_numbers_that_criu_deals_out_are_no_difference(tmp_path: Path) -> None:
    assert told(tmp_path) == []


def test_a_byte_in_a_pipe_is_told_by_the_descriptor_that_leads_to_it(tmp_path: Path) -> None:
    assert set(told(tmp_path, bytes=b"x")) == {
        f"pipe at descriptor 1 of process 5 {word}" for word in ("bytes", "data")
    }


def test_settings_of_a_process_are_told_and_those_of_init_are_not(tmp_path: Path) -> None:
    assert told(tmp_path, umask=0) == ["process 5 umask"]


def page(**words: int) -> bytes:
    data = bytearray(PAGE)
    for at, value in words.items():
        struct.pack_into("<Q", data, int(at[1:]), value)
    return bytes(data)


STACK = 0x7FF0_0000_0000


@pytest.mark.parametrize(
    ("before", "after", "changed"),
    [
        ({0x1000_0000: page(_8=1)}, {0x1000_0000: page(_8=1)}, []),
        ({0x1000_0000: page(_8=1)}, {0x1000_0000: page(_8=2)}, [0x1000_0008]),
        ({}, {0x1000_0000: page()}, []),  # zeros that were read, then zeros that were written
        ({}, {0x1000_0000: page(_16=1)}, [0x1000_0010]),
        ({0x1000_0000: page(_16=1)}, {}, [0x1000_0010]),
        ({0x1000_0000: page(), 0x1000_1000: page(_0=1)}, {0x1000_1000: page(_0=1)}, []),
        ({0x2000_0000: page(_256=1)}, {0x2000_0000: page(_256=2)}, []),  # struct rseq
        ({0x2000_0000: page(_256=1)}, {0x2000_0000: page(_256=2, _288=1)}, [0x2000_0120]),
        ({STACK - PAGE: page(_0=1)}, {STACK - PAGE: page(_0=2)}, []),  # below the stack pointer
        ({STACK: page(_3704=1)}, {STACK: page(_3704=2)}, []),
        ({STACK: page(_3712=1)}, {STACK: page(_3712=2)}, [STACK + 3712]),  # the red zone
        ({STACK: page(_3840=1)}, {STACK: page(_3840=2)}, [STACK + 3840]),
    ],
)
def test_memory_is_compared_by_words_and_what_is_dead_is_left_out(
    tmp_path: Path, before: dict[int, bytes], after: dict[int, bytes], changed: list[int]
) -> None:
    sides = [
        Memory(Image(Made(tmp_path / str(base), base, pages=pages).folder))
        for base, pages in ((10, before), (30, after))
    ]
    (words,) = [
        one
        for one in imagememory.compare(*sides, lambda path, at: None, lambda path, at: None)
        if one.space == "process 5"
    ]
    assert sorted(words.after) == changed


@pytest.mark.parametrize(("below", "changed"), [(page(_8=1), []), (page(_8=2), [0x4000_0008]), (None, [0x4000_0000])])
def test_a_page_of_a_file_that_was_copied_is_compared_with_the_file(
    tmp_path: Path, below: bytes | None, changed: list[int]
) -> None:
    options: dict[str, Any] = {"vmas": [(0x4000_0000, 0x5000_0000, 2, 0x41, 1)]}
    old, new = (
        Memory(Image(Made(tmp_path / str(base), base, **options, pages=pages).folder))
        for base, pages in ((10, {}), (30, {0x4000_0000: page(_8=1)}))
    )
    asked: list[tuple[str, int]] = []

    def beneath(path: str, offset: int) -> bytes | None:
        asked.append((path, offset))
        return below

    (words,) = [one for one in imagememory.compare(old, new, beneath, beneath) if one.space == "process 5"]
    assert sorted(words.after) == changed and asked == [("/bin/x", 0)]


def test_a_stack_on_the_heap_has_no_known_end(tmp_path: Path) -> None:
    made = Image(Made(tmp_path / "x", 10, sp=0x1000_8000).folder)
    (one,) = made.processes[5].threads
    assert imagememory.stack_bottom(one, Memory(made).mappings(made.processes[5])) is None


def test_what_a_control_names_is_left_out_and_counted() -> None:
    words = imagememory.Words("process 5", {4096: 1, 8192: 1}, {4096: 2, 8192: 2})
    place = ("process 5", "thread 5", "register", "bx")
    found = oracle._Found(evidence=[], words=[words], registers=[(place, 1, 2)])
    inner, outer, left_out = oracle._lines(found, oracle.Noise(frozenset({("process 5", 4096)}), frozenset({place})))
    assert (len(inner), outer, left_out) == (1, [], 2) and "0x2000" in inner[0]
