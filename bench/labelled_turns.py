"""Turns of an agent with the right answer to "what changed since the last turn?": none, files, processes or full.

Scenarios are sequences: each turn is judged against the end of the one before, the first against the end of `setup`.

The rule by which the labels were given, before anything was measured with them:
- *files* if after the turn any name, type, mode, owner, content, link target or attribute is another. Times alone, new inode
  numbers with the same content, and what is written and taken back are no change. /dev/shm is a folder of the sandbox's own.
- *processes* if anything is another that a restore of processes brings back and a program could find out: a process more or
  less, memory, descriptors, offsets, limits, signals, pipes, System V objects. A server that ran has changed; one that
  slept through the turn has not.
- *full* if both. *none* if neither. A file that a process holds open and that loses or changes its name is both: the
  descriptor leads elsewhere by name, and an image of before names what is no longer there.
- Of a persistent shell counts what its next command could tell: directory, variables, functions, aliases, traps, options,
  limits, mask, jobs, descriptors. Not what a shell keeps of the last command alone (`$?`, `$_`, PIPESTATUS, its own heap) or
  what changes by itself (SECONDS, RANDOM, LINENO).

A turn ends when its command has: so commands wait for what they start (`rests NAME` waits until the processes of that name
have not run for a while). Labels are data: nothing here measures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

Label = Literal["none", "files", "processes", "full"]


@dataclass(frozen=True)
class Turn:
    """One command and what it changes."""

    command: str
    label: Label
    shell: bool = False
    """Given to the persistent bash of the scenario; else run by `bash -c` of its own."""


@dataclass(frozen=True)
class Scenario:
    """Turns that build on each other."""

    name: str
    turns: tuple[Turn, ...]
    setup: str = ""
    needs: tuple[str, ...] = ()
    """Programs that the image must have."""
    restless: bool = False
    """A process in it wakes at every freeze in its own code (an event loop with a timer): what that alone changes is no
    change of a turn."""

    @property
    def has_shell(self) -> bool:
        return any(turn.shell for turn in self.turns)


RESTS = r"""cat >/usr/local/bin/rests <<'END'
#!/bin/bash
look() { for pid in $(pgrep -x "$1"); do cat /proc/$pid/task/*/status 2>/dev/null | grep ctxt; done; }
for try in {1..100}; do
    before=$(look "$1"); sleep 0.4
    [ -n "$before" ] && [ "$before" = "$(look "$1")" ] && exit 0
done
exit 1
END
chmod 755 /usr/local/bin/rests; mkdir -p /work; cd /work
"""
"""What every scenario begins with."""


def _turns(*pairs: tuple[str, Label], shell: bool = False) -> tuple[Turn, ...]:
    return tuple(Turn(command, label, shell) for command, label in pairs)


_GIT = """git config --global user.name A; git config --global user.email a@example.org; git config --global init.defaultBranch main
git config --global gc.auto 0; git config --global advice.detachedHead false
"""
_IPC = "import ctypes, struct; c = ctypes.CDLL(None); "

SCENARIOS: tuple[Scenario, ...] = (
    Scenario(
        "reading",
        _turns(
            ("ls -la / /work", "none"),
            ("grep -r root /etc | wc -l", "none"),
            ("find / -xdev -name '*.conf' | head -n 50", "none"),
            ("cat a.txt; head -c 10 a.txt; wc a.txt; stat a.txt; md5sum a.txt", "none"),
            ("git status", "none"),
            ("git log --stat | cat; git diff; git show | cat", "none"),
            ("python3 -c 'import json; print(json.dumps({}))'", "none"),
            ("touch a.txt", "none"),
            ("git status", "files"),  # it notes the new time in its index
            ("git status", "none"),
            ("cat nothing; ls nowhere", "none"),
            ("sleep 0.1 | cat", "none"),
        ),
        setup=f"{_GIT}git init -q . && echo one >a.txt && git add . && git commit -qm first && sleep 1.1 && git status",
        needs=("git", "python3"),
    ),
    Scenario(
        "editing",
        _turns(
            ("sed -i s/nowhere/x/ a.txt", "none"),
            ("sed -i s/one/two/ a.txt", "files"),
            ("python3 -c \"t = open('a.txt').read(); open('a.txt', 'w').write(t)\"", "none"),
            ("python3 -c \"t = open('a.txt').read(); open('a.txt', 'w').write(t + 'x')\"", "files"),
            ("perl -pi -e s/two/three/ a.txt", "files"),
            ("touch a.txt", "none"),
            ("touch new", "files"),
            ("cp a.txt b.txt", "files"),
            ("cp a.txt b.txt", "none"),
            ("mv b.txt c.txt", "files"),
            ("mv c.txt d.txt; mv d.txt c.txt", "none"),
            ("chmod 600 c.txt", "files"),
            ("chmod 600 c.txt", "none"),
            ("ln -s a.txt l", "files"),
            ("ln -sf a.txt l", "none"),
            ("truncate -s 0 c.txt", "files"),
            ("rm c.txt && touch c.txt && chmod 600 c.txt", "none"),
            ("rm c.txt", "files"),
            ("mkdir -p deep/er && rmdir -p deep/er", "none"),
        ),
        setup="printf 'one\\nlines\\n' >a.txt",
        needs=("perl", "python3"),
    ),
    Scenario(
        "building with a script",
        _turns(
            ("./build", "files"),
            ("./build", "none"),
            ("touch in && ./build", "none"),  # the same again
            ("echo more >>in && ./build", "files"),
            ("./build; ./build", "none"),
        ),
        setup="printf '#!/bin/sh\\n[ out -nt in ] || tr a-z A-Z <in >out\\n' >build; chmod 755 build; echo text >in",
    ),
    Scenario(
        "building with make",
        _turns(
            ("make", "files"),
            ("make", "none"),
            ("make -n; make -q", "none"),
            ("make clean", "files"),
            ("make clean", "none"),
        ),
        setup="printf 'out: in\\n\\tcp in out\\nclean:\\n\\trm -f out\\n' >Makefile; echo text >in",
        needs=("make",),
    ),
    Scenario(
        "compiling Python",
        _turns(
            ("python3 -m compileall -q pkg", "files"),
            ("python3 -m compileall -q pkg", "none"),
            ("sleep 1.1; touch pkg/m.py; python3 -m compileall -q pkg", "files"),  # the time is in the .pyc
            ("python3 -c 'import pkg.m'", "none"),
        ),
        setup="mkdir pkg; echo x = 1 >pkg/m.py; echo >pkg/__init__.py",
        needs=("python3",),
    ),
    Scenario(
        "testing",
        _turns(
            ("python3 -B -m unittest -q", "none"),
            ("python3 -m unittest -q", "files"),  # __pycache__
            ("python3 -m unittest -q", "none"),
            ("PYTHONDONTWRITEBYTECODE=1 python3 -m unittest -q; echo $?", "none"),
            ("rm -r __pycache__", "files"),
        ),
        setup="printf 'import unittest\\nclass T(unittest.TestCase):\\n    def test_a(self): self.assertEqual(1, 1)\\n' >test_a.py",
        needs=("python3",),
    ),
    Scenario(
        "installing a .deb",
        _turns(
            ("dpkg -i hello.deb", "files"),
            ("dpkg -s hello-crab; dpkg -L hello-crab", "none"),
            ("hello-crab", "none"),
            ("dpkg -i hello.deb", "files"),  # its log
            ("dpkg -r hello-crab", "files"),
        ),
        setup="mkdir -p h/DEBIAN h/usr/bin; printf '#!/bin/sh\\necho hi\\n' >h/usr/bin/hello-crab; chmod 755 h/usr/bin/hello-crab; "
        "printf 'Package: hello-crab\\nVersion: 1\\nArchitecture: all\\nMaintainer: a <a@example.org>\\nDescription: x\\n' >h/DEBIAN/control; "
        "dpkg-deb -b h hello.deb",
        needs=("dpkg-deb",),
    ),
    Scenario(
        "installing with pip",
        _turns(
            ("python3 -m pip install -q --no-index --break-system-packages ./pkg_crab-1-py3-none-any.whl", "files"),
            ("python3 -c 'import pkg_crab'", "none"),
            ("python3 -m pip uninstall -qy --break-system-packages pkg_crab", "files"),
        ),
        setup="python3 -c \"import zipfile as z; f = z.ZipFile('pkg_crab-1-py3-none-any.whl', 'w'); d = 'pkg_crab-1.dist-info/'; "
        "f.writestr('pkg_crab.py', ''); f.writestr(d + 'METADATA', 'Metadata-Version: 2.1\\nName: pkg_crab\\nVersion: 1\\n'); "
        "f.writestr(d + 'WHEEL', 'Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n'); f.writestr(d + 'RECORD', ''); f.close()\"; "
        "python3 -m pip --version",
        needs=("pip3",),
    ),
    Scenario(
        "git",
        _turns(
            ("git init -q .", "files"),
            ("echo one >a; git add a", "files"),
            ("git commit -qm one", "files"),
            ("sleep 1.1; git status", "none"),
            ("git branch other", "files"),
            ("git branch; git log --oneline | cat", "none"),
            ("git checkout -q other", "files"),
            ("echo two >a; git stash -q", "files"),
            ("git stash list | cat; git diff", "none"),
            ("git stash pop -q", "files"),
            ("git commit -qam two", "files"),
            ("git tag v1", "files"),
            ("git tag -d v1; git tag v1", "files"),  # a deleted name leaves a file packed-refs
            ("git tag -d v1; git tag v1", "none"),
            ("git clone -q . /work/clone", "files"),
        ),
        setup=_GIT,
        needs=("git",),
    ),
    Scenario(
        "a server that polls",
        _turns(
            (
                "setsid python3 -m http.server 8100 >/dev/null 2>&1 </dev/null & until (: </dev/tcp/127.0.0.1/8100) 2>/dev/null; do sleep 0.1; done; sleep 1",
                "processes",
            ),
            ("ls", "processes"),  # it looks around every half a second
            (
                "python3 -c 'import urllib.request as u; u.urlopen(\"http://127.0.0.1:8100/\").read()'; sleep 0.5",
                "processes",
            ),
            ("pkill -f http.server; sleep 0.3", "processes"),
            ("ls", "none"),
        ),
        needs=("python3",),
    ),
    Scenario(
        "a server that waits",
        _turns(
            (
                "setsid python3 server.py >/dev/null 2>&1 </dev/null & until grep -q :1FA5 /proc/net/tcp; do sleep 0.1; done; rests python3",
                "processes",
            ),
            ("ls -la /work", "none"),
            ("sleep 0.5; grep -c : /proc/net/tcp", "none"),
            ("exec 3<>/dev/tcp/127.0.0.1/8101; cat <&3; rests python3", "processes"),
            ("ls", "none"),
            ("echo x >unrelated", "files"),
            ("pkill -x python3; while pgrep -x python3; do sleep 0.1; done", "processes"),
        ),
        setup='printf \'import socket\\ns = socket.create_server(("127.0.0.1", 8101))\\nn = 0\\nwhile True:\\n'
        "    c = s.accept()[0]\\n    n += 1\\n    c.send(str(n).encode())\\n    c.close()\\n' >server.py",
        needs=("python3",),
    ),
    Scenario(
        "netcat",
        _turns(
            (
                "setsid nc -l 127.0.0.1 8102 >/dev/null 2>&1 </dev/null & until grep -q :1FA6 /proc/net/tcp; do sleep 0.1; done; rests nc",
                "processes",
            ),
            ("ls", "none"),
            ("pkill -x nc; sleep 0.2", "processes"),
        ),
        needs=("nc",),
    ),
    Scenario(
        "jobs",
        _turns(
            ("setsid sleep 10000 </dev/null >/dev/null 2>&1 & rests sleep", "processes"),
            ("ls", "none"),
            ("sleep 0.2 & wait", "none"),
            ("kill $(pgrep -x sleep); while pgrep -x sleep; do sleep 0.1; done", "processes"),
            ("setsid sleep 10000 </dev/null >out 2>&1 & rests sleep", "full"),
            ("cat out", "none"),
            ("kill -STOP $(pgrep -x sleep); sleep 0.1", "processes"),
            ("kill -CONT $(pgrep -x sleep); rests sleep", "processes"),
            ("kill -0 $(pgrep -x sleep); ps aux; cat /proc/[0-9]*/status", "none"),
            ("renice -n 3 $(pgrep -x sleep)", "processes"),
            ("renice -n 3 $(pgrep -x sleep)", "none"),
            ("prlimit --pid $(pgrep -x sleep) --nofile=100:200", "processes"),
            ("echo 300 >/proc/$(pgrep -x sleep)/oom_score_adj", "processes"),
            ("rm out", "full"),  # what a process holds has lost its name: its image names no file that is there
            ("kill $(pgrep -x sleep); while pgrep -x sleep; do sleep 0.1; done", "processes"),
        ),
        needs=("pgrep", "renice"),
    ),
    Scenario(
        "a job that ends later",
        _turns(
            ("setsid bash -c 'read <>/work/go; echo done >late' </dev/null >/dev/null 2>&1 & rests bash", "processes"),
            ("ls", "none"),
            ("echo >go; while pgrep -fx 'bash -c read .*'; do sleep 0.1; done", "full"),
            ("cat late", "none"),
        ),
        setup="mkfifo go",
    ),
    Scenario(
        "following a file",
        _turns(
            ("setsid tail -f log </dev/null >/dev/null 2>&1 & rests tail", "processes"),
            ("sleep 1.5; cat log", "processes"),  # on an overlay it looks every second, and counts how often in vain
            ("echo more >>log; sleep 1.5", "full"),
            ("sleep 1.5; echo other >unrelated", "full"),
        ),
        setup="echo first >log",
    ),
    Scenario(
        "tmux",
        _turns(
            ("tmux -f /dev/null new-session -d -s s; sleep 1; rests bash", "full"),
            ("ls", "none"),
            ("tmux send-keys -t s 'x=1' Enter; sleep 1; rests bash", "processes"),
            ("tmux send-keys -t s 'touch /work/made' Enter; sleep 1; rests bash", "full"),
            ("ls /work", "none"),
        ),
        setup="tmux -V",
        needs=("tmux",),
        restless=True,
    ),
    Scenario(
        "an interpreter",
        _turns(
            ("setsid python3 -iq <>in >/dev/null 2>&1 & rests python3", "processes"),
            ("ls", "none"),
            ("echo 'x = 1' >in; rests python3", "processes"),
            ('echo \'open("made", "w").close()\' >in; rests python3', "full"),
            ("echo 'exit()' >in; while pgrep -x python3; do sleep 0.1; done", "full"),  # it keeps its history
        ),
        setup="mkfifo in",
        needs=("python3",),
    ),
    Scenario(
        "sqlite",
        _turns(
            ("sqlite3 d.db 'create table t(a)'", "files"),
            ("sqlite3 d.db 'insert into t values(1)'", "files"),
            ("sqlite3 d.db 'select * from t'; sqlite3 d.db .schema", "none"),
            ("sqlite3 d.db 'begin; insert into t values(2); rollback'", "none"),
            ("sqlite3 d.db 'delete from t where a = 7'", "none"),
            ("sqlite3 d.db 'update t set a = 3'", "files"),
            ("sqlite3 d.db 'drop table t'", "files"),
        ),
        needs=("sqlite3",),
    ),
    Scenario(
        "a shell",
        _turns(
            (":", "none"),
            ("ls >/dev/null", "none"),
            ("cd /tmp", "processes"),
            ("pwd", "none"),
            ("cd /work", "processes"),
            ("export A=1", "processes"),
            ("export A=1", "none"),
            ("x=1", "processes"),
            ("unset x", "processes"),
            ("f() { :; }", "processes"),
            ("f", "none"),
            ("alias ll='ls -l'", "processes"),
            ("trap : USR1", "processes"),
            ("umask 077", "processes"),
            ("umask 077", "none"),
            ("ulimit -n 512", "processes"),
            ("set -o pipefail", "processes"),
            ("shopt -s nullglob", "processes"),
            ("echo x >made", "files"),
            ("cat made; grep x made; false", "none"),
            ("exec 7<made", "processes"),
            ("read -r -u 7 line", "processes"),
            ("exec 7<&-", "processes"),
            ("sleep 10000 & rests sleep", "processes"),
            ("jobs", "none"),
            ("kill %1; wait", "processes"),
            ("(cd /; y=1; echo $y)", "none"),
            ("sleep 0.2", "none"),
            ("B=2 env >/dev/null", "none"),
            ("mkdir made.d && cd made.d", "full"),
            shell=True,
        ),
    ),
    Scenario(
        "a shell beside commands",
        (
            Turn("x=1", "processes", shell=True),
            Turn("ls", "none"),
            Turn("echo x >made", "files"),
            Turn("cat made", "none", shell=True),
            Turn("rm made", "files", shell=True),
        ),
    ),
    Scenario(
        "temporary files",
        _turns(
            ("t=$(mktemp); echo x >$t; rm $t", "none"),
            ("d=$(mktemp -d); touch $d/{1..50}; rm -r $d", "none"),
            ("echo x >/tmp/kept", "files"),
            ("rm /tmp/kept", "files"),
            ("echo x >/dev/shm/kept", "files"),
            ("cat /dev/shm/kept", "none"),
            ("rm /dev/shm/kept", "files"),
            ("echo x >/dev/shm/t; rm /dev/shm/t", "none"),
            ("python3 -c 'import tempfile; tempfile.TemporaryFile().write(b\"x\")'", "none"),
        ),
        needs=("python3",),
    ),
    Scenario(
        "System V objects",
        _turns(
            (f"python3 -c '{_IPC}c.semget(7, 1, 0o1600)'", "processes"),
            (f"python3 -c '{_IPC}c.semop(c.semget(7, 1, 0), struct.pack(\"<Hhh\", 0, 2, 0), 1)'", "processes"),
            (f"python3 -c '{_IPC}print(c.semctl(c.semget(7, 1, 0), 0, 12))'; cat /proc/sysvipc/sem", "none"),
            (f"python3 -c '{_IPC}c.semctl(c.semget(7, 1, 0), 0, 0)'", "processes"),
            (
                f'python3 -c \'{_IPC}i = c.msgget(7, 0o1600); c.msgsnd(i, struct.pack("<q", 1) + b"hello", 5, 0)\'',
                "processes",
            ),
            (f"python3 -c '{_IPC}c.msgctl(c.msgget(7, 0), 0, None)'", "processes"),
            (f"python3 -c '{_IPC}i = c.shmget(8, 4096, 0o1600); c.shmctl(i, 0, None)'", "none"),
            (
                f"python3 -c '{_IPC}c.shmat.restype = ctypes.c_void_p; ctypes.memset(c.shmat(c.shmget(7, 4096, 0o1600), None, 0), 1, 9)'",
                "processes",
            ),
            (
                f"python3 -c '{_IPC}c.shmat.restype = ctypes.c_void_p; ctypes.memset(c.shmat(c.shmget(7, 4096, 0), None, 0), 2, 9)'",
                "processes",
            ),
            (
                f"python3 -c '{_IPC}c.shmat.restype = ctypes.c_void_p; ctypes.memset(c.shmat(c.shmget(7, 4096, 0), None, 0), 2, 9)'",
                "none",
            ),
        ),
        needs=("python3",),
    ),
)


def play(scenario: Scenario, run: Callable[[str], object], tell: Callable[[str], object]) -> Iterator[Turn]:
    """Give each turn's command to `run` (`bash -c`, in /work) or `tell` (the persistent bash, which returns when it is done);
    yields each turn after its end. The caller has run `setup` and begun the shell."""
    for turn in scenario.turns:
        (tell if turn.shell else run)(turn.command)
        yield turn
