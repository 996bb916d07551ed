"""References to checkpoints: `SANDBOX@REF`. Pure functions over the list of checkpoints.

REF is `head`, `head~N` (N checkpoints before it on its branch), a turn number (on the branch of the head), a label, or an
id or its beginning. Turn numbers are looked up on the branch that is alive; what was rewound away is still there by label
or id.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from crab.errors import InvalidRequest, NotFound
from crab.model import Checkpoint

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_IDENTITY = re.compile(r"[a-z][0-9a-f]{12}")
LABEL = re.compile(r"[A-Za-z_][A-Za-z0-9._/-]{0,62}")


def split(reference: str) -> tuple[str, str]:
    """`SANDBOX@REF` as its two parts; without `@` the ref is `head`."""
    sandbox, _, ref = reference.partition("@")
    return sandbox, ref or "head"


def branch(checkpoints: Sequence[Checkpoint], head: str | None) -> list[Checkpoint]:
    """The head and its ancestors, newest first."""
    known = {checkpoint.id: checkpoint for checkpoint in checkpoints}
    found: list[Checkpoint] = []
    while head is not None and head in known:
        found.append(known[head])
        head = known[head].parent
    return found


def resolve(ref: str, checkpoints: Sequence[Checkpoint], head: str | None, sandbox: str = "the sandbox") -> Checkpoint:
    """The checkpoint that a reference names. Raises `NotFound`, which says what exists, or `InvalidRequest`."""
    line = branch(checkpoints, head)
    if match := re.fullmatch(r"head(?:~(\d+))?", ref):
        back = int(match.group(1) or 0)
        if back < len(line):
            return line[back]
    elif ref.isdigit() and (found := next((c for c in line if c.turn == int(ref)), None)):
        return found
    else:
        labelled = [c for c in checkpoints if c.label == ref]
        if labelled:
            return labelled[-1]
        begun = [c for c in checkpoints if c.id.startswith(ref)] if len(ref) >= 4 else []
        if len(begun) == 1:
            return begun[0]
        if len(begun) > 1:
            raise InvalidRequest(f"{ref!r} is the beginning of {len(begun)} ids", remedy="give more of the id")
    turns = ", ".join(str(c.turn) for c in reversed(line[:30])) or "none"
    labels = ", ".join(sorted({c.label for c in checkpoints if c.label})) or "none"
    raise NotFound(
        f"{sandbox} has no checkpoint {ref!r}",
        remedy=f"turns: {turns}; labels: {labels}; `crab turns {sandbox}` --all` lists the rest",
    )


def check_name(name: str) -> str:
    """The name, if a sandbox may have it. Raises `InvalidRequest`."""
    if not NAME.fullmatch(name):
        raise InvalidRequest(
            f"{name!r} is not a name",
            remedy="use a-z, 0-9, '.', '_' and '-', at most 63, beginning with a letter or number",
        )
    if name == "head" or _IDENTITY.fullmatch(name):
        raise InvalidRequest(
            f"a sandbox cannot be called {name!r}: it reads as {'a checkpoint' if name == 'head' else 'an id'}",
            remedy="choose another name",
        )
    return name


def check_label(label: str) -> str:
    """The label, if a checkpoint may have it: nothing that reads as a turn, an id or `head`. Raises `InvalidRequest`."""
    if label and (not LABEL.fullmatch(label) or label.startswith("head") or _IDENTITY.fullmatch(label)):
        raise InvalidRequest(
            f"{label!r} is not a label",
            remedy="begin with a letter; letters, numbers, '.', '_', '/', '-', at most 63; not 'head…' nor an id",
        )
    return label
