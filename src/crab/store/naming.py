"""Which checkpoint of a store a text names: an id or its beginning, or NAME[@REF]. A pure function over what is there."""

from __future__ import annotations

from collections.abc import Sequence

from crab.errors import InvalidRequest, NotFound
from crab.model import StoredCheckpoint


def chosen(text: str, everything: Sequence[StoredCheckpoint]) -> StoredCheckpoint:
    """The checkpoint. NAME is that of a sandbox; of several with one name it is the one that was stored last. REF is
    `head` (the newest), a turn, a label, or an id. Raises `NotFound`, which says what exists, or `InvalidRequest`."""
    name, separator, ref = text.partition("@")
    of_name = [one for one in everything if name in (one.sandbox_name, one.sandbox)]
    if not of_name and not separator:
        begun = [one for one in everything if one.id == name or (len(name) >= 4 and one.id.startswith(name))]
        if len(begun) > 1:
            raise InvalidRequest(f"{name!r} is the beginning of {len(begun)} ids", remedy="give more of the id")
        if begun:
            return begun[0]
    if not of_name:
        names = ", ".join(sorted({one.sandbox_name for one in everything})[:20]) or "none"
        raise NotFound(f"the store has no checkpoint {text!r}", remedy=f"sandboxes in the store: {names}")
    newest = max(of_name, key=lambda one: one.stored)
    line = sorted((one for one in of_name if one.sandbox == newest.sandbox), key=lambda one: (one.created, one.turn))
    if ref in ("", "head"):
        return line[-1]
    for one in reversed(line):
        if (ref.isdigit() and one.turn == int(ref)) or one.label == ref or (len(ref) >= 4 and one.id.startswith(ref)):
            return one
    turns = ", ".join(str(one.turn) for one in line[-30:])
    labels = ", ".join(sorted({one.label for one in line if one.label})) or "none"
    raise NotFound(f"{name} has no checkpoint {ref!r} in the store", remedy=f"turns: {turns}; labels: {labels}")
