"""What a checkpoint becomes in a store: stretches of blobs, pieces of files, pages of memory, lists of members."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.checkpoint.dumps import Dump, dumps, space
from unit.checkpoint.test_archive import members
from unit.store.stores import made

from crab.checkpoint import pages
from crab.checkpoint.extents import Extent, Extents, flat, joined, unflat
from crab.checkpoint.pages import PAGE, Earlier, Layout
from crab.checkpoint.pax import Member
from crab.checkpoint.pieces import pieces
from crab.checkpoint.stored_read import StoredContent
from crab.checkpoint.stored_tree import TreeWriter, read_tree
from crab.errors import ArchiveRefused, Damaged
from crab.store import packs
from crab.store.plan import Cut
from crab.store.repository import Repository
from crab.store.writing import Writer

# ---------------------------------------------------------------- stretches

BLOBS = {bytes([number]) * 32: os.urandom(300) for number in range(1, 4)}


@st.composite
def contents(draw: st.DrawFn) -> list[Extent]:
    found: list[Extent] = []
    for _ in range(draw(st.integers(0, 12))):
        blob = draw(st.sampled_from([b"", *BLOBS]))
        offset = draw(st.integers(0, 200)) if blob else 0
        found.append(Extent(blob, offset, draw(st.integers(1, 100))))
    return found


def spelt(content: list[Extent]) -> bytes:
    return b"".join(BLOBS[e.blob][e.offset : e.offset + e.size] if e.blob else bytes(e.size) for e in content)


@given(contents(), st.data())
def test_a_part_of_a_content_is_that_part(content: list[Extent], data: st.DataObject) -> None:
    whole, text = Extents(content), spelt(content)
    assert whole.size == len(text)
    offset = data.draw(st.integers(0, len(text)))
    size = data.draw(st.integers(0, len(text) - offset))
    assert spelt(whole.part(offset, size)) == text[offset : offset + size]
    assert spelt(joined(content)) == text
    assert len(joined(content)) <= len(content)


@given(contents())
def test_a_content_as_numbers_and_back(content: list[Extent]) -> None:
    links: dict[bytes, int] = {}
    numbers = flat(content, links)
    assert unflat(numbers, list(links)) == content
    for broken in (numbers[:-1], [*numbers[:-1], -5], [99, *numbers[1:]]):
        if numbers:
            with pytest.raises(ValueError):
                unflat(broken, list(links))


# ---------------------------------------------------------------- pieces

CUT = Cut(least=64 << 10, average=128 << 10, most=512 << 10)


def test_pieces_do_not_move_when_something_is_inserted_before_them() -> None:
    data = random.Random(1).randbytes(40 << 20)
    first = list(pieces([data], CUT))
    second = list(pieces((data[:5_000_000] + b"inserted" + data[5_000_000:],), CUT))
    assert b"".join(first) == data
    assert len(set(first) & set(second)) >= len(first) - 3
    assert max(map(len, first)) <= CUT.most


@given(st.lists(st.integers(0, 3 << 20), max_size=8), st.integers(0, 2**32))
@settings(max_examples=15, deadline=None)
def test_pieces_are_the_content_however_it_comes(sizes: list[int], seed: int) -> None:
    data = random.Random(seed).randbytes(sum(sizes))
    blocks: list[bytes] = []
    at = 0
    for size in sizes:
        blocks.append(data[at : at + size])
        at += size
    found = list(pieces(blocks, CUT))
    assert b"".join(found) == data
    assert found == list(pieces([data], CUT))


def test_a_small_file_is_one_piece() -> None:
    assert list(pieces([b"abc", b"def"], Cut())) == [b"abcdef"]
    assert list(pieces([], Cut())) == []


# ---------------------------------------------------------------- members


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return made(tmp_path / "s")


@given(found=st.lists(members(), max_size=30), data=st.data())
@settings(max_examples=20, deadline=None)
def test_a_tree_comes_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, found: list[Member], data: st.DataObject
) -> None:
    repository = made(tmp_path_factory.mktemp("tree") / "s")
    with Writer(repository) as writer:
        blob = writer.add(b"0123456789" * 100)
        out = TreeWriter(writer)
        given_: list[tuple[Member, bytes | list[Extent], tuple[int, int]]] = []
        for member in found:
            content: bytes | list[Extent] = b""
            if member.kind == "file":
                many = data.draw(st.sampled_from([0, 1, 100]))
                content = [Extent(blob, number % 50, 1) for number in range(many)] if many else b"few"
            stamp = data.draw(st.tuples(st.integers(0, 2**63 - 1), st.integers(-(2**62), 2**62)))
            given_.append((member, content, stamp))
            out.add(member, content, stamp)
        out.finish()
        writer._send(packs.DATA)
        writer._send(packs.NODE)
        writer._index(0)
    back = list(read_tree(repository, out.segments))
    for member in found:
        if member.atime == member.mtime:
            member.atime = None
    assert [(one.member, one.content, one.stamp) for one in back] == given_
    assert out.size.entries == len(found)


def test_a_change_of_one_file_changes_one_list(repository: Repository) -> None:
    def segments(names: list[bytes]) -> list[bytes]:
        with Writer(repository) as writer:
            out = TreeWriter(writer)
            for name in sorted(names):
                out.add(Member(b"files/u/" + name, "file", size=0))
            out.finish()
            return out.segments

    names = [b"%05d" % number for number in range(5000)]
    first, second = segments(names), segments([*names, b"02500x"])
    assert 40 < len(first) < 160
    assert 1 <= len(set(second) - set(first)) <= 2  # the name itself may be where a list is cut


def test_members_that_must_not_be_are_refused(repository: Repository) -> None:
    """The headers are those of an archive, and so are the checks."""
    bad = Member(b"files/u/../../etc/passwd", "file")
    with Writer(repository) as writer:
        out = TreeWriter(writer)
        out.add(bad)
        out.finish()
        writer._send(packs.NODE)
        writer._index(0)
    with pytest.raises(ArchiveRefused):
        list(read_tree(repository, out.segments))


def test_a_content_that_is_not_what_it_states(repository: Repository) -> None:
    with Writer(repository) as writer:
        blob = writer.add(b"0123456789")
        writer._send(packs.DATA)
        writer._index(0)
    member = Member(b"x", "file", size=5)
    with pytest.raises(Damaged, match="size"):
        StoredContent(repository, [Extent(blob, 0, 6)], member)
    with pytest.raises(Damaged, match="outside"):
        StoredContent(repository, [Extent(blob, 8, 5)], member).read(5)
    good = StoredContent(
        repository, [Extent(blob, 1, 2), Extent(b"", 0, 1), Extent(blob, 9, 1), Extent(blob, 9, 1)], member
    )
    assert (good.read(2), good.read(9), good.read(1)) == (b"12", b"\x0099", b"")


# ---------------------------------------------------------------- pages


class Blobs:
    """A store of blobs."""

    def __init__(self) -> None:
        self.kept: dict[bytes, bytes] = {}
        self.new = 0

    def put(self, data: bytes) -> bytes:
        self.new += len(data)
        name = b"%032d" % len(self.kept)
        self.kept[name] = data
        return name

    def store(self, dump: Dump, before: Earlier | None = None) -> Earlier:
        self.new = 0
        layout = Layout(dump.folder)
        found = dict(pages.contents_of(layout, before, self.put, lambda blob: len(self.kept[blob])))
        assert found.keys() == dump.files.keys()
        for name, content in found.items():
            text = b"".join(
                self.kept[e.blob][e.offset : e.offset + e.size] if e.blob else bytes(e.size) for e in content
            )
            assert text == dump.files[name]
        return Earlier(layout, {name: Extents(content) for name, content in found.items()})


def test_only_pages_that_changed_are_stored(tmp_path: Path) -> None:
    blobs = Blobs()
    first = blobs.store(Dump(tmp_path / "1", {1: space(*range(1, 1001))}))
    assert blobs.new == 1000 * PAGE
    changed = list(range(1, 1001))
    changed[10], changed[500] = 7777, 8888
    second = blobs.store(Dump(tmp_path / "2", {1: space(*changed)}), first)
    assert blobs.new == 2 * PAGE
    assert len(second.contents["pages-1.img"].extents) < 40
    blobs.store(Dump(tmp_path / "3", {1: space(*changed)}), second)
    assert blobs.new == 0


def test_pages_are_found_again_where_they_were_however_the_file_moved(tmp_path: Path) -> None:
    blobs = Blobs()
    first = blobs.store(Dump(tmp_path / "1", {1: space(*range(1, 200))}))
    more = {**space(9001, 9002, 9003, at=0x1000), **space(*range(1, 200)), **space(9004, at=0x9000000)}
    blobs.store(Dump(tmp_path / "2", {1: more}), first)
    assert blobs.new == 4 * PAGE


def test_zeros_cost_nothing(tmp_path: Path) -> None:
    blobs = Blobs()
    found = blobs.store(Dump(tmp_path / "1", {1: space(*[0] * 500, 5, *[0] * 500)}))
    assert blobs.new == PAGE
    assert len(found.contents["pages-1.img"].extents) == 3


def test_a_forked_process_shares_with_its_parent(tmp_path: Path) -> None:
    blobs = Blobs()
    parent, child = space(*range(1, 301)), space(*range(1, 300), 9999)
    blobs.store(Dump(tmp_path / "1", {2: child, 7: parent, 3: child}, {2: 7, 3: 7, 7: 1}))
    assert blobs.new == 302 * PAGE


def test_what_a_restore_must_read_stays_within_bounds(tmp_path: Path) -> None:
    """Whatever the history, of a blob that is read at least an eighth is needed."""
    blobs, rng = Blobs(), random.Random(3)
    numbers = list(range(1, 601))
    last = blobs.store(Dump(tmp_path / "0", {1: space(*numbers)}))
    for turn in range(1, 15):
        for _ in range(120):
            numbers[rng.randrange(600)] = rng.randrange(10**6, 10**9)
        last = blobs.store(Dump(tmp_path / str(turn), {1: space(*numbers)}), last)
        read = sum(len(blobs.kept[blob]) for blob in {e.blob for e in last.contents["pages-1.img"].extents} - {b""})
        assert read <= 8 * 600 * PAGE


@given(st.lists(dumps, min_size=1, max_size=4), st.dictionaries(st.integers(1, 3), st.integers(0, 3), max_size=3))
@settings(max_examples=40, deadline=None)
def test_whatever_the_pages_are_they_come_back(
    tmp_path_factory: pytest.TempPathFactory, history: list[dict[int, dict[int, bytes]]], parents: dict[int, int]
) -> None:
    folder = tmp_path_factory.mktemp("dumps")
    blobs, last = Blobs(), None
    for number, spaces in enumerate(history):
        last = blobs.store(Dump(folder / str(number), spaces, parents), last)


def test_a_dump_before_that_is_gone_costs_time_only(tmp_path: Path) -> None:
    blobs = Blobs()
    first = blobs.store(Dump(tmp_path / "1", {1: space(*range(1, 100))}))
    (tmp_path / "1" / "pages-1.img").unlink()
    blobs.store(Dump(tmp_path / "2", {1: space(*range(1, 100))}), first)
    assert blobs.new == 99 * PAGE


def test_images_that_are_none_are_no_layout(tmp_path: Path) -> None:
    (tmp_path / "pagemap-1.img").write_bytes(os.urandom(100))
    with pytest.raises(ValueError):
        Layout(tmp_path)
