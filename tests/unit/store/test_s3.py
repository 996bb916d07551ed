"""A store on a real S3 server (moto), and on one that fails: slow, overloaded, cut short, without conditions, without rights."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator

import pytest
from aiohttp import ClientSession, web
from unit.store.stores import put, read

from crab.errors import CrabError, InvalidRequest, NotFound, StoreRefused, StoreUnavailable
from crab.store import gc
from crab.store.check import check
from crab.store.objects import objects_at, service_time
from crab.store.repository import Repository
from crab.store.s3 import S3Objects

KEY = b"a key of at least sixteen bytes"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of an S3 server."""
    from moto.server import ThreadedMotoServer

    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    try:
        host, port = moto.get_host_and_port()
        yield f"http://{host}:{port}"
    finally:
        moto.stop()


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty bucket."""
    import boto3

    variables = {
        "AWS_ENDPOINT_URL": server,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    name = f"bucket-{time.monotonic_ns()}"
    boto3.client("s3", endpoint_url=server).create_bucket(Bucket=name)
    return name


Fault = Callable[[web.Request, bytes], Awaitable[web.StreamResponse | None]]


class Proxy:
    """Between Crab and the server: passes on what `fault` does not answer itself."""

    def __init__(self, server: str) -> None:
        self.fault: Fault | None = None
        self.asked: list[tuple[str, str]] = []
        self._server = server
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()
        self.port = 0

        async def serve() -> None:
            app = web.Application(client_max_size=1 << 30)
            app.router.add_route("*", "/{path:.*}", self._answer)
            self._runner = web.AppRunner(app)
            await self._runner.setup()
            site = web.TCPSite(self._runner, "127.0.0.1", 0)
            await site.start()
            self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
            ready.set()

        def run() -> None:
            self._loop.run_until_complete(serve())
            self._loop.run_forever()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        ready.wait(10)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.asked.append((request.method, request.path))
        if self.fault is not None and (answer := await self.fault(request, body)) is not None:
            return answer
        return await self.passed(request, body)

    async def passed(self, request: web.Request, body: bytes, without: str = "") -> web.StreamResponse:
        headers = {k: v for k, v in request.headers.items() if k.lower() not in ("host", "content-length", without)}
        async with (
            ClientSession(auto_decompress=False) as session,
            session.request(request.method, self._server + request.path_qs, headers=headers, data=body) as answer,
        ):
            skip = ("transfer-encoding", "content-encoding", "connection")
            kept = {k: v for k, v in answer.headers.items() if k.lower() not in skip}
            if request.method == "HEAD":
                return web.Response(status=answer.status, headers=kept)
            kept.pop("Content-Length", None)
            return web.Response(status=answer.status, headers=kept, body=await answer.read())


@pytest.fixture
def proxy(server: str, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    proxy = Proxy(server)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
    yield proxy
    proxy.close()


def opened(bucket: str, timeout: float = 5.0, retries: int = 1) -> S3Objects:
    return S3Objects(f"s3://{bucket}/some/prefix", timeout=timeout, retries=retries)


# ---------------------------------------------------------------- it works


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "keyed"])
def test_a_store_on_s3(bucket: str, key: bytes | None) -> None:
    url = f"s3://{bucket}/some/prefix"
    repository = Repository.create(objects_at(url), key, grace=0.4)
    contents = [os.urandom(300_000), b"x" * 100]
    put(repository, "c1", *contents)
    put(repository, "c2", contents[0], b"two")
    other = Repository.open(objects_at(url), key)
    other.refresh()
    assert other.names() == ["c1", "c2"]
    assert read(other, "c1") == contents
    assert other.get(other.sealing.identify(b"x" * 100), whole=False) == b"x" * 100
    assert not check(other, data=True).problems
    other.remove("c1")
    done = 0
    end = time.monotonic() + 20
    while not done and time.monotonic() < end:
        time.sleep(0.5)
        done = gc.collect(other).removed
    assert done
    assert read(repository, "c2") == [contents[0], b"two"]
    with pytest.raises(NotFound):
        other.record("c1")


def test_objects_of_s3(bucket: str) -> None:
    objects = opened(bucket)
    assert objects.put_if_absent("a/b", b"first")
    assert not objects.put_if_absent("a/b", b"second")
    assert objects.get("a/b") == b"first"
    assert objects.get_range("a/b", 1, 3) == b"irs"
    assert objects.get_range("a/b", 1, 0) == b""
    objects.put("a/c", b"")
    large = os.urandom(40 << 20)
    objects.put("large", large)  # in several parts
    assert objects.get("large") == large
    assert [(found.name, found.size) for found in objects.list("a/")] == [("a/b", 5), ("a/c", 0)]
    assert abs(service_time(objects) - time.time()) < 60
    objects.delete("a/b")
    objects.delete("a/b")
    with pytest.raises(NotFound):
        objects.get("a/b")
    assert list(objects.list("none/")) == []


# ---------------------------------------------------------------- it fails


def failing(bucket: str, kind: type[CrabError], text: str, **options: float) -> None:
    begin = time.monotonic()
    with pytest.raises(kind, match=text) as error:
        opened(bucket, **options).get("crab-store.json")  # type: ignore[arg-type]
    assert error.value.remedy
    assert time.monotonic() - begin < 15


def test_nobody_answers(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    failing(bucket, StoreUnavailable, "cannot be reached")


def test_a_bucket_that_is_not_there(bucket: str) -> None:
    with pytest.raises(StoreRefused, match="no bucket"):
        list(opened("no-such-bucket-at-all").list(""))
    with pytest.raises((StoreRefused, NotFound)):
        opened("no-such-bucket-at-all").get("x")


def test_a_service_that_is_slow(proxy: Proxy, bucket: str) -> None:
    async def slow(request: web.Request, body: bytes) -> None:
        await asyncio.sleep(1.2)

    proxy.fault = slow
    failing(bucket, StoreUnavailable, "does not answer within 0.5 s", timeout=0.5, retries=0)


def test_a_service_that_is_overloaded(proxy: Proxy, bucket: str) -> None:
    async def busy(request: web.Request, body: bytes) -> web.Response:
        return web.Response(status=503, text="<Error><Code>SlowDown</Code></Error>")

    proxy.fault = busy
    failing(bucket, StoreUnavailable, "503")
    assert len(proxy.asked) == 2  # it was tried again


def test_a_service_that_is_overloaded_for_a_moment(proxy: Proxy, bucket: str) -> None:
    objects = opened(bucket, retries=5)
    repository = Repository.create(objects)
    count = 0

    async def sometimes(request: web.Request, body: bytes) -> web.Response | None:
        nonlocal count
        count += 1
        return web.Response(status=503) if count % 3 else None

    proxy.fault = sometimes
    content = os.urandom(100_000)
    put(repository, "c1", content)
    assert read(repository, "c1") == [content]


def test_an_answer_that_is_cut_short(proxy: Proxy, bucket: str) -> None:
    opened(bucket).put("crab-store.json", bytes(100_000))

    async def cut(request: web.Request, body: bytes) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={
                "Content-Length": "100000",
                "ETag": '"x"',
                "Last-Modified": "Tue, 01 Dec 2026 00:00:00 GMT",
            }
        )
        await response.prepare(request)
        await response.write(bytes(1000))
        assert request.transport
        request.transport.close()
        return response

    proxy.fault = cut
    failing(bucket, StoreUnavailable, "cut short|cannot be reached", retries=0)


def test_a_service_that_refuses(proxy: Proxy, bucket: str) -> None:
    async def refuse(request: web.Request, body: bytes) -> web.Response:
        return web.Response(status=403, text="<Error><Code>AccessDenied</Code></Error>")

    proxy.fault = refuse
    failing(bucket, StoreRefused, "credentials")


def test_a_service_that_knows_no_conditions(proxy: Proxy, bucket: str) -> None:
    async def unknown(request: web.Request, body: bytes) -> web.Response | None:
        if "If-None-Match" in request.headers:
            return web.Response(status=501, text="<Error><Code>NotImplemented</Code></Error>")
        return None

    proxy.fault = unknown
    with pytest.raises(StoreRefused, match="conditional writes"):
        Repository.create(opened(bucket, retries=0))


def test_a_service_that_ignores_conditions(proxy: Proxy, bucket: str) -> None:
    async def ignore(request: web.Request, body: bytes) -> web.StreamResponse | None:
        if "If-None-Match" in request.headers:
            return await proxy.passed(request, body, without="if-none-match")
        return None

    proxy.fault = ignore
    with pytest.raises(StoreRefused, match="ignores"):
        Repository.create(opened(bucket))


def test_a_write_whose_answer_was_lost_is_no_conflict(proxy: Proxy, bucket: str) -> None:
    """The service wrote the object, its answer was cut off, the request is sent again: the object is there already."""
    repository = Repository.create(opened(bucket))
    lost = 0

    async def lose(request: web.Request, body: bytes) -> web.Response | None:
        nonlocal lost
        if request.method == "PUT" and "/checkpoints/" in request.path and not lost:
            lost += 1
            await proxy.passed(request, body)
            return web.Response(status=500)
        return None

    proxy.fault = lose
    put(repository, "c1", b"x")
    assert lost
    assert read(repository, "c1") == [b"x"]


def test_what_fails_in_the_middle_leaves_nothing_that_counts(proxy: Proxy, bucket: str) -> None:
    repository = Repository.create(opened(bucket, retries=0))
    for part in ("/packs/", "/index/", "/checkpoints/"):

        async def fail(request: web.Request, body: bytes, part: str = part) -> web.Response | None:
            return web.Response(status=500) if request.method == "PUT" and part in request.path else None

        proxy.fault = fail
        with pytest.raises(StoreUnavailable):
            put(repository, "c1", b"x" * 1000)
        proxy.fault = None
        assert repository.names() == []
        assert not check(Repository.open(opened(bucket))).problems
    put(repository, "c1", b"x" * 1000)
    assert read(Repository.open(opened(bucket)), "c1") == [b"x" * 1000]


def test_urls_that_make_no_sense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "not a url")
    with pytest.raises((InvalidRequest, StoreUnavailable, StoreRefused)):
        S3Objects("s3://bucket", timeout=1, retries=0).get("x")
