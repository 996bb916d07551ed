"""Changes that a reviewer got past the inspector once: each is seen."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from e2e.box import Box, eventually

from crab.daemon import requests as ask
from crab.model import Checkpoint

pytestmark = [pytest.mark.kernel, pytest.mark.criu]


@pytest.fixture(autouse=True)
def needs_a_tier(box: Box) -> None:
    if not box.service._core.inspector.tier:
        pytest.skip(box.service._core.inspector.why_not)


def taken(box: Box) -> Checkpoint:
    """A checkpoint, and the rest that a model's wait gives."""
    made = box.checkpoint()
    time.sleep(0.3)
    return made


def sleeper(box: Box, source: str = "", **spec: object) -> None:
    """A process that sleeps, captured and at rest; its number is in /tmp/up."""
    text = f"import os, socket, time\n{source}\nopen('/tmp/up', 'w').write(str(os.getpid()))\ntime.sleep(100000)"
    box.spawn("python3", "-c", text, **spec).detach()
    eventually(lambda: box.read("/tmp/up"))
    box.checkpoint(policy="always")
    time.sleep(0.3)


def told(made: Checkpoint) -> str:
    assert made.decision
    return f"{made.kind}: {'; '.join(made.decision.reasons)}"


def test_a_process_that_ends_after_a_rewind_is_missed_by_nobody(box: Box) -> None:
    sleeper(box)
    box.rewind()
    time.sleep(0.3)
    box.run("kill $(cat /tmp/up); sleep 0.1")
    made = taken(box)
    assert made.kind == "processes", told(made)
    box.rewind(made.id)
    assert not box.result("grep -q python3 /proc/$(cat /tmp/up)/cmdline").ok


def test_system_v_objects_after_a_rewind_are_seen(box: Box) -> None:
    taken(box)
    box.rewind()
    box.run("ipcmk -M 4096 && ipcmk -S 2")
    made = taken(box)
    assert made.kind == "processes" and "System V" in told(made), told(made)


@pytest.mark.parametrize(
    ("source", "script"),
    [
        ("r, w = os.pipe(); os.write(w, b'waiting'); os.dup2(r, 9)", "head -c7 /proc/$(cat /tmp/up)/fd/9 >/dev/null"),
        ("os.mkfifo('/root/p'); f = os.open('/root/p', os.O_RDWR)", "echo more > /root/p"),
        ("os.system('echo one > /root/log'); f = open('/root/log', 'a')", "cp -p /root/log /root/l2; mv /root/l2 /root/log"),
        ("os.mkdir('/root/cwd'); os.chdir('/root/cwd')", "rmdir /root/cwd; mkdir /root/cwd"),
        ("", "echo 23456 > /proc/sys/kernel/shmmax"),
        ("", "echo 500 > /proc/$(cat /tmp/up)/oom_score_adj"),
    ],
)  # fmt: skip
def test_what_others_do_to_a_sleeper_is_seen(box: Box, source: str, script: str) -> None:
    sleeper(box, source)
    assert taken(box).kind == "none"
    box.run(script)
    made = taken(box)
    assert made.kind in ("processes", "full"), told(made)


def test_the_size_of_a_sleeper_s_terminal_is_state(box: Box) -> None:
    command = box.spawn("sleep", "100000", tty=True)
    box.checkpoint(policy="always")
    time.sleep(0.3)
    assert taken(box).kind == "none"
    command.resize(50, 132)
    time.sleep(0.1)
    made = taken(box)
    assert made.kind == "processes", told(made)
    command.kill()


@pytest.mark.parametrize(
    ("source", "script"),
    [
        ("s = socket.socket(socket.AF_UNIX); s.bind('/root/us'); s.listen()", "chmod 777 /root/us"),
        ("s = socket.socket(socket.AF_UNIX); s.bind('/root/us'); s.listen()", "rm /root/us; echo config > /root/us"),
        ("os.mkdir('/root/w'); import ctypes; c = ctypes.CDLL(None); f = c.inotify_init(); c.inotify_add_watch(f, b'/root/w', 0x100)", "rm -r /root/w"),
    ],
)  # fmt: skip
def test_files_do_not_change_under_sockets_and_watches_that_have_their_names(
    box: Box, source: str, script: str
) -> None:
    sleeper(box, source)
    box.run(script)
    made = taken(box)
    assert made.kind == "full", told(made)
    result = box.ask(ask.Verify, ref=made.id)
    assert result.proof.verdict == "proven", result.differences


