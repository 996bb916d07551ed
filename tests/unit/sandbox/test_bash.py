"""What bash is asked and what it answers: real bash on a real terminal."""

from __future__ import annotations

import itertools
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from unit.sandbox.terminal import Terminal, bash_on_a_terminal

from crab.model import ShellState
from crab.sandbox.bash import BASH, VOLATILE, hindrance, parts_of, quoted
from crab.sandbox.shell import Shell, changes

NONCE = "0123456789abcdef"


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[tuple[Shell, Terminal]]:
    shell, made = bash_on_a_terminal(tmp_path)
    yield shell, made
    made.kill()
    made.process.wait()


@pytest.fixture
def shell(terminal: tuple[Shell, Terminal]) -> Shell:
    return terminal[0]


def known(shell: Shell) -> ShellState:
    state = shell.state(stale=True)
    assert not state.unknown, state.unknown
    return state


def run(shell: Shell, command: str) -> str:
    result = shell.run(command, 20.0)
    assert not result.timed_out and not result.ended, result
    return result.output


# ---------------------------------------------------------------- text


# control characters, quotes, newlines, and text that looks like the marks
awkward = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]) | st.sampled_from("\n\t'\"\\!$`\x03\x04\x1b\x7f"),
    max_size=3000,
)


@settings(max_examples=60, deadline=None)
@given(awkward)
def test_quoted_text_is_that_very_text_to_bash(text: str) -> None:
    word = quoted(text)
    assert all(len(line) < 4095 and line.isprintable() and line.isascii() for line in word.split("\n"))
    done = subprocess.run(["bash", "-c", f"printf %s {word}"], capture_output=True, check=True)
    assert done.stdout.decode() == text


@given(st.binary(max_size=200), st.integers(0, 255))
def test_the_end_is_found_behind_any_output(output: bytes, status: int) -> None:
    came = b"$ echo\r\ncrab-begin-%s\r\n%s\r\ncrab-end-%s %d himBHs:ignorespace\r\nbash$ " % (
        NONCE.encode(),
        output,
        NONCE.encode(),
        status,
    )
    found = BASH.ending(came, NONCE)
    assert found is not None
    assert (found.output, found.status) == (output.replace(b"\r\n", b"\n").decode(errors="backslashreplace"), status)
    assert found.hindrance == ""
    for cut in range(came.index(b"crab-end-"), came.index(b"bash$ ") - 1):
        assert BASH.ending(came[:cut], NONCE) is None


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=300))
def test_the_echo_of_what_is_typed_is_never_taken_for_an_answer(command: str) -> None:
    for typed in (BASH.typed(command, NONCE), BASH.mark(NONCE), BASH.question(NONCE)):
        assert BASH.end_word(NONCE) not in typed
        assert BASH.answer_word(NONCE) not in typed


def test_everything_typed_fits_the_lines_of_a_terminal() -> None:
    for typed in (BASH.typed("x" * 9000, NONCE), BASH.mark(NONCE), BASH.question(NONCE)):
        assert max(map(len, typed.split(b"\n"))) < 4095
        assert typed.endswith(b"\n")


def test_a_text_is_cut_into_parts_by_name() -> None:
    empty = dict.fromkeys(
        ("jobs", "dirs", "cwd", "umask", "completion", "hash", "positional", "status", "last-job"), b""
    )
    parts = parts_of(
        empty
        | {
            "variable": b'declare -- A="1"\ndeclare -x PATH="/bin"\ndeclare -r SHELLOPTS="x"\n',
            "function": b"f () \n{ \n    echo a\n}\ndeclare -fx f\ndeclare () \n{ \n    :\n}\n",
            "alias": b"alias a='1\n2'\nalias -- -b='3'\n",
            "trap": b"trap -- 'echo a\nb' SIGUSR1\n",
            "builtin": b"enable -n test\n",
            "option": b"pipefail::extglob",
        }
    )
    assert parts == empty | {
        "variable:A": b'declare -- A="1"\n',
        "variable:PATH": b'declare -x PATH="/bin"\n',
        "function:f": b"f () \n{ \n    echo a\n}\ndeclare -fx f\n",
        "function:declare": b"declare () \n{ \n    :\n}\n",
        "alias:a": b"alias a='1\n2'\n",
        "alias:-b": b"alias -- -b='3'\n",
        "trap:SIGUSR1": b"trap -- 'echo a\nb' SIGUSR1\n",
        "builtin:test": b"enable -n test\n",
        "option:pipefail": b"on",
        "option:extglob": b"on",
    }


