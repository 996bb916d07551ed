"""JSON that can also name what is no UTF-8: a file, an argument of a process.

Texts with surrogate escapes (PEP 383) keep them, as `\\udcXX`: that is not strict JSON, but Python and JavaScript read it, and
nothing else could name such a file.
"""

from __future__ import annotations

from typing import Any

import msgspec


def encode(value: Any) -> bytes:
    """JSON of a value; bytes are base64."""
    try:
        return msgspec.json.encode(value, enc_hook=str)
    except UnicodeEncodeError:
        import json  # rarely needed, and the command line waits for every import

        return json.dumps(msgspec.to_builtins(value, enc_hook=str)).encode()


def decode(data: bytes, kind: Any) -> Any:
    """Inverse of `encode`. Raises msgspec.DecodeError or ValidationError."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        return msgspec.convert(raw(data), kind, str_keys=True)


def raw(data: bytes) -> Any:
    """What JSON says, without a type. Raises msgspec.DecodeError."""
    import json

    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from None
