"""Where answers come from: a real model, or a file of recorded ones.

Nothing is kept of a caller's credentials: they pass through with the request. An agent inside a sandbox need not have them at
all, and should not: what is in its memory is in its checkpoints. It is given a placeholder, which is replaced here by
what the host was told (and keeps in memory only).
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Protocol
from urllib.parse import parse_qsl
from urllib.request import getproxies, proxy_bypass

import aiohttp
import msgspec
from yarl import URL

from crab.errors import InvalidRequest
from crab.model import Struct
from crab.turns import bodies

DEFAULTS = {
    "anthropic": "https://api.anthropic.com",
    "gemini": "https://generativelanguage.googleapis.com",
    "openai": "https://api.openai.com",
}
"""Where requests go for which no other address was given."""
PLACEHOLDER = "sk-crab-placeholder"
CREDENTIALS = ("authorization", "x-api-key", "api-key", "x-goog-api-key")
"""Headers that carry one."""
_HOP_BY_HOP = frozenset(
    (
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te"),
        *("trailer", "transfer-encoding", "upgrade", "host", "content-length", "expect"),
    )
)
"""Of RFC 9110 section 7.6.1, and what belongs to one connection besides."""
CONNECT_SECONDS = 30.0
SILENCE_SECONDS = 900.0
"""How long a model may say nothing. Clients give up at 600 s, but a connection that is dead without a word would be waited for
for ever, by every retry."""

Headers = list[tuple[str, str]]
FAILURES = (OSError, ValueError, aiohttp.ClientError, TimeoutError)
"""What asking may raise: nobody is there, the answer is cut, it is none (a damaged encoding), or the address is none."""


class Answer(Protocol):
    """An answer that has begun."""

    status: int
    headers: Headers

    def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises OSError or aiohttp.ClientError if it is cut."""
        ...


class Upstream(Protocol):
    """Who answers."""

    def ask(
        self, method: str, target: str, headers: Headers, body: bytes | AsyncIterator[bytes] | None
    ) -> AbstractAsyncContextManager[Answer]:
        """Send a request; `target` is path and query. Raises OSError or aiohttp.ClientError if nobody answers."""
        ...


def passed_on(headers: Iterable[tuple[str, str]]) -> Headers:
    """The headers that belong to the message, not to one connection."""
    found = list(headers)
    named = {name.strip().lower() for key, value in found if key.lower() == "connection" for name in value.split(",")}
    return [(key, value) for key, value in found if key.lower() not in _HOP_BY_HOP | named]


def family(path: str, headers: Mapping[str, str]) -> str:
    """Whose API a request speaks, by its path and what clients of that API always send."""
    if "/v1beta/" in path or "x-goog-api-key" in headers:
        return "gemini"
    if "anthropic-version" in headers or "x-api-key" in headers or path.rstrip("/").endswith("/v1/messages"):
        return "anthropic"
    return "openai"


def secrets(target: str, headers: Iterable[tuple[str, str]], upstream: Upstream | None = None) -> list[bytes]:
    """The credentials that a request carries, and those that are filled in on its way, to be kept out of everything that is
    written."""
    found = [value.split()[-1] for key, value in headers if key.lower() in CREDENTIALS and value.strip()]
    found += [value for key, value in parse_qsl(target.partition("?")[2]) if key in ("key", "api_key")]
    if isinstance(upstream, Real):
        found += upstream.keys
    return [value.encode(errors="surrogateescape") for value in dict.fromkeys(found) if value != PLACEHOLDER]


def reason(error: BaseException) -> str:
    """A failure in words, without addresses: that of a proxy may have a login in it."""
    if isinstance(error, aiohttp.ClientResponseError):
        return f"{type(error).__name__}, status {error.status}"
    if isinstance(error, aiohttp.InvalidURL):
        return "the address is none"
    return str(error) or type(error).__name__


class _HttpAnswer:
    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.status = response.status
        self.headers = list(response.headers.items())
        self._response = response

    async def chunks(self) -> AsyncIterator[bytes]:
        async for data in self._response.content.iter_any():
            yield data


