r"""Bash: what is typed for a command and for a question about its state, and what the answers mean. All pure.

**A command** is typed as one list: a mark, an `eval` of the quoted text, a mark with the exit status. The marks have a nonce
and are put together by `printf` from two words, so that the terminal's echo of what was typed never looks like one; they go
to /dev/tty, so a shell whose output was redirected (`exec >file`) still sends them. `eval` parses the command by itself: an
unclosed quote or a here-document cannot swallow the mark. The text is quoted to plain printable characters in lines that a
terminal takes (no control characters that it would act upon, no `!` that would be a reference to history). Each mark comes
from a subshell that exits with the status it found: `$?` lives on in the shell itself, so it is there after a rewind too.

**A question** is a list without a simple command in the shell itself (a DEBUG trap would see it): the state is listed in a
command substitution. That is a copy of the shell in which volatile variables can be unset and options put aside, and the only
kind of subshell that still knows the jobs of its parent. It stands in a redirection, since an assignment or an argument would
change `$_` and `$?`. It uses builtins only, as `\builtin NAME`, so that neither aliases nor functions nor an empty PATH lead it
astray. `declare -p` quotes all control characters (bash 4.4), so each variable is one line. The subshell that follows has the
options of the shell (in a substitution `set -e` is off) and writes a line in which the terminal must not change anything.

Nothing is put into PS1 or PROMPT_COMMAND, which belong to the agent. HISTCONTROL=ignorespace in the environment, and a space
before what is typed, keep all of it out of the history. Where asking could be seen (PROMPT_COMMAND would run, a trace go into
a file, the question into the history), nothing is asked.

Not in the state, since bash does not list it: position of `$RANDOM`, base of `$SECONDS`, the history, key bindings, exit
statuses of jobs that are no longer listed. The cache of command paths is left out as far as it follows from PATH.

Known limits: a function named `builtin`, a disabled `printf` and `set -r` keep the marks from coming; under `set -e` any status
but 0 of a whole command ends the shell; `$_` and more than one PIPESTATUS do not pass from one command to the next; a
question, like a press of Enter, makes bash report (and forget) background jobs that have ended.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from blake3 import blake3

from crab.model import ShellState
from crab.sandbox.interpreter import Ending

LONGEST_LINE = 2000
"""Characters: a terminal in canonical mode takes 4095 in a line (N_TTY_BUF_SIZE, termios(3)) and drops the rest."""
VOLATILE = (
    *("RANDOM", "SRANDOM", "SECONDS", "EPOCHSECONDS", "EPOCHREALTIME", "BASH_MONOSECONDS"),  # other at every look
    *("BASHPID", "BASH_SUBSHELL", "BASH_COMMAND", "LINENO", "HISTCMD", "PIPESTATUS"),  # of the copy that looks
    *("LINES", "COLUMNS", "BASH_CMDS"),  # set at the end of every program; the cache of paths has its own section
)
"""Unset in the copy before the variables are listed."""
_CANARY = "aZ\tz"
"""What the terminal must let through as it is, or else two values might look the same (`stty tab3`, `olcuc`)."""
_SECTIONS = {
    "positional": r"""printf '%q\n' "$0" "${@:3}" """,
    "jobs": "jobs -l",
    "trap": "trap -p",
    "alias": "alias -p",
    "dirs": "dirs -l -p",
    "cwd": "pwd -P",
    "umask": "umask",
    "completion": "complete -p",
    "builtin": "enable -n",
    "hash": "hash -l",
    "function": "declare -f",
    "variable": "declare -p",
}
"""In this order, since a section may disturb later ones: the first `trap` that sets one makes bash forget its parent's.
Builtins that were loaded from a library are seen from outside, by the library."""
_BEFORE = {
    "alias": r"\builtin trap - DEBUG ERR RETURN EXIT; ",
    "variable": rf"\builtin unset -v {' '.join(VOLATILE)}; ",
}
_MAY_FAIL = {"cwd", "hash", "completion", "dirs"}  # a work directory that was removed; nothing to list


# ---------------------------------------------------------------- what is typed


def quoted(command: str) -> str:
    """The command as one word of bash, in lines that a terminal takes."""
    pieces, line = [], ""
    for byte in command.encode(errors="surrogateescape"):
        # not ! (history), ' and \ (quoting), nor what is not printable ASCII
        plain = 0x20 <= byte < 0x7F and byte not in b"!'\\"
        line += chr(byte) if plain else f"\\x{byte:02x}"
        if len(line) >= LONGEST_LINE:
            pieces.append(line)
            line = ""
    pieces.append(line)
    # \xHH takes at most two digits, and pieces are cut between bytes; a backslash before a newline joins the lines
    return "\\\n".join(f"$'{piece}'" for piece in pieces)


def _keeping_status(printing: str) -> str:
    """A subshell that prints, with `$1` the exit status, and leaves `$?` as it is."""
    return rf'( \builtin set -- "$?"; \builtin printf {printing}; \builtin exit "$1" ) 2>/dev/null >/dev/tty'


_NO_ERROR = r" && { \builtin :; } 2>/dev/null"
"""Behind a status that is not 0, so that it is no error to `set -e` and an ERR trap; no trace of it is to be seen."""


def _end(nonce: str) -> str:
    # begins with a newline: output seldom ends with one. 1 and 2 are no options of bash
    mark = _keeping_status(
        rf"""'\n%s%s %d %s:%s\n' crab-end- {nonce} "$1" "$-${{PROMPT_COMMAND[*]:+1}}${{BASH_XTRACEFD:+2}}" """
        '"${HISTCONTROL:+${HISTCONTROL//[^a-z]/}}"'
    )
    return mark + _NO_ERROR


def _listing(nonce: str) -> str:
    """Prints the state, section by section, each ended by a line with the status of its command."""
    parts = [
        r'\builtin set +efuvxT -- "$?" "$SHELLOPTS:$BASHOPTS" "$@"',
        rf"""\builtin printf '%s%s %s %s:%s\n' crab-state- {nonce} "$2" "$1" "${{!-}}" """,
    ]
    for name, command in _SECTIONS.items():
        parts.append(
            rf"""{_BEFORE.get(name, "")}\builtin {command}; \builtin printf '%s%s %s\n' crab-part- {nonce} "$?" """
        )
    return "; ".join([*parts, r'\builtin exit "$1"'])


class Bash:
    """The `Interpreter`."""

    name = "bash"
    argv = ("bash", "--noprofile", "--norc", "--noediting")
    """Without line editing a TAB is a TAB, and the terminal's own line discipline takes the lines."""
    env: Mapping[str, str] = {"HISTCONTROL": "ignorespace"}

    def typed(self, command: str, nonce: str) -> bytes:
        """A list of a mark, the command, and a mark with its status."""
        begin = _keeping_status(rf"'%s%s\n' crab-begin- {nonce}")
        return f" {begin}{_NO_ERROR}; \\builtin eval {quoted(command)}; {_end(nonce)}\n".encode()

    def mark(self, nonce: str) -> bytes:
        """The second mark alone: an interrupt throws away the rest of a list, the mark with it."""
        return f" {_end(nonce)}\n".encode()

    def end_word(self, nonce: str) -> bytes:
        return b"crab-end-" + nonce.encode()

    def ending(self, output: bytes, nonce: str) -> Ending | None:
        """Output, status, and what the mark says of the shell."""
        word = self.end_word(nonce)
        at = output.find(word)  # before the regular expression: that is slow on megabytes
        end = re.compile(rb"%s (\d+) (\w*):(\w*)\r?\n" % word).match(output, at) if at >= 0 else None
        if end is None:
            return None
        status, flags, history = int(end[1]), end[2].decode(), end[3].decode()
        text = output[:at].removesuffix(b"\n").removesuffix(b"\r")
        return Ending(
            status=status,
            output=self.so_far(text, nonce),
            hindrance=hindrance(flags, prompt="1" in flags, trace="2" in flags, history=history),
        )

    def so_far(self, output: bytes, nonce: str) -> str:
        """What came after the begin mark of that nonce; all, if the mark is no longer there (far too much output)."""
        begin = re.search(rb"crab-begin-%s\r?\n" % nonce.encode(), output)
        text = output[begin.end() :] if begin else output
        return text.replace(b"\r\n", b"\n").decode(errors="backslashreplace")

    def question(self, nonce: str) -> bytes:
        """One line of at most 4095 characters."""
        canary = _CANARY.replace("\t", r"\t")
        mark = _keeping_status(rf"""'%s%s {canary} %s\n' crab-answer- {nonce} "$-" """)
        listing = f'"$( {{ {_listing(nonce)}; }} >/dev/tty )"'
        # An empty line first: after a syntax error in an `eval`, bash (5.2) does not know the `{` that begins a line.
        # Errors are put away before the rest: what a trace or a disabled builtin would say is not to be seen.
        return f"\n {{ {mark}{_NO_ERROR}; }} 2>/dev/null >/dev/null{listing}\n".encode()

    def answer_word(self, nonce: str) -> bytes:
        return b"crab-answer-" + nonce.encode()

    def answer(self, output: bytes, nonce: str, outside: Mapping[str, bytes]) -> ShellState:
        """The state, or why it is not known."""
        found = re.search(rb"crab-answer-%s (.*?) (\w*)(\r?)\n" % nonce.encode(), output)
        begin = re.search(rb"crab-state-%s (\S*) (\d+):(\d*)\r?\n" % nonce.encode(), output)
        if found is None or begin is None or found[1] != _CANARY.encode():
            return ShellState(unknown="its terminal changes what is written to it, or its answer was cut off")
        text, newline = output[begin.end() : found.start()], found[3] + b"\n"
        cut = re.split(rb"crab-part-%s (\d+)%s" % (nonce.encode(), newline), text)
        sections = {name: cut[2 * n].replace(newline, b"\n") for n, name in enumerate(_SECTIONS) if 2 * n < len(cut)}
        statuses = dict(zip(_SECTIONS, cut[1::2], strict=False))
        if len(cut) != 2 * len(_SECTIONS) + 1 or cut[-1]:
            return ShellState(unknown="its answer is not whole: output of another process came between")
        for name, status in statuses.items():
            if status != b"0" and name not in _MAY_FAIL:
                return ShellState(unknown=f"it cannot list itself: `{_SECTIONS[name]}` ended with {status.decode()}")
        # `$-` of the subshell, since a substitution does not have `set -e`
        sections["option"] = begin[1] + (b":errexit" if b"e" in found[2] else b"")
        sections |= {**outside, "status": begin[2], "last-job": begin[3]}
        sections["hash"] = _told_paths(sections)
        parts = parts_of(sections) | dict(outside)
        if why := _hindrance_in(parts, found[2].decode()):
            return ShellState(unknown=why)
        # over the sections, not the parts: where those are cut is a matter of explanation only
        total = blake3()
        for name, section in sorted(sections.items()):
            total.update(b"%s %d\n%s" % (name.encode(), len(section), section))
        return ShellState(
            digest=total.hexdigest(), parts={name: blake3(part).hexdigest(16) for name, part in parts.items()}
        )


