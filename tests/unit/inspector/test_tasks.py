"""Descriptions of tasks: what two of them say about a process."""

from __future__ import annotations

import dataclasses
import struct

import pytest

from crab.inspector import survivors
from crab.inspector.decide import Fate
from crab.inspector.sameness import _without, same_place, same_threads
from crab.inspector.task import Task, altered, parse

REGISTERS = struct.pack("21Q", *range(100, 121))
TASK = Task(
    slot=0, process=50, thread=50, state=1, exit_state=0, tracer=0, start=1000, activity=(5, 1, 0, 3, 0),
    settings=(0, 0, 120, 50, 50, 0, 3, 0, 50_000), pending=(0, 0), blocked=0, limits=bytes(256), registers=REGISTERS, fpu=b"",
)  # fmt: skip
OTHER = dataclasses.replace(TASK, process=60, thread=60, start=2000)
THREAD = dataclasses.replace(TASK, thread=51, start=1001)
INIT = dataclasses.replace(TASK, process=1, thread=1, start=1)


def standing(old: list[Task], new: list[Task]) -> dict[int, Fate | None]:
    found = survivors.compare(survivors.by_process(old), survivors.by_process(new), 1)
    return {one.key[0]: one.fate for one in found}


def ran(task: Task) -> Task:
    return dataclasses.replace(task, activity=(6, 2, 0, 3, 0))


def test_who_did_not_run_is_what_it_was() -> None:
    assert standing([INIT, TASK, THREAD, OTHER], [ran(INIT), OTHER, THREAD, TASK]) == {50: None, 60: None}


def test_who_ran_came_or_went_is_told() -> None:
    assert standing([TASK], [ran(TASK)]) == {50: Fate.RAN}
    assert standing([TASK], []) == {50: Fate.ENDED}
    assert standing([], [TASK]) == {50: Fate.STARTED}
    assert standing([TASK], [dataclasses.replace(TASK, state=0)]) == {50: Fate.RAN}, "it is on a processor"


def test_a_thread_more_or_less_is_a_process_that_ran() -> None:
    assert standing([TASK], [TASK, THREAD]) == standing([TASK, THREAD], [TASK]) == {50: Fate.RAN}


def test_a_number_that_was_given_to_another_process_is_another_process() -> None:
    found = survivors.compare(
        survivors.by_process([TASK]), survivors.by_process([dataclasses.replace(TASK, start=1001)]), 1
    )
    assert [(one.key, one.fate) for one in found] == [((50, 1000), Fate.ENDED), ((50, 1001), Fate.STARTED)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"settings": (0, 0, 125, 50, 50, 0, 3, 0, 50_000)}, "nice value"),
        ({"settings": (0, 0, 120, 50, 50, 0, 1, 0, 50_000)}, "affinity"),
        ({"settings": (0, 0, 120, 77, 50, 0, 3, 0, 50_000)}, "process group"),
        ({"pending": (1 << 9, 0)}, "signal"),
        ({"pending": (0, 1 << 9)}, "signal"),
        ({"state": 4}, "stopped or continued"),
        ({"exit_state": 32}, "ended"),
        ({"tracer": 1}, "traced"),
        ({"limits": bytes(7 * 16) + b"\1" + bytes(256 - 7 * 16 - 1)}, "open files"),
        ({}, ""),
    ],
)
def test_what_others_did_to_a_sleeping_task_is_seen(change: dict[str, object], said: str) -> None:
    text = altered(TASK, dataclasses.replace(TASK, **change))
    assert said in text and bool(said) == bool(text)


def registers(**changed: int) -> bytes:
    names = [
        "r15",
        "r14",
        "r13",
        "r12",
        "bp",
        "bx",
        "r11",
        "r10",
        "r9",
        "r8",
        "ax",
        "cx",
        "dx",
        "si",
        "di",
        "orig_ax",
        "ip",
        "cs",
        "flags",
        "sp",
        "ss",
    ]
    values = dict(zip(names, range(100, 121), strict=True)) | {"orig_ax": 7} | changed
    return struct.pack("21Q", *(value & (1 << 64) - 1 for value in values.values()))


def test_a_restarted_system_call_is_the_same_place() -> None:
    assert same_place(registers(ax=-514), registers(ax=-38))
    assert same_place(registers(ax=-516), registers(ax=-38, orig_ax=219))
    assert same_place(registers(ip=116), registers(ip=118))


def test_another_place_register_or_result_is_not() -> None:
    for changed in ({"bx": 1}, {"r15": 1}, {"sp": 1}, {"ip": 300}, {"di": 1}, {"orig_ax": 8}):
        assert not same_place(registers(), registers(**changed)), changed
    assert not same_place(registers(orig_ax=-1, ax=1), registers(orig_ax=-1, ax=2)), "outside a call the result counts"


def test_threads_are_the_same_only_if_all_sleep_where_they_slept() -> None:
    assert same_threads([TASK, THREAD], [TASK, THREAD])
    assert not same_threads([TASK, THREAD], [TASK])
    assert not same_threads([TASK], [dataclasses.replace(TASK, state=0)])
    assert not same_threads([TASK], [dataclasses.replace(TASK, fpu=b"1")])


def test_a_reading_of_another_layout_is_refused() -> None:
    assert list(parse(b"")) == []
    with pytest.raises(ValueError, match="no list of tasks"):
        list(parse(bytes(1001)))


@pytest.mark.parametrize(
    ("ranges", "known", "left"),
    [
        ([(0, 10)], [], [(0, 10)]),
        ([(0, 10)], [(0, 10)], []),
        ([(0, 10)], [(2, 4), (6, 8)], [(0, 2), (4, 6), (8, 10)]),
        ([(5, 7), (0, 3)], [(2, 6)], [(0, 2), (6, 7)]),
        ([(0, 4), (4, 8)], [(3, 5)], [(0, 3), (5, 8)]),
    ],
)
def test_what_no_known_stretch_covers_is_left(ranges: list, known: list, left: list) -> None:
    assert list(_without(ranges, known)) == left
