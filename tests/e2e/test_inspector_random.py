"""Random operations on files, turn after turn: the inspector says that something changed exactly if a walk of the files does.

The truth is told by the program that does the operations: a description of all that they can reach, times left out. Now and
then `crab diff` is asked as well, which looks at every name of the file system. `$CRAB_TEST_OPERATIONS` is the number of operations (1000; by
hand, take 20000), `$CRAB_TEST_SEED` makes a run again.
"""

from __future__ import annotations

import json
import os
import random
import time

import pytest
from e2e.box import Box

from crab.daemon import requests as ask
from crab.model import ExecSpec

pytestmark = [pytest.mark.kernel, pytest.mark.criu, pytest.mark.slow]

OPERATIONS = int(os.environ.get("CRAB_TEST_OPERATIONS", "1000"))
SEED = int(os.environ.get("CRAB_TEST_SEED", str(time.time_ns() % 1_000_000)))
NAMES = [f"{folder}{name}" for folder in ("", "d/", "e/", "d/f/") for name in "abc"]
FOLDERS = ["d", "e", "d/f", "g"]
IMAGE = ["/etc/profile", "/etc/bash.bashrc", "/usr/share/common-licenses/BSD", "/etc/issue"]

ACT = r"""
import hashlib, json, mmap, os, shutil, socket, sys
os.chdir("/srv/random")
def store(name, at, byte):
    with open(name, "r+b") as f:
        os.ftruncate(f.fileno(), 8192)
        m = mmap.mmap(f.fileno(), 8192); m[at] = byte; m.close()
acts = {
    "write": lambda n, t: open(n, "w").write(t),
    "append": lambda n, t: open(n, "a").write(t),
    "rewrite": lambda n: (lambda s: open(n, "wb").write(s))(open(n, "rb").read()),
    "there and back": lambda n: (os.rename(n, "z"), os.rename("z", n)),
    "copy over": lambda n: (shutil.copy2(n, "z"), os.rename("z", n)),
    "store": store,
    "truncate": os.truncate, "unlink": os.unlink, "rename": os.rename, "link": os.link, "chmod": os.chmod,
    "symlink": lambda n, t: (os.path.lexists(n) and os.unlink(n), os.symlink(t, n)),
    "chown": lambda n, u: os.lchown(n, u, u), "utime": lambda n, s: os.utime(n, (s, s)),
    "xattr": lambda n, v: os.setxattr(n, "user.k", v.encode()), "no xattr": lambda n: os.removexattr(n, "user.k"),
    "mkdir": os.mkdir, "rmdir": os.rmdir, "rmtree": shutil.rmtree, "fifo": os.mkfifo, "read": lambda n: open(n, "rb").read(),
    "temporary": lambda n, t: (open("zz", "w").write(t), os.unlink("zz")),
    "image": lambda n, t: open(n, "a").write(t), "no image": os.unlink, "open image": lambda n: open(n, "r+").close(),
}
done = 0
for word, *rest in json.load(sys.stdin):
    try:
        acts[word](*rest); done += 1
    except OSError:
        pass

found, groups = [], {}
for top in (".", *IMAGE):
    for place, folders, files in os.walk(top) if os.path.isdir(top) else [(os.path.dirname(top), [], [os.path.basename(top)])]:
        for name in sorted([*folders, *files]):
            path = os.path.join(place, name)
            if not os.path.lexists(path):
                continue
            s = os.lstat(path)
            kind = s.st_mode >> 12
            content = hashlib.sha256(open(path, "rb").read()).hexdigest() if kind == 8 else os.readlink(path) if kind == 10 else ""
            xattrs = {k: os.getxattr(path, k, follow_symlinks=False).hex() for k in os.listxattr(path, follow_symlinks=False)}
            if kind == 8 and s.st_nlink > 1:
                groups.setdefault(s.st_ino, []).append(path)
            found.append([path, s.st_mode, s.st_uid, s.st_gid, content, sorted(xattrs.items())])
state = [sorted(found), sorted(map(sorted, groups.values()))]
print(json.dumps([done, state]))
"""
ACT = f"IMAGE = {IMAGE!r}\n{ACT}"


