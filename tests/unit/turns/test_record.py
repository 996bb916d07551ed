"""The record of questions, answers and outcomes: what it promises as long as nothing breaks."""

from __future__ import annotations

import itertools
import json
import sqlite3
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from backports import zstd
from blake3 import blake3
from unit.turns.stored import loose

from crab.errors import AlreadyExists, NotFound
from crab.model import ExecResult
from crab.turns import retention
from crab.turns.exchange import Exchange
from crab.turns.record import Record
from crab.turns.redact import Redactor, kept_headers

KEY = b'sk-ant-api03-very/secret"key+of=somebody'


def chain_of(items: Sequence[bytes]) -> list[bytes]:
    chain: list[bytes] = []
    for item in items:
        chain.append(blake3((chain[-1] if chain else b"") + item).digest())
    return chain


def ask(record: Record, *words: str | bytes, sandbox: str = "s1", **more: Any) -> Exchange:
    items = [word if isinstance(word, bytes) else word.encode() for word in words]
    return record.begin(sandbox, chain=chain_of(items), items=items, **more)


def answer(record: Record, exchange: Exchange, body: bytes = b"answer", **more: Any) -> Exchange:
    values: dict[str, Any] = {"status": 200, "headers": {"Content-Type": "application/json"}, "complete": True}
    return record.answered(exchange.id, body=body, **(values | more))


def turn(record: Record, checkpoint: str, *words: str, sandbox: str = "s1") -> Exchange:
    made = ask(record, *words, sandbox=sandbox)
    record.protected(made.id, checkpoint=checkpoint, turn=len(words), protection="durable")
    answer(record, made, f"to {words[-1]}".encode())
    return record.released(made.id)


def command(record: Record, exchange: int, index: int = 0, result: bytes | None = b"r", sandbox: str = "s1") -> int:
    made = record.outcomes.begin(sandbox, exchange, index, b"digest")
    if result is not None:
        record.outcomes.end(made.id, "done", result)
    return made.id


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "turns.db"


@pytest.fixture
def record(path: Path) -> Iterator[Record]:
    record = Record.open(path)
    yield record
    record.close()


# ---- exchanges


def test_an_answer_is_found_by_its_conversation_and_has_the_bytes_that_came(record: Record) -> None:
    made = ask(
        record,
        "be good",
        "hello",
        wire="anthropic",
        model="m",
        client="claude-code",
        agent="a",
        session="x",
        bytes_in=7,
    )
    assert (made.state, made.kind, made.wire, made.model, made.client, made.agent, made.session, made.bytes_in) == (
        "open", "main", "anthropic", "m", "claude-code", "a", "x", 7)  # fmt: skip
    assert record.find("s1", made.key) is None
    body = bytes(range(256)) * 3
    done = answer(record, made, body, calls=2, wait_ms=5.5)
    assert (done.state, done.calls, done.wait_ms, done.bytes_out, done.content_type) == (
        "answered",
        2,
        5.5,
        768,
        "application/json",
    )
    assert record.find("s1", made.key) == done == record.get(made.id) and record.answer(made.id) == body
    assert record.find("s2", made.key) is None and record.find("s1", b"another") is None
    assert record.conversation(made.id) == [b"be good", b"hello"]


def test_everything_is_there_when_it_is_opened_again(path: Path) -> None:
    first = Record.open(path)
    made = turn(first, "c1", "hello")
    command(first, made.id)
    first.close()
    second = Record.open(path)
    assert second.find("s1", made.key) == made and second.outcomes.of("s1", made.id)[0].result == b"r"
    assert second.set_aside is None


def test_a_question_that_comes_again_before_it_was_answered_is_the_same_turn(record: Record) -> None:
    made = ask(record, "hello")
    record.failed(made.id, 429, "slow down")
    again = ask(record, "hello")
    assert again.id == made.id and (again.status, again.note, again.state) == (429, "slow down", "open")
    assert ask(record, "hello", sandbox="s2").id != made.id
    answer(record, made)
    assert ask(record, "hello").id != made.id


