"""CRIU's image files: what is edited, and that all else stays byte for byte."""

from __future__ import annotations

import struct
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from crab.checkpoint import imagefiles
from crab.checkpoint.imagefiles import parse, serialize

fields = st.lists(
    st.one_of(
        st.tuples(st.integers(1, 500), st.just(0), st.integers(0, 2**64 - 1)),
        st.tuples(st.integers(1, 500), st.just(2), st.binary(max_size=300)),
        st.tuples(st.integers(1, 500), st.just(1), st.binary(min_size=8, max_size=8)),
        st.tuples(st.integers(1, 500), st.just(5), st.binary(min_size=4, max_size=4)),
    ),
    max_size=20,
)


@given(fields)
def test_a_message_is_what_it_was_after_parsing_and_serializing(message: list[imagefiles.Field]) -> None:
    assert parse(serialize(message)) == message


def image(path: Path, *messages: bytes, magics: int = 2) -> None:
    path.write_bytes(b"MAGC" * magics + b"".join(struct.pack("<I", len(m)) + m for m in messages))


def timer(ticks: int, value: tuple[int, int], interval: tuple[int, int]) -> bytes:
    words = [
        (1, 0, 3),
        (4, 0, 1),
        (5, 0, ticks),
        (7, 0, value[0]),
        (8, 0, value[1]),
        (9, 0, interval[0]),
        (10, 0, interval[1]),
    ]
    return serialize([(1, 0, 17), (2, 0, 3), (12, 2, serialize([*words]))])


def armed(message: bytes) -> tuple[object, object]:
    inner = imagefiles.first(message, imagefiles.FILE_TIMERFD)
    assert isinstance(inner, bytes)
    return imagefiles.first(inner, 7), imagefiles.first(inner, 8)


def test_a_periodic_timer_with_an_unread_tick_is_armed_again(tmp_path: Path) -> None:
    image(tmp_path / "files.img", timer(1, (0, 0), (2, 30_000_000)))
    imagefiles.rearm_timers(tmp_path)
    (message,) = imagefiles.messages(tmp_path / "files.img")
    assert armed(message) == (2, 30_000_000)


def test_timers_that_run_or_are_switched_off_or_fired_once_are_left_alone(tmp_path: Path) -> None:
    others = [
        timer(0, (0, 5), (0, 7)),
        timer(0, (0, 0), (0, 7)),
        timer(1, (0, 0), (0, 0)),
        serialize([(1, 0, 1), (3, 2, b"x")]),
    ]
    image(tmp_path / "files.img", *others)
    before = (tmp_path / "files.img").read_bytes()
    imagefiles.rearm_timers(tmp_path)
    assert (tmp_path / "files.img").read_bytes() == before


def test_the_inventory_names_the_user_namespace_of_the_root_task(tmp_path: Path) -> None:
    image(tmp_path / "ids-1.img", serialize([(1, 0, 1), (10, 0, 12)]))
    root_ids = serialize([(1, 0, 4), (10, 0, 3), (11, 0, 9)])
    image(tmp_path / "inventory.img", serialize([(1, 0, 2), (3, 2, root_ids), (7, 2, b"kept")]), magics=1)
    imagefiles.keep_user_namespace(tmp_path)
    data = (tmp_path / "inventory.img").read_bytes()
    (size,) = struct.unpack_from("<I", data, 4)
    message = data[8 : 8 + size]
    inner = imagefiles.first(message, imagefiles.ROOT_IDS)
    assert isinstance(inner, bytes)
    assert parse(inner) == [(1, 0, 4), (10, 0, 12), (11, 0, 9)]
    assert imagefiles.first(message, 7) == b"kept"


def test_the_processes_of_a_dump_are_listed(tmp_path: Path) -> None:
    image(tmp_path / "pstree.img", serialize([(1, 0, 1), (2, 0, 0)]), serialize([(1, 0, 77), (2, 0, 1)]))
    assert imagefiles.process_ids(tmp_path) == [1, 77]
