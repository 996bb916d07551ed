"""Persistent shells in real sandboxes: over captures, rewinds, forks and daemons, and what is known of their state."""

from __future__ import annotations

import shutil
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from e2e.box import Box, eventually
from e2e.leaks import left_of
from e2e.roots import small_root

from crab.daemon import requests as ask
from crab.daemon.service import Service
from crab.errors import (
    AlreadyExists,
    Busy,
    CommandNotFound,
    InvalidRequest,
    NotCapturable,
    NotFound,
    SandboxGone,
)
from crab.host import processes
from crab.model import ExecSpec, ShellResult, ShellState
from crab.sandbox.shell import Shell, changes

pytestmark = pytest.mark.criu


def said(box: Box, command: str, **fields: object) -> str:
    result: ShellResult = box.ask(ask.ShellRun, command=command, **fields)
    assert not result.timed_out and not result.ended, result
    return result.output


def state(box: Box, shell: str = "main") -> ShellState:
    found: ShellState = box.ask(ask.ShellLook, shell=shell)
    assert found.digest, found
    return found


def driver(box: Box, shell: str = "main") -> Shell:
    """What an inspector gets."""
    core = box.service._core
    return core.life(core.registry.find(box.name)).shells.registered()[f"shell:{shell}"]


def test_one_command_finds_what_another_one_left(box: Box) -> None:
    assert said(box, "cd /tmp; export A=1; f() { echo f-$A; }") == ""
    assert said(box, "pwd; f; bash -c 'echo $A'; (exit 3)") == "/tmp\nf-1\n1\n"
    assert said(box, "echo $?") == "3\n"
    assert said(box, "pwd", shell="other") == "/root\n"
    assert sorted(status.id for status in box.ask(ask.CommandList)) == ["shell:main", "shell:other"]


def test_a_shell_belongs_to_whom_it_was_started_for(box: Box) -> None:
    box.run("useradd -m agent")
    start = {"user": "agent", "cwd": "/usr", "env": {"A": "1"}}
    assert said(box, "id -un; pwd; echo $A", shell="a", **start) == "agent\n/usr\n1\n"
    assert said(box, "cd /; id -un; pwd", shell="a", user="root", cwd="/var") == "agent\n/\n"


def test_a_command_takes_its_time_and_no_more_and_others_are_refused_meanwhile(box: Box) -> None:
    said(box, ":")
    results: list[ShellResult] = []
    running = threading.Thread(
        target=lambda: results.append(box.ask(ask.ShellRun, command="echo a; sleep 60", timeout=1))
    )
    running.start()
    eventually(lambda: not driver(box).idle)
    with pytest.raises(Busy, match="a command runs in shell:main"):
        box.ask(ask.ShellRun, command="echo no")
    assert box.ask(ask.ShellLook).unknown == "a command runs in it"
    assert said(box, "echo elsewhere", shell="other") == "elsewhere\n"
    running.join(30)
    assert (results[0].exit_code, results[0].timed_out, results[0].ended) == (124, True, False)
    assert results[0].output.startswith("a\n")
    assert not box.ask(ask.ShellInterrupt)
    running = threading.Thread(target=lambda: results.append(box.ask(ask.ShellRun, command="sleep 60")))
    running.start()
    eventually(lambda: not driver(box).idle)
    assert box.ask(ask.ShellInterrupt)
    running.join(30)
    assert (results[1].exit_code, results[1].timed_out) == (130, False)


def test_a_shell_that_ended_is_followed_by_a_new_one(box: Box) -> None:
    said(box, "x=1")
    result = box.ask(ask.ShellRun, command="exit 5")
    assert (result.exit_code, result.ended) == (5, True)
    with pytest.raises(NotFound, match="no persistent shell 'main'"):
        box.ask(ask.ShellLook)
    assert said(box, "echo ${x-none}") == "none\n"