def test_a_cut_answer_leaves_the_question_open(record: Record) -> None:
    made = ask(record, "hello")
    cut = answer(record, made, b"hel", complete=False)
    assert cut.state == "open" and record.find("s1", made.key) is None and record.answer(made.id) == b"hel"
    assert [found.id for found in record.open_ones("s1")] == [made.id]
    record.released(made.id)
    assert record.open_ones("s1") == []
    again = ask(record, "hello")
    assert again.id == made.id and again.state == "open"
    assert answer(record, again, b"hello").complete and record.answer(made.id) == b"hello"


def test_a_whole_answer_is_never_replaced(record: Record) -> None:
    made = ask(record, "hello")
    first = answer(record, made, b"one")
    assert answer(record, made, b"two") == first and record.answer(made.id) == b"one"


def test_of_several_answers_to_one_conversation_the_newest_is_found(record: Record) -> None:
    for word in (b"one", b"two"):
        newest = answer(record, ask(record, "hello"), word)
    found = record.find("s1", newest.key)
    assert found and record.answer(found.id) == b"two"


def test_what_is_abandoned_is_not_found_and_no_retry_of_it_is_expected(record: Record) -> None:
    made = ask(record, "hello")
    assert record.abandon(made.id, "the client went away").state == "abandoned"
    assert record.open_ones("s1") == [] and ask(record, "hello").id != made.id
    done = turn(record, "c1", "other")
    outcome = command(record, done.id)
    record.abandon(done.id)
    record.rewound("s1", {"c1", "c2"}, "c2", False)
    assert record.find("s1", done.key) is None and record.outcomes.of("s1") == []
    assert outcome and record.outcomes.begin("s1", done.id, 0, b"d").state == "intended"


@pytest.mark.parametrize("ask_again", [False, True])
def test_an_answer_whose_turn_was_lost_is_given_once_unless_another_one_is_wanted(
    record: Record, ask_again: bool
) -> None:
    first = turn(record, "c1", "a")
    lost = answer(record, ask(record, "a", "b"), b"costly")  # the sandbox died before its checkpoint
    record.rewound("s1", {"c1"}, "c1", ask_again)
    key = chain_of([b"a", b"b"])[-1]
    found = record.lost("s1", key)
    assert (found.id if found else None) == (None if ask_again else lost.id)
    if found:
        record.recall(found)
    assert record.lost("s1", key) is None
    assert record.lost("s1", chain_of([b"a"])[-1]) is None, "that one is in the past, and not lost"
    assert record.get(first.id).abandoned == ask_again
    record.rewound("s1", {"c1"}, "c1", False)
    assert record.lost("s1", key) is None, "it was given, and what came of that has its own exchange"


def test_an_exchange_says_how_safe_it_was(record: Record) -> None:
    made = ask(record, "hello")
    assert made.protection is None
    kept = record.protected(made.id, checkpoint="c1", turn=4, protection="unprotected", why="held for 60 s")
    assert (kept.checkpoint, kept.turn, kept.protection, kept.why) == ("c1", 4, "unprotected", "held for 60 s")
    answer(record, made)
    assert record.released(made.id, held_ms=12.5).held_ms == 12.5 and record.get(made.id).state == "released"


def test_listing_is_oldest_first_and_goes_back_page_by_page(record: Record) -> None:
    made = [ask(record, f"hello {number}").id for number in range(5)]
    assert [found.id for found in record.exchanges("s1")] == made
    assert [found.id for found in record.exchanges("s1", limit=2)] == made[3:]
    assert [found.id for found in record.exchanges("s1", limit=2, before=made[3])] == made[1:3]


