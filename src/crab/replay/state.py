"""The state of a sandbox as its programs can see it, and what differs between two of them.

`observe` looks from inside, with the sandbox's own python3 and its persistent shell: files with their content, processes with
what they hold open, listening ports, the shell's variables, functions, options and jobs, and the output of the commands that
the trajectory wants observed. `compare` is a pure function. What is volatile is dealt with in `volatile.py` and nowhere else.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from crab.errors import CommandNotFound, CrabError, InvalidRequest
from crab.model import ExecResult, Struct
from crab.replay import volatile

if TYPE_CHECKING:
    from crab.sdk.sync import Sandbox, Shell

SHELL_LOOK = {
    "cwd": "pwd",
    "variables": "declare -p",
    "functions": "declare -f",
    "aliases": "alias -p",
    "options": "set +o; shopt -p",
    "traps": "trap -p",
    "mask": "umask",
    "jobs": "jobs -l",
}
"""What is asked of a persistent shell."""
_OBSERVER = Path(__file__).with_name("observer.py")
_SHOWN = 60  # characters of a value in a message


class FileState(Struct, kw_only=True, omit_defaults=True):
    """One path. What does not apply to its type is empty."""

    type: str
    mode: str = ""
    owner: str = ""
    size: int = -1
    """Of a file whose bytes are compared, else -1."""
    content: str = ""
    """A digest."""
    links: int = 1
    target: str = ""
    number: str = ""
    attributes: str = ""
    unreadable: str = ""


class ProcessState(Struct, kw_only=True):
    """One process, without its number."""

    argv: tuple[str, ...]
    cwd: str
    uid: int
    state: str
    descriptors: dict[str, str] = {}
    """What they lead to: path, position and flags of a file, the content too if it is deleted; else only the sort."""


class Inside(Struct, kw_only=True):
    """What `observer.py` prints."""

    files: dict[str, FileState]
    processes: tuple[ProcessState, ...]
    ports: tuple[str, ...]


class Observation(Struct, kw_only=True):
    """The state of a sandbox."""

    files: dict[str, FileState] = {}
    """By path; undecodable bytes of a path are written as `\\xff`."""
    processes: tuple[ProcessState, ...] = ()
    ports: tuple[str, ...] = ()
    shell: dict[str, str] = {}
    """State of the persistent shell: `variable X`, `function f`, `cwd`, …; empty if there is none."""
    outputs: dict[str, str] = {}
    """Command: exit status and output."""
    left_out: tuple[str, ...] = ()
    """Patterns of the files that were not looked at."""


def observe(
    sandbox: Sandbox,
    *,
    shell: Shell | None = None,
    commands: Iterable[str] = (),
    roots: Iterable[str] = ("/",),
    left_out: Iterable[str] = (),
    timeout: float = 600.0,
) -> Observation:
    """Look at a running sandbox. `left_out` are further patterns (as in `volatile.PATHS`).

    The commands run last: they might change what else is looked at. Raises InvalidRequest if there is no python3 in the
    image, and CrabError if looking fails.
    """
    seen = _look(sandbox, list(roots), volatile.path_rules(left_out), timeout)
    about_shell: dict[str, str] = {}
    if shell is not None:
        answers = {name: shell.run(command, timeout=timeout).output for name, command in SHELL_LOOK.items()}
        about_shell = shell_state(answers)
    outputs = {command: _said(sandbox.run(["bash", "-c", command], timeout=timeout)) for command in commands}
    return Observation(
        files=seen.files,
        processes=seen.processes,
        ports=seen.ports,
        shell=about_shell,
        outputs=outputs,
        left_out=(*volatile.PATHS, *left_out),
    )


def _look(sandbox: Sandbox, roots: list[str], leave_out: list[str], timeout: float) -> Inside:
    rules = ascii({"roots": roots, "leave_out": leave_out, "contents": volatile.content_rules()})
    try:
        done = sandbox.run(
            ["python3", "-I", "-S", "-B", "-", rules], user="root", input=_OBSERVER.read_bytes(), timeout=timeout
        )
    except CommandNotFound as error:
        raise InvalidRequest(
            "the state of the sandbox cannot be observed: there is no python3 in its image",
            remedy="choose an image with python3, or replay without --kill (nothing is compared then)",
        ) from error
    try:
        return msgspec.json.decode(done.stdout, type=Inside)
    except msgspec.DecodeError as error:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        why = "it took too long" if done.timed_out else said[-1] if said else f"status {done.exit_code}"
        raise CrabError(
            f"the state of the sandbox could not be observed: {why}", remedy="look at it by `crab exec` and `crab ps`"
        ) from error


def _said(done: ExecResult) -> str:
    text = (done.stdout + done.stderr).decode(errors="backslashreplace")
    return f"exit {done.exit_code}\n{volatile.plain(text)}"


# ---------------------------------------------------------------- the shell


def shell_state(answers: Mapping[str, str]) -> dict[str, str]:
    """Named parts of what a shell answered to `SHELL_LOOK`, without what is volatile. Pure."""
    found = {"cwd": answers["cwd"].strip(), "umask": answers["mask"].strip()}
    for name, text in _declared(answers["variables"]):
        if name not in volatile.VARIABLES:
            found[f"variable {name}"] = text
    for name, text in _functions(answers["functions"]):
        found[f"function {name}"] = text
    for line in answers["aliases"].splitlines():
        found[line.partition("=")[0]] = line  # begins with `alias NAME=`
    for line in answers["options"].splitlines():
        word, value, name = (*line.split(), "", "", "")[:3]  # `set -o NAME` or `shopt -s NAME`
        found[f"option {name}"] = f"{word} {value}"
    for line in answers["traps"].splitlines():
        found[f"trap {line.rpartition(' ')[2]}"] = line
    for number, line in enumerate(volatile.JOB_NUMBER.sub(r"\1 ", answers["jobs"]).splitlines(), 1):
        found[f"job {number}"] = line.strip()
    return found


def _declared(text: str) -> Iterator[tuple[str, str]]:
    """Variables of `declare -p`. A value may have newlines: it goes on until the next line that declares one."""
    heads = list(re.finditer(r"(?m)^declare -[-A-Za-z]+ ([A-Za-z_]\w*)", text))
    for head, after in zip(heads, [*heads[1:], None], strict=True):
        yield head[1], text[head.start() : after.start() if after else len(text)].strip()


def _functions(text: str) -> Iterator[tuple[str, str]]:
    """Functions of `declare -f`: a body ends with a brace at the beginning of a line."""
    for body in re.finditer(r"(?ms)^(\S+) \(\) ?\n\{.*?^\}", text):
        yield body[1], body[0]


# ---------------------------------------------------------------- the comparison


def compare(wanted: Observation, found: Observation) -> list[str]:
    """What differs, a sentence each; nothing if the states are equal. `wanted` is the undisturbed one."""
    return [
        *_processes(wanted.processes, found.processes),
        *_ports(wanted.ports, found.ports),
        *_parts("observed", wanted.outputs, found.outputs),
        *_shell(wanted.shell, found.shell),
        *_files(wanted.files, found.files),
        *(f"looked at other files: {pattern} left out" for pattern in sorted({*wanted.left_out} ^ {*found.left_out})),
    ]


def _files(wanted: Mapping[str, FileState], found: Mapping[str, FileState]) -> Iterator[str]:
    for path in sorted(wanted.keys() | found.keys()):
        one, other = wanted.get(path), found.get(path)
        if other is None:
            if not _gone_with_its_folder(path, wanted, found):
                yield f"{wanted[path].type} {path} is missing"
        elif one is None:
            if not _gone_with_its_folder(path, found, wanted):
                yield f"{other.type} {path} is there, but should not"
        elif one != other:
            yield f"{one.type} {path}: {', '.join(_changes(one, other))}"


def _changes(one: FileState, other: FileState) -> Iterator[str]:
    for field in FileState.__struct_fields__:
        before, after = getattr(one, field), getattr(other, field)
        if before != after:
            yield "other content" if field == "content" else f"{field} {after!r}, should be {before!r}"


def _processes(wanted: Iterable[ProcessState], found: Iterable[ProcessState]) -> Iterator[str]:
    ours, theirs = _grouped(wanted), _grouped(found)
    for key in [*sorted(ours), *sorted(theirs.keys() - ours.keys())]:
        one, other = ours.get(key, []), theirs.get(key, [])
        argv, cwd, uid = key
        what = f"process {_short(' '.join(argv))} (in {cwd}, uid {uid})"
        if len(other) != len(one):
            number = abs(len(one) - len(other))
            times = f" {number} times" if number > 1 else ""
            yield f"{what} is missing{times}" if len(other) < len(one) else f"{what} runs{times}, but should not"
            continue
        for before, after in zip(one, other, strict=True):
            if before.state != after.state:
                yield f"{what} is {after.state}, should be {before.state}"
            yield from _parts(f"{what}, descriptor", before.descriptors, after.descriptors)


def _grouped(processes: Iterable[ProcessState]) -> dict[tuple[tuple[str, ...], str, int], list[ProcessState]]:
    groups: dict[tuple[tuple[str, ...], str, int], list[ProcessState]] = {}
    for process in processes:
        groups.setdefault((process.argv, process.cwd, process.uid), []).append(process)
    for group in groups.values():
        group.sort(key=lambda process: (process.state, sorted(process.descriptors.items())))
    return groups


def _ports(wanted: Iterable[str], found: Iterable[str]) -> Iterator[str]:
    ours, theirs = Counter(wanted), Counter(found)
    yield from (f"nothing listens on {port}" for port in sorted((ours - theirs).elements()))
    yield from (f"something listens on {port}, but should not" for port in sorted((theirs - ours).elements()))


def _shell(wanted: Mapping[str, str], found: Mapping[str, str]) -> Iterator[str]:
    if wanted and not found:
        yield "the persistent shell is gone"
    elif found and not wanted:
        yield "there is a persistent shell, but should not"
    else:
        yield from _parts("shell,", wanted, found)


def _parts(what: str, wanted: Mapping[str, str], found: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(wanted.keys() | found.keys()):
        before, after = wanted.get(name), found.get(name)
        label = f"{what} {_short(name)}"
        if after is None:
            yield f"{label} is missing"
        elif before is None:
            yield f"{label} is there, but should not: {_short(after)}"
        elif before != after:
            yield f"{label}: {_difference(before, after)}"


def _difference(before: str, after: str) -> str:
    """The first lines that differ, of two texts that do."""
    ours, theirs = before.splitlines(), after.splitlines()
    for number, (one, other) in enumerate(zip(ours, theirs, strict=False), 1):
        if one != other:
            line = f"line {number} " if len(ours) > 1 or len(theirs) > 1 else ""
            return f"{line}is {_short(other)!r}, should be {_short(one)!r}"
    if len(ours) == len(theirs):
        return "other line ends"
    longer, verb = (theirs, "is there, but should not") if len(theirs) > len(ours) else (ours, "is missing")
    number = min(len(ours), len(theirs)) + 1
    return f"line {number} {_short(longer[number - 1])!r} {verb}"


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def _gone_with_its_folder(path: str, here: Mapping[str, FileState], there: Mapping[str, FileState]) -> bool:
    """Whether the folder of a path is missing `there` as well, so that it is enough to name the folder."""
    folder = path.rpartition("/")[0] or "/"
    return folder != path and folder in here and folder not in there
