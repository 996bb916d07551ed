"""What CRIU's log is turned into."""

from __future__ import annotations

import pytest

from crab.checkpoint import criulog
from crab.errors import CaptureFailed, NoSpace, NotCapturable

IN_FLIGHT = "(00.01) Error (criu/sk-inet.c:190): inet: In-flight connection (l) for 1f\n(00.02) Error (criu/cr-dump.c:2111): Dumping FAILED.\n"
HARMLESS = "(00.00) Error (criu/util.c:1533): rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted\n"


def test_a_connection_in_flight_is_worth_all_attempts() -> None:
    assert criulog.attempts_for(IN_FLIGHT, 8) == 8


def test_what_will_not_pass_is_not_tried_again() -> None:
    assert criulog.attempts_for("(0) Error (x): No space left on device", 8) == 1
    assert criulog.attempts_for("(0) Error (criu/files-ext.c): Can't dump io_uring", 8) == 1


def test_what_is_not_known_is_tried_three_times() -> None:
    assert criulog.attempts_for("(0) Error (criu/x.c:1): something new", 8) == 3


def test_a_full_disk_is_named() -> None:
    error = criulog.explain_dump("(0) Error (criu/image.c): Can't write: No space left on device", "s1.1")
    assert isinstance(error, NoSpace) and "runs on" in error.message


def test_a_holder_of_an_io_uring_is_not_capturable() -> None:
    assert isinstance(criulog.explain_dump("(0) Error (criu/files-ext.c): Can't dump io_uring", "s"), NotCapturable)


def test_an_unknown_failure_shows_the_first_error_and_keeps_the_log() -> None:
    error = criulog.explain_dump(
        HARMLESS + "(0.1) Error (criu/a.c:1): first\n(0.2) Error (criu/b.c:2): second\n", "s1.1"
    )
    assert type(error) is CaptureFailed and "first" in error.message and "second" in error.details["log"]


@pytest.mark.parametrize("log", ["", HARMLESS, "no errors at all"])
def test_a_log_without_errors_is_no_crash(log: str) -> None:
    assert "gave no reason" in criulog.explain_dump(log, "s").message
