"""The driver of a persistent shell: real bash on a real terminal."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from unit.sandbox.terminal import Terminal, bash_on_a_terminal

from crab.errors import Busy
from crab.model import ShellState
from crab.sandbox import shell as shells
from crab.sandbox.shell import Shell, changes


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[tuple[Shell, Terminal]]:
    shell, made = bash_on_a_terminal(tmp_path)
    yield shell, made
    if shell.idle:
        shell.run("kill -9 $(jobs -p)", 5.0)
    made.kill()
    made.process.wait()


@pytest.fixture
def shell(terminal: tuple[Shell, Terminal]) -> Shell:
    return terminal[0]


def said(shell: Shell, command: str) -> tuple[int, str]:
    result = shell.run(command, 20.0)
    assert not result.timed_out and not result.ended
    return result.exit_code, result.output


# ---------------------------------------------------------------- commands


def test_a_command_ends_with_its_status_and_its_output(shell: Shell) -> None:
    assert said(shell, "echo one; echo two >&2; (exit 7)") == (7, "one\ntwo\n")
    assert said(shell, "printf unfinished") == (0, "unfinished")
    assert said(shell, ":") == (0, "")


def test_the_shell_keeps_its_state(shell: Shell) -> None:
    assert said(shell, "cd /; export A=1; f() { echo f-$A; }; alias g='echo g'") == (0, "")
    assert said(shell, "pwd; f; g; bash -c 'echo $A'") == (0, "/\nf-1\ng\n1\n")


def test_the_exit_status_of_one_command_is_known_to_the_next(shell: Shell) -> None:
    said(shell, "(exit 3)")
    assert said(shell, "echo $? $PIPESTATUS") == (0, "3 3\n")
    assert said(shell, "echo $?") == (0, "0\n")


@pytest.mark.parametrize(
    ("command", "code", "output"),
    [
        ("cat <<'X'\na\tb\n$x `y` \\ \"\n'\n!!\nX", 0, "a\tb\n$x `y` \\ \"\n'\n!!\n"),
        ("echo a # comment", 0, "a\n"),
        ("for x in 1 2\ndo\n  echo $x\ndone", 0, "1\n2\n"),
        ("echo 'ü🦀'", 0, "ü🦀\n"),
        ("echo hi!; echo !x", 0, "hi!\n!x\n"),
        ("echo ''\\''", 1, None),  # an open quote
        ("echo )", 1, None),
        ("if true; then", 1, None),
        ("cat <<X\nnever ended", 0, None),
        ("echo crab-end-; echo crab-begin-", 0, "crab-end-\ncrab-begin-\n"),
        ("echo " + "x" * 20_000, 0, "x" * 20_000 + "\n"),
        ("set -x; echo a; set +x", 0, None),
        ("printf '\\377\\n'", 0, "\\xff\n"),
    ],
)
def test_no_command_keeps_its_end_from_being_seen(shell: Shell, command: str, code: int, output: str | None) -> None:
    found = said(shell, command)
    assert (found[0] == 0) == (code == 0)
    assert output is None or found[1] == output
    assert said(shell, "echo still here") == (0, "still here\n")


def test_a_shell_whose_output_was_redirected_still_tells_the_end(shell: Shell, tmp_path: Path) -> None:
    assert said(shell, "exec >log 2>&1") == (0, "")
    assert said(shell, "echo hidden; (exit 4)") == (4, "")
    assert "hidden\n" in (tmp_path / "log").read_text()


def test_background_jobs_are_not_waited_for(shell: Shell) -> None:
    begin = time.monotonic()
    assert said(shell, "sleep 60 &")[0] == 0
    assert "Running" in said(shell, "jobs")[1]
    assert time.monotonic() - begin < 10


def test_a_prompt_that_was_changed_matters_nothing(shell: Shell) -> None:
    said(shell, "PS1='crab-end-$? '; PROMPT_COMMAND='echo noise'")
    assert said(shell, "echo a; (exit 2)") == (2, "a\n")


def test_an_error_trap_hears_of_no_status_twice(shell: Shell) -> None:
    said(shell, "trap 'echo trapped' ERR; (exit 3) || :")
    said(shell, "! true")  # a status that is no error
    assert said(shell, "echo $?") == (0, "1\n")


def test_the_history_holds_nothing_of_what_is_typed(shell: Shell) -> None:
    said(shell, "echo a")
    shell.state()
    assert said(shell, "history; fc -l 2>&1")[1].count("crab") == 0


def test_a_command_that_does_not_end_is_interrupted_and_the_shell_lives_on(shell: Shell) -> None:
    result = shell.run("echo a; sleep 60", 0.5)
    assert (result.exit_code, result.timed_out, result.ended) == (124, True, False)
    assert result.output.startswith("a\n")
    assert said(shell, "echo $?") == (0, "130\n")


def test_a_command_that_cannot_be_interrupted_costs_the_shell(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shells, "PATIENCE", 0.5)
    result = shell.run("trap '' INT; while :; do sleep 0.1; done", 0.3)
    assert (result.exit_code, result.timed_out, result.ended) == (124, True, True)
    assert not shell.alive


def test_a_shell_that_ends_says_so(shell: Shell) -> None:
    result = shell.run("echo bye; exit 5", 20.0)
    assert (result.exit_code, result.ended, result.timed_out) == (5, True, False)
    assert "bye" in result.output
    assert not shell.alive and not shell.idle
    assert shell.state().unknown == "it has ended"


def test_a_second_command_is_refused_and_the_first_can_be_interrupted_from_elsewhere(
    terminal: tuple[Shell, Terminal],
) -> None:
    shell, made = terminal
    results = []
    running = threading.Thread(target=lambda: results.append(shell.run("echo begun; sleep 60")))
    running.start()
    while b"\nbegun" not in made.shown:
        time.sleep(0.01)
    with pytest.raises(Busy, match="a command runs in shell:main"):
        shell.run("echo no")
    assert shell.state().unknown == "a command runs in it"
    shell.interrupt()
    running.join(20)
    assert (results[0].exit_code, results[0].timed_out, results[0].ended) == (130, False, False)
    assert said(shell, "echo again") == (0, "again\n")


def test_a_shell_that_was_found_running_is_busy_until_its_command_has_ended(tmp_path: Path) -> None:
    found, made = bash_on_a_terminal(tmp_path)
    found._is_known = False  # as the driver of another daemon finds it
    try:
        made.write(b"sleep 1\n")
        while found.idle:
            time.sleep(0.01)
        assert found.state().unknown == "a command runs in it"
        with pytest.raises(Busy):
            found.run("echo no")
        while not found.idle:
            time.sleep(0.01)
        assert said(found, "echo yes") == (0, "yes\n")
    finally:
        made.kill()
        made.process.wait()


# ---------------------------------------------------------------- state: what is kept, what is asked


def test_a_state_is_asked_for_once_for_each_command(terminal: tuple[Shell, Terminal]) -> None:
    shell, made = terminal
    first = shell.state()
    asked = made.shown.count(b"crab-answer-")
    assert shell.state() is first
    assert made.shown.count(b"crab-answer-") == asked
    assert shell.state(stale=True) == first
    assert made.shown.count(b"crab-answer-") > asked
    said(shell, "x=1")
    assert changes(first, shell.state()) == ["variable:x"]


def test_a_state_that_does_not_come_in_time_is_unknown(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shells, "ANSWER_PATIENCE", 0.0)
    assert shell.state() == ShellState(unknown="it did not answer")
    assert shell.state() == ShellState(unknown="it did not answer")  # nor is it asked again
    monkeypatch.undo()
    while not shell.idle:
        time.sleep(0.01)
    assert said(shell, "echo goes on") == (0, "goes on\n")
    assert shell.state().digest


def test_what_changed_is_told_by_the_digest_of_before(shell: Shell) -> None:
    before = shell.digest()
    assert before is not None and shell.changed_since(before) == ""
    said(shell, "x=1; f() { :; }")
    assert shell.digest() != before
    assert shell.changed_since(before) == "function:f, variable:x"
    assert shell.changed_since("of long ago") == ""
    said(shell, "set -v")
    assert shell.digest() is None


def test_unknown_differs_from_everything() -> None:
    known, unknown = ShellState(digest="a", parts={"cwd": "1"}), ShellState(unknown="busy")
    assert changes(unknown, unknown) == changes(known, unknown) == ["unknown: busy"]
    assert changes(known, known) == []
    assert changes(known, ShellState(digest="b", parts={"cwd": "2", "jobs": "3"})) == ["cwd", "jobs"]
    assert changes(known, ShellState(digest="b", parts={"cwd": "1"})) == ["something"]
