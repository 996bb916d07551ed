"""How things look as text: sizes, times, tables. Pure functions.

Names of files and command lines come from inside a sandbox, so they may hold anything, also what moves the cursor of a
terminal: `clean` makes it visible instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Table:
    """Rows of cells. `right` names the columns that are aligned to the right, `empty` is said if there are no rows."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: frozenset[str] = frozenset()
    empty: str = ""
    tones: Mapping[str, str] = field(default_factory=dict[str, str])
    """Colours of cells on a terminal, by the first word in them."""
    notes: tuple[str, ...] = ()
    """Lines below it."""


TONES = {
    "running": "green",
    "paused": "yellow",
    "lost": "red",
    "damaged": "red",
    "proven": "green",
    "failed": "red",
    "ok": "green",
    "degraded": "yellow",
    "missing": "red",
}


def clean(text: str) -> str:
    """The text with everything that is not printable written as an escape (`\\n`, `\\x1b`, `\\u202e`)."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escape(char) for char in text)


def _escape(char: str) -> str:
    code = ord(char)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is no UTF-8 (PEP 383)
        return f"\\x{code - 0xDC00:02x}"
    return char.encode("unicode_escape").decode()


def plain(table: Table) -> str:
    """Aligned columns, two spaces between them, nothing that a terminal would have to understand."""
    if not table.rows:
        return "\n".join(filter(None, (table.empty, *table.notes)))
    rows = [table.columns, *table.rows] if any(table.columns) else list(table.rows)
    cells = [[clean(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(table.columns))]
    lines = []
    for row in cells:
        aligned = [
            cell.rjust(width) if name in table.right else cell.ljust(width)
            for cell, width, name in zip(row, widths, table.columns, strict=True)
        ]
        lines.append("  ".join(aligned).rstrip())
    return "\n".join([*lines, *map(clean, table.notes)])


def without_empty_columns(table: Table, optional: Iterable[str]) -> Table:
    """The table without those of the optional columns that have nothing in them."""
    drop = {
        number
        for number, name in enumerate(table.columns)
        if name in set(optional) and not any(row[number] for row in table.rows)
    }

    def kept(row: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(cell for number, cell in enumerate(row) if number not in drop)

    return Table(kept(table.columns), tuple(map(kept, table.rows)), table.right, table.empty, table.tones, table.notes)


def pairs(values: Mapping[str, str]) -> Table:
    """Names and values below each other; those without a value are left out."""
    return Table(("", ""), tuple((f"{name}:", value) for name, value in values.items() if value))


def size(count: float) -> str:
    """Bytes, short: `0 B`, `3.4 KiB`, `21 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 10 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def milliseconds(value: float) -> str:
    """A duration, short: `8.9 ms`, `52 ms`, `1.20 s`."""
    if value < 10:
        return f"{value:.1f} ms"
    return f"{value:.0f} ms" if value < 1000 else f"{value / 1000:.2f} s"


def ago(then: float, now: float) -> str:
    """How long something is past: `3 s ago`, `2 h ago`."""
    seconds = max(now - then, 0)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def moment(when: float) -> str:
    """A point in time, in the user's zone."""
    import time

    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when)) if when else ""
