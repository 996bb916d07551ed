"""Bodies: read along in every encoding, never beyond what any API takes."""

from __future__ import annotations

import gzip
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crab.host.zstd import zstd
from crab.turns import bodies

PACK = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
    "zstd": lambda data: zstd().compress(data),
    "": bytes,
    "identity": bytes,
}


@pytest.mark.parametrize("encoding", list(PACK))
def test_a_body_is_read_as_it_was_meant(encoding: str) -> None:
    for data in (b"", b"x", b"abc" * 100_000):
        assert bodies.decoded([("content-ENCODING", encoding.upper())], PACK[encoding](data)) == data


@given(st.lists(st.binary(max_size=50), min_size=1, max_size=4))
def test_members_of_gzip_one_after_the_other_are_one_body(parts: list[bytes]) -> None:
    packed = b"".join(map(gzip.compress, parts))
    assert bodies.decoded([("Content-Encoding", "gzip")], packed) == b"".join(parts)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd"])
@given(at=st.integers(1, 60), flip=st.integers(1, 255))
def test_a_damaged_or_cut_body_is_a_value_error_or_still_right(encoding: str, at: int, flip: int) -> None:
    data = b"a body that is long enough to be cut, and to be damaged " * 3
    packed = PACK[encoding](data)
    headers = [("Content-Encoding", encoding)]
    with pytest.raises(ValueError):
        bodies.decoded(headers, packed[: len(packed) - min(at, len(packed) - 1)])
    damaged = bytearray(packed)
    damaged[at % len(packed)] ^= flip
    try:
        bodies.decoded(headers, bytes(damaged))
    except ValueError:
        pass


def test_an_encoding_that_nobody_knows_is_said() -> None:
    for encoding in ("br", "gzip, gzip", "compress"):
        with pytest.raises(OSError, match=encoding):
            bodies.decoded([("Content-Encoding", encoding)], b"")


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd"])
def test_a_bomb_is_refused(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "LARGEST", 1000)
    headers = [("Content-Encoding", encoding)]
    assert bodies.decoded(headers, PACK[encoding](bytes(1000))) == bytes(1000)
    for size in (1001, 10_000_000):
        with pytest.raises(ValueError):
            bodies.decoded(headers, PACK[encoding](bytes(size)))
    if encoding == "gzip":
        with pytest.raises(ValueError):
            bodies.decoded(headers, gzip.compress(bytes(600)) * 2)


def test_a_request_asks_for_no_encoding_and_is_otherwise_the_same() -> None:
    headers = [("X-A", "1"), ("accept-encoding", "gzip"), ("Accept-Encoding", "br"), ("X-A", "2")]
    assert bodies.unencoded(headers) == [("X-A", "1"), ("X-A", "2"), ("Accept-Encoding", "identity")]
