"""The coordinator: doors, addresses, and an end that loses nothing and leaves nothing."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from unit.turns.stack import asks, opened

from crab.errors import InvalidRequest, WrongState
from crab.model import ModelAccess
from crab.turns import coordinator
from crab.turns.coordinator import Coordinator, check_upstream
from crab.turns.protection import Haste, Safety
from crab.turns.record import Record


class Keeper:
    """Owns sandboxes that are names."""

    def __init__(self) -> None:
        self.models: dict[str, ModelAccess | None] = {"s1": ModelAccess(upstream="mock"), "none": None}
        self.calls = 0

    def access(self, sandbox: str) -> ModelAccess | None:
        return self.models.get(sandbox)

    def protect(self, sandbox: str) -> Safety:
        self.calls += 1
        return Safety(protection="durable", checkpoint=f"{sandbox}.{self.calls}", turn=self.calls)

    def haste(self, sandbox: str) -> Haste:
        return Haste()

    def bring_back(self, sandbox: str, checkpoint: str) -> None:
        raise AssertionError("nobody wants that here")


def loops() -> set[int | None]:
    """Threads of coordinators; other tests may have one of their own."""
    return {thread.ident for thread in threading.enumerate() if thread.name == "crab-turns"}


@pytest.fixture
def keeper() -> Keeper:
    return Keeper()


@pytest.fixture
def made(tmp_path: Path, keeper: Keeper) -> Iterator[Coordinator]:
    before, others = opened(), loops()
    one = Coordinator(tmp_path)
    one.begin(keeper)
    yield one
    one.end()
    assert loops() <= others, "its thread has ended"
    assert not opened() - before


def ask(url: str, body: bytes = asks("$ echo hi", stream=False), method: str = "POST", path: str = "/v1/chat/completions") -> tuple[int, Any]:  # fmt: skip
    parts = urlsplit(url)
    line = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=10)
    try:
        line.request(method, parts.path + path, body)
        answer = line.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        line.close()


def door() -> tuple[socket.socket, str]:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    return listener, f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_who_uses_no_model_gets_no_thread(tmp_path: Path, keeper: Keeper) -> None:
    before, others = len(os.listdir("/proc/self/fd")), loops()
    one = Coordinator(tmp_path)
    one.begin(keeper)
    one.dismiss("s1.1")
    one.resume()
    one.forget("s1")
    assert loops() <= others
    one.end()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_door_is_served_until_it_is_dismissed(made: Coordinator) -> None:
    listener, url = door()
    made.admit("s1", "s1.1", listener)
    status, answer = ask(url)
    assert status == 200 and answer["choices"][0]["message"]["tool_calls"]
    second, elsewhere = door()
    made.admit("s1", "s1.1", second)  # the same again replaces it
    assert ask(elsewhere)[0] == 200
    made.dismiss("s1.1")
    made.dismiss("s1.1")
    for gone in (url, elsewhere):
        with pytest.raises(ConnectionError):
            ask(gone)
    assert made.record.exchanges("s1")[0].checkpoint == "s1.1"


def test_a_door_of_a_sandbox_that_is_gone_says_so(made: Coordinator, keeper: Keeper) -> None:
    listener, url = door()
    made.admit("s1", "s1.1", listener)
    assert ask(url)[0] == 200
    del keeper.models["s1"]
    made.forget("s1")
    assert ask(url)[0] == 404 and not made._channels and not made._places


def test_an_address_is_for_one_sandbox_and_nobody_guesses_it(made: Coordinator, keeper: Keeper) -> None:
    keeper.models["s2"] = ModelAccess(upstream="mock")
    url, other = made.address("s1"), made.address("s2")
    assert ask(url)[0] == ask(other)[0] == 200
    root, _, token = url.rpartition("/")
    wrong = [f"{root}/{'0' * 32}", f"{root}/", root, f"{root}/{token}x", f"{root.replace('s1', 's2')}/{token}", f"{root.replace('s1', 's%31')}/{token}"]  # fmt: skip
    for one in wrong:
        status, answer = ask(one)
        assert status == 404 and "no sandbox" in answer["error"]["message"]
    with pytest.raises(WrongState, match="without a model"):
        made.address("none")


def test_bytes_that_are_no_text_in_an_address_stop_nobody(made: Coordinator) -> None:
    parts = urlsplit(made.address("s1"))
    for path in (b"/s1/t\xf6ken/v1/x", b"/\xff/\xff", b"/s1", b"//", b"/s1//"):
        with socket.create_connection((parts.hostname, parts.port), 5) as line:
            line.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            assert line.recv(1000).split()[1] in (b"404", b"400")
    assert ask(made.address("s1"))[0] == 200


def test_the_next_daemon_listens_at_the_same_address(tmp_path: Path, keeper: Keeper) -> None:
    urls = list[str]()
    for number in range(2):
        one = Coordinator(tmp_path)
        one.begin(keeper)
        if number:
            one.resume()
            assert ask(urls[0])[0] == 200
        urls.append(one.address("s1"))
        one.end()
    assert urls[0] == urls[1] and (tmp_path / "turns.json").stat().st_mode & 0o077 == 0


def test_a_port_that_is_taken_is_given_up_for_another(
    tmp_path: Path, keeper: Keeper, caplog: pytest.LogCaptureFixture
) -> None:
    one = Coordinator(tmp_path)
    one.begin(keeper)
    port = urlsplit(one.address("s1")).port
    one.end()
    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        thief.bind(("127.0.0.1", port))
        thief.listen()
        two = Coordinator(tmp_path)
        two.begin(keeper)
        assert ask(two.address("s1"))[0] == 200 and urlsplit(two.address("s1")).port != port
        two.end()
    assert "is taken" in caplog.text


def test_many_who_want_the_address_at_once_get_one(made: Coordinator) -> None:
    urls = list[str]()
    threads = [threading.Thread(target=lambda: urls.append(made.address("s1"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(urls) == 8 and len(set(urls)) == 1


def test_answers_that_are_under_way_at_the_end_are_waited_for_and_recorded(tmp_path: Path, keeper: Keeper) -> None:
    one = Coordinator(tmp_path)
    one.begin(keeper)
    parts = urlsplit(one.address("s1"))
    with socket.create_connection((parts.hostname, parts.port), 5) as line:
        body = asks("~ 0.4\n$ echo slow", stream=False)
        head = f"POST {parts.path}/v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
        line.sendall(head.encode() + body)
        end = time.monotonic() + 5
        while not one.record.exchanges("s1"):
            assert time.monotonic() < end
            time.sleep(0.01)
        began = time.monotonic()
        one.end()
        assert time.monotonic() - began < 4
        assert b"echo slow" in line.recv(1 << 16)
    record = Record.open(tmp_path / "turns.db")
    [known] = record.exchanges("s1")
    assert known.complete and b"echo slow" in record.answer(known.id)
    record.close()


def test_a_client_that_never_fetched_its_answer_delays_no_end(tmp_path: Path, keeper: Keeper) -> None:
    one = Coordinator(tmp_path)
    one.begin(keeper)
    parts = urlsplit(one.address("s1"))
    with socket.create_connection((parts.hostname, parts.port), 5) as line:
        body = asks("~ 0.1\n$ echo slow", stream=False)
        line.sendall(
            f"POST {parts.path}/v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        time.sleep(0.03)
    end = time.monotonic() + 5
    while not any(known.released for known in one.record.exchanges("s1")):
        assert time.monotonic() < end
        time.sleep(0.01)
    began = time.monotonic()
    one.end()
    assert time.monotonic() - began < 2


def test_captures_of_many_sandboxes_do_not_stop_another(made: Coordinator, keeper: Keeper) -> None:
    """(asyncio's own pool has six threads on a small machine.)"""
    free, taken = threading.Event(), list[str]()

    def protect(sandbox: str) -> Safety:
        taken.append(sandbox)
        if sandbox != "s1":
            free.wait(20)
        return Safety(protection="durable", checkpoint=f"{sandbox}.c", turn=1)

    keeper.protect = protect  # type: ignore[method-assign]
    names = [f"t{number}" for number in range(40)]
    keeper.models |= dict.fromkeys(names, ModelAccess(upstream="mock"))
    urls = [made.address(name) for name in names]
    threads = [threading.Thread(target=ask, args=(url,)) for url in urls]
    for thread in threads:
        thread.start()
    try:
        end = time.monotonic() + 10
        while len(taken) < 40:
            assert time.monotonic() < end, f"{len(taken)} captures began"
            time.sleep(0.01)
        began = time.monotonic()
        assert ask(made.address("s1"))[0] == 200
        assert time.monotonic() - began < 3
    finally:
        free.set()
        for thread in threads:
            thread.join()


def test_keys_reach_a_model_that_was_asked_before(made: Coordinator, keeper: Keeper) -> None:
    async def channel() -> Any:
        return await made._channel("s3")

    keeper.models["s3"] = ModelAccess(upstream="http://127.0.0.1:9")
    found = made._do(channel()).result()
    made.credentials("s3", {"openai": "sk-later"})
    assert found.upstream._filled("openai", "Bearer sk-crab-placeholder") == "Bearer sk-later"


def test_a_model_that_is_changed_is_asked_from_then_on(made: Coordinator, keeper: Keeper) -> None:
    url = made.address("s1")
    assert ask(url)[0] == 200
    keeper.models["s1"] = ModelAccess(upstream="http://127.0.0.1:9")
    assert ask(url, asks("another", stream=False))[0] == 502


@pytest.mark.parametrize("text", ["", "mock", "http://127.0.0.1:1", "https://a/b"])
def test_upstreams_that_are_some(text: str) -> None:
    assert check_upstream(text) == text


def test_api_is_a_word_for_the_real_ones() -> None:
    assert check_upstream("api") == ""


@pytest.mark.parametrize("text", ["Mock", "ftp://a", "replay:", "replay:/nowhere", "127.0.0.1:80", "mock:x"])
def test_upstreams_that_are_none_are_refused_with_a_remedy(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_upstream(text)
    assert caught.value.remedy


def test_a_file_of_answers_is_an_upstream(tmp_path: Path) -> None:
    (tmp_path / "a").write_text('{"body": "x"}')
    assert check_upstream(f"replay:{tmp_path / 'a'}")


def test_a_damaged_endpoint_is_made_anew(tmp_path: Path, keeper: Keeper) -> None:
    (tmp_path / "turns.json").write_bytes(b"\xff{")
    one = Coordinator(tmp_path)
    one.begin(keeper)
    assert ask(one.address("s1"))[0] == 200
    one.end()


def test_nothing_blocks_the_loop_while_the_registry_is_busy(made: Coordinator, keeper: Keeper) -> None:
    url, busy = made.address("s1"), threading.Event()
    access = keeper.access

    def slow(sandbox: str) -> ModelAccess | None:
        busy.set()
        time.sleep(0.3)
        return access(sandbox)

    keeper.access = slow  # type: ignore[method-assign]
    thread = threading.Thread(target=ask, args=(url,))
    thread.start()
    busy.wait(60)

    async def beat() -> None:
        await asyncio.sleep(0)

    began = time.monotonic()
    made._do(beat()).result()
    assert time.monotonic() - began < 0.2
    thread.join()
    assert coordinator.MOST_THREADS > 32
