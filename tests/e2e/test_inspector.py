"""The inspector on real sandboxes: what a turn changed is what is captured, nothing more and never less."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.box import Box, eventually

from crab.daemon import requests as ask
from crab.daemon.service import Service
from crab.errors import CrabError
from crab.model import Checkpoint, Decision, ExecSpec, Mount

pytestmark = [pytest.mark.kernel, pytest.mark.criu]

SLEEPER = "import os, time; open('/tmp/up', 'w').write(str(os.getpid())); time.sleep(100000)"


@pytest.fixture(autouse=True)
def needs_a_tier(box: Box) -> None:
    if not box.service._core.inspector.tier:
        pytest.skip(box.service._core.inspector.why_not)


def turn(box: Box, script: str = "true") -> Checkpoint:
    """A command, and the checkpoint at its end."""
    if script:
        box.run(f"bash -c '{script}'" if "'" not in script else script)
    return box.checkpoint()


def rest(box: Box) -> None:
    """Wait as for a model: until those who stood still for the last capture rest again."""
    life = box.service._core.life(box.service._core.registry.find(box.name))
    known = box.service._core.inspector.baseline(life.key)
    assert known is not None
    eventually(lambda: all(p.proven for p in (known.processes or {}).values()))
    time.sleep(0.3)


def sleeper(box: Box, source: str = SLEEPER) -> None:
    """A process that sleeps, captured, and at rest."""
    box.run("rm -f /tmp/up")
    box.background(f'exec python3 -c "{source}"')
    eventually(lambda: box.read("/tmp/up"))
    box.checkpoint(policy="always")
    rest(box)


class Talk:
    """A program that answers each line that it is given with one of its own."""

    def __init__(self, box: Box, source: str, **spec: Any) -> None:
        self.command = box.spawn("python3", "-uc", source, stdin=True, **spec)
        self._answers: queue.Queue[bytes] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with contextlib.suppress(CrabError):
            begun = b""
            for piece in self.command.events():
                *lines, begun = (begun + piece.data).split(b"\n")
                for line in lines:
                    self._answers.put(line)

    def hear(self) -> bytes:
        return self._answers.get(timeout=20)

    def say(self, text: str) -> bytes:
        self.command.write(text.encode() + b"\n")
        return self.hear()


def reasons(decision: Decision | None) -> str:
    assert decision is not None
    return "; ".join((*decision.reasons, *decision.notes))


# ---------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("script", "kind", "said"),
    [
        ("ls -R /etc; cat /etc/passwd; find /usr -maxdepth 2", "none", "no file and no process"),
        ("echo hi > /root/a", "files", "root/a added"),
        ("echo two > /root/kept", "files", "root/kept changed (content)"),
        ("echo one > /root/kept", "none", "hold what they held"),
        ("touch /root/kept", "none", "only times differ"),
        ("touch /root/x; rm /root/x", "none", "without effect"),
        ("mkdir -p /root/d/e; rm -r /root/d", "none", "no file"),
        ("rm /root/kept", "files", "root/kept removed"),
        ("mv /root/kept /root/moved", "files", "root/moved added"),
        ("mv /root/kept /root/t; mv /root/t /root/kept", "none", "without effect"),
        ("cp /root/kept /root/new; mv /root/new /root/kept", "none", "without effect"),
        ("ln /root/kept /root/second", "files", "root/second added"),
        ("chmod 600 /root/kept", "files", "mode"),
        ("chown 1:1 /root/kept", "files", "owner"),
        ("setfattr -n user.k -v v /root/kept || python3 -c 'import os; os.setxattr(\"/root/kept\", \"user.k\", b\"v\")'", "files", "xattr"),
        ("ln -s a /root/link", "files", "root/link added"),
        ("mkfifo /root/fifo", "files", "root/fifo added"),
        ("truncate -s 100M /root/sparse", "files", "root/sparse added"),
        ("echo >> /etc/hostname", "files", "etc/hostname changed (content)"),
        ("python3 -c 'open(\"/etc/passwd\", \"r+\")'", "none", "without effect"),
        ("rm /etc/passwd", "files", "etc/passwd removed"),
        ("rm -r /usr/share/doc", "files", "not all their names are known"),
        ("mv /usr/share/doc /usr/share/docs", "files", "usr/share/docs added"),
        ("echo x > /dev/shm/x", "files", "dev/shm/x added"),
        ("mkdir -p /root/full && mv /root/full /root/tree", "files", "root/tree"),
    ],
)  # fmt: skip
def test_files_count_by_what_they_hold_at_the_end(box: Box, script: str, kind: str, said: str) -> None:
    box.run("echo one > /root/kept; mkdir /root/tree; echo x > /root/tree/leaf")
    box.checkpoint()
    made = turn(box, script)
    assert made.kind == kind, reasons(made.decision)
    assert said in reasons(made.decision)
    assert turn(box).kind == "none", "the next turn starts from there"


def test_hazard_i02_a_second_write_within_one_tick_of_the_clock_is_seen(box: Box) -> None:
    box.run("echo 0 > /root/tick")
    writer = Talk(
        box,
        "import sys, os; f = os.open('/root/tick', os.O_RDWR)\nfor line in sys.stdin: print(os.pwrite(f, line.encode(), 0))",
    )
    for number in range(10):
        writer.say(f"{number}")
        box.checkpoint(policy="files")
        writer.say(f"{(number + 1) % 10}")
        assert "root/tick" in reasons(box.ask(ask.Explain)), number
    writer.command.kill()


def test_hazard_i03_a_store_into_a_page_that_is_writable_already_is_not_missed(box: Box) -> None:
    source = """