def test_helpers_are_recorded_and_are_nobody_s_position(record: Record) -> None:
    main = turn(record, "c1", "hello")
    helper = answer(record, ask(record, "hello", "title?", kind="helper"))
    assert record.newest("s1") == main and record.find("s1", helper.key) == helper
    assert record.position("s1", chain_of([b"hello", b"title?"])) == main


def test_the_newest_released_one_is_told_from_the_newest(record: Record) -> None:
    assert record.newest("s1") is None
    first, second = turn(record, "c1", "a"), ask(record, "a", "b")
    assert record.newest("s1") == second and record.newest("s1", released=True) == first


def test_a_returning_agent_is_placed_by_its_conversation(record: Record) -> None:
    words = [f"word {number}" for number in range(1200)]
    first = turn(record, "c1", *words[:10])
    second = turn(record, "c2", *words[:1100])
    chain = chain_of([word.encode() for word in words])
    assert record.position("s1", chain) == second
    assert record.position("s1", chain[:1099]) == first
    assert record.position("s1", chain[:9]) is None and record.position("s1", []) is None
    record.rewound("s1", {"c1"}, "c1", ask_again=False)
    assert record.position("s1", chain) == record.get(first.id)


def test_a_chain_must_fit_its_items(record: Record) -> None:
    with pytest.raises(ValueError):
        record.begin("s1", chain=[], items=[])
    with pytest.raises(ValueError):
        record.begin("s1", chain=[b"a"], items=[b"a", b"b"])


def test_what_was_forgotten_meanwhile_is_reported(record: Record) -> None:
    made = ask(record, "hello")
    outcome = record.outcomes.begin("s1", 0, 0, b"d")
    record.forget("s1")
    for call in (
        lambda: record.protected(made.id, checkpoint="c", turn=1, protection="durable"),
        lambda: answer(record, made),
        lambda: record.released(made.id),
        lambda: record.failed(made.id, 500, ""),
        lambda: record.abandon(made.id),
        lambda: record.answer(made.id),
        lambda: record.conversation(made.id),
        lambda: record.outcomes.end(outcome.id, "done", b""),
    ):
        with pytest.raises(NotFound):
            call()


def test_texts_that_are_no_utf_8_are_taken(record: Record) -> None:
    made = ask(record, "hello", agent="a\udcff")
    assert made.agent == "a?"
    assert answer(record, made, headers={"X-Request-Id": "\udcfe"}).headers == {"x-request-id": "?"}


# ---- space


def test_a_long_chat_costs_what_was_said_and_not_its_square(tmp_path: Path) -> None:
    def chat(turns: int) -> int:
        random = Random(1)
        record = Record.open(tmp_path / f"{turns}.db")
        items, chain = [b"instructions"], chain_of([b"instructions"])
        for _ in range(turns):
            for _ in range(2):
                items.append(random.randbytes(1000))
                chain.append(blake3(chain[-1] + items[-1]).digest())
            record.begin("s1", chain=chain, items=items)
        assert record.size().items == 1 + 2 * turns and record.size().content == 12 + 2000 * turns
        while record._database.shrink(1000):
            pass
        return record.size().file

    short, long = chat(100), chat(200)
    assert long < 2.2 * short and long < 2 * 200 * 2000


def test_equal_content_is_stored_once_whoever_said_it(record: Record) -> None:
    body = Random(1).randbytes(100_000)
    for number in range(10):
        answer(record, ask(record, "hello", sandbox=f"s{number}"), body)
    size = record.size()
    assert size.items == 1 and size.content == 100_005 and size.exchanges == 10


def test_a_request_of_50_mb_is_taken(record: Record) -> None:
    image = Random(1).randbytes(50 << 20)
    made = ask(record, "look", image)
    answer(record, made, image)
    assert record.conversation(made.id)[1] == image == record.answer(made.id)


