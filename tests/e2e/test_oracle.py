"""The oracle against real checkpoints: what it says of nothing, and of one small change at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from e2e.box import Box, eventually
from e2e.judged import Judged

from crab.sandbox.command import Command

pytestmark = [pytest.mark.kernel, pytest.mark.criu]


@pytest.fixture
def judged(make_box: Callable[..., Box], pruned: str) -> Judged:
    return Judged(make_box(image=pruned))


def python(judged: Judged, source: str) -> Command:
    return judged.still("python3", "-c", f"import os, signal, time, mmap, ctypes, socket\n{source}\nsignal.pause()")


# ---------------------------------------------------------------- nothing

SLEEPERS = (
    ("sleep", "100000"),
    ("python3", "-c", "import time; time.sleep(100000)"),
    ("python3", "-c", "import signal; signal.pause()"),
    ("python3", "-c", "import socket; s = socket.create_server(('127.0.0.1', 8000)); s.accept()"),
    ("python3", "-c", "import select; p = select.epoll(); p.poll()"),
    ("python3", "-c", "import select; select.select([], [], [], 99999)"),
    ("python3", "-c", "import select; select.poll().poll()"),
    ("python3", "-c", "import threading as t, time\n[t.Thread(target=time.sleep, args=(9999,)).start() for _ in '123']\nt.Event().wait()"),
    ("sh", "-c", "mkfifo /tmp/f; exec python3 -c \"open('/tmp/f').readline()\" 3<>/tmp/f"),
    ("sh", "-c", "sleep 100000 | cat"),
    ("bash", "-c", "sleep 100000 & wait"),
    ("sh", "-c", "sleep 100000 | sqlite3 /tmp/x.db"),
)  # fmt: skip
RESTLESS = (("perl", "-e", "sleep 100000 while 1"), ("nginx", "-g", "daemon off;"), ("tmux", "-D", "-f", "/dev/null"))
"""They sleep as well, but each freeze wakes them in their own code: they count how long they will still sleep, or keep a copy
of the time of day."""


def test_two_captures_around_nothing_are_the_same_for_processes_that_sleep(judged: Judged) -> None:
    commands = [judged.box.spawn(*words) for words in SLEEPERS]
    commands += [judged.box.spawn("bash", stdin=True), judged.box.spawn("bash", "-i", tty=True, stdin=True)]
    judged.rests(*commands)
    judged.capture()  # some take another way the first time that a call of theirs is interrupted
    for _ in range(3):
        truth = judged.around(lambda: time.sleep(1.2))
        assert truth.kind == "none" and not truth.left_out, "\n".join(truth.processes)


def test_what_a_freeze_alone_does_to_processes_that_sleep_is_learnt_and_left_out(judged: Judged) -> None:
    judged.rests(*[judged.box.spawn(*words) for words in RESTLESS])
    judged.capture()
    truth = judged.around(lambda: None)
    assert truth.kind == "processes" and truth.ran == {int(line.split()[1].strip(":")) for line in truth.processes}
    judged.learn()
    for _ in range(3):
        truth = judged.around(lambda: time.sleep(1.2))
        assert truth.kind == "none" and truth.left_out, "\n".join(truth.processes)


HOLDER = """
import select, struct, fcntl
gone = open('/tmp/gone', 'w'); gone.write('x' * 99); gone.flush(); os.unlink('/tmp/gone')
left, right = socket.socketpair(); left.send(b'waits')
there = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); there.bind('\\0there')
eventfd = os.eventfd(3); memory = os.memfd_create('x'); os.write(memory, b'abc')
r, w = os.pipe(); os.write(w, b'in a pipe')
events = select.epoll(); events.register(left); events.register(r, select.EPOLLIN)
master, slave = os.openpty(); os.write(master, b'half a line')
fcntl.flock(gone, fcntl.LOCK_EX)
c = ctypes.CDLL(None); c.semctl(c.semget(7, 2, 0o1600), 1, 16, 5)
shared = mmap.mmap(-1, 8192); shared[5] = 7
signal.pthread_sigmask(signal.SIG_BLOCK, [10]); os.kill(os.getpid(), 10)
os.umask(0o27); os.nice(3)
server = socket.create_server(('127.0.0.1', 8200)); client = socket.create_connection(('127.0.0.1', 8200)); client.send(b'hello'); peer = server.accept()[0]
"""
"""A process with one of each kind of object."""


def test_what_a_rewind_brings_back_is_what_was_captured(judged: Judged) -> None:
    commands = [judged.box.spawn(*words) for words in SLEEPERS]
    judged.rests(*commands, judged.box.spawn("bash", "-i", tty=True, stdin=True))
    python(judged, HOLDER)
    judged.capture()
    before = judged.capture()
    judged.box.rewind()
    truth = judged.compare(before, judged.capture())
    # CRIU 4.1.1 leaves SO_REUSEPORT set on the TCP connections that it restores
    other = [line for line in truth.processes if not line.endswith("options reuseport was 0, is 1")]
    assert not other and not truth.files and len(truth.processes) == 2, "\n".join(truth.processes)


@pytest.mark.parametrize("script", ["true", "ls -R /etc >/dev/null", "echo x >/tmp/t; rm /tmp/t", "(sleep 0.1 & wait)"])
def test_a_command_that_leaves_nothing_is_nothing(judged: Judged, script: str) -> None:
    judged.still("sleep", "100000")
    truth = judged.around(lambda: judged.box.run(script))
    assert (truth.kind, truth.files, truth.processes) == ("none", (), ())


# ---------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("script", "kind", "path"),
    [
        ("echo x >/tmp/new", "files", "tmp/new"),
        ("chmod 600 /tmp/old", "files", "tmp/old"),
        ("printf OLD >/tmp/old", "files", "tmp/old"),
        ("echo x >/dev/shm/x", "files", "dev/shm/x"),
        ("printf old >/tmp/old", "none", ""),
        ("touch -d 2001-01-01 /tmp/old", "none", ""),
    ],
)
def test_files_are_told_by_their_content(judged: Judged, script: str, kind: str, path: str) -> None:
    judged.box.run("printf old >/tmp/old")
    judged.still("sleep", "100000")
    truth = judged.around(lambda: judged.box.run(script))
    assert truth.kind == kind and not truth.processes, truth.processes
    assert [change.path for change in truth.files] == [path] * bool(path)
    assert (truth.times_only > 0) == (kind == "none")


def test_a_new_process_and_a_new_file_are_full(judged: Judged) -> None:
    def turn() -> None:
        judged.box.background("echo >/tmp/new; exec sleep 100000")
        eventually(lambda: judged.box.result("test -e /tmp/new && pgrep -x sleep").ok)

    truth = judged.around(turn)
    assert truth.kind == "full" and "sleep 100000" in truth.processes[0]


# ---------------------------------------------------------------- memory


def poke(host_pid: int, address: int, data: bytes) -> None:
    """Change memory of a process that does not notice."""
    with open(f"/proc/{host_pid}/mem", "r+b", buffering=0) as memory:
        os.pwrite(memory.fileno(), data, address)


@pytest.mark.parametrize("kind", ["heap", "shared"])
def test_one_byte_in_the_memory_of_a_process_that_sleeps_is_a_change(judged: Judged, kind: str) -> None:
    made = {"heap": "m = ctypes.create_string_buffer(100)", "shared": "p = mmap.mmap(-1, 8192); p[9] = 1; m = ctypes.c_char.from_buffer(p)"}  # fmt: skip
    command = python(judged, f"{made[kind]}\nopen('/tmp/at', 'w').write(str(ctypes.addressof(m)))")
    address = int(judged.box.read("/tmp/at"))
    host_pid = judged.host_pid(command)
    judged.rests(command)
    truth = judged.around(lambda: poke(host_pid, address + 40, b"!"))
    assert truth.kind == "processes" and len(truth.processes) == 1 and "1 words of memory" in truth.processes[0]
    assert f"{address + 40 & ~7:#x}" in truth.processes[0] or kind == "shared"
    assert judged.around(lambda: poke(host_pid, address + 40, b"!")).kind == "none"


def test_a_page_that_is_written_with_what_was_there_is_no_change(judged: Judged) -> None:
    command = python(judged, "m = mmap.mmap(-1, 1 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n"
                             "open('/tmp/at', 'w').write(str(ctypes.addressof(ctypes.c_char.from_buffer(m))))")  # fmt: skip
    address = int(judged.box.read("/tmp/at"))
    judged.rests(command)
    host_pid = judged.host_pid(command)
    assert judged.around(lambda: poke(host_pid, address + 8192, bytes(4096))).kind == "none"
    program = next(
        line
        for line in Path(f"/proc/{host_pid}/maps").read_text().splitlines()
        if "libc.so" in line and " r-xp " in line
    )
    start = int(program.partition("-")[0], 16)
    with open(f"/proc/{host_pid}/mem", "rb", buffering=0) as memory:
        same = os.pread(memory.fileno(), 4096, start)
    assert judged.around(lambda: poke(host_pid, start, same)).kind == "none"  # a private copy of a page of a file
    assert judged.around(lambda: poke(host_pid, start, b"?" + same[1:])).kind == "processes"


# ---------------------------------------------------------------- kernel objects

C = "import ctypes, os, sys; c = ctypes.CDLL(None, use_errno=True); "
SEMAPHORES = C + "i = c.semget(0x77, 2, 0o1600); assert i >= 0; "
MEMORY = C + "i = c.shmget(0x77, 4096, 0o1600); c.shmat.restype = ctypes.c_void_p; a = c.shmat(i, None, 0); "
QUEUE = C + "i = c.msgget(0x77, 0o1600); assert i >= 0; "
SHARED = C + "fd = c.syscall(438, c.syscall(434, int(sys.argv[1]), 0), 3, 0); assert fd >= 0, ctypes.get_errno(); "
"""A descriptor of the open file that is 3 in that process (pidfd_getfd)."""
CASES: dict[str, tuple[str, str, str, str]] = {
    # what is there before (python), who holds it (a program that sleeps), the turn (a script; $P is the holder), a line
    "value of a semaphore": (SEMAPHORES, "", f"python3 -c '{SEMAPHORES} c.semctl(i, 1, 16, 5)'", "semaphores 0: values"),
    "a new semaphore": ("", "", f"python3 -c '{SEMAPHORES}'", "semaphores 0"),
    "second store to System V memory": (
        MEMORY + "ctypes.memset(a, 1, 10)", "", f"python3 -c '{MEMORY} ctypes.memset(a + 100, 2, 1)'", "System V"),
    "a message in a queue": (QUEUE, "", f"python3 -c '{QUEUE} c.msgsnd(i, b\"\\1\\0\\0\\0\\0\\0\\0\\0hello\", 5, 0)'", "message queue"),
    "a pipe filled": ("os.mkfifo('/tmp/f')", "os.open('/tmp/f', os.O_RDWR)", "echo x >/tmp/f", "bytes was 0, is 2"),
    "a datagram": ("", "s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM); s.bind('\\0here')",
                   "python3 -c 'import socket; socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b\"x\", \"\\0here\")'", "queue of the socket"),
    "renice": ("", "", "renice -n 5 $P", "nice was"),
    "prlimit": ("", "", "prlimit --pid $P --nofile=64:128", "rlimits"),
    "a blocked signal": ("", "signal.pthread_sigmask(signal.SIG_BLOCK, [10])", "kill -USR1 $P", "pending"),
    "a stopped process": ("", "", "kill -STOP $P", "state was"),
    "out of memory score": ("", "", "echo 500 >/proc/$P/oom_score_adj", "oom_score_adj was 0, is 500"),
    "an offset moved by another": ("open('/tmp/x', 'w').write('x' * 99)", "assert os.open('/tmp/x', 0) == 3",
                                   f"python3 -c '{SHARED} os.lseek(fd, 50, 0)' $P", "position was 0, is 50"),
    "a flag set by another": ("open('/tmp/x', 'w').write('x' * 99)", "assert os.open('/tmp/x', 0) == 3",
                              f"python3 -c '{SHARED} os.set_blocking(fd, False)' $P", "flags was"),
    "an eventfd": ("", "assert os.eventfd(7, os.EFD_NONBLOCK) == 3", f"python3 -c '{SHARED} os.eventfd_write(fd, 3)' $P", "counter was 7, is 10"),
    "a timerfd set": ("", "c = ctypes.CDLL(None); assert c.timerfd_create(1, 0) == 3",
                      f"python3 -c '{SHARED} c.timerfd_settime(fd, 0, (ctypes.c_long * 4)(0, 0, 9999, 0), None)' $P", "armed was False, is True"),
    "a memory file": ("", "fd = os.memfd_create('m'); assert fd == 3; os.write(fd, b'abc')", f"python3 -c '{SHARED} os.pwrite(fd, b\"x\", 1)' $P", "memfd at"),
    "an epoll set": ("", "import select; e = select.epoll(); assert e.fileno() == 3; r, w = os.pipe(); e.register(r, 1)",
                     f"python3 -c '{SHARED} import select; os.dup2(fd, 100); os.dup2(c.syscall(438, c.syscall(434, int(sys.argv[1]), 0), 4, 0), 4); select.epoll.fromfd(100).modify(4, 4)' $P", "targets"),
    "a file without a name": ("", "fd = os.open('/tmp/gone', os.O_RDWR | os.O_CREAT); assert fd == 3; os.unlink('/tmp/gone')",
                              f"python3 -c '{SHARED} os.pwrite(fd, b\"x\", 0)' $P", "nameless"),
    "data for a terminal": ("", "m, s = os.openpty(); assert m == 3", f"python3 -c '{SHARED} os.write(fd, b\"typed\\n\")' $P", "tty"),
    "settings of a terminal": ("", "m, s = os.openpty(); assert m == 3", f"python3 -c '{SHARED} import termios; a = termios.tcgetattr(fd); a[3] ^= termios.ECHO; termios.tcsetattr(fd, 0, a)' $P", "settings local"),
    "size of a terminal": ("", "m, s = os.openpty(); assert m == 3", f"python3 -c '{SHARED} import termios; termios.tcsetwinsize(fd, (7, 9))' $P", "size rows"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_change_of_a_kernel_object_behind_the_back_of_its_holder_is_told(judged: Judged, name: str) -> None:
    before, holder, script, line = CASES[name]
    if before:
        judged.box.python(f"import os\n{before}")
    command = python(judged, holder)
    judged.capture()
    pid = command.status().pid
    first = judged.capture()
    judged.box.run("true")
    second = judged.capture()
    assert judged.compare(first, second).processes == ()
    judged.box.run(f"P={pid}; {script}")
    truth = judged.compare(second, judged.capture())
    assert truth.kind == "processes" and any(line in found for found in truth.processes), truth
    assert not truth.ran, truth.processes  # memory and registers are as they were


# ---------------------------------------------------------------- shells


@pytest.mark.parametrize(("words", "line"), [("export A=1", "memory"), ("cd /tmp", "cwd was"), ("umask 077", "umask was"), ("exec 7</etc/passwd", "descriptor 7"),
                                             ("ulimit -n 77", "rlimits"), ("trap : USR1", "actions")])  # fmt: skip
def test_what_a_shell_keeps_is_told(judged: Judged, words: str, line: str) -> None:
    tell = judged.shell()
    truth = judged.around(lambda: tell(words))
    assert truth.kind == "processes" and any(line in found for found in truth.processes), truth.processes
    assert bool(truth.ran) == (line == "memory")