def test_what_would_be_seen_is_not_asked() -> None:
    assert hindrance("himx", prompt=False, trace=False, history="ignoreboth:erasedups") == ""
    assert "PROMPT_COMMAND" in hindrance("him", prompt=True, trace=False, history="ignorespace")
    assert "BASH_XTRACEFD" in hindrance("himx", prompt=False, trace=True, history="ignorespace")
    assert "DEBUG" in hindrance("himT", prompt=False, trace=False, history="ignorespace")
    assert "set -v" in hindrance("himv", prompt=False, trace=False, history="ignorespace")
    assert "history" in hindrance("him", prompt=False, trace=False, history="erasedups")


# ---------------------------------------------------------------- what changes the state


CHANGES = [
    ("A=1", ["variable:A"], "unset A"),
    ("A=$'one\\ntwo\\001\\377'", ["variable:A"], "unset A"),
    ("export HOME", None, None),
    ("declare -A m=([a]=1 [$'\\n']='declare -- forged=\"1\"')", ["variable:m"], "unset m"),
    ("declare -i n=5", ["variable:n"], "unset n"),
    ("f() { echo f; }", ["function:f"], "unset -f f"),
    ("declare() { :; }", ["function:declare"], "unset -f declare"),
    ("alias q='ls\n-l'", ["alias:q"], "unalias q"),
    ("trap 'echo x\ny' USR1", ["trap:SIGUSR1"], "trap - USR1"),
    ("trap : EXIT", ["trap:EXIT"], "trap - EXIT"),
    ("trap : DEBUG", ["trap:DEBUG"], "trap - DEBUG"),
    ("trap : ERR RETURN", ["trap:ERR", "trap:RETURN"], "trap - ERR RETURN"),
    ("set -o pipefail", ["option:pipefail"], "set +o pipefail"),
    ("set -e", ["option:errexit"], "set +e"),
    ("set -u", ["option:nounset"], "set +u"),
    ("set -f", ["option:noglob"], "set +f"),
    ("set -x", ["option:xtrace"], "set +x"),
    ("set -E", ["option:errtrace"], "set +E"),
    ("set -o noclobber", ["option:noclobber"], "set +o noclobber"),
    ("shopt -s extglob", ["option:extglob"], "shopt -u extglob"),
    ("shopt -s inherit_errexit", ["option:inherit_errexit"], "shopt -u inherit_errexit"),
    ("complete -W 'a b' word", ["completion"], "complete -r word"),
    ("enable -n times", ["builtin:times"], "enable times"),
    ("umask 077", ["umask"], "umask 022"),
    ("ulimit -S -n 512", ["limits"], None),
    ("cd /usr", ["cwd", "dirs", "variable:OLDPWD", "variable:PWD"], None),
    ("pushd -n /usr", ["dirs"], "popd -n"),
    ("hash -p /bin/ls listing", ["hash"], "hash -d listing"),
    ("hash -p /tmp/ls ls", ["hash"], "hash -d ls"),
    ("(exit 3)", ["status"], ":"),
    ("set -- a 'b\nc'", ["positional"], "set --"),
    ("BASH_ARGV0=other", ["positional"], "BASH_ARGV0=bash"),
    ("IFS=0123456789", ["variable:IFS"], "IFS=$' \\t\\n'"),
    ("PATH=", ["variable:PATH"], None),
]


@pytest.mark.parametrize(("act", "wanted", "undo"), CHANGES)
def test_every_change_is_seen_and_named_and_gone_when_it_is_undone(
    shell: Shell, act: str, wanted: list[str] | None, undo: str | None
) -> None:
    run(shell, "umask 022")
    before = known(shell)
    run(shell, act)
    after = known(shell)
    if wanted is None:
        assert after == before
        return
    found = changes(before, after)
    assert [part for part in found if part != "variable:POSIXLY_CORRECT"] == wanted
    assert after.digest != before.digest
    if undo is not None:
        run(shell, undo)
        assert changes(before, known(shell)) == []


def test_a_background_job_is_part_of_the_state(shell: Shell) -> None:
    before = known(shell)
    run(shell, "sleep 60 & sleep 61 &")
    running = known(shell)
    assert changes(before, running) == ["jobs", "last-job"]
    run(shell, "kill -STOP %1; sleep 0.1")
    assert changes(running, known(shell)) == ["jobs"]
    run(shell, "kill -9 %1 %2; wait")


@pytest.mark.parametrize(
    "command",
    [
        ":",
        "ls / >/dev/null",
        "echo $RANDOM $SECONDS $EPOCHREALTIME >/dev/null",
        "true | false | true",
        "(cd /; A=1; f() { :; })",
        "echo x >kept; cat kept; rm kept",
        "for unused in; do :; done",
        "cd . ; OLDPWD=$PWD",
    ],
)
def test_what_changes_nothing_in_the_shell_gives_the_same_state(shell: Shell, command: str) -> None:
    run(shell, "cd .; OLDPWD=$PWD")
    before = known(shell)
    run(shell, command)
    assert changes(before, known(shell)) == []


