"""Tables on a terminal, with rich. Loaded only when standard output is one."""

from __future__ import annotations

import rich.console
import rich.table
from rich.text import Text

from crab.cli.text import Table, clean


def print_table(table: Table) -> None:
    """Print a table in colour (unless NO_COLOR). Only the last column is wrapped to fit the terminal."""
    console = rich.console.Console(highlight=False)
    if table.rows:
        shown = made(table)
        # a line that is too long is better than ids and numbers broken in two
        width = max(console.width, console.measure(shown, options=console.options.update(width=1000)).minimum)
        console.print(shown, width=width, crop=False, overflow="ignore", no_wrap=True)
    elif table.empty:
        console.print(Text(table.empty))
    for note in table.notes:
        console.print(Text(clean(note), style="yellow"))


def made(table: Table) -> rich.table.Table:
    """The table as rich has it. Cells are no markup: what a sandbox says is not to be obeyed."""
    headed = any(table.columns)
    shown = rich.table.Table(box=None, show_header=headed, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    last = len(table.columns) - 1
    for number, name in enumerate(table.columns):
        justify = "right" if name in table.right else "left"
        if number == last:
            shown.add_column(name, justify=justify, overflow="fold", min_width=min(20, _widest(table, last)))
        else:
            shown.add_column(name, justify=justify, no_wrap=True)
    for row in table.rows:
        shown.add_row(*(Text(clean(cell), style=table.tones.get(cell.partition(" ")[0], "")) for cell in row))
    return shown


def _widest(table: Table, column: int) -> int:
    return max(len(clean(row[column])) for row in (table.columns, *table.rows))
