"""The collection takes what nobody needs, when nobody can rely on it any more, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.store.stores import again, forward, made, put, read, record

from crab.errors import Busy, Damaged
from crab.store import gc
from crab.store.check import check, stats
from crab.store.repository import Repository, write_index
from crab.store.writing import Writer

GRACE = 3600.0


def collect(repository: Repository) -> tuple[int, int, int]:
    done = gc.collect(repository)
    return done.condemned, done.removed, done.rewritten


def whole(repository: Repository) -> None:
    found = check(again(repository), data=True)
    assert not found.problems, found


def test_what_nobody_needs_goes_after_twice_the_grace_period(tmp_path: Path) -> None:
    repository = made(tmp_path / "s")
    put(repository, "c1", os.urandom(50_000))
    put(repository, "c2", b"other")
    before = stats(repository).stored
    repository.remove("c1")
    assert collect(repository) == (0, 0, 0)  # its record still counts
    forward(repository, seconds=GRACE + 1)
    assert collect(repository) == (2, 0, 0)
    assert collect(repository) == (0, 0, 0)
    assert stats(repository).stored > before - 10_000
    forward(repository, seconds=GRACE + 1)
    assert collect(repository) == (0, 2, 0)
    assert stats(repository).stored < before - 45_000
    whole(repository)
    assert read(again(repository), "c2") == [b"other"]
    for left in ("condemned", "deleted", "clock"):
        assert not any((tmp_path / "s" / left).iterdir())


def test_another_checkpoint_keeps_what_it_shares(tmp_path: Path) -> None:
    repository = made(tmp_path / "s")
    shared = os.urandom(50_000)
    put(repository, "c1", shared, b"one")
    put(repository, "c2", shared, b"two")
    repository.remove("c1")
    for _ in range(3):
        forward(repository, seconds=GRACE + 1)
        collect(repository)
        whole(repository)
    assert read(again(repository), "c2") == [shared, b"two"]


def test_a_pack_of_which_little_is_needed_is_rewritten(tmp_path: Path) -> None:
    repository = made(tmp_path / "s")
    small = os.urandom(5_000)
    put(repository, "c1", small, os.urandom(100_000))
    put(repository, "c2", small)
    repository.remove("c1")
    forward(repository, seconds=GRACE + 1)
    assert gc.collect(repository).rewritten == 1
    forward(repository, seconds=GRACE + 1)
    assert gc.collect(repository).removed >= 2
    assert stats(again(repository)).stored < 10_000
    whole(repository)
    assert read(again(repository), "c2") == [small]


def test_many_small_packs_become_few(tmp_path: Path) -> None:
    repository = made(tmp_path / "s")
    for number in range(40):
        put(repository, f"c{number}", b"%d" % number * 100)
    assert gc.collect(repository).rewritten == 80
    forward(repository, seconds=GRACE + 1)
    assert gc.collect(repository).removed == 80
    assert len(list((tmp_path / "s").rglob("packs/*/*"))) == 2
    assert len(list((tmp_path / "s" / "index").iterdir())) < 3
    whole(repository)
    last = again(repository)
    last.refresh()
    assert [read(last, f"c{number}") for number in range(40)] == [[b"%d" % number * 100] for number in range(40)]


def test_a_writer_does_not_take_what_is_condemned_for_there(tmp_path: Path) -> None:
    repository = made(tmp_path / "s")
    content = os.urandom(50_000)
    put(repository, "c1", content)
    repository.remove("c1")
    forward(repository, seconds=GRACE + 1)
    assert gc.collect(repository).condemned
    assert put(again(repository), "c2", content).checkpoint.added > 50_000
    forward(repository, seconds=GRACE + 1)
    assert gc.collect(repository).removed
    whole(repository)
    assert read(again(repository), "c2") == [content]


def test_a_writer_that_began_before_keeps_what_it_found(tmp_path: Path) -> None:
    """Between its beginning and its end, a collection condemns what it relies on. The next one sees its record."""
    repository = made(tmp_path / "s")
    content = os.urandom(50_000)
    put(repository, "c1", content)
    repository.remove("c1")
    forward(repository, seconds=GRACE + 1)
    with Writer(again(repository)) as writer:
        inner = writer.node([writer.add(content)], b"inner")
        assert gc.collect(repository).condemned == 2
        forward(repository, seconds=GRACE / 2)
        gc.collect(repository)
        writer.publish(record("c2", writer.node([inner], b"c2")))
    assert writer.added < 1000
    for _ in range(3):
        forward(repository, seconds=GRACE)
        gc.collect(repository)
        whole(repository)
    assert read(again(repository), "c2") == [content]


def test_a_writer_whose_ground_is_gone_is_told_and_can_begin_again(tmp_path: Path) -> None:
    """That takes clocks that lie, or a session longer than is allowed. Nothing is published that cannot be read."""
    repository = made(tmp_path / "s")
    content = os.urandom(50_000)
    put(repository, "c1", content)
    with Writer(again(repository)) as writer:
        root = writer.node([writer.add(content)], b"inner")
        repository.remove("c1")
        for _ in range(2):
            forward(repository, seconds=GRACE + 1)
            gc.collect(repository)
        with pytest.raises(Busy, match="removed meanwhile"):
            writer.publish(record("c2", root))
    assert again(repository).names() == []
    put(writer.repository, "c2", content)
    whole(repository)


def test_a_part_that_was_taken_over_stays_when_its_checkpoint_goes(tmp_path: Path) -> None:
    """A writer takes over a node of a checkpoint without a look at what it needs; then that checkpoint is removed. Even with
    an old mark on its packs, left by a collection of before."""
    repository = made(tmp_path / "s")
    content = os.urandom(50_000)
    first = put(repository, "c1", content)
    root = repository.node(first.root)[0][0]
    with Writer(again(repository)) as writer:
        repository.remove("c1")
        gc.collect(repository)
        forward(repository, seconds=GRACE / 2 - 10)
        gc.collect(repository)
        writer.publish(record("c2", writer.node([root], b"c2")))
    for _ in range(3):
        forward(repository, seconds=GRACE + 1)
        gc.collect(repository)
        whole(repository)
    assert read(again(repository), "c2") == [content]


def test_packs_of_a_writer_that_was_killed_go_too(tmp_path: Path) -> None:
    repository = made(tmp_path / "s")
    put(repository, "c1", b"x")
    (tmp_path / "s" / "packs" / "ff").mkdir(exist_ok=True)
    orphan = tmp_path / "s" / "packs" / "ff" / ("ff" * 32)
    orphan.write_bytes(b"half a pack")
    foreign = tmp_path / "s" / "packs" / "README"
    foreign.write_bytes(b"not ours")
    assert collect(repository)[0] == 1
    assert any("no index" in note for note in check(repository).notes)
    forward(repository, seconds=GRACE + 1)
    assert collect(repository)[1] == 1
    assert not orphan.exists()
    assert foreign.exists()


def test_a_clock_that_is_set_back_removes_nothing_early(tmp_path: Path) -> None:
    repository = made(tmp_path / "s")
    put(repository, "c1", b"x" * 10_000)
    repository.remove("c1")
    forward(repository, seconds=GRACE + 1)
    assert collect(repository)[0] == 2
    forward(repository, seconds=-10 * GRACE)
    assert collect(repository)[1] == 0
    put(repository, "c2", b"y")
    whole(repository)


def test_nothing_is_removed_from_a_store_that_is_damaged(tmp_path: Path) -> None:
    repository = made(tmp_path / "s")
    put(repository, "c1", b"one")
    put(repository, "c2", b"two")
    repository.remove("c2")
    (tmp_path / "s" / "checkpoints" / "c1").write_bytes(b"?")
    forward(repository, seconds=GRACE + 1)
    with pytest.raises(Damaged, match="c1"):
        gc.collect(again(repository))
    assert not (tmp_path / "s" / "condemned").exists()


def test_two_collections_at_a_time(tmp_path: Path) -> None:
    repository = made(tmp_path / "s")
    contents = [os.urandom(20_000) for _ in range(6)]
    for number, content in enumerate(contents):
        put(repository, f"c{number}", content)
    for number in range(0, 6, 2):
        repository.remove(f"c{number}")
    one, two = again(repository), again(repository)
    for _ in range(3):
        forward(repository, one, two, seconds=GRACE + 1)
        one.refresh()
        gc.collect(two)
        gc.collect(one)
        whole(repository)
    for number in range(1, 6, 2):
        assert read(again(repository), f"c{number}") == [contents[number]]


def test_two_collections_that_each_see_a_copy_of_their_own_remove_neither(tmp_path: Path) -> None:
    """Both wrote the same content at once, and each learnt of its own pack first."""
    one = made(tmp_path / "s")
    two = again(one)
    content = os.urandom(100_000)
    with Writer(one) as first, Writer(two) as second:
        inner = first.node([first.add(content)], b"inner"), second.node([second.add(content)], b"inner")
        first.publish(record("c1", first.node([inner[0]], b"c1")))
        second.publish(record("c2", second.node([inner[1]], b"c2")))

    def beside(method: str, prefix: str) -> None:
        """Collect with one; the other does it where the first is about to write something of that kind."""
        real, done = getattr(one.objects, method), list[str]()

        def hooked(name: str, data: bytes) -> None:
            if name.startswith(prefix) and not done:
                done.append(name)
                gc.collect(two)
            real(name, data)

        setattr(one.objects, method, hooked)
        gc.collect(one)
        delattr(one.objects, method)

    beside("put", "condemned/")
    forward(one, two, seconds=GRACE + 1)
    beside("put", "index/")
    for name in ("c1", "c2"):
        assert read(again(one), name) == [content]


def test_a_checkpoint_that_was_taken_out_elsewhere_and_sent_again_is_the_new_one(tmp_path: Path) -> None:
    repository = made(tmp_path / "s")
    content = os.urandom(50_000)
    put(repository, "c1", content)
    again(repository).remove("c1")
    with Writer(repository) as writer:
        root = writer.node([writer.node([writer.add(content)], b"another")], b"c1")
        assert writer.publish(record("c1", root)).root == root
    for _ in range(2):
        gc.collect(repository)
        forward(repository, seconds=GRACE + 1)
    assert read(again(repository), "c1") == [content]


def test_nothing_is_removed_while_a_pack_is_missing(tmp_path: Path) -> None:
    repository = made(tmp_path / "s")
    content = os.urandom(50_000)
    put(repository, "c1", content)
    put(repository, "c2", os.urandom(1000))
    repository.remove("c2")
    place = repository.place(repository.sealing.identify(content))
    assert place
    (tmp_path / "s" / place[0].name).unlink()

    def there() -> list[Path]:
        return sorted(path for path in (tmp_path / "s").rglob("*") if path.is_file())

    before = there()
    for _ in range(2):
        with pytest.raises(Damaged, match="missing or damaged"):
            gc.collect(again(repository))
    assert there() == before


# ---------------------------------------------------------------- the decision

packs_ = st.dictionaries(st.binary(min_size=1, max_size=2), st.integers(1, 1000), max_size=12)


@given(packs_, st.data(), st.floats(0, 1e6), st.floats(0, 1e4))
@settings(max_examples=300, deadline=None)
def test_a_plan_never_touches_what_is_needed_or_young(
    there: dict[bytes, int], data: st.DataObject, now: float, grace: float
) -> None:
    names = sorted(there) or [b"x"]
    needed = {name: data.draw(st.integers(0, size)) for name, size in there.items() if data.draw(st.booleans())}
    condemned = data.draw(st.dictionaries(st.sampled_from(names), st.floats(-1e6, 2e6), max_size=12))
    plan = gc.planned(there, needed, condemned, now, grace)
    for pack in plan.remove:
        assert pack in there and pack not in needed and now - condemned[pack] >= grace
    assert not {*plan.remove, *plan.condemn} & needed.keys()
    assert not set(plan.condemn) & condemned.keys()
    assert set(plan.rewrite) <= needed.keys()
    unneeded = there.keys() - needed.keys()
    waiting = {pack for pack in unneeded & condemned.keys() if now - condemned[pack] < grace}
    assert {*plan.remove, *plan.condemn} | waiting == unneeded


def test_an_index_that_names_what_is_gone_holds_nobody_up(tmp_path: Path) -> None:
    """As two collections at a time can leave one."""
    repository = made(tmp_path / "s")
    content = os.urandom(50_000)
    put(repository, "c1", content)
    repository.remove("c1")
    late = again(repository)
    late.refresh()
    for _ in range(2):
        forward(repository, seconds=GRACE + 1)
        gc.collect(repository)
    write_index(late, [pack for found in late.indexes().values() for pack in found])
    writer = again(repository)
    with pytest.raises(Busy):
        put(writer, "c2", content)
    put(writer, "c2", content)
    found = check(again(repository))
    assert not found.problems
    assert len(found.notes) == 2
    gc.collect(again(repository))
    assert not check(again(repository)).notes
    assert read(again(repository), "c2") == [content]
