"""How things look as text."""

from __future__ import annotations

import io

import pytest
import rich.console

from crab.cli import pretty, text
from crab.cli.text import Table, plain

NASTY = "a\x1b[2Jb\nc\udcffd\u202ee\x7f"


def test_nothing_that_moves_a_cursor_gets_through() -> None:
    assert text.clean(NASTY) == "a\\x1b[2Jb\\nc\\xffd\\u202ee\\x7f"
    assert text.clean("naïve … 日本") == "naïve … 日本"


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (10 * 1024, "10 KiB"),
        (3_500_000, "3.3 MiB"),
        (5 << 30, "5.0 GiB"),
        (3 << 40, "3.0 TiB"),
    ],
)
def test_sizes_are_short(count: int, shown: str) -> None:
    assert text.size(count) == shown


@pytest.mark.parametrize(("value", "shown"), [(0.04, "0.0 ms"), (8.94, "8.9 ms"), (52.4, "52 ms"), (1200, "1.20 s")])
def test_durations_are_short(value: float, shown: str) -> None:
    assert text.milliseconds(value) == shown


@pytest.mark.parametrize(
    ("age", "shown"), [(-5, "0 s ago"), (59, "59 s ago"), (60, "1 min ago"), (7200, "2 h ago"), (200_000, "2 d ago")]
)
def test_ages_are_short(age: float, shown: str) -> None:
    assert text.ago(1000.0, 1000.0 + age) == shown


def test_columns_are_aligned_and_lines_have_no_trailing_blanks() -> None:
    table = Table(("NAME", "N", "WHY"), (("a", "1", ""), ("long", "200", "because")), right=frozenset({"N"}))
    assert plain(table) == "NAME    N  WHY\na       1\nlong  200  because"


def test_an_empty_table_says_what_to_do() -> None:
    assert plain(Table(("A",), (), empty="nothing; make one", notes=("note",))) == "nothing; make one\nnote"


def test_what_a_sandbox_says_cannot_break_a_table() -> None:
    lines = plain(Table(("COMMAND",), ((NASTY,),))).splitlines()
    assert lines == ["COMMAND", text.clean(NASTY)]


def test_columns_that_say_nothing_can_be_left_out() -> None:
    table = Table(("A", "B", "C"), (("1", "", ""), ("2", "", "")), notes=("n",))
    slim = text.without_empty_columns(table, {"B"})
    assert (slim.columns, slim.rows, slim.notes) == (("A", "C"), (("1", ""), ("2", "")), ("n",))


def test_pairs_have_no_header_and_no_empty_values() -> None:
    assert plain(text.pairs({"name": "x", "reason": "", "id": "s1"})) == "name:  x\nid:    s1"


def test_only_the_last_column_is_broken_to_fit_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    pretty.print_table(Table(("ID", "WORDS"), (("c" * 35, "word " * 10), ("d", "short"))))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("c" * 35 + "  word word")
    assert lines[2].startswith(" " * 37 + "word")
    assert max(map(len, lines)) <= 60
    pretty.print_table(Table(("ID", "NUMBER", "ID"), (("c" * 35, "12345678", "e" * 35),)))
    assert f"{'c' * 35}  12345678  {'e' * 20}" in capsys.readouterr().out


def test_a_terminal_gets_colours_but_no_markup_of_others() -> None:
    table = Table(("STATE", "WHAT"), (("failed (why)", "[bold]not bold[/bold]" + NASTY),), tones=text.TONES)
    out = io.StringIO()
    rich.console.Console(file=out, force_terminal=True, width=200, color_system="standard").print(pretty.made(table))
    assert "[bold]not bold[/bold]a\\x1b[2Jb" in out.getvalue()
    assert "\x1b[31mfailed (why)" in out.getvalue()
