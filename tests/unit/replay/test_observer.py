"""The script that looks at a sandbox from inside, run on this machine."""

from __future__ import annotations

import json
import os
import py_compile
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crab.replay import observer, volatile

SCRIPT = Path(observer.__file__)


def look(root: Path, *left_out: str) -> dict:
    rules = {"roots": [str(root)], "leave_out": volatile.path_rules(left_out), "contents": volatile.content_rules()}
    command = [sys.executable, "-I", "-S", "-B", "-", ascii(rules)]
    done = subprocess.run(command, input=SCRIPT.read_bytes(), capture_output=True, check=True)
    return json.loads(done.stdout)


def files(root: Path, *left_out: str) -> dict[str, dict]:
    found = look(root, *left_out)["files"]
    return {path.removeprefix(str(root)): entry for path, entry in found.items()}


@pytest.mark.parametrize(
    "change",
    [
        lambda root: (root / "a").write_text("two"),
        lambda root: (root / "a").chmod(0o600),
        lambda root: (root / "a").unlink(),
        lambda root: (root / "new").touch(),
        lambda root: (root / "d").rmdir(),
        lambda root: ((root / "l").unlink(), (root / "l").symlink_to("b")),
        lambda root: ((root / "a").unlink(), os.mkfifo(root / "a")),
        lambda root: (root / "h").hardlink_to(root / "a"),
    ],
    ids=["content", "mode", "removal", "addition", "folder", "target", "type", "hard link"],
)
def test_every_change_of_files_is_seen(tmp_path: Path, change) -> None:
    (tmp_path / "a").write_text("one")
    (tmp_path / "d").mkdir()
    (tmp_path / "l").symlink_to("a")
    before = files(tmp_path)
    assert before == files(tmp_path)
    change(tmp_path)
    assert before != files(tmp_path)


def test_times_are_not_compared(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one")
    before = files(tmp_path)
    os.utime(tmp_path / "a", (1, 1))
    assert before == files(tmp_path)


def test_names_that_are_no_text_are_seen(tmp_path: Path) -> None:
    for name in (b"\xff", b"a\nb", b'"', "ü🦀".encode(), b"\\xff"):
        (Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))).touch()
    assert set(files(tmp_path)) == {"", "/\\xff", "/a\nb", '/"', "/ü🦀"}


def test_what_is_left_out_is_left_out_with_all_below_it(tmp_path: Path) -> None:
    (tmp_path / "log" / "deep").mkdir(parents=True)
    (tmp_path / "log" / "deep" / "a").touch()
    (tmp_path / "keep").touch()
    assert set(files(tmp_path, f"{tmp_path}/log")) == {"", "/keep"}


def test_a_python_cache_is_the_code_in_it(tmp_path: Path) -> None:
    source = tmp_path / "a.py"

    def compiled(text: str, when: int) -> dict:
        source.write_text(text)
        os.utime(source, (when, when))
        py_compile.compile(str(source), str(tmp_path / "a.pyc"), doraise=True)
        return files(tmp_path)["/a.pyc"]

    text = "def f(x={1, 2}):\n    return [y + 'a' for y in 'abc' if (y, 1.0) != x]\n"
    assert compiled(text, 1000) == compiled(text, 2000)
    assert compiled(text, 1000) != compiled(text.replace("'a'", "'b'"), 1000)
    foreign = (
        b"\x42\r\r\n" + bytes(12) + b"\xe3" + bytes(70)
    )  # marshal of this Python would raise a SystemError, or crash
    (tmp_path / "a.pyc").write_bytes(foreign)
    before = files(tmp_path)["/a.pyc"]
    (tmp_path / "a.pyc").write_bytes(foreign + b"x")
    assert files(tmp_path)["/a.pyc"] != before


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_a_git_index_is_what_it_lists(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True, capture_output=True)

    git("init")
    for name in ("a", "b" * 9, "c" * 60):
        (tmp_path / name).write_text(name)
    git("add", ".")
    before = files(tmp_path)["/.git/index"]
    raw = (tmp_path / ".git/index").read_bytes()
    for path in tmp_path.iterdir():
        os.utime(path, (1000, 1000))
    git("update-index", "--refresh")
    assert raw != (tmp_path / ".git/index").read_bytes()
    assert before == files(tmp_path)["/.git/index"]
    (tmp_path / "a").write_text("other")
    git("add", ".")
    assert before != files(tmp_path)["/.git/index"]


def test_processes_show_where_they_run_and_what_they_hold_open(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    script = "exec 7<>gone; rm gone; printf secret >&7; exec 8<>kept; exec sleep 60"
    child = subprocess.Popen(["bash", "-c", script], cwd=work, stdin=subprocess.DEVNULL)
    try:
        while not (Path(f"/proc/{child.pid}/cmdline").read_bytes().startswith(b"sleep")):
            pass
        (found,) = [one for one in look(work)["processes"] if one["cwd"] == str(work)]
    finally:
        child.kill()
        child.wait()
    assert found["argv"] == ["sleep", "60"]
    assert found["state"] == "alive"
    assert found["descriptors"]["0"] == "/dev/null"
    assert found["descriptors"]["8"] == f"{work}/kept at 0, flags 2"
    digest = observer.of_bytes(b"secret")
    assert found["descriptors"]["7"] == f"{work}/gone (deleted) at 6, flags 2, content {digest}"


def test_it_does_not_see_itself(tmp_path: Path) -> None:
    assert not [one for one in look(tmp_path)["processes"] if "-I" in one["argv"]]


def test_listening_ports_are_seen(tmp_path: Path) -> None:
    with socket.socket() as tcp, socket.socket(socket.AF_UNIX) as unix:
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        unix.bind(str(tmp_path / "s"))
        unix.listen()
        found = look(tmp_path)["ports"]
        assert f"tcp 127.0.0.1:{tcp.getsockname()[1]}" in found
        assert f"unix {tmp_path}/s" in found


@given(st.recursive(st.text() | st.integers(), lambda one: st.lists(one) | st.dictionaries(st.text(), one)))
def test_its_json_is_json(value: object) -> None:
    assert json.loads(observer.encoded(value)) == value
