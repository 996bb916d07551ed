"""Users of a sandbox: from a name as the caller gives it to the numbers that a process gets.

Reads the sandbox's own /etc/passwd and /etc/group as text: the host's name service knows nothing of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from crab.errors import ExecFailed


@dataclass(frozen=True)
class Identity:
    """User, group and further groups of a process, and what its environment says of them."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    name: str
    home: str
    shell: str


ROOT = Identity(0, 0, (), "root", "/root", "/bin/sh")


def resolve(user: str, passwd: str, group: str) -> Identity:
    """The identity of `name`, `number`, `name:group` or `number:number`. Raises `ExecFailed` for an unknown name."""
    wanted, _, wanted_group = user.partition(":")
    found: Identity | None = None
    names: list[str] = []
    for fields in _rows(passwd, 7):
        names.append(fields[0])
        if fields[0] == wanted or fields[2] == wanted:
            found = Identity(int(fields[2]), int(fields[3]), (), fields[0], fields[5] or "/", fields[6] or "/bin/sh")
            break
    if found is None and wanted in ("", "0", "root"):
        found = ROOT
    if found is None and wanted.isdigit():
        found = Identity(int(wanted), int(wanted), (), wanted, "/", "/bin/sh")
    if found is None:
        raise ExecFailed(
            f"no user {wanted!r} in the sandbox", remedy=f"use a number, or one of: {', '.join(names[:20])}"
        )
    groups = [int(row[2]) for row in _rows(group, 4) if found.name in row[3].split(",")]
    gid = found.gid
    if wanted_group:
        numbers = [int(row[2]) for row in _rows(group, 4) if row[0] == wanted_group]
        if not numbers and not wanted_group.isdigit():
            raise ExecFailed(f"no group {wanted_group!r} in the sandbox", remedy="use the number of a group")
        gid = numbers[0] if numbers else int(wanted_group)
    return Identity(found.uid, gid, tuple(sorted({gid, *groups})), found.name, found.home, found.shell)


def _rows(text: str, count: int) -> list[list[str]]:
    rows = [line.split(":") for line in text.splitlines()]
    return [row for row in rows if len(row) >= count and row[2].isdigit() and (count < 7 or row[3].isdigit())]
