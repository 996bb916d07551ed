"""Objects on an S3-compatible service, through obstore. Endpoint and keys come from the usual AWS_… variables.

Knows what the errors of the service mean to a user; obstore retries what is worth it. A write under a condition
(`If-None-Match`) that the service ignores is found by asking for it twice (`Repository.create`).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import obstore
from obstore import exceptions
from obstore.store import S3Store

from crab.errors import CrabError, InvalidRequest, NotFound, StoreRefused, StoreUnavailable
from crab.store.objects import Found

TIMEOUT_VARIABLE = "CRAB_STORE_TIMEOUT"
"""Seconds for one request."""
_TIMEOUT = 60.0
_RETRIES = 5
_PART = 8 << 20
_STATUS = re.compile(r"(?:status(?: code)?:?|Server returned non-2xx status code:) (\d{3})", re.IGNORECASE)
_CUT = re.compile(r"end of file|before message length|decoding response body|unexpected eof|incomplete", re.IGNORECASE)
_SLOW = re.compile(r"timed ?out", re.IGNORECASE)
_UNKNOWN = re.compile(r"NotImplemented|not implemented|status: 501|InvalidArgument.*If-None-Match", re.DOTALL)


class S3Objects:
    """See `crab.store.objects.Objects`."""

    def __init__(self, url: str, timeout: float | None = None, retries: int = _RETRIES) -> None:
        """Raises `InvalidRequest` for a URL or variables that make no sense. Nothing is asked of the service yet."""
        self.url = url.rstrip("/")
        seconds = timeout or _seconds(os.environ.get(TIMEOUT_VARIABLE, "")) or _TIMEOUT
        self._seconds = seconds
        bucket, _, prefix = url.removeprefix("s3://").strip("/").partition("/")
        options: Any = {
            "timeout": timedelta(seconds=seconds),
            "connect_timeout": timedelta(seconds=min(seconds, 10)),
        }
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        if (endpoint or os.environ.get("AWS_ENDPOINT", "")).startswith("http://"):
            options["allow_http"] = True
        retry: Any = {
            "max_retries": retries,
            "retry_timeout": timedelta(seconds=3 * seconds),
            "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=5), "base": 2},
        }
        config: Any = {"endpoint": endpoint} if endpoint else {}
        try:
            self._store = S3Store(
                bucket, prefix=prefix or None, config=config, client_options=options, retry_config=retry
            )
        except Exception as error:
            raise InvalidRequest(
                f"{url} cannot be used: {error}", remedy="check the URL and the AWS_… variables of the daemon"
            ) from error

    def get(self, name: str) -> bytes:
        with self._saying(name):
            return bytes(obstore.get(self._store, name).bytes())

    def get_range(self, name: str, offset: int, size: int) -> bytes:
        if not size:
            return b""
        with self._saying(name):
            return bytes(obstore.get_range(self._store, name, start=offset, length=size))

    def put(self, name: str, data: bytes | bytearray) -> None:
        with self._saying(name):
            obstore.put(self._store, name, bytes(data), use_multipart=len(data) > 4 * _PART, chunk_size=_PART)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        try:
            with self._saying(name):
                obstore.put(self._store, name, data, mode="create")
        except _Exists:
            return False
        return True

    def list(self, prefix: str) -> Iterator[Found]:
        with self._saying(prefix):
            for batch in obstore.list(self._store, prefix.rstrip("/") or None, chunk_size=1000):
                for meta in batch:
                    yield Found(name=meta["path"], size=int(meta["size"]), modified=meta["last_modified"].timestamp())

    def delete(self, name: str) -> None:
        with self._saying(name), contextlib.suppress(exceptions.NotFoundError, FileNotFoundError):
            obstore.delete(self._store, name)

    @contextlib.contextmanager
    def _saying(self, name: str) -> Iterator[None]:
        """What the service says, as an error of Crab."""
        try:
            yield
        except CrabError:
            raise
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
            raise _Exists(name) from error
        except Exception as error:
            raise self._meaning(name, error) from error

    def _meaning(self, name: str, error: Exception) -> CrabError:
        text = re.sub(r"\s+", " ", str(error)).partition(" Debug source: ")[0]
        text = re.sub(r"max_retries: \d+, retry_timeout: \S+ - ", "", text)
        place = f"{self.url}/{name}"
        found = _STATUS.search(text)
        status = int(found[1]) if found else 0
        if "NoSuchBucket" in text:
            return StoreRefused(f"there is no bucket for {self.url}", remedy="make the bucket, or check the URL")
        if isinstance(error, exceptions.NotFoundError | FileNotFoundError):
            return NotFound(f"the store has no {name}", remedy="`crab store check` says what is missing")
        if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError) or status in (
            401,
            403,
        ):
            return StoreRefused(
                f"{place}: the service refuses the credentials or the right to do this ({text[:200]})",
                remedy="check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION of the daemon, and the bucket's policy",
            )
        if _UNKNOWN.search(text) or isinstance(error, exceptions.NotSupportedError):
            return StoreRefused(
                f"{place}: the service does not know conditional writes (If-None-Match), which keep two daemons apart",
                remedy="use a service that does (AWS S3, MinIO, SeaweedFS, R2, …), or a folder",
            )
        if status == 507 or "QuotaExceeded" in text:
            return StoreRefused(f"{place}: the service is full ({text[:200]})", remedy="make room there")
        if _CUT.search(text):
            why = "its answers are cut short"
        elif _SLOW.search(str(error)):
            why = f"it does not answer within {self._seconds:g} s"
        elif status >= 500 or status == 429:
            why = f"it is overloaded or out of order (status {status})"
        elif status:
            return StoreRefused(f"{place}: {text[:300]}", remedy="see what the service says; check the URL")
        else:
            why = "it cannot be reached"
        return StoreUnavailable(
            f"{place}: the service failed, {why} ({text[:200]})",
            remedy=f"try again later; check AWS_ENDPOINT_URL; ${TIMEOUT_VARIABLE} allows more seconds for a request",
        )


class _Exists(CrabError):
    """There is an object of that name."""


def _seconds(text: str) -> float | None:
    try:
        return float(text) if 0 < float(text) < 1e6 else None
    except ValueError:
        return None
