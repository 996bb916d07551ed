"""The API of the daemon: what goes over its socket, in both directions, by both clients. Needs no root."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from unit.standin import ODD, Program, Served, StandIn, sample, served

from crab import errors, lenient
from crab.daemon import openapi, run, server, service, wire
from crab.daemon import requests as ask
from crab.daemon.async_client import AsyncSocketTransport
from crab.daemon.client import SocketTransport, check_answer
from crab.daemon.http import Line
from crab.errors import (
    Busy,
    CrabError,
    DaemonUnavailable,
    ExecFailed,
    HostUnsuitable,
    InvalidRequest,
    NotFound,
    SandboxGone,
    WrongState,
)
from crab.model import ExecResult, ExecSpec, ExecStatus, Mount, ShellResult
from crab.sandbox.command import Output

SPEC = ExecSpec(argv=("true",))


def error_classes(base: type[CrabError] = CrabError) -> list[type[CrabError]]:
    found = [base] if base.__module__ == errors.__name__ else []
    for child in base.__subclasses__():
        found += error_classes(child)
    return found


@pytest.fixture
def stand_in() -> StandIn:
    return StandIn()


@pytest.fixture
def host(stand_in: StandIn, tmp_path: Path) -> Iterator[Served]:
    with served(stand_in, tmp_path / "run" / "crab.sock") as running:
        yield running


@pytest.fixture
def client(host: Served) -> Iterator[SocketTransport]:
    transport = SocketTransport(host.path)
    yield transport
    transport.close()


def eventually(condition: Callable[[], Any], seconds: float = 5.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)
    return found


# ---------------------------------------------------------------- calls


@pytest.mark.parametrize("text", ["text", ODD], ids=["plain", "odd"])
@pytest.mark.parametrize("operation", ask.CALLS)
def test_every_call_arrives_as_it_was_made_and_its_answer_too(
    operation: str, text: str, stand_in: StandIn, client: SocketTransport
) -> None:
    kind = ask.CALLS[operation]
    request, answer = sample(kind, text), sample(kind.returns, text)
    stand_in.answers[kind] = answer

    got = client.call(request)

    assert stand_in.asked == [request]
    assert got == answer
    assert type(got) is type(answer)


@pytest.mark.parametrize("text", ["text", ODD], ids=["plain", "odd"])
def test_the_asynchronous_client_says_and_hears_the_same(text: str, stand_in: StandIn, host: Served) -> None:
    stand_in.answers |= {kind: sample(kind.returns, text) for kind in ask.CALLS.values()}

    async def all_of_them() -> None:
        transport = AsyncSocketTransport(host.path)
        for kind in ask.CALLS.values():
            request = sample(kind, text)
            assert await transport.call(request) == stand_in.answers[kind]
            assert stand_in.asked[-1] == request
        await transport.close()

    asyncio.run(all_of_them())


@pytest.mark.parametrize("kind", error_classes())
def test_every_error_keeps_its_type_over_the_socket(
    kind: type[CrabError], stand_in: StandIn, client: SocketTransport
) -> None:
    stand_in.answers[ask.About] = kind("what happened", remedy="what to do", pid=7, path=Path("/x"))

    with pytest.raises(kind) as caught:
        client.call(ask.About())

    assert type(caught.value) is kind
    assert caught.value.to_wire() == {
        "error": kind.__name__,
        "message": "what happened",
        "remedy": "what to do",
        "details": {"pid": 7, "path": "/x"},
    }
    answer = Line(client.path).ask("GET", "/v1/about", {})
    assert answer.status == kind.http_status


def test_an_error_of_a_newer_daemon_is_an_error_of_crab() -> None:
    error = wire.read_error(b'{"error": "FromTheFuture", "message": "m", "remedy": "r", "details": {}}')
    assert type(error) is CrabError
    assert (error.message, error.remedy) == ("m", "r")


def test_a_defect_of_the_service_is_told_with_the_remedy_to_report_it(
    stand_in: StandIn, client: SocketTransport, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in.answers[ask.Doctor] = ZeroDivisionError("division by zero")
    with pytest.raises(CrabError, match="ZeroDivisionError: division by zero") as caught:
        client.call(ask.Doctor())
    assert "report" in caught.value.remedy
    assert "/v1/call/doctor" in caplog.text


def test_many_threads_share_a_client(stand_in: StandIn, client: SocketTransport) -> None:
    stand_in.answers[ask.Inspect] = lambda request: NotFound(request.sandbox)
    wrong: list[str] = []

    def ask_often(number: int) -> None:
        for turn in range(20):
            try:
                client.call(ask.Inspect(sandbox=f"{number}.{turn}"))
            except NotFound as error:
                if error.message != f"{number}.{turn}":
                    wrong.append(error.message)

    threads = [threading.Thread(target=ask_often, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(stand_in.asked) == 160


def test_a_client_goes_on_with_the_next_daemon(stand_in: StandIn, tmp_path: Path) -> None:
    path = tmp_path / "crab.sock"
    client = SocketTransport(path)
    for _ in range(2):
        with served(stand_in, path):
            assert client.call(ask.About()).state_dir == "/state"
    with pytest.raises(DaemonUnavailable):
        client.call(ask.About())


def test_short_calls_are_answered_while_commands_are_waited_for(stand_in: StandIn, client: SocketTransport) -> None:
    gate = threading.Event()
    result = ExecResult(exit_code=0, stdout=b"", stderr=b"")

    def wait(_: ask.Request) -> ExecResult:
        gate.wait(10)
        return result

    stand_in.answers[ask.Run] = wait
    threads = [
        threading.Thread(target=client.call, args=(ask.Run(sandbox="x", spec=SPEC),))
        for _ in range(server.SHORT_CALLS + 10)
    ]
    for thread in threads:
        thread.start()
    eventually(lambda: len(stand_in.asked) == len(threads), 20)
    assert client.call(ask.About()).pid == 1
    gate.set()
    for thread in threads:
        thread.join()


# ---------------------------------------------------------------- refusals


def post(path: Path, url: str, body: bytes, **headers: str) -> CrabError:
    answer = Line(path).ask("POST", url, headers, body)
    assert answer.status >= 400
    return wire.read_error(answer.read())


@pytest.mark.parametrize(
    ("url", "body", "said"),
    [
        ("/v1/call/frobnicate", b"{}", "no operation 'frobnicate'"),
        ("/v1/call/inspect", b'{"sandbox": "x", "colour": "red"}', "no field 'colour'"),
        ("/v1/call/run", b'{"sandbox": "x", "spec": {"argv": ["a"], "shell": true}}', "no field 'spec.shell'"),
        (
            "/v1/call/create",
            b'{"mounts": [{"source": "/a", "target": "/b"}, {"source": "/a", "target": "/b", "mode": 1}]}',
            "no field 'mounts.1.mode'",
        ),
        ("/v1/call/inspect", b"{}", "missing required field `sandbox`"),
        ("/v1/call/inspect", b'{"sandbox": 3}', "Expected `str`"),
        ("/v1/call/inspect", b"{", "not a request of inspect"),
        ("/v1/call/inspect", b"\xff\xfe", "not a request of inspect"),
        ("/v1/call/create", b'{"network": "wifi"}', "Invalid enum value"),
        ("/v1/commands", b'{"sandbox": "x"}', "missing required field `spec`"),
        ("/v1/commands/x/1/signal", b'{"number": 65}', "no signal 65"),
        ("/v1/commands/x/1/signal", b'{"number": 0}', "no signal 0"),
        ("/v1/commands/x/1/resize", b'{"rows": 0, "columns": 80}', "0 rows"),
        ("/v2/everything", b"", "POST /v2/everything: Not Found"),
        ("/v1/about", b"", "Method Not Allowed"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_with_the_reason(
    host: Served, stand_in: StandIn, url: str, body: bytes, said: str
) -> None:
    error = post(host.path, url, body)
    assert isinstance(error, InvalidRequest)
    assert said in error.message
    assert error.remedy
    assert not stand_in.asked


def test_variables_may_have_any_name(stand_in: StandIn, client: SocketTransport) -> None:
    stand_in.answers[ask.Create] = sample(ask.Create.returns)
    request = ask.Create(env={"name": "1", "ANY": "2"}, mounts=(Mount(source="/a", target="/b"),))
    client.call(request)
    assert stand_in.asked == [request]


def test_a_client_of_another_version_is_refused_and_both_are_named(host: Served, stand_in: StandIn) -> None:
    error = post(host.path, "/v1/call/doctor", b"{}", **{wire.API_HEADER: "7"})
    assert isinstance(error, DaemonUnavailable)
    assert "client speaks version 7" in error.message
    assert f"daemon speaks version {wire.API}" in error.message
    assert not stand_in.asked


def test_a_daemon_of_another_version_is_noticed_by_the_client() -> None:
    with pytest.raises(DaemonUnavailable, match=r"daemon speaks version 2 .* client speaks version 1"):
        check_answer(Path("/s"), "2", 200, b"{}")
    with pytest.raises(DaemonUnavailable, match="is not Crab"):
        check_answer(Path("/s"), None, 200, b"<html>")


def test_every_version_is_told_who_answers(host: Served) -> None:
    answer = Line(host.path).ask("GET", "/v1/about", {wire.API_HEADER: "7"})
    assert answer.status == 200
    assert json.loads(answer.read())["state_dir"] == "/state"


def test_the_versions_of_service_and_socket_are_one() -> None:
    assert wire.API == service.API


# ---------------------------------------------------------------- the socket


def test_the_socket_is_for_its_owner_and_group_only(host: Served) -> None:
    assert stat.S_IMODE(host.path.stat().st_mode) == 0o660
    assert stat.S_IMODE(host.path.parent.stat().st_mode) == 0o711


def test_who_may_use_the_daemon() -> None:
    may = server.may_use
    assert may(0, 0, (), None, 500)
    assert may(500, 500, (), None, 500)
    assert not may(501, 0, (), None, 500)
    assert may(501, 42, (), 42, 500)
    assert may(501, 7, (8, 42), 42, 500)
    assert not may(501, 7, (8,), 42, 500)


def test_the_kernel_says_who_connected() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        uid, gid, groups = server.peer(ours)
    assert (uid, gid) == (os.geteuid(), os.getegid())
    assert sorted(groups) == sorted(os.getgroups())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become another user")
def test_another_user_is_refused_even_if_the_files_would_let_him(host: Served) -> None:
    host.path.chmod(0o666)
    for folder in (host.path.parent, *host.path.parent.parents):  # pytest keeps its folders to itself
        with contextlib.suppress(PermissionError):
            folder.chmod(folder.stat().st_mode | 0o011)
    from_child, to_parent = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            answer = Line(host.path).ask("POST", "/v1/call/doctor", {})
            os.write(to_parent, answer.read())
        finally:
            os._exit(0)
    os.close(to_parent)
    os.waitpid(child, 0)
    said = os.read(from_child, 1 << 16)
    os.close(from_child)
    error = wire.read_error(said)
    assert isinstance(error, DaemonUnavailable)
    assert "user 65534 may not use this daemon" in error.message


def test_a_second_daemon_on_the_socket_is_refused(host: Served) -> None:
    with pytest.raises(Busy, match="another daemon listens"):
        server.listen(host.path)
    assert SocketTransport(host.path).call(ask.About()).pid == 1


def test_the_socket_of_a_dead_daemon_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "crab.sock"
    server.listen(path).close()
    assert path.exists()
    with pytest.raises(DaemonUnavailable, match="nobody listens"):
        SocketTransport(path).open()
    server.listen(path).close()


def test_a_file_in_the_place_of_the_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "crab.sock"
    path.write_text("precious")
    with pytest.raises(InvalidRequest, match="is no socket"):
        server.listen(path)
    assert path.read_text() == "precious"


def test_a_path_that_no_socket_can_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="too long"):
        server.listen(tmp_path / ("x" * 120))
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises((HostUnsuitable, InvalidRequest)):
        server.listen(blocked / "crab.sock")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_no_daemon_means_a_remedy(tmp_path: Path, asynchronous: bool) -> None:
    path = tmp_path / "none.sock"

    def reach() -> None:
        if asynchronous:
            asyncio.run(AsyncSocketTransport(path).call(ask.About()))
        else:
            SocketTransport(path).call(ask.About())

    with pytest.raises(DaemonUnavailable, match=r"no socket .*none\.sock") as caught:
        reach()
    assert "crab daemon run" in caught.value.remedy
    assert "--embedded" in caught.value.remedy


def test_somebody_else_on_the_socket_is_no_daemon(tmp_path: Path) -> None:
    path = tmp_path / "other.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()

        def reply(data: bytes) -> None:
            connection, _ = other.accept()
            with connection:
                connection.recv(9999)
                connection.sendall(data)

        for data, said in (
            (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", "not Crab"),
            (b"SSH-2.0-OpenSSH\r\n", "no HTTP"),
            (b"", "closed"),
            (b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\nhi", "closed"),
        ):
            thread = threading.Thread(target=reply, args=(data,))
            thread.start()
            with pytest.raises(DaemonUnavailable, match=said):
                SocketTransport(path).call(ask.About())
            thread.join()


def test_a_call_that_was_cut_off_is_not_made_again(stand_in: StandIn, tmp_path: Path) -> None:
    path = tmp_path / "crab.sock"
    calls: list[bytes] = []
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind(str(path))
        daemon.listen()

        def accept_and_die() -> None:
            for _ in range(2):
                daemon.settimeout(1.0)
                with contextlib.suppress(TimeoutError):
                    connection, _ = daemon.accept()
                    with connection:
                        calls.append(connection.recv(9999))

        thread = threading.Thread(target=accept_and_die)
        thread.start()
        with pytest.raises(DaemonUnavailable, match="before it answered") as caught:
            SocketTransport(path).call(ask.TakeCheckpoint(sandbox="x"))
        thread.join()
    assert len(calls) == 1
    assert "not known" in caught.value.remedy


# ---------------------------------------------------------------- streams


def test_output_flows_as_it_comes_and_ends_with_the_status(stand_in: StandIn, client: SocketTransport) -> None:
    command = client.spawn("x", ExecSpec(argv=("work",), name="w"))
    program = stand_in.started()
    assert (command.name, command.pid) == ("w", 1001)
    assert command.status().running
    stream = command.events()
    for stage in range(3):
        program.say(b"stage %d" % stage, stream=1 + stage % 2)
        assert next(stream) == Output(1 + stage % 2, b"stage %d" % stage)
    program.end(3)
    assert list(stream) == []
    assert command.status() == ExecStatus(id="w", running=False, exit_code=3, pid=1001)


def test_a_lot_of_output_arrives_whole_however_slow_the_reader(stand_in: StandIn, client: SocketTransport) -> None:
    pieces = [bytes([number % 251]) * 60_000 for number in range(100)]

    def talk(program: Program) -> None:
        for piece in pieces:
            program.say(piece)
        program.end()

    stand_in.script = talk
    command = client.spawn("x", SPEC)
    time.sleep(0.2)
    program = stand_in.started()
    assert program.acknowledged < len(pieces), "what nobody has read must wait in the sandbox"
    assert b"".join(piece.data for piece in command.events()) == b"".join(pieces)
    assert program.acknowledged == len(pieces)


def test_a_stream_may_be_left_and_taken_up_in_the_middle(stand_in: StandIn, client: SocketTransport) -> None:
    def talk(program: Program) -> None:
        for number in range(5):
            program.say(b"%d" % number)
        program.end()

    stand_in.script = talk
    command = client.spawn("x", SPEC)
    for _ in command.events():
        break
    assert b"".join(piece.data for piece in command.events()) == b"1234"


def test_the_death_of_the_sandbox_is_told_in_the_stream(stand_in: StandIn, client: SocketTransport) -> None:
    command = client.spawn("x", SPEC)
    program = stand_in.started()
    program.say(b"last words")
    stream = command.events()
    assert next(stream).data == b"last words"
    program.vanish("it was killed")
    with pytest.raises(SandboxGone, match="it was killed") as caught:
        list(stream)
    assert caught.value.remedy == "recover it"


def test_a_reader_that_disconnects_leaves_the_command_and_its_output(
    stand_in: StandIn, client: SocketTransport
) -> None:
    command = client.spawn("x", ExecSpec(argv=("work",), name="w"))
    program = stand_in.started()
    program.say(b"before")
    assert next(command.events()).data == b"before"
    program.wait(lambda p: p.acknowledged == 1)
    command._connection.close()  # as the death of the client does

    program.say(b"meanwhile")
    again = eventually(lambda: attached(client, "w"))
    stream = again.events()
    assert next(stream).data == b"meanwhile"
    assert program.exit is None
    program.end(4)
    assert list(stream) == []
    assert again.status().exit_code == 4


def attached(client: SocketTransport, name: str) -> Any:
    with contextlib.suppress(Busy):  # the server has not noticed yet
        return client.attach("x", name)
    return None


def test_a_detached_reader_gets_what_is_under_way_and_the_next_one_the_rest(
    stand_in: StandIn, client: SocketTransport
) -> None:
    command = client.spawn("x", ExecSpec(argv=("work",), name="w"))
    program = stand_in.started()
    program.say(b"first")
    program.wait(lambda p: p.acknowledged == 1)
    command.detach()
    program.say(b"second")
    assert [piece.data for piece in command.events()] == [b"first"]
    assert command.status().running

    again = client.attach("x", "1")
    program.end()
    assert [piece.data for piece in again.events()] == [b"second"]


def test_a_command_has_one_reader_at_a_time(stand_in: StandIn, client: SocketTransport) -> None:
    first = client.spawn("x", ExecSpec(argv=("work",), name="w"))
    for name in ("w", "1"):
        with pytest.raises(Busy, match="another client reads"):
            client.attach("x", name)
    stand_in.started().end()
    assert list(first.events()) == []
    assert client.attach("x", "w").status().running


def test_attaching_to_nothing_says_so(client: SocketTransport) -> None:
    with pytest.raises(NotFound, match="no command 'w'"):
        client.attach("x", "w")
    with pytest.raises(NotFound, match="no command 'odd/name %'"):
        client.attach("x", "odd/name %")


def test_a_command_that_cannot_be_started_is_refused(stand_in: StandIn, client: SocketTransport) -> None:
    stand_in.refusal = ExecFailed("no such user", remedy="make it")
    with pytest.raises(ExecFailed, match="no such user"):
        client.spawn("x", SPEC)


def test_everything_that_can_be_said_to_a_command_arrives(stand_in: StandIn, client: SocketTransport) -> None:
    command = client.spawn("x", ExecSpec(argv=("cat",), stdin=True, tty=True))
    program = stand_in.started()
    command.write(b"in\x00put")
    command.write(b"")
    command.close_input()
    command.signal(2)
    command.resize(40, 120)
    assert program.input == b"in\x00put"
    assert program.input_closed
    assert program.signals == [2]
    assert program.sizes == [(40, 120)]
    command.kill()
    assert program.killed
    assert list(command.events()) == []
    assert command.status().exit_code == 137


def test_much_input_goes_in_pieces(stand_in: StandIn, client: SocketTransport) -> None:
    command = client.spawn("x", ExecSpec(argv=("cat",), stdin=True))
    data = os.urandom(3 << 20)
    command.write(data)
    assert stand_in.started().input == data


def test_input_that_is_not_taken_is_an_error_with_a_reason(stand_in: StandIn, client: SocketTransport) -> None:
    command = client.spawn("x", SPEC)
    program = stand_in.started()
    program.takes_input = False
    with pytest.raises(WrongState, match="takes no more input"):
        command.write(b"x")
    program.end()
    list(command.events())
    with pytest.raises(WrongState, match="nobody reads"):
        command.write(b"x")


def test_signals_reach_a_command_that_nobody_reads(stand_in: StandIn, client: SocketTransport) -> None:
    command = client.spawn("x", SPEC)
    command.detach()
    list(command.events())
    command.signal(15)
    assert stand_in.started().signals == [15]


def test_the_time_limit_is_known_to_who_attaches_later(
    stand_in: StandIn, client: SocketTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    handles: list[Any] = []
    spawn = stand_in.spawn

    def noting(sandbox: str, spec: ExecSpec) -> Any:
        handles.append(spawn(sandbox, spec))
        return handles[-1]

    monkeypatch.setattr(stand_in, "spawn", noting)
    command = client.spawn("x", ExecSpec(argv=("work",), timeout=1))
    command.detach()
    list(command.events())
    again = client.attach("x", "1")
    handles[0].timed_out = True  # what the service's timer does
    stand_in.started().end(137)
    assert list(again.events()) == []
    assert again.status().timed_out
    assert again.status().exit_code == 124


def test_a_command_is_killed_if_who_waits_for_it_has_gone(stand_in: StandIn, host: Served) -> None:
    gate = threading.Event()

    def run_it(request: ask.Run) -> ExecResult:
        handle = stand_in.spawn(request.sandbox, request.spec)
        list(handle.events())
        gate.set()
        return ExecResult(exit_code=handle.status().exit_code or 0, stdout=b"", stderr=b"")

    stand_in.answers[ask.Run] = run_it
    line = socket.socket(socket.AF_UNIX)
    line.connect(str(host.path))
    body = lenient.encode(ask.Run(sandbox="x", spec=SPEC))
    line.sendall(b"POST /v1/call/run HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    program = stand_in.started()
    assert not program.killed
    line.close()
    program.wait(lambda p: p.killed)
    assert gate.wait(60)


def test_a_command_in_a_shell_is_interrupted_if_who_waits_for_it_has_gone(stand_in: StandIn, host: Served) -> None:
    asked, interrupted = threading.Event(), threading.Event()

    def run_it(_: ask.ShellRun) -> ShellResult:
        asked.set()
        assert interrupted.wait(60)
        return ShellResult(exit_code=130, output="")

    def interrupt(request: ask.ShellInterrupt) -> bool:
        assert (request.sandbox, request.shell) == ("x", "s")
        interrupted.set()
        return True

    stand_in.answers |= {ask.ShellRun: run_it, ask.ShellInterrupt: interrupt}
    line = socket.socket(socket.AF_UNIX)
    line.connect(str(host.path))
    body = lenient.encode(ask.ShellRun(sandbox="x", shell="s", command="sleep 9"))
    line.sendall(b"POST /v1/call/shell-run HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    assert asked.wait(60)
    line.close()
    assert interrupted.wait(60)


def test_readers_are_sent_away_when_the_daemon_ends(stand_in: StandIn, tmp_path: Path) -> None:
    path = tmp_path / "crab.sock"
    with served(stand_in, path):
        client = SocketTransport(path)
        command = client.spawn("x", ExecSpec(argv=("work",), name="w"))
        program = stand_in.started()
        program.say(b"first")
        program.wait(lambda p: p.acknowledged == 1)
    stream = command.events()
    assert next(stream).data == b"first"
    with pytest.raises(DaemonUnavailable, match="is ending"):
        next(stream)
    with served(stand_in, path):
        program.say(b"second")
        program.end()
        assert [piece.data for piece in client.attach("x", "w").events()] == [b"second"]


def test_a_call_under_way_is_finished_when_the_daemon_ends(stand_in: StandIn, tmp_path: Path) -> None:
    begun = threading.Event()

    def slow(_: ask.Request) -> Any:
        begun.set()
        time.sleep(0.5)
        return sample(ask.TakeCheckpoint.returns)

    stand_in.answers[ask.TakeCheckpoint] = slow
    answers: list[Any] = []
    with served(stand_in, tmp_path / "crab.sock") as running:
        client = SocketTransport(running.path)
        thread = threading.Thread(target=lambda: answers.append(client.call(ask.TakeCheckpoint(sandbox="x"))))
        thread.start()
        assert begun.wait(60)
    thread.join(5)
    assert answers == [sample(ask.TakeCheckpoint.returns)]


def test_the_asynchronous_client_streams_the_same(stand_in: StandIn, host: Served) -> None:
    async def everything() -> None:
        transport = AsyncSocketTransport(host.path)
        command = await transport.spawn("x", ExecSpec(argv=("cat",), stdin=True, name="w"))
        program = stand_in.started()
        stream = command.events()
        program.say(b"one")
        assert await anext(stream) == Output(1, b"one")
        await command.write(b"input")
        await command.close_input()
        await command.signal(1)
        await command.resize(3, 4)
        assert (program.input, program.input_closed, program.signals, program.sizes) == (b"input", True, [1], [(3, 4)])
        with pytest.raises(Busy):
            await transport.attach("x", "w")
        await command.detach()
        program.say(b"two")
        assert [piece.data async for piece in stream] == []
        assert command.status().running
        again = await transport.attach("x", "w")
        assert await anext(again.events()) == Output(1, b"two")
        await again.kill()
        assert [piece.data async for piece in again.events()] == []
        assert again.status().exit_code == 137
        lost = await transport.spawn("x", SPEC)
        stand_in.started(2).vanish("gone")
        with pytest.raises(SandboxGone, match="gone"):
            _ = [piece async for piece in lost.events()]
        await transport.close()

    asyncio.run(everything())


def test_cancelling_an_asynchronous_reader_leaves_the_command(stand_in: StandIn, host: Served) -> None:
    async def everything() -> None:
        transport = AsyncSocketTransport(host.path)
        command = await transport.spawn("x", ExecSpec(argv=("work",), name="w"))

        async def read() -> None:
            async for _ in command.events():
                pass

        task = asyncio.create_task(read())
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await transport.close()
        stand_in.started().say(b"later")
        fresh = AsyncSocketTransport(host.path)
        for _ in range(200):
            with contextlib.suppress(Busy):
                again = await fresh.attach("x", "w")
                break
            await asyncio.sleep(0.01)
        assert (await anext(again.events())).data == b"later"
        await fresh.close()

    asyncio.run(everything())


# ---------------------------------------------------------------- frames


def test_frames_are_found_wherever_the_stream_is_cut() -> None:
    frames = [(1, b"out"), (2, b""), (0, b"{}"), (255, b"x" * 300)]
    stream = b"".join(wire.frame(number, data) for number, data in frames)
    for size in (1, 2, 5, 7, 1000):
        reader = wire.FrameReader()
        found = [item for at in range(0, len(stream), size) for item in reader.feed(stream[at : at + size])]
        assert found == frames


# ---------------------------------------------------------------- the description


def test_the_description_names_every_call_once_and_all_that_it_refers_to() -> None:
    document = openapi.description()
    assert document["openapi"].startswith("3.1")
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    names = [operation["operationId"] for operation in operations]
    assert len(names) == len(set(names))
    assert set(ask.CALLS) <= set(names)
    schemas = document["components"]["schemas"]

    def references(node: Any) -> Iterator[str]:
        if isinstance(node, dict):
            if "$ref" in node:
                yield node["$ref"]
            for part in node.values():
                yield from references(part)
        elif isinstance(node, list):
            for part in node:
                yield from references(part)

    for reference in references(document):
        assert reference.removeprefix("#/components/schemas/") in schemas
    for operation in operations:
        assert operation["summary"]
        assert operation["responses"]
        for parameter in operation.get("parameters", ()):
            assert {"name", "in", "schema"} <= parameter.keys()
    for path in document["paths"]:
        in_path = {part[1:-1] for part in path.split("/") if part.startswith("{")}
        stated = {
            p["name"] for o in document["paths"][path].values() for p in o.get("parameters", ()) if p["in"] == "path"
        }
        assert in_path == stated


@pytest.mark.parametrize("operation", ask.CALLS)
def test_what_is_sent_is_what_the_description_says(operation: str) -> None:
    schemas = openapi.description()["components"]["schemas"]
    kind = ask.CALLS[operation]
    sent = msgspec.to_builtins(sample(kind))
    schema = schemas[kind.__name__]
    assert set(sent) == set(schema["properties"])
    assert schema["description"]


def test_fields_are_described_with_the_texts_under_them() -> None:
    schemas = openapi.description()["components"]["schemas"]
    assert schemas["Create"]["properties"]["name"]["description"] == "Empty: one is made up."
    assert "exit_code" in schemas["ExecStatus"]["properties"]


def test_the_description_is_served(host: Served) -> None:
    answer = Line(host.path).ask("GET", "/v1/openapi.json", {})
    assert json.loads(answer.read()) == json.loads(json.dumps(openapi.description()))


# ---------------------------------------------------------------- the process


def test_systemd_is_told_if_it_wants_to_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run.notify("READY=1")  # nobody listens
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        run.notify("READY=1")
        assert systemd.recv(100) == b"READY=1"


def test_stopping_a_daemon_that_does_not_run_says_that_it_is_absent(tmp_path: Path) -> None:
    with pytest.raises(DaemonUnavailable) as caught:
        run.stop(tmp_path / "none.sock")
    assert caught.value.details["absent"]


def test_stop_ends_the_process_that_answers(stand_in: StandIn, tmp_path: Path) -> None:
    daemon = subprocess.Popen(["sleep", "100"])
    stand_in.answers[ask.About] = ask.Version(crab="0", api=1, pid=daemon.pid, state_dir="/s")
    with served(stand_in, tmp_path / "crab.sock") as running:
        threading.Thread(target=daemon.wait, daemon=True).start()
        assert run.stop(running.path, 5).pid == daemon.pid
    assert daemon.wait(60) == -15
