"""The form of packs and documents: what was written once is read for ever, and nothing else is."""

from __future__ import annotations

import contextlib

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from crab.errors import Damaged, Incompatible, WrongKey
from crab.store import documents, packs
from crab.store.packs import DATA, NODE, Blob
from crab.store.sealing import Keyed, Plain

PLAIN, KEYED = Plain(), Keyed(b"k" * 32)
SEALINGS = pytest.mark.parametrize("sealing", [PLAIN, KEYED], ids=["plain", "keyed"])
blobs = st.lists(st.tuples(st.sampled_from([DATA, NODE]), st.binary(max_size=5000)), max_size=20)


class Fixed(Plain):
    """Salts that are known."""

    def salt(self) -> bytes:
        return bytes(range(32))


class FixedKeyed(Keyed):
    def salt(self) -> bytes:
        return bytes(range(32))


def of(sealing: Plain | Keyed, *contents: bytes) -> list[Blob]:
    return [Blob(sealing.identify(content), DATA, content) for content in contents]


# ---------------------------------------------------------------- version 1, byte by byte

# One blob of 3 bytes that zstd cannot make smaller, so no version of zstd changes what is here but the list.
PACK = bytes.fromhex("435241425041434b0100000000000000" + bytes(range(32)).hex() + "00616263")
ENTRY = bytes.fromhex("6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85000400000003000000")


def test_a_pack_of_version_1_is_what_it_always_was() -> None:
    pack, data = packs.build(Fixed(), of(PLAIN, b"abc"), 1)
    assert data[: len(PACK)] == PACK
    assert pack.entries == ENTRY
    assert data.endswith(b"CRABEND\n")
    length = int.from_bytes(data[-44:-40], "little")
    listed = data[-44 - length : -44]
    assert documents.unpack(listed, 1000) == ENTRY
    assert data[-40:-8] == blake3(listed).digest()
    assert len(PACK) + length + 44 == len(data)
    assert pack.id == blake3(data).digest()
    assert pack.name == f"packs/{pack.id.hex()[:2]}/{pack.id.hex()}"