def test_a_shell_s_settings_that_lie_in_the_kernel_are_seen(box: Box) -> None:
    box.ask(ask.ShellRun, command="x=0")
    taken(box)
    box.ask(ask.ShellRun, command=":")
    assert taken(box).kind == "none"
    box.ask(ask.ShellRun, command="echo 500 >/proc/$$/oom_score_adj")
    made = taken(box)
    assert made.kind == "processes", told(made)


def test_an_agent_that_stores_through_a_mapping_of_a_file_counts_as_changed(box: Box) -> None:
    source = "import mmap, sys, time\nf = open('/root/db', 'r+b'); m = mmap.mmap(f.fileno(), 4096)\nfor line in sys.stdin: m[0:4] = line[:4].encode(); time.sleep(0)"
    box.run("truncate -s 4096 /root/db")
    agent = box.spawn("python3", "-uc", source, stdin=True, name="agent:x")
    threading.Thread(target=lambda: list(agent.events()), daemon=True).start()
    time.sleep(0.3)
    taken(box)
    for line in (b"\0\0\0\0\n", b"DATA\n"):
        agent.write(line)
        time.sleep(0.1)
        assert taken(box).kind in ("processes", "full")
    agent.kill()


def test_what_is_copied_in_during_a_checkpoint_is_not_forgotten(box: Box, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("given")
    for number in range(6):

        def give(number: int = number) -> None:
            time.sleep(0.02 * number)
            box.ask(ask.CopyIn, source=str(tmp_path / "f"), target=f"/root/f{number}")

        thread = threading.Thread(target=give)
        thread.start()
        box.checkpoint(policy="always")
        thread.join()
        made = box.checkpoint()
        missing = [c.path for c in box.ask(ask.Diff, ref=made.id).files]
        assert not missing, (missing, told(made))


def test_a_command_beside_a_checkpoint_of_files_loses_nothing(box: Box) -> None:
    box.run("mkdir /w; cd /w; seq 1000 | xargs touch")
    box.checkpoint()
    end = time.monotonic() + 6

    def beside() -> None:
        number = 0
        while time.monotonic() < end:
            number += 1
            box.run(f"echo {number} > /w/new{number}")

    thread = threading.Thread(target=beside)
    thread.start()
    number = 0
    while time.monotonic() < end:
        number += 1
        box.run(f"echo {number} > /main")
        box.checkpoint(durable=False)
    thread.join()
    made = box.checkpoint()
    while made.kind != "none":
        made = box.checkpoint()
    missing = [c.path for c in box.ask(ask.Diff, ref=made.id).files if c.what != ("times",)]
    assert not missing, missing


def test_how_a_command_ended_and_what_it_wrote_is_state_until_somebody_fetches_it(box: Box) -> None:
    taken(box)
    box.spawn("sh", "-c", "echo said; exit 3", name="left").detach()
    eventually(lambda: any(c.id == "left" and not c.running for c in box.ask(ask.CommandList)))
    made = taken(box)
    assert made.kind == "processes", told(made)
    assert "left has ended, and nobody has fetched how" in told(made)
    assert taken(box).kind == "none"
    for _ in range(2):
        result = box.service.command(box.name, "left").collect()
        assert (result.stdout, result.exit_code) == (b"said\n", 3)
        assert "how left ended was fetched" in told(taken(box))
        box.rewind(made.id)


def test_a_command_whose_outcome_was_fetched_leaves_nothing(box: Box) -> None:
    taken(box)
    for _ in range(20):
        box.run("echo said")
        made = box.checkpoint()
        assert made.kind == "none", told(made)
