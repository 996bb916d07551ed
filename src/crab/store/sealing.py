"""How bytes of a store are named and kept secret. Without a key they are named by BLAKE3 and stored as they are.

With a key everything but the plan of the store (crab-store.json) is encrypted with AES-256-GCM. Each object has a random salt
of 256 bits, from which HKDF makes a key of its own; the parts of an object count their nonces up from 0. So no pair of key and
nonce is ever used twice, however much is written, and a part is bound to its object, its number and its name.
Digests are keyed: equal contents have equal names within a store, but nobody without the key can tell which.

Knows nothing of packs.
"""

from __future__ import annotations

import hashlib
import secrets
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from blake3 import blake3

from crab.errors import Damaged, HostUnsuitable, InvalidRequest, NotFound, WrongKey
from crab.model import Struct
from crab.store.objects import EXTRA

SALT = 32
_LEAST = 16
"""Bytes of a key file."""
_MOST = 1 << 16
_MEMORY = 256 << 20
_CHECK = b"crab store key check 1"


class Sealing(Protocol):
    """What is done to bytes on their way to the store and back."""

    encrypted: bool

    def identify(self, data: bytes) -> bytes:
        """The 32 bytes that a content is named by."""
        ...

    def salt(self) -> bytes:
        """A salt for a new object."""
        ...

    def seal(self, salt: bytes, number: int, context: bytes, data: bytes) -> bytes:
        """Part `number` of the object with that salt; `context` is what it is."""
        ...

    def open(self, salt: bytes, number: int, context: bytes, data: bytes) -> bytes:
        """Inverse of `seal`. Raises `Damaged`."""
        ...


class Plain:
    """No key."""

    encrypted = False

    def identify(self, data: bytes) -> bytes:
        return blake3(data).digest()

    def salt(self) -> bytes:
        return secrets.token_bytes(SALT)  # no key needs it, but it makes every object another one (docs/store.md, gc)

    def seal(self, salt: bytes, number: int, context: bytes, data: bytes) -> bytes:
        return data

    def open(self, salt: bytes, number: int, context: bytes, data: bytes) -> bytes:
        return data


class Keyed:
    """A key."""

    encrypted = True

    def __init__(self, master: bytes) -> None:
        self._names = _derived(master, b"", b"crab store 1: names")
        self._master = _derived(master, b"", b"crab store 1: objects")
        self._cipher = lru_cache(64)(self._make)

    def identify(self, data: bytes) -> bytes:
        return blake3(data, key=self._names).digest()

    def salt(self) -> bytes:
        return secrets.token_bytes(SALT)

    def seal(self, salt: bytes, number: int, context: bytes, data: bytes) -> bytes:
        return self._cipher(salt).encrypt(number.to_bytes(12, "little"), data, context)

    def open(self, salt: bytes, number: int, context: bytes, data: bytes) -> bytes:
        from cryptography.exceptions import InvalidTag

        try:
            return self._cipher(salt).decrypt(number.to_bytes(12, "little"), data, context)
        except (InvalidTag, ValueError) as error:
            raise Damaged(
                "bytes of the store are not those that were written", remedy="`crab store check` says what is affected"
            ) from error

    def _make(self, salt: bytes) -> Any:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        return AESGCM(_derived(self._master, salt, b"crab store 1: object"))


class Encryption(Struct, kw_only=True):
    """How a store is encrypted: part of crab-store.json, not secret. Times are those of one look at the key file."""

    cipher: str = "aes-256-gcm"
    kdf: str = "scrypt"
    n: int = 1 << 15
    r: int = 8
    p: int = 1
    salt: str
    """Hexadecimal, as `check`: what says whether a key is the right one."""
    check: str


def key_of(file: Path) -> bytes:
    """The key in a file: all its bytes, without a newline at the end."""
    try:
        with open(file, "rb") as opened:
            key = opened.read(_MOST + 1)
    except FileNotFoundError:
        raise NotFound(f"there is no key file {file}", remedy="give the path of the key on the daemon's host") from None
    except OSError as error:
        raise InvalidRequest(f"the key file {file} cannot be read: {error.strerror}", remedy="check it") from error
    key = key.removesuffix(b"\n")
    if not _LEAST <= len(key) <= _MOST:
        raise InvalidRequest(
            f"the key file {file} has {len(key)} bytes; a key has {_LEAST} to {_MOST}",
            remedy="make one: `head -c 32 /dev/urandom | base64 > FILE`",
        )
    return key


def new_encryption(key: bytes) -> tuple[Encryption, Sealing]:
    """For a new store."""
    draft = Encryption(salt=secrets.token_hex(16), check="")
    master = _master(key, draft)
    made = Encryption(salt=draft.salt, check=_derived(master, b"", _CHECK).hex())
    return made, Keyed(master)


def sealing(encryption: Encryption | None, key: bytes | None, place: str) -> Sealing:
    """What a store is sealed by. Raises `WrongKey`, also if a key is given and the store has none: whoever could replace
    the plan of a store would otherwise get to read what is written from then on."""
    if encryption is None:
        if key is not None:
            raise WrongKey(
                f"the store {place} is not encrypted, and a key is given",
                remedy="leave the key away if that is meant; else somebody has replaced the store",
            )
        return Plain()
    if key is None:
        raise WrongKey(f"the store {place} is encrypted", remedy="give its key file (--key-file or $CRAB_STORE_KEY)")
    master = _master(key, encryption)
    if _derived(master, b"", _CHECK).hex() != encryption.check:
        raise WrongKey(f"the key is not the one of the store {place}", remedy="give the key file that it was made with")
    return Keyed(master)


def _master(key: bytes, how: Encryption) -> bytes:
    fits = how.n * how.r * 128 < _MEMORY and 0 < how.p <= 16
    if (how.cipher, how.kdf) != ("aes-256-gcm", "scrypt") or not fits:
        raise Damaged(
            f"the store is encrypted in a way that this Crab does not know ({how.cipher}, {how.kdf}, {how.n})",
            remedy="upgrade Crab, or put a copy of crab-store.json back",
        )
    try:
        return hashlib.scrypt(
            key, salt=bytes.fromhex(how.salt), n=how.n, r=how.r, p=how.p, maxmem=2 * _MEMORY, dklen=32
        )
    except ValueError as error:
        raise Damaged(
            f"crab-store.json cannot be used: {error}", remedy="put a copy of crab-store.json back"
        ) from error


def _derived(master: bytes, salt: bytes, purpose: bytes) -> bytes:
    try:
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    except ImportError as error:
        raise HostUnsuitable(f"an encrypted store needs cryptography ({error})", remedy=EXTRA) from error
    return HKDF(algorithm=SHA256(), length=32, salt=salt or None, info=purpose).derive(master)