BASH = Bash()


# ---------------------------------------------------------------- what an answer means


def hindrance(flags: str, *, prompt: bool, trace: bool, history: str) -> str:
    """Why a shell must not be asked: empty if asking it is not seen. `flags` is its `$-`, `history` its HISTCONTROL."""
    if prompt:
        return "PROMPT_COMMAND would run"
    if trace and "x" in flags:
        return "the trace of commands (set -x) would go to BASH_XTRACEFD"
    if "T" in flags:
        return "a DEBUG trap would see it (set -T)"
    if "v" in flags:
        return "it shows what it reads (set -v)"
    if "ignorespace" not in history and "ignoreboth" not in history:
        return "its history would hold the question: HISTCONTROL has neither ignorespace nor ignoreboth"
    return ""


def _hindrance_in(parts: Mapping[str, bytes], flags: str) -> str:
    """The same, as an answer tells it: of a shell that was asked without having run a command first."""

    def value(name: str) -> str:
        return parts.get(f"variable:{name}", b"").decode(errors="replace").strip().partition("=")[2]

    empty = ("", '""', "()", '([0]="")')
    return hindrance(
        flags,
        prompt=value("PROMPT_COMMAND") not in empty,
        trace=value("BASH_XTRACEFD") not in empty,
        history=value("HISTCONTROL"),
    )


