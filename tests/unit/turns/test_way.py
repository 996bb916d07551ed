"""The way to a model: which proxy it takes, and what is asked of nobody on it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from crab.turns import upstream
from crab.turns.database import Database
from crab.turns.exchange import Standing
from crab.turns.place import Place
from crab.turns.record import Record


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    upstream._way_to.cache_clear()
    yield
    upstream._way_to.cache_clear()


def test_the_proxy_of_the_environment_is_used_with_its_login_and_not_for_those_that_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("https_proxy", "http://me:secret@proxy.example:3128")
    monkeypatch.setenv("no_proxy", "localhost,.inside.example")
    assert str(upstream._way_to("https", "api.example")) == "http://me:secret@proxy.example:3128"
    assert upstream._way_to("https", "models.inside.example") is None
    assert upstream._way_to("http", "api.example") is None


def test_a_proxy_is_told_who_asks_and_the_model_is_not_told_what_netrc_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / ".netrc").write_text("machine model.example login other password hidden\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    heads: list[bytes] = []

    async def talk() -> None:
        async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            writer.close()

        server = await asyncio.start_server(proxy, "127.0.0.1", 0)
        monkeypatch.setenv("http_proxy", f"http://me:secret@127.0.0.1:{server.sockets[0].getsockname()[1]}")
        async with server, upstream.session() as session:
            real = upstream.Real(session, "http://model.example")
            async with real.ask("POST", "/v1/messages", [("x-api-key", "mine")], b"{}") as answer:
                assert answer.status == 200

    asyncio.run(talk())
    assert heads[0].startswith(b"POST http://model.example/v1/messages")
    assert b"proxy-authorization: basic bwu6c2vjcmv0" in heads[0].lower()
    assert b"\r\nauthorization:" not in heads[0].lower()


def test_a_reader_sees_what_is_on_the_disk_while_another_transaction_is_open(tmp_path: Path) -> None:
    database = Database(tmp_path / "turns.db")
    record = Record(database)
    record.begin("box", chain=[b"1"], items=[b"question"])
    with database.write() as db:
        db.execute("DELETE FROM exchanges")
        assert len(record.exchanges("box")) == 1
    assert record.exchanges("box") == []
    database.close()


def test_a_step_at_once_is_the_step_of_an_agent_that_goes_on_and_no_other(tmp_path: Path) -> None:
    record = Record.open(tmp_path / "turns.db")
    place = Place(record, "box")
    chain = (b"1",)
    step = place.step_at_once(chain, "")
    assert step is not None
    assert step == place.step(chain, "")
    made = record.begin("box", chain=chain, items=[b"question"])
    record.answered(made.id, status=200, headers={}, body=b"answer", complete=True, standing=Standing(exchange=made.id))
    assert record.standing("box").exchange == made.id
    assert place.step_at_once(chain, "") is None, "its answer was lost on the way: it is replayed"
    place.brought_back(set(), "checkpoint", ask_again=False)
    assert place.step_at_once((b"2",), "") is None
    record.close()
