"""Bodies of messages: how they are encoded. What is passed on is never changed; this is for reading along."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from crab.host.zstd import zstd

if TYPE_CHECKING:  # upstreams need this module
    from crab.turns.upstream import Headers

LARGEST = 256 << 20
"""Bytes of a request that is read: twice the largest that any of the APIs takes. More is passed through, and is no turn."""


def header(headers: Iterable[tuple[str, str]], name: str) -> str:
    """The first header of that name (in small letters); empty if there is none."""
    return next((value for key, value in headers if key.lower() == name), "")


def unencoded(headers: Headers) -> Headers:
    """The same request, for an answer that can be read along."""
    return [
        *((key, value) for key, value in headers if key.lower() != "accept-encoding"),
        ("Accept-Encoding", "identity"),
    ]


def decoder(headers: Headers) -> Callable[[bytes], bytes] | None:
    """What decodes a body, and raises ValueError if it is damaged; None if it is plain. Raises OSError for an encoding that
    cannot be read."""
    encoding = header(headers, "content-encoding").strip().lower()
    if encoding in ("", "identity"):
        return None
    if encoding in ("gzip", "x-gzip", "deflate"):
        return _inflate
    if encoding == "zstd":
        return _unzstd
    raise OSError(f"the body is encoded as {encoding}, which cannot be read")


def decoded(headers: Headers, body: bytes) -> bytes:
    """A request's body as it was meant. Raises OSError or ValueError if it cannot be read."""
    decode = decoder(headers)
    return body if decode is None else decode(body)


def _inflate(body: bytes) -> bytes:
    """gzip (any number of members, one after the other) or zlib, whichever it is. Raises ValueError."""
    pieces: list[bytes] = []
    left = LARGEST
    while body:
        reader = zlib.decompressobj(zlib.MAX_WBITS | 32)
        try:
            pieces.append(reader.decompress(body, left + 1))
        except zlib.error as error:
            raise ValueError(f"the body is damaged: {error}") from error
        left -= len(pieces[-1])
        if left < 0:
            raise ValueError(f"the body has more than {LARGEST} bytes")
        if not reader.eof:
            raise ValueError("the body is cut")
        body = reader.unused_data
    return b"".join(pieces)


def _unzstd(body: bytes) -> bytes:
    module = zstd()
    try:
        reader = module.ZstdDecompressor()
        plain = reader.decompress(body, LARGEST)
    except module.ZstdError as error:
        raise ValueError(f"the body is damaged: {error}") from error
    if not reader.eof:
        raise ValueError(f"the body is cut, or has more than {LARGEST} bytes")
    return plain