def parts_of(sections: Mapping[str, bytes]) -> dict[str, bytes]:
    """The text of each part of the state. What is not understood stays in the part before it: nothing is left out."""
    whole = ("jobs", "dirs", "cwd", "umask", "completion", "hash", "positional", "status", "last-job")
    parts = {name: sections[name] for name in whole}
    for kind, head in _HEADS.items():
        for name, piece in _pieces(head, sections[kind]):
            word = piece.split()[-1] if kind == "trap" else name
            key = f"{kind}:{word.decode(errors='backslashreplace')}"
            parts[key] = parts.get(key, b"") + piece
    for name in ("SHELLOPTS", "BASHOPTS"):  # said by the options
        parts.pop(f"variable:{name}", None)
    for option in filter(None, sections["option"].split(b":")):
        parts[f"option:{option.decode(errors='backslashreplace')}"] = b"on"
    return parts


_HEADS = {
    "variable": rb"(?m)^declare -\S+ ([A-Za-z_]\w*)",
    "function": rb"(?m)^(?!declare -)(\S+) \(\) *$",
    "alias": rb"(?m)^alias (?:-- )?([^=\n]+)=",
    "trap": rb"(?m)^(trap) -- ",
    "builtin": rb"(?m)^enable -n (\S+)$",
}
"""How a part begins in its section, and its name. (Of a trap the name comes last.)"""


def _pieces(head: bytes, text: bytes) -> Iterator[tuple[bytes, bytes]]:
    """(name, text) from one head to the next; what stands before the first has no name."""
    heads = list(re.finditer(head, text))
    if before := text[: heads[0].start() if heads else len(text)]:
        yield b"", before
    for one, after in zip(heads, [*heads[1:], None], strict=False):
        yield one[1], text[one.start() : after.start() if after else len(text)]


def _told_paths(sections: Mapping[str, bytes]) -> bytes:
    """What of `hash -l` is more than a cache: paths that bash did not find in PATH by itself, but was told by `hash -p`."""
    path = re.search(rb'(?m)^declare -\S+ PATH="(.*)"$', sections["variable"])
    folders = path[1].split(b":") if path else []

    def is_cache(line: bytes) -> bool:
        entry = re.fullmatch(rb"builtin hash -p (\S*)/(\S+) (\S+)\n?", line)
        return entry is not None and entry[2] == entry[3] and entry[1] in folders

    return b"".join(line for line in sections["hash"].splitlines(keepends=True) if not is_cache(line))
