"""Object storage, as far as the store needs it: bytes under names. The contract, and which backend a URL means.

Names are ASCII, parts separated by slashes. An object appears whole or not at all, and is never changed: whatever is written
has a name of its own, so no backend has to offer more than that. The clock that counts is the service's.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from crab.errors import HostUnsuitable, InvalidRequest
from crab.model import Struct

VARIABLE = "CRAB_STORE"
EXTRA = "`pip install 'crab-runtime[store]'`"


class Found(Struct, kw_only=True):
    """One object of a listing."""

    name: str
    size: int
    modified: float
    """When it was written, by the service's clock."""


class Objects(Protocol):
    """Raises everywhere `StoreUnavailable` (try again later) and `StoreRefused` (try something else); `NoSpace`."""

    url: str

    def get(self, name: str) -> bytes:
        """The whole object. Raises `NotFound`."""
        ...

    def get_range(self, name: str, offset: int, size: int) -> bytes:
        """That part of it; shorter only if the object is. Raises `NotFound`."""
        ...

    def put(self, name: str, data: bytes | bytearray) -> None:
        """Write an object whose name nobody else uses. It would survive a crash of the service's host on return."""
        ...

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """The same, unless there is one of that name: then nothing is written. Whether it was."""
        ...

    def list(self, prefix: str) -> Iterator[Found]:
        """All objects whose names begin with `prefix`, which ends with a slash or is empty."""
        ...

    def delete(self, name: str) -> None:
        """Remove an object, if it is there."""
        ...


def objects_at(url: str) -> Objects:
    """The storage that a URL names: `s3://BUCKET[/PREFIX]`, `file:///FOLDER`, or an absolute path."""
    scheme, separator, rest = url.partition("://")
    if separator and scheme == "s3":
        if not rest.strip("/"):
            raise InvalidRequest(f"{url} names no bucket", remedy="write s3://BUCKET/PREFIX")
        try:
            from crab.store.s3 import S3Objects
        except ImportError as error:
            raise HostUnsuitable(f"a store on S3 needs obstore ({error})", remedy=EXTRA) from error
        return S3Objects(url)
    path = rest if separator and scheme == "file" else url
    if (separator and scheme != "file") or not os.path.isabs(path):
        raise InvalidRequest(
            f"{url or 'nothing'} is no place of a store",
            remedy=f"give s3://BUCKET/PREFIX, file:///FOLDER or an absolute path, with --store or in ${VARIABLE}",
        )
    from crab.store.folder import FolderObjects

    return FolderObjects(Path(path))


def service_time(objects: Objects) -> float:
    """What the service's clock says now: clocks of hosts differ, and are set."""
    name = f"clock/{secrets.token_hex(8)}"
    objects.put(name, b"now")
    try:
        return next(found.modified for found in objects.list("clock/") if found.name == name)
    finally:
        objects.delete(name)
