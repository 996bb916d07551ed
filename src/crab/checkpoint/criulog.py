"""What CRIU's log says went wrong, in the words of this project. Pure functions over text."""

from __future__ import annotations

import re
from dataclasses import dataclass

from crab.errors import CaptureFailed, NoSpace, NotCapturable

# What usually passes by itself: the next attempt, a few milliseconds later, succeeds.
_TRANSIENT = (
    "In-flight connection",  # a TCP connection that is not accepted yet
    "unread in a TCP connection",
    "foreground group of a terminal",  # a job has ended, its shell is about to take the terminal back
    "a file of a single thread",
    "Unable to freeze",
    "Unix socket with queued in-flight",
    "has a pending connection",
)


@dataclass(frozen=True)
class Cause:
    """A reason that users can act on: found by `pattern`, told by `message`."""

    pattern: re.Pattern[str]
    message: str
    remedy: str


_CAUSES = (
    Cause(
        re.compile(r"(\d+).*(?:is being|already) traced|SEIZE (\d+).*Operation not permitted"),
        "process {0} is being traced (a debugger or strace)",
        "end the debugger; the next turn captures again",
    ),
    Cause(
        re.compile(r"io_uring"),
        "a process holds an io_uring",
        "start the program without io_uring (UV_USE_IO_URING=0, --disable-uring)",
    ),
    Cause(
        re.compile(r"External socket is used|unix.*external"),
        "a unix socket leads out of the sandbox",
        "close the connection to the outside",
    ),
    Cause(
        re.compile(r"Can't dump.*(?:tun|packet) socket|unsupported.*(?:family|socket)|Unsupported socket", re.I),
        "a process holds a kind of socket that cannot be captured",
        "end that process before the turn ends",
    ),
    Cause(
        re.compile(r"mqueue|Unknown FS magic 0x19800202"), "a process holds a POSIX message queue", "close the queue"
    ),
    Cause(
        re.compile(r"unread in a TCP connection"),
        "a TCP connection has more unread data than a restored one could hold (net.core.rmem_max)",
        "let the program read, or raise that limit: `sysctl -w net.core.rmem_max=16777216`",
    ),
    Cause(
        re.compile(r"foreground group of a terminal"),
        "no process is left of the job in the foreground of a terminal, and its shell does not take the terminal back",
        "end that shell before the turn ends",
    ),
    Cause(
        re.compile(r"process (\d+) holds \S+, a file of a single thread"),
        "process {} has a file of a single thread open (/proc/PID/task/TID)",
        "close it before the turn ends",
    ),
    Cause(
        re.compile(r"packetized mode for pipes"),
        "a process holds a pipe in packet mode (O_DIRECT)",
        "close the pipe before the turn ends",
    ),
    Cause(
        re.compile(r"Can't lookup mount"),
        "a descriptor leads out of the sandbox",
        "report this: it should not be possible",
    ),
)


def errors(log: str) -> list[str]:
    """The lines that report errors, without time stamps."""
    lines = (re.sub(r"^\(\d+\.\d+\)\s+", "", line) for line in log.splitlines() if "Error" in line)
    return [line for line in lines if "RLIMIT_NOFILE for self" not in line]


def attempts_for(log: str, most: int) -> int:
    """How many attempts a failure like this is worth: all for what passes by itself, one for what does not, three for
    what is not known (a process that ended at the wrong moment has many messages)."""
    lines = errors(log)
    if any(text in line for line in lines for text in _TRANSIENT):
        return most
    text = "\n".join(lines)
    return 1 if "No space" in text or any(cause.pattern.search(text) for cause in _CAUSES) else 3


def explain_dump(log: str, sandbox: str) -> CaptureFailed | NoSpace:
    """The error to raise for a failed dump."""
    lines = errors(log)
    text = "\n".join(lines)
    if "No space left on device" in text or "Disk quota exceeded" in text:
        return NoSpace(
            f"sandbox {sandbox} was not captured: no space left in the state directory; it runs on",
            remedy="remove checkpoints (`crab rm-checkpoint`) or enlarge the file system",
        )
    for cause in _CAUSES:
        if match := cause.pattern.search(text):
            number = next((group for group in match.groups() if group), "?")
            return NotCapturable(
                f"sandbox {sandbox} was not captured: {cause.message.format(number)}; it runs on",
                remedy=cause.remedy,
                log=text[-2000:],
            )
    said = lines[0] if lines else "CRIU gave no reason"
    return CaptureFailed(
        f"sandbox {sandbox} was not captured: {said}; it runs on",
        remedy="the log of CRIU is in `details.log`; see docs/troubleshooting.md",
        log=text[-2000:],
    )