def operation(r: random.Random) -> list[object]:
    """One operation; a third of them change nothing in the end, some cannot be done."""
    name, other = r.choice(NAMES), r.choice(NAMES)
    text = r.choice(["", "x", "yy", "x" * 5000])
    image = r.choice(IMAGE)
    return r.choice(
        [
            *[["write", name, text]] * 4, ["append", name, text], ["rewrite", name], ["there and back", name], ["copy over", name],
            ["store", name, r.randrange(8192), r.randrange(256)], ["truncate", name, r.choice([0, 1, 9000])], ["unlink", name],
            ["rename", name, other], ["link", name, other], ["chmod", name, r.choice([0o600, 0o644, 0o4755])],
            ["symlink", name, text[:9] or "a"], ["chown", name, r.choice([0, 1])], ["utime", name, r.randrange(10**9)],
            ["xattr", name, text[:9]], ["no xattr", name], ["mkdir", r.choice(FOLDERS)], ["rmdir", r.choice(FOLDERS)],
            ["rmtree", r.choice(FOLDERS)], ["rename", r.choice(FOLDERS), r.choice(FOLDERS)], ["fifo", r.choice(["p", "d/p"])], ["unlink", r.choice(["p", "d/p"])], ["read", name],
            ["temporary", name, text], ["image", image, text], ["no image", image], ["open image", image],
            ["chmod", r.choice(FOLDERS), r.choice([0o700, 0o755])],
        ]
    )  # fmt: skip


def act(box: Box, turn: list[list[object]]) -> tuple[int, list[list[object]]]:
    """How many could be done, and what is there afterwards: files, and groups of names of one file."""
    spec = ExecSpec(argv=("python3", "-c", ACT), stdin=True, timeout=20)
    done = box.ask(ask.Run, spec=spec, input=json.dumps(turn).encode())
    assert done.ok, done.stderr.decode()
    count, state = json.loads(done.text())
    return count, state


def test_the_inspector_agrees_with_a_walk_of_the_files(box: Box, figures) -> None:
    if not box.service._core.inspector.tier:
        pytest.skip(box.service._core.inspector.why_not)
    names_files = box.service._core.inspector.tier != "C"
    r = random.Random(SEED)
    counts = {"turns": 0, "done": 0, "changed": 0, "false alarms": 0}
    box.run("mkdir -p /srv/random/d/f /srv/random/e")
    _, base = act(box, [])
    box.checkpoint()
    asked = 0
    while asked < OPERATIONS:
        turn = [operation(r) for _ in range(r.choice([1, 1, 2, 3, 20, 60]))]
        asked += len(turn)
        done, state = act(box, turn)
        decision = box.ask(ask.Explain)
        truth = state != base
        story = f"seed {SEED}, turn {counts['turns']}: {turn}\ndecided {decision}\nchanged: {truth}"
        assert decision.kind in ("none", "files") or not names_files, story
        assert not truth or decision.kind != "none", f"missed. {story}"
        if counts["turns"] % 40 == 0:
            changed = [c for c in box.ask(ask.Diff, ref="head").files if c.what != ("times",)]
            assert bool(changed) == truth, f"{story}\ndiff: {changed}"
        counts["turns"] += 1
        counts["done"] += done
        counts["changed"] += truth
        counts["false alarms"] += decision.kind != "none" and not truth
        if r.random() < 0.7:
            made = box.checkpoint(durable=False)
            assert made.kind == decision.kind, story
            base = state
            if r.random() < 0.1:
                box.rewind(made.id)
                assert act(box, [])[1] == base, "a rewind brings back what was there"
    figures(f"random operations, seed {SEED}: {counts}")
    assert counts["false alarms"] <= counts["changed"] // 10 or not names_files