# ---------------------------------------------------------------- what a question must not do


PREPARED = (
    "trap 'echo d >>debug' DEBUG; trap 'echo e >>errors' ERR; trap 'echo x >>exits' EXIT; trap 'echo r >>returns' RETURN",
    "set -E; set -o noclobber; trap 'echo d >>debug' DEBUG; trap 'echo e >>errors' ERR",
    "IFS=0123456789; set -u; set -f",
    "declare() { echo forged; }; printf() { echo forged; }; trap() { echo forged; }; set() { echo forged; }",
    "alias builtin='echo forged' declare='echo forged' printf='echo forged' exit='echo forged' set='echo forged'",
    "PATH=",
    "exec >log",
    "exec >&- 2>&-",
    "exec 2>/dev/tty",
    "readonly RANDOM SECONDS LINENO",
    "set -o posix",
    "set -x",
    "echo '",
    "stty -echo",
    "stty -onlcr",
    "unset HISTFILE; HISTCONTROL=ignoreboth",
    "PS1='$(echo prompt >>prompts)$ '",
    "sleep 60 & sleep 61 &",
)


@pytest.mark.parametrize("prepared", PREPARED)
def test_a_question_is_answered_and_leaves_no_trace(
    terminal: tuple[Shell, Terminal], tmp_path: Path, prepared: str
) -> None:
    """Two equal shells, one of which is asked: whatever can be looked at is the same."""
    seen: list[tuple[object, ...]] = []
    look = (
        'builtin echo $? ${PIPESTATUS[@]} "$_" $- ${!-none} $BASH_SUBSHELL >&9; builtin history >&9; builtin jobs >&9; '
        "builtin fc -l >&9 2>&9; builtin trap -p >&9"
    )
    for asked in (False, True):
        folder = tmp_path / f"asked-{asked}"
        folder.mkdir()
        shell, made = bash_on_a_terminal(folder)
        try:
            run(shell, f"exec 9>{folder}/looked; cd {folder}; A=1")
            shell.run(prepared, 20.0)
            shell.run("(exit 3)", 20.0)
            if asked:
                states = [known(shell) for _ in range(3)]
                if "RANDOM" not in prepared:
                    assert states[0] == states[1] == states[2]
                assert "variable:A" in states[0].parts
            shell._settle()
            descriptors = sorted(path.name for path in Path(f"/proc/{shell.host_pid()}/fd").iterdir())
            result = shell.run(look, 20.0)
            shell._settle()  # a trap may run once more behind the mark
            files = {path.name: path.read_text() for path in folder.iterdir()}
            files.pop("prompts", None)  # each prompt is made anew
            text = "".join(line for line in files["looked"] if not line.isdigit())
            if "sleep" in prepared:
                run(shell, "kill -9 %1 %2")
        finally:
            made.kill()
            made.process.wait()
        seen.append(
            (result, text.replace(str(folder), ""), descriptors, {k: v for k, v in files.items() if k != "looked"})
        )
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("PROMPT_COMMAND='echo x >>ran'", "PROMPT_COMMAND"),
        ("PROMPT_COMMAND=('echo x >>ran' :)", "PROMPT_COMMAND"),
        ("exec 7>ran; BASH_XTRACEFD=7; set -x", "BASH_XTRACEFD"),
        ("set -v", "set -v"),
        ("trap 'echo x >>ran' DEBUG; shopt -s extdebug", "DEBUG"),
        ("HISTCONTROL=erasedups", "HISTCONTROL"),
        ("unset HISTCONTROL", "HISTCONTROL"),
    ],
)
def test_a_question_that_would_be_seen_is_not_asked(
    terminal: tuple[Shell, Terminal], tmp_path: Path, command: str, why: str
) -> None:
    shell, made = terminal
    run(shell, command)
    time.sleep(0.1)  # the prompt, and what runs before it
    shown, ran = bytes(made.shown), (tmp_path / "ran").read_text() if (tmp_path / "ran").exists() else ""
    state = shell.state(stale=True)
    assert why in state.unknown and not state.digest and not state.parts
    time.sleep(0.1)
    assert bytes(made.shown) == shown
    assert ran == ((tmp_path / "ran").read_text() if (tmp_path / "ran").exists() else "")
    if why not in ("set -v", "errors"):  # of a shell that was found running nobody knows before it was asked
        shell._hindrance = ""
        assert why in shell.state(stale=True).unknown