import mmap, os, sys
f = os.open('/root/map', os.O_RDWR | os.O_CREAT); os.ftruncate(f, 8192); m = mmap.mmap(f, 8192); m[0] = 1; print('up')
for line in sys.stdin: m[1] = int(line); print('ok')
"""
    writer = Talk(box, source)
    writer.hear()
    box.checkpoint()
    for number in (5, 6):
        writer.say(f"{number}")
        made = box.checkpoint()
        assert made.kind in ("full", "processes"), reasons(made.decision)
    box.run("rm /root/map")
    box.rewind(made.id)
    assert box.run("od -An -tu1 -j1 -N1 /root/map").strip() == "6"


def test_hazard_f05_odd_names_are_seen_and_told(box: Box) -> None:
    box.checkpoint()
    box.python("import os; open(b'/root/\\xff\\n' + b'x' * 200, 'w').write('1')")
    made = box.checkpoint()
    assert made.kind == "files" and made.decision and made.decision.files[0].path.startswith("root/\\xff\n")


def test_hazard_f05_a_process_with_odd_arguments_is_captured_and_compared(box: Box) -> None:
    box.background('exec python3 -c \'import os; os.execv("/bin/sleep", [b"sl\\xffeep", b"100000"])\'')
    eventually(lambda: b"sl\xffeep" in b"".join(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in box.host_pids()))
    made = box.checkpoint()
    result = box.ask(ask.Verify, ref=made.id)
    assert result.proof.verdict == "proven", result.differences


def test_hazard_f08_what_lies_in_dev_shm_is_part_of_comparisons(box: Box) -> None:
    box.checkpoint()
    box.run("echo x > /dev/shm/x")
    assert [change.path for change in box.ask(ask.Diff, ref="head").files] == ["dev/shm/x"]


def test_hazard_f06_ten_thousand_files_cost_no_more_than_a_few_of_them(box: Box) -> None:
    box.checkpoint()
    made = turn(box, "mkdir /root/many; cd /root/many; seq 7000 | xargs touch")
    assert made.kind in ("files", "full")
    assert made.decision and len(made.decision.files) <= 16
    assert turn(box).kind == "none"


def test_hazard_i01_more_changes_than_fit_mean_full_and_the_next_turn_has_more_room(box: Box) -> None:
    box.checkpoint()
    made = turn(box, "mkdir /root/many; cd /root/many; seq 20000 | xargs touch")
    assert made.kind == "full" and "did not fit" in reasons(made.decision)
    assert turn(box).kind == "none"
    made = turn(box, "cd /root/many; seq 20000 | xargs -n 1000 sh -c 'for f; do echo x > $f; done' x")
    assert made.kind == "files", reasons(made.decision)


def test_what_the_host_copies_in_counts_although_no_process_of_the_sandbox_wrote_it(box: Box, tmp_path: Path) -> None:
    box.checkpoint()
    (tmp_path / "given").write_text("from outside")
    box.ask(ask.CopyIn, source=str(tmp_path / "given"), target="/root/given")
    made = box.checkpoint()
    assert made.kind == "files" and "was copied to /root/given" in reasons(made.decision)
    box.rewind(made.id)
    assert box.read("/root/given") == "from outside"


def test_hazard_f07_what_lies_in_a_folder_of_the_host_is_told_and_never_captured(
    service: Service, tmp_path: Path
) -> None:
    mounts = (Mount(source=str(tmp_path), target="/mnt", kind="bind"),)
    sandbox = service.handle(ask.Create(image="workloads", name="bound", mounts=mounts))
    box = Box(service, sandbox.name)
    try:
        os.chmod(tmp_path, 0o777)
        box.checkpoint()
        made = turn(box, "echo x > /mnt/x")
        assert made.kind == "none" and "folders of the host" in reasons(made.decision)
    finally:
        service.handle(ask.Remove(sandbox=sandbox.name, force=True))


def test_a_copy_on_write_mount_is_watched_like_the_root(service: Service, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("one")
    mounts = (Mount(source=str(tmp_path), target="/work", kind="copy"),)
    sandbox = service.handle(ask.Create(image="workloads", name="copied", mounts=mounts))
    box = Box(service, sandbox.name)
    try:
        box.checkpoint()
        assert turn(box, "cat /work/kept").kind == "none"
        made = turn(box, "echo two > /work/kept")
        assert made.kind == "files" and "work/kept changed (content)" in reasons(made.decision)
        assert turn(box, "echo two > /work/kept").kind == "none"
    finally:
        service.handle(ask.Remove(sandbox=sandbox.name, force=True))


# ---------------------------------------------------------------- processes


def test_hazard_i08_a_process_that_did_not_run_stands_in_one_that_ran_does_not(box: Box) -> None:
    sleeper(box)
    for _ in range(3):
        assert turn(box, "ls /").kind == "none"
    made = turn(box, "echo x > /root/x")
    assert made.kind == "files" and made.processes_from != made.id
    box.run("kill -USR1 $(cat /tmp/up); sleep 0.1")
    assert box.checkpoint().kind == "processes", "it was killed by the signal"


def test_a_checkpoint_of_files_alone_is_restored_with_the_processes_of_before(box: Box) -> None:
    sleeper(box)
    pid = box.read("/tmp/up")
    box.run("echo newer > /root/newer")
    made = box.checkpoint()
    assert made.kind == "files", reasons(made.decision)
    result = box.ask(ask.Verify, ref=made.id)
    assert result.proof.verdict == "proven", result.differences
    box.run("rm /root/newer")
    box.rewind(made.id)
    assert box.read("/root/newer") == "newer\n"
    assert box.run(f"grep -c time.sleep /proc/{pid}/cmdline") == "1\n"
    (clone,) = box.fork(1, made.id)
    assert clone.read("/root/newer") == "newer\n"


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("sleep 1000 >/dev/null 2>&1 &", "sleep"),
        ("kill -STOP $(cat /tmp/up)", "stopped"),
        ("renice 5 $(cat /tmp/up)", "nice"),
        ("prlimit --nofile=500 --pid $(cat /tmp/up)", "open files"),
        ("taskset -p 1 $(cat /tmp/up)", "affinity"),
        ("kill $(cat /tmp/up)", "ended"),
        ("ipcmk -M 4096", "shared memory"),
        ("ipcmk -S 2", "semaphores"),
        ("ipcmk -Q", "message queues"),
    ],
)
def test_what_others_do_to_processes_and_kernel_tables_is_seen(box: Box, script: str, said: str) -> None:
    sleeper(box)
    assert turn(box).kind == "none"
    made = turn(box, script)
    assert made.kind in ("processes", "full"), reasons(made.decision)
    assert said in reasons(made.decision)


def test_hazard_i04_a_semaphore_that_only_a_dead_process_changed_is_seen(box: Box) -> None:
    make = "import ctypes; l = ctypes.CDLL(None); s = l.semget(77, 1, 0o1600); l.semctl(s, 0, 16, 5); print(s)"
    use = "import ctypes; l = ctypes.CDLL(None); s = l.semget(77, 1, 0); print(l.semctl(s, 0, 16, 4))"
    box.python(make)
    box.checkpoint()
    assert turn(box).kind == "none"
    box.python(use)
    assert "semaphores" in reasons(box.checkpoint().decision)


def test_a_pending_signal_and_bytes_in_a_pipe_of_a_sleeper_are_state(box: Box) -> None:
    source = "import os, signal, time; signal.pthread_sigmask(0, {signal.SIGUSR2}); os.mkfifo('/root/p'); f = os.open('/root/p', os.O_RDWR); open('/tmp/up', 'w').write(str(os.getpid())); time.sleep(100000)"
    sleeper(box, source)
    assert turn(box).kind == "none"
    made = turn(box, "echo hello > /root/p")
    assert made.kind in ("processes", "full") and "pipe" in reasons(made.decision), reasons(made.decision)
    rest(box)
    made = turn(box, "kill -USR2 $(cat /tmp/up)")
    assert made.kind in ("processes", "full") and "signal" in reasons(made.decision), reasons(made.decision)


def test_a_replaced_file_that_a_sleeper_has_open_is_not_given_to_it(box: Box) -> None:
    source = "import os, time; f = open('/root/held', 'w+'); f.write('mine'); f.flush(); open('/tmp/up', 'w').write(str(os.getpid())); time.sleep(100000)"
    sleeper(box, source)
    made = turn(box, "echo log >> /root/held")
    assert made.kind == "files", "the same file grew: " + reasons(made.decision)
    made = turn(box, "echo other > /root/new; mv /root/new /root/held")
    assert made.kind == "full" and "another file now" in reasons(made.decision), reasons(made.decision)
    result = box.ask(ask.Verify, ref=made.id)
    assert result.proof.verdict == "proven", result.differences


def test_the_memory_of_an_agent_lags_behind_turns_that_change_nothing_and_no_others(box: Box) -> None:
    agent = Talk(box, "import sys\nfor n, line in enumerate(sys.stdin): print('turn', n)", name="agent:parrot")
    agent.say("go")
    box.checkpoint()
    agent.say("go")
    time.sleep(0.2)
    made = turn(box, "ls /")
    assert made.kind == "none" and "the agent parrot" in reasons(made.decision), reasons(made.decision)
    agent.say("go")
    time.sleep(0.2)
    made = turn(box, "echo x > /root/x")
    assert made.kind == "full" and "its memory must fit the rest" in reasons(made.decision), reasons(made.decision)
    agent.command.kill()


# ---------------------------------------------------------------- what is not known


def test_without_a_checkpoint_or_after_a_restore_nothing_is_taken_for_known(box: Box) -> None:
    first = box.checkpoint()
    assert first.kind == "full" and "no checkpoint to compare with" in reasons(first.decision)
    sleeper(box)
    box.rewind()
    made = turn(box)
    assert made.kind == "processes" and "nothing is known of it" in reasons(made.decision), reasons(made.decision)
    box.ask(ask.Stop)
    box.ask(ask.Start)
    assert turn(box).kind == "full"


def test_explain_looks_and_captures_nothing(box: Box) -> None:
    box.checkpoint()
    box.run("echo x > /root/x")
    decision = box.ask(ask.Explain)
    assert decision.kind == "files" and "root/x added" in decision.reasons[0]
    assert len(box.ask(ask.Turns)) == 1
    made = box.checkpoint()
    assert box.ask(ask.Explain, ref=str(made.turn)) == made.decision
    always = box.checkpoint(policy="always")
    assert "without a look" in box.ask(ask.Explain, ref=always.id).reasons[0]


def test_a_turn_that_changed_nothing_can_be_rewound_to_exported_and_removed(box: Box, tmp_path: Path) -> None:
    box.run("echo kept > /root/kept")
    box.checkpoint()
    empty = turn(box)
    assert empty.kind == "none" and empty.files_from and empty.processes_from == empty.files_from
    box.run("rm /root/kept")
    box.rewind(empty.id)
    assert box.read("/root/kept") == "kept\n"
    assert box.ask(ask.Verify, ref=empty.id).proof.verdict == "proven"
    exported = box.ask(ask.Export, ref=empty.id, path=str(tmp_path / "e.crab"))
    assert exported.id == empty.id
    imported = Box(box.service, box.service.handle(ask.Import(path=str(tmp_path / "e.crab"), name="imported")).name)
    try:
        imported.ask(ask.Recover)
        assert imported.read("/root/kept") == "kept\n"
    finally:
        imported.ask(ask.Remove, force=True)


def test_hazard_r07_what_others_need_of_a_removed_checkpoint_becomes_theirs(box: Box) -> None:
    sleeper(box)
    pid = box.read("/tmp/up")
    first = box.ask(ask.Turns)[-1]
    box.run("echo kept > /root/kept")
    files = box.checkpoint()
    empty, last = turn(box), turn(box)
    assert (files.kind, empty.kind, last.kind) == ("files", "none", "none")
    assert files.processes_from == last.processes_from == first.id and last.files_from == files.id
    for gone in (first, files):
        box.ask(ask.RemoveCheckpoint, ref=gone.id)
    assert [one.id for one in box.ask(ask.Turns)] == [empty.id, last.id]
    assert turn(box).kind == "none", "the inspector knows where it all is"
    for ref in (empty.id, last.id):
        result = box.ask(ask.Verify, ref=ref)
        assert result.proof.verdict == "proven", result.differences
    box.ask(ask.Kill)
    box.ask(ask.Recover)
    assert box.read("/root/kept") == "kept\n"
    assert box.run(f"grep -c time.sleep /proc/{pid}/cmdline") == "1\n"
    with pytest.raises(CrabError, match="head"):
        box.ask(ask.RemoveCheckpoint, ref="head")


def test_a_capture_that_failed_forgets_nothing(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    from crab.daemon import history
    from crab.errors import CaptureFailed

    box.checkpoint()
    box.run("echo x > /root/x; setsid sleep 1000 >/dev/null 2>&1 &")

    def fails(*arguments: object) -> None:
        arguments[4]()  # type: ignore[operator]  the moment came
        raise CaptureFailed("the disk is gone", remedy="")

    with monkeypatch.context() as patch:
        patch.setattr(history, "capture", fails)
        with pytest.raises(CaptureFailed):
            box.checkpoint()
    decision = box.ask(ask.Explain)
    assert decision.kind == "full" and "root/x" in reasons(decision) and "sleep" in reasons(decision)


SCRIPT = """
import sys
from crab.daemon import requests as ask
from crab.daemon.service import Service
from crab.errors import CrabError
from crab.model import ExecSpec
service = Service.open(sys.argv[1])
service.handle(ask.Create(image="small", name="orphan"))
service.handle(ask.TakeCheckpoint(sandbox="orphan"))
service.handle(ask.Run(sandbox="orphan", spec=ExecSpec(argv=("sh", "-c", "echo 1 > /root/one"))))
print("ready", flush=True)
input()
"""


def test_hazard_i05_a_new_daemon_goes_on_where_a_killed_one_stopped(second_state: Path) -> None:
    """Changes of before and of the time without a daemon are all seen."""
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, second_state], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout and process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGKILL)
    with Service.open(second_state) as service:
        decision = service.handle(ask.Explain(sandbox="orphan"))
        assert decision.kind == "files" and "root/one added" in reasons(decision), reasons(decision)
        service.handle(ask.TakeCheckpoint(sandbox="orphan"))
        assert service.handle(ask.TakeCheckpoint(sandbox="orphan")).kind == "none"


@pytest.fixture
def switched_off(second_state: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setenv("CRAB_INSPECTOR", "off")
    with Service.open(second_state) as service:
        yield service


def test_switched_off_every_checkpoint_is_full_and_says_so(switched_off: Service) -> None:
    switched_off.handle(ask.Create(image="small", name="plain"))
    box = Box(switched_off, "plain")
    box.checkpoint()
    made = box.checkpoint()
    assert made.kind == "full" and "switched off" in reasons(made.decision)


def test_a_sandbox_that_dies_while_it_is_looked_at_is_gone_not_unchanged(box: Box) -> None:
    box.checkpoint()
    box.ask(ask.Kill)
    with pytest.raises(CrabError):
        box.checkpoint()


def test_thousands_of_short_lived_processes_leave_nothing(box: Box) -> None:
    box.checkpoint()
    box.ask(ask.Run, spec=ExecSpec(argv=("bash", "-c", "for i in $(seq 3000); do /bin/true; done")))
    assert box.checkpoint().kind == "none"