def test_a_shell_is_after_a_rewind_what_it_was_at_the_checkpoint(box: Box) -> None:
    said(box, "cd /tmp; x=1; sleep 1000 & f() { echo f$x; }; trap 'echo t' USR1; set -o pipefail; false")
    then = state(box)
    box.checkpoint("then")
    assert said(box, "echo $?") == "1\n"  # nor does the capture cost it
    said(box, "cd /; x=2; unset -f f; kill %1; wait; trap - USR1")
    assert {"cwd", "variable:x", "function:f", "trap:SIGUSR1", "jobs"} <= set(changes(then, state(box)))
    box.rewind("then")
    assert changes(then, state(box)) == []
    assert said(box, "echo $?; f; pwd; jobs -p | wc -l; kill -USR1 $$") == "1\nf1\n/tmp\n1\nt\n"
    box.ask(ask.Kill)
    with pytest.raises(Exception, match="lost"):
        said(box, "echo no")
    box.ask(ask.Recover)
    assert said(box, "echo $? $x") == "1 1\n"


def test_forks_have_shells_of_their_own(box: Box) -> None:
    said(box, "x=1; (exit 4)")
    one, other = box.fork(2)
    try:
        assert said(one, "echo $? $x; x=2") == "4 1\n"
        assert said(other, "echo $? $x") == "4 1\n"
        assert said(box, "echo $? $x") == "4 1\n"
    finally:
        for fork in (one, other):
            fork.ask(ask.Remove, force=True)


def test_a_command_goes_on_through_a_capture(box: Box) -> None:
    said(box, "x=1")
    results: list[ShellResult] = []
    running = threading.Thread(
        target=lambda: results.append(
            box.ask(ask.ShellRun, command="for i in {1..3000}; do echo $i; sleep 0.001; done")
        )
    )
    running.start()
    for _ in range(3):
        box.checkpoint(durable=False)
    running.join(60)
    # CRIU writes what waits in a terminal back through the terminal: a line that it found there has another \r then
    assert results[0].output.replace("\r", "") == "".join(f"{n}\n" for n in range(1, 3001))
    box.rewind()  # in the middle of it: a command runs in the shell that comes back
    with pytest.raises(Busy):
        said(box, "echo no")
    assert box.ask(ask.ShellLook).unknown == "a command runs in it"
    assert box.ask(ask.ShellInterrupt)
    eventually(lambda: driver(box).idle)
    assert said(box, "echo $x") == "1\n"


def test_a_terminal_whose_foreground_job_is_gone_is_refused_not_dumped_in_vain(box: Box) -> None:
    """CRIU 4.1 dumps it, and fails to restore it ("tty: Failed to set group"). In a shell it lasts for a moment: then a second
    attempt is made."""
    job = "import os, signal, sys, time\nsignal.signal(signal.SIGTTOU, signal.SIG_IGN)\npid = os.fork()\n"
    job += "if not pid:\n    os.setpgid(0, 0); time.sleep(0.2); os._exit(0)\n"
    job += "time.sleep(0.1); os.tcsetpgrp(0, pid); os.wait(); print('gone', flush=True); time.sleep(1000)"
    command = box.spawn("python3", "-c", job, tty=True, name="leader")
    assert next(command.events()).data == b"gone\r\n"
    command.detach()
    with pytest.raises(NotCapturable, match="no process is left of the job in the foreground of a terminal"):
        box.checkpoint()
    box.service.command(box.name, "leader").kill()
    eventually(lambda: len(box.host_pids()) == 1)
    box.checkpoint()


def test_a_command_that_loses_its_sandbox_says_so(box: Box) -> None:
    said(box, ":")
    errors: list[Exception] = []

    def run() -> None:
        try:
            box.ask(ask.ShellRun, command="sleep 60")
        except SandboxGone as error:
            errors.append(error)

    running = threading.Thread(target=run)
    running.start()
    eventually(lambda: not driver(box).idle)
    box.ask(ask.Kill)
    running.join(30)
    assert errors


def test_names_of_shells_are_nobody_elses(box: Box) -> None:
    said(box, ":")
    with pytest.raises(InvalidRequest, match="those of persistent shells"):
        box.spawn("sleep", "1", name="shell:mine")
    with pytest.raises(InvalidRequest, match="cannot be attached to"):
        box.service.command(box.name, "shell:main")
    for name in ("", "a b", "a" * 57, "../x"):
        with pytest.raises(InvalidRequest, match="no name for a shell"):
            said(box, ":", shell=name)
    with pytest.raises(AlreadyExists):
        box.service._core.life(box.service._core.registry.find(box.name)).execute(
            ExecSpec(argv=("true",), name="shell:main")
        )