def test_forgetting_a_sandbox_frees_what_only_it_needed(record: Record) -> None:
    common = Random(1).randbytes(50_000)
    kept = ask(record, common, sandbox="kept")
    before = record.size()
    made = ask(record, common, Random(2).randbytes(3_000_000))
    answer(record, made, Random(3).randbytes(3_000_000))
    command(record, made.id, result=Random(4).randbytes(1_000_000))
    assert record.size().file > 7_000_000
    record.forget("s1")
    after = record.size()
    assert (after.exchanges, after.outcomes, after.items, after.stored) == (1, 0, 1, before.stored)
    assert after.file < 1_000_000 and record.conversation(kept.id) == [common]


def long_past(record: Record, turns: int, sandbox: str = "s1") -> None:
    for number in range(turns):
        made = turn(record, f"{sandbox}c{number}", *map(str, range(number + 1)), sandbox=sandbox)
        command(record, made.id, result=b"%d" % number, sandbox=sandbox)


def test_others_write_while_a_long_past_is_forgotten(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    long_past(record, 200)
    long_past(record, 3, "s2")
    waiting, left = ask(record, "x", sandbox="s3"), list[int]()

    def others(_: float) -> None:
        with ThreadPoolExecutor(1) as pool:  # the lock is free, and a slice has been taken
            assert pool.submit(lambda: answer(record, waiting).complete).result(10)
        left.append(record.size().exchanges + record.size().outcomes)

    monkeypatch.setattr(retention, "_leave_room", others)
    record.forget("s1")
    assert len(left) >= 12 and left == sorted(left, reverse=True)
    assert max(before - after for before, after in itertools.pairwise([407, *left])) <= 32
    assert record.sandboxes() == ["s2", "s3"] and not loose(record)
    assert record.conversation(record.exchanges("s2")[-1].id) == [b"0", b"1", b"2"]


def test_a_past_that_was_forgotten_in_part_is_still_known_to_be_there(
    path: Path, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    long_past(record, 100)
    slices = itertools.count()

    def dies(_: float) -> None:
        if next(slices) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(retention, "_leave_room", dies)
    with pytest.raises(KeyboardInterrupt):
        record.forget("s1")
    assert not loose(record), "each slice takes all that is its own"
    record.close()
    again = Record.open(path)
    assert again.sandboxes() == ["s1"] and 0 < again.size().exchanges < 100
    again.forget("s1")
    assert (again.sandboxes(), again.size().items, again.size().stored) == ([], 0, 0)
    again.close()


def test_nothing_is_left_of_what_was_replaced(record: Record) -> None:
    made = ask(record, "hello")
    answer(record, made, b"hel", complete=False)
    answer(record, made, b"hell", complete=False)
    answer(record, made, b"hello")
    record.protected(made.id, checkpoint="c1", turn=1, protection="durable")
    begun = record.outcomes.begin("s1", made.id, 0, b"d")
    record.mark("s1", "c2")
    record.outcomes.end(begun.id, "done", b"seen by nobody")
    record.rewound("s1", {"c1", "c2"}, "c2", False)
    assert record.outcomes.of("s1")[0].state == "intended" and not loose(record)


def age(record: Record, seconds: float) -> None:
    """All that is recorded came so much earlier."""
    with record._database.write() as db:
        db.execute("UPDATE exchanges SET asked = asked - ?", (seconds,))
        db.execute("UPDATE outcomes SET started = started - ?", (seconds,))


def test_what_was_rewound_away_goes_when_it_is_too_old_and_what_counts_stays(record: Record) -> None:
    first = turn(record, "c1", "a")
    kept = command(record, first.id)
    second = turn(record, "c2", "a", "b")
    gone = command(record, second.id)
    third, waiting = turn(record, "c3", "a", "b", "c"), ask(record, "x", kind="helper")
    record.rewound("s1", {"c1", "c2"}, "c2", True)
    again = turn(record, "c4", "a", "b")
    age(record, 1000)
    young = turn(record, "c1", "a", sandbox="s2")
    assert record.retain(max_age_seconds=2000) == 0
    assert record.retain(max_age_seconds=500) == 3, "the second and the third one, and the helper of that time"
    assert [one.id for one in record.exchanges("s1")] == [first.id, again.id]
    assert record.size().items == 2, "and what was said in them alone"
    assert record.exchanges("s2") == [young] and record.conversation(again.id) == [b"a", b"b"]
    with pytest.raises(NotFound):
        record.outcomes.end(gone, "done", b"")
    assert {record.get(one.id).kind for one in (second, third, waiting)} == {"mark"}
    record.rewound("s1", {"c1", "c2"}, "c2", False)
    assert [one.id for one in record.outcomes.of("s1")] == [kept], (
        "the second one says that it was before its checkpoint"
    )


def test_an_answer_whose_turn_was_lost_is_kept_for_whoever_asks_the_same(record: Record) -> None:
    turn(record, "c1", "a")
    lost = answer(record, ask(record, "a", "b"), b"costly")
    record.rewound("s1", {"c1"}, "c1", False)
    age(record, 1000)
    record.retain(max_age_seconds=500, max_bytes=0)
    assert record.lost("s1", lost.key) == record.get(lost.id)


def test_what_is_too_much_goes_if_it_was_rewound_away_and_else_that_is_said(
    record: Record, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[int] = []
    for number in range(50):
        exchange = ask(record, f"{number}")
        record.protected(exchange.id, checkpoint=f"c{number}", turn=number, protection="durable")
        answer(record, exchange, Random(number).randbytes(10_000))
        made.append(exchange.id)
    command(record, made[9], result=Random(99).randbytes(10_000))
    record.rewound("s1", {f"c{number}" for number in range(10)}, "c9", True)
    record.retain(max_bytes=250_000)
    left = [found.id for found in record.exchanges("s1")]
    assert record.size().stored <= 250_000 and set(made[:9]) < set(left) and not caplog.text
    record.retain(max_bytes=0)
    assert [found.id for found in record.exchanges("s1")] == made[:9], "all that counts"
    assert record.size().outcomes == 0 and "all of it of sandboxes that are there" in caplog.text


# ---- outcomes


def test_an_outcome_is_told_by_its_place(record: Record) -> None:
    made = turn(record, "c1", "hello")
    begun = record.outcomes.begin("s1", made.id, 0, b"digest")
    assert (begun.state, begun.result, begun.command) == ("intended", None, b"digest")
    result = msgspec.msgpack.encode(ExecResult(exit_code=3, stdout=b"\xff", stderr=b""))
    done = record.outcomes.end(begun.id, "done", result)
    assert record.outcomes.at("s1", made.id, 0) == done and done.result == result and done.ended
    assert record.outcomes.at("s1", made.id, 1) is None and record.outcomes.at("s2", made.id, 0) is None
    command(record, made.id, 1)
    assert [found.index for found in record.outcomes.of("s1", made.id)] == [0, 1]


def test_of_two_who_begin_one_command_one_wins(record: Record) -> None:
    def begin(_: int) -> bool:
        try:
            record.outcomes.begin("s1", 0, 0, b"d")
        except AlreadyExists:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(begin, range(8))) == [False] * 7 + [True]


def test_threads_share_one_record(record: Record) -> None:
    def chat(sandbox: str) -> list[int]:
        made: list[int] = []
        for number in range(30):
            exchange = turn(record, f"{sandbox}c{number}", *map(str, range(number + 1)), sandbox=sandbox)
            command(record, exchange.id, sandbox=sandbox)
            assert record.find(sandbox, exchange.key) == exchange
            made.append(exchange.id)
            if number % 10 == 0:
                record.retain(max_age_seconds=1000)
        return made

    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(chat, ("s1", "s2")))
    assert [[found.id for found in record.exchanges(name)] for name in ("s1", "s2")] == made
    assert record.size().items == 30


def test_retries_from_two_threads_are_one_turn(record: Record) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: ask(record, "hello").id, range(40)))
    assert len(set(made)) == 1


