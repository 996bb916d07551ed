"""The one error tree.

Every error that crosses a public boundary of Crab is a `CrabError`: it says what happened, why, and what to do about it
(`remedy`). It keeps its type across the daemon's socket: `to_wire` and `from_wire` are inverse for every class here.
This module knows nothing of the rest of the package.
"""

from __future__ import annotations

from typing import Any, ClassVar


class CrabError(Exception):
    """Base of all errors of Crab.

    `message` states what happened and why, `remedy` what the user can do. `exit_status` is what the command line ends with
    (documented in docs/errors.md), `http_status` what the daemon's API answers with.
    """

    exit_status: ClassVar[int] = 70
    http_status: ClassVar[int] = 500

    def __init__(self, message: str, *, remedy: str = "", **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.details = details

    def __str__(self) -> str:
        return f"{self.message}\n  remedy: {self.remedy}" if self.remedy else self.message

    def to_wire(self) -> dict[str, Any]:
        """The error as JSON data; `from_wire` makes the same error of it."""
        return {"error": type(self).__name__, "message": self.message, "remedy": self.remedy, "details": self.details}


class InvalidRequest(CrabError):
    """What was asked for makes no sense: a bad name, an unknown option, a path that leaves its root."""

    exit_status = 64
    http_status = 400


class NotFound(CrabError):
    """A sandbox, image, turn, label or checkpoint that does not exist. The message says what does exist."""

    exit_status = 66
    http_status = 404


class AlreadyExists(CrabError):
    """The name is taken."""

    exit_status = 73
    http_status = 409


class Busy(CrabError):
    """Another lifecycle operation of the same sandbox is under way, or another process owns the state directory."""

    exit_status = 75
    http_status = 409


class WrongState(CrabError):
    """The operation needs the sandbox in another state (a checkpoint of a stopped sandbox, say)."""

    exit_status = 76
    http_status = 409


class InUse(CrabError):
    """Something that others still build on cannot be removed."""

    exit_status = 76
    http_status = 409


class HostUnsuitable(CrabError):
    """The machine lacks what the operation needs: kernel, CRIU, a capability, a program, root. See `crab doctor`."""

    exit_status = 69
    http_status = 501


class DaemonUnavailable(CrabError):
    """The daemon does not run, its socket is not permitted, or it speaks another version of the API."""

    exit_status = 69
    http_status = 503


class NoSpace(CrabError):
    """A file system is full or a quota is reached. The message names which one."""

    exit_status = 74
    http_status = 507


class LaunchFailed(CrabError):
    """The sandbox could not be started."""

    exit_status = 71


class ExecFailed(CrabError):
    """A command could not be started in the sandbox (its own exit status is not an error)."""

    exit_status = 126
    http_status = 422


class CommandNotFound(ExecFailed):
    """The program does not exist in the sandbox."""

    exit_status = 127


class Uncertain(CrabError):
    """Whether a command of an agent was run, and how it ended, cannot be known after a crash. It is not run again by itself."""

    exit_status = 75
    http_status = 409


class SandboxGone(CrabError):
    """The sandbox died (or was killed) while it was being used. `crab recover` brings its newest checkpoint back."""

    exit_status = 71
    http_status = 410


class CaptureFailed(CrabError):
    """No checkpoint was made; the sandbox runs on and its previous head is intact."""

    exit_status = 70


class NotCapturable(CaptureFailed):
    """The sandbox holds something that cannot be captured now (a traced process, an io_uring). Says what and which pid."""


class RestoreFailed(CrabError):
    """The restore failed or was refused; what ran before still runs, the checkpoint is untouched."""

    exit_status = 70


class Incompatible(RestoreFailed):
    """The checkpoint was made on another kernel, CPU, CRIU or base image. The message names both versions."""

    http_status = 409


class Damaged(CrabError):
    """An artefact does not have the size or digest that its manifest states. Nothing was destroyed."""

    exit_status = 65
    http_status = 422


class ArchiveRefused(Damaged):
    """An archive that is truncated, foreign or malicious (path traversal, device nodes, far too large)."""


class StoreUnavailable(CrabError):
    """A store does not answer: unreachable, too slow, overloaded, or its answers are cut short. What is in it is untouched."""

    exit_status = 69
    http_status = 503


class StoreRefused(CrabError):
    """A store answers and says no: credentials, rights, or something that the service cannot do (conditional writes)."""

    exit_status = 77
    http_status = 502


class WrongKey(StoreRefused):
    """The key is not the one that the store was made with, or it was made with one and none is given."""


def _classes(base: type[CrabError]) -> dict[str, type[CrabError]]:
    found = {base.__name__: base}
    for child in base.__subclasses__():
        found |= _classes(child)
    return found


def from_wire(data: dict[str, Any]) -> CrabError:
    """The error that `CrabError.to_wire` was called on; an unknown class (newer daemon) becomes a plain `CrabError`."""
    kind = _classes(CrabError).get(str(data.get("error")), CrabError)
    error = kind(str(data.get("message", "unknown error")), remedy=str(data.get("remedy", "")))
    error.details = dict(data.get("details") or {})
    return error