class Real:
    """A model behind HTTP."""

    def __init__(self, session: aiohttp.ClientSession, base: str = "", keys: Mapping[str, str] | None = None) -> None:
        """`base` is where requests go (empty: to the API that they speak); `keys` replaces placeholders, by family;
        what is put there later counts."""
        self._session, self._base = session, base.rstrip("/")
        self._keys = {} if keys is None else keys

    @property
    def keys(self) -> Collection[str]:
        """The credentials that it fills in."""
        return self._keys.values()

    @asynccontextmanager
    async def ask(
        self, method: str, target: str, headers: Headers, body: bytes | AsyncIterator[bytes] | None
    ) -> AsyncIterator[Answer]:
        kind = family(target, {key.lower(): value for key, value in headers})
        url = URL((self._base or DEFAULTS[kind]) + self._filled(kind, target), encoded=True)
        sent = [(key, self._filled(kind, value)) for key, value in passed_on(headers)]
        length = bodies.header(headers, "content-length")
        if body is not None and not isinstance(body, bytes) and length.isdigit():
            sent.append(("Content-Length", length))  # some servers take no chunks
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=SILENCE_SECONDS)
        async with self._session.request(
            method,
            url,
            headers=sent,
            data=body,
            timeout=timeout,
            allow_redirects=False,
            skip_auto_headers=_AUTOMATIC,
            proxy=_way_to(url.scheme, url.host or ""),
        ) as response:
            yield _HttpAnswer(response)

    def _filled(self, kind: str, value: str) -> str:
        key = self._keys.get(kind)
        return value.replace(PLACEHOLDER, key) if key and PLACEHOLDER in value else value


_AUTOMATIC = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")


@functools.cache
def _way_to(scheme: str, host: str) -> URL | None:
    """The proxy on the way to a host, by the usual variables of the environment, with the login that stands in them."""
    found = getproxies().get(scheme)
    if not found or proxy_bypass(host):
        return None
    return URL(found if "://" in found else f"http://{found}")


def session() -> aiohttp.ClientSession:
    """What real upstreams send with. Made within the event loop.

    It adds nothing of its own to a request: no cookies, which would be those of another sandbox, and (as `trust_env` would)
    nothing out of the host's ~/.netrc.
    """
    connector = aiohttp.TCPConnector(limit=0, ttl_dns_cache=60)
    return aiohttp.ClientSession(auto_decompress=False, connector=connector, cookie_jar=aiohttp.DummyCookieJar())


class Recorded(Struct, kw_only=True):
    """One line of a file of answers."""

    body: str
    status: int = 200
    content_type: str = "text/event-stream"
    delay: float = 0.0
    """Seconds until the first byte."""


class Ready:
    """One answer that is there already, to whatever is asked."""

    def __init__(self, status: int, headers: Headers, body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    async def chunks(self) -> AsyncIterator[bytes]:
        yield self.body

    @asynccontextmanager
    async def ask(
        self, method: str, target: str, headers: Headers, body: bytes | AsyncIterator[bytes] | None
    ) -> AsyncIterator[Answer]:
        yield self


class Replay:
    """Answers from a file (JSON Lines of `Recorded`), one after the other: for tests and demonstrations without a model.

    Which one is next is told by the number of answers in the request's conversation, so that a restart changes nothing.
    """

    def __init__(self, path: Path) -> None:
        """Raises `InvalidRequest` if the file cannot be read."""
        try:
            lines = path.read_bytes().splitlines()
            self._answers = [msgspec.json.decode(line, type=Recorded) for line in lines if line.strip()]
        except (OSError, msgspec.DecodeError) as error:
            raise InvalidRequest(
                f"the answers in {path} cannot be read: {error}",
                remedy='give a file with one JSON object a line: {"body": …, "content_type": …}',
            ) from error

    @asynccontextmanager
    async def ask(
        self, method: str, target: str, headers: Headers, body: bytes | AsyncIterator[bytes] | None
    ) -> AsyncIterator[Answer]:
        number = _answers_in(headers, body) if isinstance(body, bytes) else 0
        if number < len(self._answers):
            await asyncio.sleep(self._answers[number].delay)
            yield _ready(self._answers[number])
        else:
            text = json.dumps(
                {"error": {"type": "not_found_error", "message": f"no answer number {number} is recorded"}}
            )
            yield _ready(Recorded(body=text, status=404, content_type="application/json"))


def _ready(recorded: Recorded) -> Ready:
    return Ready(recorded.status, [("Content-Type", recorded.content_type)], recorded.body.encode())


def _answers_in(headers: Headers, body: bytes) -> int:
    """How many turns of the model a conversation holds: runs of items that are its own."""
    try:
        asked = json.loads(bodies.decoded(headers, body))
    except (OSError, ValueError):
        return 0
    if not isinstance(asked, dict):
        return 0
    items = asked.get("messages") or asked.get("contents") or asked.get("input") or []
    count, inside = 0, False
    for item in items if isinstance(items, list) else []:
        kind = str(item.get("type", "")) if isinstance(item, dict) else ""
        own = isinstance(item, dict) and (
            item.get("role") in ("assistant", "model") or kind == "reasoning" or kind.endswith("_call")
        )
        count += own and not inside
        inside = own
    return count