# ---- credentials


def everything(path: Path) -> bytes:
    """All that lies on the disk, and all of it that is compressed in plain."""
    raw = b"".join(found.read_bytes() for found in sorted(path.parent.iterdir()))
    db = sqlite3.connect(path)
    plain = b"".join(zstd.decompress(row[0]) for row in db.execute("SELECT data FROM blobs"))
    db.close()
    return raw + plain


def test_nothing_of_a_key_reaches_the_disk(path: Path, record: Record) -> None:
    key, text = KEY, KEY.decode()
    escaped = json.dumps({"say": f"{text} {text}"}).encode()
    slashed = escaped.replace(b"/", rb"\/")
    made = ask(
        record, b"plain " + key, escaped, slashed, agent=text, session=text, client=text, secrets=[b"Bearer " + key]
    )
    record.failed(made.id, 401, f"wrong key {text}", secrets=[key])
    done = answer(record, made, b"data: " + key + b"\n" + escaped, secrets=[key],
                  headers={"Set-Cookie": "session=abcdefgh", "Authorization": text, "X-Request-ID": text, "Request-Id": "r1"})  # fmt: skip
    outcome = record.outcomes.begin("s1", made.id, 0, b"digest")
    record.outcomes.end(outcome.id, "done", msgspec.msgpack.encode({"stdout": b"KEY=" + key}), secrets=[key])
    record.abandon(made.id, text, secrets=[key])
    found = everything(path)
    for form in (
        key,
        json.dumps(text)[1:-1].encode(),
        json.dumps(text)[1:-1].replace("/", r"\/").encode(),
        b"api03",
        b"abcdefgh",
    ):
        assert form not in found
    assert done.headers == {"x-request-id": "[redacted]", "request-id": "r1"}
    assert record.answer(made.id) == b'data: [redacted]\n{"say": "[redacted] [redacted]"}'
    assert record.conversation(made.id) == [b"plain [redacted]", *[b'{"say": "[redacted] [redacted]"}'] * 2]


