"""Everything that differs between two undisturbed runs of the same commands, and how a comparison deals with it.

This is the only place: what is not in one of these tables is compared as it is. Each entry has its reason. A run may add
patterns of files of its own (`volatile` in its trajectory); nothing is left out on other grounds.

Never compared, because every run has its own: times of files and processes, numbers of inodes, pipes, sockets and terminals,
process ids (and with them the order of processes), addresses in memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

Content = Literal["python-cache", "git-index"]

PATHS: dict[str, str] = {
    "/proc/*": "views of the kernel; processes and ports are compared by themselves",
    "/sys/*": "views of the kernel",
    "/dev/pts/*": "numbers of terminals",
    "/run/**/*.pid": "process ids",
    "/var/log/**": "log lines begin with a time",
    "/etc/machine-id": "each sandbox has its own",
    "/var/cache/ldconfig/aux-cache": "inode numbers and times of the libraries, rewritten when a package is installed",
}
"""Files that are left out: pattern, reason. `*` is anything within one name, `**` any number of folders or names."""

CONTENTS: dict[str, tuple[Content, str]] = {
    "/**/*.pyc": (
        "python-cache",
        "its head has the time of its source, and marshal's flags depend on reference counts: the code in it is compared",
    ),
    "/**/.git/index": (
        "git-index",
        "has times and inode numbers of the files: the listed modes, objects and names are compared",
    ),
}
"""Files of which not the bytes are compared: pattern, how instead, reason."""

ENVIRONMENT: dict[str, str] = {
    "GIT_AUTHOR_DATE": "2024-01-01T00:00:00Z",
    "GIT_COMMITTER_DATE": "2024-01-01T00:00:00Z",
    "PYTHONHASHSEED": "0",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "TERM": "dumb",
    "HISTFILE": "",
}
"""Environment of a replayed sandbox. Dates of commits go into their names, and the hash seed into the order of Python's
sets: with both fixed, the same commands make the same objects. A pager would wait for a key; a dumb terminal gets no
colours; a history file would be written when a shell ends, in an order that depends on when."""

HOSTNAME = "replay"
"""Host name of every replayed sandbox: it stands in files, prompts and environments."""

VARIABLES: frozenset[str] = frozenset(
    {
        *("BASHPID", "PPID"),  # process ids
        *("EPOCHREALTIME", "EPOCHSECONDS", "SECONDS"),  # times
        *("RANDOM", "SRANDOM"),  # other at every look
        *("_", "BASH_COMMAND", "HISTCMD", "LINENO", "PIPESTATUS", "FUNCNAME"),  # the command that looks
        *("BASH_ARGC", "BASH_ARGV", "BASH_LINENO", "BASH_SOURCE"),
        *("COLUMNS", "LINES"),  # size of the window: of who looks
    }
)
"""Variables of a persistent shell that are left out."""

JOB_NUMBER = re.compile(r"(?m)^(\[\d+\][-+ ]?|(?= +\d+ +\|)) *\d+ +")
"""Process id in a line of `jobs -l`, with the blanks that make it as wide as others; the further processes of a pipeline have
lines without a number of a job."""

TEXT: tuple[tuple[re.Pattern[str], str], ...] = (
    # 2024-05-01 12:00:00.123+02:00
    (re.compile(r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d([.,]\d+)?)?( ?[+-]\d\d:?\d\d|Z)?"), "TIME"),
    # May  1 12:00 of `ls -l`
    (re.compile(r"\b(Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) [ \d]\d +\d\d:\d\d(:\d\d)?\b"), "TIME"),
    # "Ran 12 tests in 0.003s", "3 passed in 0.12 seconds"
    (re.compile(r"\bin \d+\.\d+ ?(s|sec|secs|seconds)\b"), "in TIME"),
    # <object at 0x7f12…>
    (re.compile(r"\b0x[0-9a-f]{8,16}\b"), "ADDRESS"),
    (re.compile(r"\b(pid|PID)([ =:]+)\d+\b"), r"\1\2PID"),
)
"""Replaced in the output of `observe` commands, in this order: pattern, replacement. A counter of a live service is not
among them: an `observe` command that shows one does not belong into a trajectory."""


def expression(pattern: str) -> str:
    """The regular expression for a whole path that a pattern of `PATHS` stands for. `{a,b}` is either of them."""
    made, at = "", 0
    while at < len(pattern):
        rest = pattern[at:]
        if rest.startswith("**/"):
            made, at = made + "(?:.*/)?", at + 3
        elif rest.startswith("**"):
            made, at = made + ".+", at + 2
        elif rest[0] == "*":
            made, at = made + "[^/]*", at + 1
        elif rest[0] == "{" and "}" in rest:
            words = rest[1 : rest.index("}")].split(",")
            made, at = made + "(?:" + "|".join(map(re.escape, words)) + ")", at + rest.index("}") + 1
        else:
            made, at = made + re.escape(rest[0]), at + 1
    return made


def plain(text: str) -> str:
    """Output of a command without what is volatile in it."""
    for pattern, replacement in TEXT:
        text = pattern.sub(replacement, text)
    return text


def path_rules(more: Iterable[str] = ()) -> list[str]:
    """Expressions of all paths to leave out."""
    return [expression(pattern) for pattern in (*PATHS, *more)]


def content_rules() -> list[tuple[str, str]]:
    """Expressions of paths with the manner of comparing them."""
    return [(expression(pattern), how) for pattern, (how, _) in CONTENTS.items()]