@pytest.mark.parametrize(
    "command",
    [
        "enable -n declare",
        "enable -n jobs",
        "stty olcuc",
        "stty tab3",
        "readonly -f f 2>/dev/null; enable -n printf",
        "builtin() { :; }",
    ],
)
def test_a_shell_that_cannot_tell_its_state_is_unknown(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr("crab.sandbox.shell.ANSWER_PATIENCE", 0.5)
    monkeypatch.setattr("crab.sandbox.shell.PATIENCE", 0.5)
    shell.run(command, 0.5)
    state = shell.state(stale=True)
    assert state.unknown and not state.digest and not state.parts


def test_output_of_a_job_in_the_middle_of_an_answer_never_makes_two_states_equal(shell: Shell) -> None:
    run(shell, "while :; do echo noise; sleep 0.001; done &")
    digests = {state.digest for state in (shell.state(stale=True) for _ in range(10)) if state.digest}
    run(shell, "kill -9 %1; wait 2>/dev/null")
    run(shell, "unset A")
    quiet = known(shell).digest
    assert quiet not in digests  # the job was there


def test_a_megabyte_of_variables_is_answered(shell: Shell) -> None:
    run(shell, "for n in {1..1000}; do declare v$n=$(printf '%01000d' $n); done")
    begin = time.monotonic()
    before = known(shell)
    assert time.monotonic() - begin < 2
    assert "variable:v1000" in before.parts
    run(shell, "v500=x")
    assert changes(before, known(shell)) == ["variable:v500"]


# ---------------------------------------------------------------- any state


names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,12}", fullmatch=True).map(lambda name: f"v_{name}")
values = st.binary(max_size=60).map(
    lambda data: data.replace(b"\0", b"").decode(errors="surrogateescape")
) | st.sampled_from(
    [
        "",
        "\n",
        "'",
        '"',
        "\\",
        'a"\ndeclare -- forged="1',
        "$x",
        "`y`",
        "crab-part- 0\n",
        "\r\n",
        "\t",
        "\x01\x02",
        "ü\udcff",
    ]
)
functions = st.sampled_from(["echo {}", "cat <<X\n{}\nX", "echo '{}\n}}\ng () \n{{'", ": {}; f2() {{ :; }}"])
states = st.fixed_dictionaries(
    {
        "variables": st.dictionaries(names, values, max_size=4),
        "functions": st.dictionaries(names, st.tuples(functions, st.integers(0, 99)), max_size=2),
        "aliases": st.dictionaries(names, values.filter(lambda value: "\x01" not in value), max_size=2),
    }
)


def set_up(state: dict) -> str:
    lines = [f"{name}={quoted(value)}" for name, value in state["variables"].items()]
    lines += [f"{name}() {{\n{body.format(n)}\n}}" for name, (body, n) in state["functions"].items()]
    lines += [f"alias {name}={quoted(value)}" for name, value in state["aliases"].items()]
    return "\n".join(lines) or ":"


def tear_down(state: dict) -> str:
    lines = [f"unset -v {name}" for name in state["variables"]]
    lines += [f"unset -f {name} f2" for name in state["functions"]]
    lines += [f"unalias {name}" for name in state["aliases"]]
    return "\n".join(lines) or ":"


_shared: list[tuple[Shell, Terminal]] = []


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    shell, made = bash_on_a_terminal(tmp_path_factory.mktemp("lasting"))
    yield shell
    made.kill()
    made.process.wait()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(states, states)
def test_equal_states_have_equal_digests_and_others_do_not(lasting: Shell, one: dict, other: dict) -> None:
    def shown(state: dict) -> tuple[ShellState, str]:
        run(lasting, set_up(state))
        found = known(lasting)
        assert found == known(lasting)
        run(lasting, "unset -v v_; v_=$(declare -p; declare -f; alias)")
        listed = run(lasting, 'printf %s "$v_" | cksum; unset -v v_')
        run(lasting, tear_down(state))
        return found, listed

    first, second, again = shown(one), shown(other), shown(one)
    assert first[0].digest == again[0].digest
    if one == other:
        assert first[0].digest == second[0].digest
    elif {k: v for k, v in one.items() if v} != {k: v for k, v in other.items() if v}:
        differs = changes(first[0], second[0])
        names = {
            f"{kind}:{name}"
            for key, kind in (("variables", "variable"), ("functions", "function"), ("aliases", "alias"))
            for name in one[key].keys() | other[key].keys()
            if one[key].get(name) != other[key].get(name)
        }
        assert differs and names & set(differs)


def test_no_volatile_variable_is_in_a_state(shell: Shell) -> None:
    parts = known(shell).parts
    assert not [name for name in VOLATILE if f"variable:{name}" in parts and name not in ("PIPESTATUS",)]
    assert list(itertools.chain(parts)) == list(parts)