def test_a_sealed_blob_of_version_1_is_what_it_always_was() -> None:
    """AES-256-GCM with a key of HKDF-SHA256: a reader of another make must get the same."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    def derived(key: bytes, salt: bytes | None, purpose: bytes) -> bytes:
        return HKDF(algorithm=SHA256(), length=32, salt=salt, info=purpose).derive(key)

    names = derived(b"k" * 32, None, b"crab store 1: names")
    key = derived(derived(b"k" * 32, None, b"crab store 1: objects"), bytes(range(32)), b"crab store 1: object")
    identity = blake3(b"abc", key=names).digest()
    _, data = packs.build(FixedKeyed(b"k" * 32), of(KEYED, b"abc"), 1)
    assert data[:48] == b"CRABPACK\x01\x01" + bytes(6) + bytes(range(32))
    assert AESGCM(key).decrypt(bytes(12), data[48:68], identity) == b"\0abc"


def test_a_document_of_version_1_is_what_it_always_was() -> None:
    data = documents.encode(Fixed(), "index/x", [1, 2])
    assert data[:42] == b"CRABDOC\n\x01\x00" + bytes(range(32))
    assert data[42:74] == blake3(b"index/x\0" + data[:42] + data[74:]).digest()
    assert documents.unpack(data[74:], 100) == bytes.fromhex("920102")


# ---------------------------------------------------------------- there and back


@SEALINGS
@given(contents=blobs)
@settings(max_examples=60, deadline=None)
def test_what_goes_into_a_pack_comes_out_of_it(sealing: Plain | Keyed, contents: list[tuple[int, bytes]]) -> None:
    given_ = [Blob(sealing.identify(content), kind, content) for kind, content in contents]
    pack, data = packs.build(sealing, given_, 1)
    found = packs.read_list(sealing, pack.id, data)
    assert (found.entries, found.salt, found.size) == (pack.entries, pack.salt, len(data))
    assert [(identity, kind) for identity, kind, _, _ in found.list()] == [(one.id, one.kind) for one in given_]
    for number, blob in enumerate(given_):
        offset, length = found.place(number)
        assert packs.opened(sealing, found, number, data[offset : offset + length]) == blob.data


@SEALINGS
@given(place=st.integers(0, 10**6), bit=st.integers(0, 7))
@settings(max_examples=150, deadline=None)
def test_a_flipped_bit_is_found(sealing: Plain | Keyed, place: int, bit: int) -> None:
    contents = of(sealing, b"a" * 3000, bytes(range(256)) * 4, b"")
    pack, data = packs.build(sealing, contents, 1)
    damaged = bytearray(data)
    damaged[place % len(data)] ^= 1 << bit
    with pytest.raises(Damaged):
        packs.read_list(sealing, pack.id, bytes(damaged))
    for number, blob in enumerate(contents):
        offset, length = pack.place(number)
        with contextlib.suppress(Damaged):
            assert packs.opened(sealing, pack, number, bytes(damaged[offset : offset + length])) == blob.data


@SEALINGS
@given(place=st.integers(0, 10**6), bit=st.integers(0, 7))
@settings(max_examples=100, deadline=None)
def test_a_flipped_bit_of_a_document_is_found(sealing: Plain | Keyed, place: int, bit: int) -> None:
    data = bytearray(documents.encode(sealing, "index/x", ["text"] * 20))
    data[place % len(data)] ^= 1 << bit
    with pytest.raises((Damaged, Incompatible, WrongKey)):
        documents.decode(sealing, "index/x", bytes(data), list[str])


@given(st.binary(max_size=400))
@settings(max_examples=200, deadline=None)
def test_other_bytes_are_refused(data: bytes) -> None:
    for made in (data, documents.MAGIC + data, documents.MAGIC + b"\1\0" + data, packs.MAGIC + b"\1\0" + data):
        with pytest.raises((Damaged, Incompatible, WrongKey)):
            documents.decode(PLAIN, "index/x", made, list[str])
        with pytest.raises((Damaged, Incompatible, WrongKey)):
            packs.read_list(PLAIN, blake3(made).digest(), made)


def test_a_document_cannot_stand_in_for_another() -> None:
    for sealing in (PLAIN, KEYED):
        data = documents.encode(sealing, "checkpoints/a", [1])
        with pytest.raises(Damaged):
            documents.decode(sealing, "checkpoints/b", data, list[int])


def test_a_blob_cannot_stand_in_for_another() -> None:
    for sealing in (PLAIN, KEYED):
        pack, data = packs.build(sealing, of(sealing, b"abc", b"abd"), 1)
        (first, length), (second, _) = pack.place(0), pack.place(1)
        with pytest.raises(Damaged):
            packs.opened(sealing, pack, 1, data[first : first + length])
        with pytest.raises(Damaged):
            packs.opened(sealing, pack, 0, data[second : second + length])


def test_nothing_is_sealed_twice_alike() -> None:
    """Equal contents in two packs: neither ciphertexts nor names of packs say so, and without a key no two packs are one."""
    one, two = (packs.build(KEYED, of(KEYED, b"abc" * 100), 1) for _ in range(2))
    assert one[1][48:100] != two[1][48:100]
    plain = [packs.build(PLAIN, of(PLAIN, b"abc"), 1)[0].id for _ in range(2)]
    assert plain[0] != plain[1]


def test_names_do_not_tell_what_is_named() -> None:
    assert KEYED.identify(b"abc") != PLAIN.identify(b"abc")
    assert KEYED.identify(b"abc") != Keyed(b"l" * 32).identify(b"abc")
    assert KEYED.identify(b"abc") == Keyed(b"k" * 32).identify(b"abc")


def test_a_newer_version_is_refused_as_one() -> None:
    data = bytearray(documents.encode(PLAIN, "index/x", [1]))
    data[8] = 2
    with pytest.raises(Incompatible, match="version 2"):
        documents.decode(PLAIN, "index/x", bytes(data), list[int])
    _, built = packs.build(PLAIN, of(PLAIN, b"abc"), 1)
    newer = bytearray(built)
    newer[8] = 9
    with pytest.raises(Incompatible, match="version 9"):
        packs.read_list(PLAIN, blake3(bytes(newer)).digest(), bytes(newer))


def test_a_small_object_does_not_unpack_to_the_whole_memory() -> None:
    from crab.host.zstd import zstd

    with pytest.raises(ValueError, match="length"):
        documents.unpack(zstd().compress(bytes(1 << 24)), 1 << 20)


def test_a_node_is_its_links_and_its_content() -> None:
    links = [bytes([number]) * 32 for number in range(3)]
    assert packs.split(packs.node(links, b"x")) == (links, b"x")
    for cut in (b"", b"\1", packs.node(links, b"")[:-1]):
        with pytest.raises(Damaged):
            packs.split(cut)