def test_an_inspector_sees_shells_processes_and_states(box: Box) -> None:
    said(box, "x=1")
    shell = driver(box)
    assert shell.idle and shell.alive
    assert Path(f"/proc/{shell.host_pid()}/comm").read_text() == "bash\n"
    first = shell.state()
    before = Path(f"/proc/{shell.host_pid()}/schedstat").read_text()
    assert shell.state() is first
    assert processes.waits_at_terminal(shell.host_pid())
    assert Path(f"/proc/{shell.host_pid()}/schedstat").read_text() == before  # not even asked
    assert shell.state(stale=True) == first
    said(box, "ls >/dev/null; true | cat")
    assert changes(first, shell.state()) == []
    said(box, "x=2")
    assert changes(first, shell.state()) == ["variable:x"]


def test_a_question_does_not_wait_for_a_sandbox_that_stands_still(box: Box) -> None:
    said(box, "x=1")
    shell = driver(box)
    life = box.service._core.life(box.service._core.registry.find(box.name))
    with life.unattended():
        begin = time.monotonic()
        assert shell.state().unknown == "it was not asked: the sandbox stands still"
        assert time.monotonic() - begin < 1
    said(box, "x=1")
    assert shell.state().digest


def test_a_question_costs_little(box: Box, figures: Callable[[str], None]) -> None:
    said(box, "cd /tmp; export A=1; f() { echo f; }; alias g=f")
    shell = driver(box)

    def milliseconds(what: Callable[[], object], times: int = 100) -> float:
        taken = []
        for _ in range(times):
            begin = time.perf_counter()
            what()
            taken.append((time.perf_counter() - begin) * 1e3)
            time.sleep(0.005)
        return statistics.median(taken)

    asking, running = milliseconds(lambda: shell.state(stale=True)), milliseconds(lambda: shell.run(":"))
    figures(f"persistent shell: state {asking:.1f} ms, an empty command {running:.1f} ms (medians)")
    assert asking < 50
    said(box, "for n in {1..1000}; do printf -v v$n '%01000d' $n; done")
    figures(
        f"persistent shell: state with 1 MB of variables {milliseconds(lambda: shell.state(stale=True), 10):.0f} ms"
    )
    assert shell.state().digest


def test_a_shell_outlives_the_daemon_and_an_image_without_bash_has_none(
    service: Service, state_dir: Path, image: str, tmp_path: Path
) -> None:
    path = state_dir.parent / f"{state_dir.name}-shells"
    shutil.rmtree(path, ignore_errors=True)
    small_root(service._core.images.path(image), tmp_path / "with", "bash")
    small_root(service._core.images.path(image), tmp_path / "without")
    try:
        with Service.open(path) as first:
            for name in ("with", "without"):
                first.handle(ask.ImageAdd(name=name, source=f"dir:{tmp_path / name}"))
                first.handle(ask.Create(name=name, image=name))
            box = Box(first, "with")
            said(box, "cd /tmp; x=1; (exit 6)")
            then = state(box)
            with pytest.raises(CommandNotFound, match="the sandbox has no bash"):
                said(Box(first, "without"), "echo no")

            def run() -> None:
                with pytest.raises(SandboxGone):
                    box.ask(ask.ShellRun, command="sleep 60", shell="late")

            late = threading.Thread(target=run)
            late.start()
            eventually(lambda: "shell:late" in [status.id for status in box.ask(ask.CommandList)])
            eventually(lambda: not driver(box, "late").idle)
            time.sleep(0.3)
        late.join(30)
        with Service.open(path) as heir:
            box = Box(heir, "with")
            assert changes(then, state(box)) == []
            assert said(box, "echo $? $x; pwd") == "6 1\n/tmp\n"
            with pytest.raises(Busy):
                said(box, "echo no", shell="late")
            assert box.ask(ask.ShellInterrupt, shell="late")
            eventually(lambda: driver(box, "late").idle)
            assert said(box, "echo back", shell="late") == "back\n"
    finally:
        last = Service.open(path)
        for sandbox in last.handle(ask.SandboxList()):
            last.handle(ask.Remove(sandbox=sandbox.name, force=True))
        owner = last._core.cgroups.owner
        last.close_down()
        assert not left_of(path, owner)
        shutil.rmtree(path)