def test_an_answer_with_a_key_in_it_is_marked(record: Record) -> None:
    assert answer(record, ask(record, "a"), b"your key is " + KEY, secrets=[KEY]).redacted
    assert not answer(record, ask(record, "b"), b"no key here", secrets=[KEY]).redacted


def test_a_masked_result_can_still_be_decoded(record: Record) -> None:
    result = ExecResult(exit_code=0, stdout=b"KEY=" + KEY + b"\n", stderr=b"12345678")
    made = record.outcomes.begin("s1", 0, 0, b"d")
    done = record.outcomes.end(made.id, "done", msgspec.msgpack.encode(result), secrets=[KEY, b"12345678"])
    read = msgspec.msgpack.decode(done.result or b"", type=ExecResult)
    assert done.redacted and read.stdout.startswith(b"KEY=[redacted]*") and len(read.stdout) == len(result.stdout)
    assert read.stderr == b"[redacte"


def test_placeholders_are_no_credentials() -> None:
    assert Redactor([b"test", b"", b"dummy", b"Bearer x"]).replaced(b"a test of a dummy x") == (
        b"a test of a dummy x",
        False,
    )


def test_of_two_keys_that_begin_alike_nothing_is_left() -> None:
    assert Redactor([b"sk-12345678", b"sk-12345678-longer"]).replaced(b"<sk-12345678-longer>") == (
        b"<[redacted]>",
        True,
    )


def test_headers_are_let_through_by_name() -> None:
    given = {"Content-Type": "a", "x-request-id": "b", "Request-ID": "c", "X-Request-Id-Upstream": "d", "set-cookie": "e",
             "authorization": "f", "x-api-key": "g", "my-request-id": "h"}  # fmt: skip
    assert kept_headers(given) == {
        "content-type": "a",
        "x-request-id": "b",
        "request-id": "c",
        "x-request-id-upstream": "d",
    }
