"""Credentials are taken out of what is stored, and headers are let through by name.

Knows the literal credentials that it is given, as they stand in plain text and in JSON strings. It does not find what is
encoded in another way (base64, gzip) or spread over several events of a stream.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence

MARK = b"[redacted]"
SHORTEST = 8
"""What is shorter is no credential but a placeholder (`test`, `dummy`), and would be found in every other sentence."""

_HEADERS = re.compile(r"content-type|(x-)?request-id.*")


def kept_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Those of an answer's headers that may be stored: no `Set-Cookie`, nothing that is not known to be harmless."""
    return {name.lower(): value for name, value in headers.items() if _HEADERS.fullmatch(name.lower())}


class Redactor:
    """Takes the credentials that it was made for out of anything."""

    def __init__(self, secrets: Sequence[bytes]) -> None:
        # of a whole header (`Bearer KEY`) each word too: the key is said without the scheme elsewhere
        words = {word for secret in secrets for word in (secret.strip(), *secret.split()) if len(word) >= SHORTEST}
        forms = {form for word in words for form in _forms(word)}
        ordered = sorted(forms, key=len, reverse=True)  # one may begin with another
        self._pattern = re.compile(b"|".join(map(re.escape, ordered))) if ordered else None

    def replaced(self, data: bytes) -> tuple[bytes, bool]:
        """The data with `[redacted]` for each credential, and whether there was one."""
        if not self._pattern:
            return data, False
        clean, found = self._pattern.subn(MARK, data)
        return (clean, True) if found else (data, False)

    def masked(self, data: bytes) -> tuple[bytes, bool]:
        """The same, and nothing changes its length: encodings that say how long a string is stay whole."""
        if not self._pattern:
            return data, False
        clean, found = self._pattern.subn(lambda match: MARK[: len(match[0])].ljust(len(match[0]), b"*"), data)
        return (clean, True) if found else (data, False)

    def text(self, text: str) -> str:
        """The same for text; what is no UTF-8 becomes a question mark (SQLite takes nothing else)."""
        return self.replaced(text.encode(errors="replace"))[0].decode(errors="replace")


def _forms(word: bytes) -> Iterator[bytes]:
    """How a credential may be written: as it is, and in a string of JSON as the usual encoders write it."""
    text = word.decode(errors="surrogateescape")
    for ascii_only in (False, True):
        form = json.dumps(text, ensure_ascii=ascii_only)[1:-1].encode(errors="surrogateescape")
        yield from (form, form.replace(b"/", rb"\/"))
    yield word
