"""The verbs: which requests they make and what they print. The service is a stand-in; the real one is tested elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from unit.standin import ODD, Handle, Program, StandIn, sample

from crab import errors, model
from crab.cli import app, reference
from crab.cli.app import SECTIONS, cli, run
from crab.cli.session import Session
from crab.daemon import requests as ask
from crab.errors import Busy, CommandNotFound, CrabError, NotFound
from crab.model import Checkpoint, Difference, FileChange, Limits, Mount, Proof, State, Timings

BOX = model.Sandbox(
    id="s1",
    name="x",
    spec=model.SandboxSpec(image="debian", mounts=(Mount(source="/h", target="/t", kind="bind"),)),
    state=State.RUNNING,
    created=0.0,
    image_fingerprint="blake3:00",
    generation=1,
    head="c2",
    turn=2,
    not_rolled_back=("/h at /t",),
)
PLAIN_BOX = msgspec.structs.replace(
    BOX, id="s2", name="y", not_rolled_back=(), state=State.LOST, reason="its init is gone", turn=0
)
FIRST = Checkpoint(
    id="c1",
    sandbox="s1",
    turn=1,
    kind="full",
    created=0.0,
    label="before",
    process_bytes=2048,
    timings=Timings(frozen_ms=8.94, total_ms=52),
    proof=Proof(verdict="failed", reason="pages differ"),
)
SECOND = Checkpoint(
    id="c2", sandbox="s1", turn=2, kind="files", created=0.0, parent="c1", proof=Proof(verdict="proven")
)
CHANGES = Difference(
    files=(
        FileChange(path="new", kind="added", size=2048),
        FileChange(path="dir", kind="added"),
        FileChange(path="a", kind="changed", what=("content", "mode")),
        FileChange(path=f"{ODD}", kind="removed"),
        FileChange(path="there", kind="renamed", before="here"),
    ),
    processes=(model.ProcessChange(pid=7, kind="started", argv=("sleep", "9")),),
)


class Fake:
    """A transport to a stand-in, without a socket between."""

    def __init__(self) -> None:
        self.service = StandIn()
        self.service.answers |= {
            ask.Inspect: BOX,
            ask.SandboxList: (BOX, PLAIN_BOX),
            ask.Turns: (FIRST, SECOND),
            ask.TakeCheckpoint: FIRST,
            ask.Rewind: BOX,
            ask.Diff: CHANGES,
        }
        for kind in ask.CALLS.values():
            self.service.answers.setdefault(kind, sample(kind.returns))

    def open(self) -> None: ...
    def close(self) -> None: ...

    def call(self, request: ask.Request) -> Any:
        return self.service.handle(request)

    def spawn(self, sandbox: str, spec: model.ExecSpec) -> Handle:
        return self.service.spawn(sandbox, spec)

    def attach(self, sandbox: str, name: str) -> Handle:
        return self.service.command(sandbox, name)


@pytest.fixture
def fake() -> Fake:
    return Fake()


@pytest.fixture
def crab(fake: Fake, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(*arguments: str) -> tuple[int, str, str]:
        status = run(arguments, Session(transport=fake))
        said = capsys.readouterr()
        return status, said.out, said.err

    return call


Crab = Callable[..., tuple[int, str, str]]
HERE = os.getcwd()
STORE: Any = {"url": f"{HERE}/s"}
CREATE = (
    "create x --image i -e A=1 -w /w -u u --network nat --memory 1G --cpus 1.5 --pids 9 --disk 2G -v d:/t:ro "
    "-v /h:/u:bind --hostname h --no-start"
)

VERBS: dict[str, tuple[list[str], ask.Request, str]] = {
    "create": (
        [*CREATE.split()],
        ask.Create(
            name="x",
            image="i",
            env={"A": "1"},
            workdir="/w",
            user="u",
            network="nat",
            limits=Limits(memory=1 << 30, cpus=1.5, pids=9, disk=2 << 30),
            mounts=(
                Mount(source=f"{HERE}/d", target="/t", read_only=True),
                Mount(source="/h", target="/u", kind="bind"),
            ),
            hostname="h",
            start=False,
        ),
        "text\n",
    ),
    "create-default": (["create"], ask.Create(), "text\n"),
    "start": (["start", "x"], ask.Start(sandbox="s1"), "text created\n"),
    "pause": (["pause", "x"], ask.Pause(sandbox="s1"), "text created\n"),
    "resume": (["resume", "x"], ask.Resume(sandbox="s1"), "text created\n"),
    "stop": (["stop", "x", "--grace", "500ms"], ask.Stop(sandbox="s1", grace=0.5), "text created\n"),
    "kill": (["kill", "x"], ask.Kill(sandbox="s1"), "text created\n"),
    "rm": (
        ["rm", "-f", "x"],
        ask.Remove(sandbox="s1", force=True),
        "removed text\nkept, as something else builds on it: text\n",
    ),
    "cp-in": (
        ["cp", "f", "x:/t"],
        ask.CopyIn(sandbox="s1", source=f"{HERE}/f", target="/t"),
        "7 files, 7 B\nskipped: text\n",
    ),
    "cp-out": (
        ["cp", "x:/t", "f"],
        ask.CopyOut(sandbox="s1", source="/t", target=f"{HERE}/f"),
        "7 files, 7 B\nskipped: text\n",
    ),
    "apply": (
        ["apply", "x", "/t", "-n"],
        ask.Apply(sandbox="s1", target="/t", dry_run=True),
        "A text (7 B)\n    text\n~ process 7 changed: text\n",
    ),
    "checkpoint": (
        ["checkpoint", "x", "-l", "before", "--policy", "files", "--no-durable"],
        ask.TakeCheckpoint(sandbox="s1", label="before", policy="files", durable=False),
        "turn 1  c1  full  before  frozen 8.9 ms  total 52 ms  2.0 KiB\n",
    ),
    "rewind": (
        ["rewind", "x@head~1", "--files-only"],
        ask.Rewind(sandbox="s1", ref="head~1", files_only=True),
        "x running at turn 2 (c2)\nnot rolled back (the host's own folders): /h at /t\n",
    ),
    "recover": (
        ["recover", "x"],
        ask.Recover(sandbox="s1"),
        "text created at turn 7 (text)\nnot rolled back (the host's own folders): text\n",
    ),
    "fork": (["fork", "x", "-n", "3"], ask.Fork(sandbox="s1", count=3), "text\n"),
    "fork-at": (["fork", "x@2", "--name", "a"], ask.Fork(sandbox="s1", ref="2", names=("a",)), "text\n"),
    "diff": (
        ["diff", "x@1", "2"],
        ask.Diff(sandbox="s1", ref="1", to="2"),
        "A new (2.0 KiB)\nA dir\nM a (content, mode)\nD naïve \\xff\\x1b[31m\\n…\nR here -> there\n+ process 7 started: sleep 9\n",
    ),
    "diff-now": (["diff", "x"], ask.Diff(sandbox="s1", ref="head"), ""),
    "diff-two": (["diff", "x@1", "x@2"], ask.Diff(sandbox="s1", ref="1", to="2"), ""),
    "diff-content": (["diff", "x@1", "--content"], ask.Diff(sandbox="s1", ref="1", content=True), ""),
    "label": (["label", "x@1", "l"], ask.Label(sandbox="s1", ref="1", label="l"), ""),
    "unlabel": (["label", "x@1"], ask.Label(sandbox="s1", ref="1", label=""), ""),
    "rm-checkpoint": (["rm-checkpoint", "x@1"], ask.RemoveCheckpoint(sandbox="s1", ref="1"), ""),
    "export": (
        ["export", "x@1", "f", "--no-image"],
        ask.Export(sandbox="s1", ref="1", path=f"{HERE}/f", with_image=False),
        "turn 7 (text) written to f\n",
    ),
    "import": (
        ["import", "f", "--name", "n", "--allow-host", "--limit", "1G"],
        ask.Import(path=f"{HERE}/f", name="n", allow_host=True, limit=1 << 30),
        "text\n",
    ),
    "compact": (["compact"], ask.Compact(), ""),
    "prune": (
        ["prune", "x", "--keep-last", "3", "--drop-labelled", "--dry-run"],
        ask.Prune(policy=ask.Policy(last=3, labelled=False), sandbox="x", dry=True),
        "",
    ),
    "prune-all": (
        ["prune", "--all", "--keep-every", "5"],
        ask.Prune(policy=ask.Policy(every=5)),
        "",
    ),
    "store-init": (
        ["store", "init", "--store", "s", "--key-file", "k", "--grace", "90s"],
        ask.StoreInit(**STORE, key_file=f"{HERE}/k", grace=90),
        "",
    ),
    "store-put": (
        ["store", "put", "--store", "s", "x@1"],
        ask.StorePut(**STORE, sandbox="x", ref="1"),
        "turn 7 (text) stored: 7 B, 7 B of it new\n",
    ),
    "store-get": (
        ["store", "get", "--store", "s", "x@1", "--name", "n", "--allow-host", "--limit", "1G"],
        ask.StoreGet(**STORE, checkpoint="x@1", name="n", allow_host=True, limit=1 << 30),
        "text\n",
    ),
    "store-ls": (["store", "ls", "--store", "s3://b/p"], ask.StoreList(url="s3://b/p"), ""),
    "store-rm": (["store", "rm", "--store", "s", "x@1"], ask.StoreRemove(**STORE, checkpoint="x@1"), ""),
    "store-stats": (["store", "stats", "--store", "s"], ask.StoreFigures(**STORE), ""),
    "store-gc": (["store", "gc", "--store", "s"], ask.StoreCollect(**STORE), ""),
    "store-gc-policy": (
        ["store", "gc", "--store", "s", "--keep-last", "3", "--keep-every", "10", "--drop-heads"],
        ask.StoreCollect(**STORE, policy=ask.Policy(last=3, every=10, heads=False)),
        "",
    ),
    "commit": (["commit", "x", "n"], ask.Commit(sandbox="s1", name="n"), "text  7 B  text\n"),
    "image-add": (
        ["image", "add", "--if-missing", "n", "dir:r"],
        ask.ImageAdd(name="n", source=f"dir:{HERE}/r", if_missing=True),
        "text  7 B  text\n",
    ),
    "image-show": (["image", "show", "n"], ask.ImageShow(name="n"), ""),
    "image-rm": (["image", "rm", "n"], ask.ImageRemove(name="n"), ""),
    "image-build": (
        ["image", "build", "--network", "none", "-e", "A=1", "n", "--from", "b", "--", "apt-get", "install", "-y", "x"],
        ask.ImageBuild(name="n", base="b", command=("apt-get", "install", "-y", "x"), network="none", env={"A": "1"}),
        "",
    ),
    "image-ls": (["image", "ls"], ask.ImageList(), ""),
    "ps": (["ps", "x"], ask.ProcessList(sandbox="s1"), ""),
    "ps-commands": (["ps", "-c", "x"], ask.CommandList(sandbox="s1"), ""),
    "turns": (["turns", "-a", "x"], ask.Turns(sandbox="s1", every=True), ""),
    "ls": (["ls"], ask.SandboxList(), ""),
    "inspect": (["inspect", "x"], ask.Inspect(sandbox="s1"), ""),
}


@pytest.mark.parametrize("name", VERBS)
def test_a_verb_makes_its_request_and_prints_the_answer(name: str, crab: Crab, fake: Fake) -> None:
    arguments, request, shown = VERBS[name]
    status, out, err = crab(*arguments)
    assert (status, err) == (0, "")
    assert request in fake.service.asked
    assert out == shown if shown else out
    assert "\x1b" not in out, "no escape sequence goes into a pipe"


@pytest.mark.parametrize("name", VERBS)
def test_with_json_a_verb_prints_one_document(name: str, crab: Crab) -> None:
    arguments = VERBS[name][0]
    words = arguments[:2] if arguments[0] in ("image", "store") else arguments[:1]
    status, out, _ = crab(*words, "--json", *arguments[len(words) :])
    assert status == 0
    assert isinstance(json.loads(out), (dict, list))
    assert crab("--json", *arguments)[1] == out


def test_json_is_what_the_service_says(crab: Crab) -> None:
    _, out, _ = crab("ls", "--json")
    assert msgspec.json.decode(out, type=tuple[model.Sandbox, ...]) == (BOX, PLAIN_BOX)
    _, out, _ = crab("diff", "x", "--json")
    assert msgspec.convert(json.loads(out), Difference) == CHANGES


def test_ls_shows_what_is_not_rolled_back_and_why_one_is_lost(crab: Crab) -> None:
    _, out, _ = crab("ls")
    lines = out.splitlines()
    assert lines[0].split() == ["NAME", "STATE", "IMAGE", "TURN", "CREATED", "WHY", "NOT", "ROLLED", "BACK"]
    assert lines[1].startswith("x     running  debian     2  ")
    assert lines[1].endswith("/h at /t")
    assert lines[2].endswith("its init is gone")


def test_turns_shows_the_head_the_cost_and_whether_it_is_proven(crab: Crab) -> None:
    _, out, _ = crab("turns", "x")
    header, first, second = out.splitlines()
    assert header.split() == [
        "TURN",
        "ID",
        "KIND",
        "LABEL",
        "DECIDED",
        "FROZEN",
        "TOTAL",
        "SIZE",
        "RESTORABLE",
        "PARENT",
    ]
    assert "8.9 ms   52 ms  2.0 KiB  failed (pages differ)  -" in first
    assert second.lstrip().startswith("2*  c2  files")
    assert second.endswith("proven                 c1")


def test_verify_ends_with_0_only_if_it_is_proven(crab: Crab, fake: Fake) -> None:
    result = model.Verification(checkpoint="c1", proof=Proof(verdict="proven"), compared={"files": 3, "pages": 9})
    fake.service.answers[ask.Verify] = result
    assert crab("verify", "x") == (0, "c1 proven\ncompared: 3 files, 9 pages\n", "")
    failed = msgspec.structs.replace(
        result, proof=Proof(verdict="failed", reason="a page differs"), differences=("page 7",)
    )
    fake.service.answers[ask.Verify] = failed
    status, out, _ = crab("verify", "x@1")
    assert status == 70
    assert out == "c1 failed: a page differs\ncompared: 3 files, 9 pages\ndiffers: page 7\n"


def test_a_check_of_a_store_ends_with_65_and_names_what_is_affected(crab: Crab, fake: Fake) -> None:
    whole = model.StoreCheck(checkpoints=2, packs=3, read=4096)
    fake.service.answers[ask.StoreLook] = whole
    text = "2 checkpoints, 3 packs, 4.0 KiB read and compared\nevery checkpoint can be read\n"
    assert crab("store", "check", "--store", "s", "--data") == (0, text, "")
    problem = model.StoreProblem(what="packs/aa/aa is missing", checkpoints=("c1",))
    fake.service.answers[ask.StoreLook] = msgspec.structs.replace(whole, problems=(problem,), affected=("c1",))
    status, out, _ = crab("store", "check", "--store", "s")
    assert status == 65
    assert out.splitlines()[1:] == ["damaged: packs/aa/aa is missing: checkpoints c1", "cannot be read: c1"]


def test_a_store_must_be_named(crab: Crab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CRAB_STORE", raising=False)
    status, _, err = crab("store", "ls")
    assert status == 64
    assert "$CRAB_STORE" in err
    assert crab("store", "gc", "--store", "s", "--drop-heads")[0] == 64


def test_of_several_sandboxes_all_are_tried(crab: Crab, fake: Fake) -> None:
    fake.service.answers[ask.Inspect] = lambda request: (
        NotFound("no y", remedy="look") if request.sandbox == "y" else BOX
    )
    status, out, err = crab("stop", "x", "y", "x")
    assert status == NotFound.exit_status
    assert out == "text created\ntext created\n"
    assert err == "crab: no y\n  remedy: look\n"


def test_nothing_is_said_with_a_hint(crab: Crab, fake: Fake) -> None:
    fake.service.answers |= {ask.SandboxList: (), ask.Turns: (), ask.ImageList: (), ask.Diff: Difference()}
    assert "crab create" in crab("ls")[1]
    assert "crab checkpoint" in crab("turns", "x")[1]
    assert "crab image add" in crab("image", "ls")[1]
    assert crab("diff", "x")[1] == "no difference\n"


# ---------------------------------------------------------------- refusals and errors


def all_errors(base: type[CrabError] = CrabError) -> list[type[CrabError]]:
    found = [base] if base.__module__ == errors.__name__ else []
    for child in base.__subclasses__():
        found += all_errors(child)
    return found


@pytest.mark.parametrize("kind", all_errors())
def test_an_error_is_one_message_with_the_remedy_and_its_exit_status(
    kind: type[CrabError], crab: Crab, fake: Fake
) -> None:
    fake.service.answers[ask.SandboxList] = kind("it\x1b[31m went wrong", remedy="try\x07 again")
    assert crab("ls") == (kind.exit_status, "", "crab: it\\x1b[31m went wrong\n  remedy: try\\x07 again\n")


def test_with_json_the_document_is_the_error(crab: Crab, fake: Fake) -> None:
    fake.service.answers[ask.TakeCheckpoint] = errors.CaptureFailed("not captured", remedy="try again", log="Error (1)")
    status, out, err = crab("--json", "checkpoint", "x")
    assert (status, err) == (70, "")
    assert json.loads(out) == {
        "error": "CaptureFailed",
        "message": "not captured",
        "remedy": "try again",
        "details": {"log": "Error (1)"},
    }


def test_with_json_a_mistaken_option_is_a_document_too(crab: Crab) -> None:
    status, out, err = crab("--json", "ls", "--colour")
    assert (status, err) == (64, "") and json.loads(out)["error"] == "InvalidRequest"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["frobnicate"], "No such command"),
        (["ls", "--colour"], "No such option"),
        (["rewind", "x"], "names no checkpoint"),
        (["cp", "a", "b"], "cannot copy"),
        (["create", "--memory", "much"], "'much' is not a size"),
        (["create", "-v", "/a"], "is not a mount"),
        (["create", "-e", "=1"], "is not a variable"),
        (["exec", "x"], "no command was given"),
        (["exec", "-t", "x", "ls"], "needs a terminal"),
        (["shell", "x"], "needs a terminal"),
        (["diff", "x@1", "y@2"], "two sandboxes"),
        (["--embedded", "--socket", "/s", "ls"], "without a daemon"),
        (["--state", "/s", "ls"], "--state needs --embedded"),
    ],
)
def test_a_command_line_that_makes_no_sense_ends_with_64(
    arguments: list[str], said: str, crab: Crab, fake: Fake
) -> None:
    status, out, err = crab(*arguments)
    assert (status, out) == (64, "")
    assert said in err
    assert not fake.service.asked


def test_ctrl_c_ends_with_130(crab: Crab, fake: Fake) -> None:
    fake.service.answers[ask.TakeCheckpoint] = KeyboardInterrupt()
    assert crab("checkpoint", "x")[0] == 130


# ---------------------------------------------------------------- exec


def talk(program: Program) -> None:
    program.say(b"out \xff\n")
    program.say(b"err\n", stream=2)
    program.end(5)


def test_exec_passes_output_and_status_on(fake: Fake, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    fake.service.script = talk
    assert (
        run(
            ["exec", "-e", "A=1", "-w", "/w", "-u", "u", "--timeout", "2min", "--name", "n", "x", "--", "a", "-b"],
            Session(transport=fake),
        )
        == 5
    )
    said = capfdbinary.readouterr()
    assert (said.out, said.err) == (b"out \xff\n", b"err\n")
    (program,) = fake.service.programs
    assert program.spec == model.ExecSpec(argv=("a", "-b"), env={"A": "1"}, cwd="/w", user="u", timeout=120, name="n")


def test_options_after_the_sandbox_are_the_commands(fake: Fake, crab: Crab) -> None:
    fake.service.script = lambda program: program.end()
    assert crab("exec", "x", "ls", "--json", "-t")[0] == 0
    assert fake.service.programs[0].spec.argv == ("ls", "--json", "-t")


def test_exec_says_that_the_time_was_up(fake: Fake, crab: Crab) -> None:
    def expire(program: Program) -> None:
        program.end(137)

    fake.service.script = expire
    spawn = fake.service.spawn

    def spawn_timed_out(sandbox: str, spec: model.ExecSpec) -> Handle:
        handle = spawn(sandbox, spec)
        handle.timed_out = True
        return handle

    fake.service.spawn = spawn_timed_out
    status, _, err = crab("exec", "--timeout", "1.5", "x", "sleep")
    assert status == 124
    assert err == "crab: the command was killed, with all that it had started, after its time limit of 1.5 s\n"


@pytest.mark.parametrize(
    "refusal", [CommandNotFound("'a' was not found", remedy="install it"), Busy("busy", remedy="wait")]
)
def test_exec_that_cannot_start_ends_with_the_status_of_the_reason(refusal: CrabError, fake: Fake, crab: Crab) -> None:
    fake.service.refusal = refusal
    assert crab("exec", "x", "a") == (refusal.exit_status, "", f"crab: {refusal.message}\n  remedy: {refusal.remedy}\n")


def test_exec_types_into_a_persistent_shell(fake: Fake, crab: Crab) -> None:
    fake.service.answers[ask.ShellRun] = model.ShellResult(exit_code=3, output="out\n")
    assert crab("exec", "--shell", "s", "x", "--", "cd /x && A=1") == (3, "out\n", "")
    assert (
        crab("exec", "--shell", "s", "-e", "A=1", "-w", "/w", "-u", "u", "--timeout", "2min", "x", "echo", "a b")[0]
        == 3
    )
    assert [request for request in fake.service.asked if isinstance(request, ask.ShellRun)] == [
        ask.ShellRun(sandbox="s1", shell="s", command="cd /x && A=1"),
        ask.ShellRun(sandbox="s1", shell="s", command="echo 'a b'", timeout=120, env={"A": "1"}, cwd="/w", user="u"),
    ]


def test_exec_says_what_became_of_a_persistent_shell(fake: Fake, crab: Crab) -> None:
    fake.service.answers[ask.ShellRun] = model.ShellResult(exit_code=124, output="", timed_out=True, ended=True)
    assert crab("exec", "--shell", "s", "--timeout", "2", "x", "sleep 9") == (
        124,
        "",
        "crab: the command was interrupted after its time limit of 2 s\ncrab: the shell s has ended\n",
    )
    assert crab("exec", "--shell", "s", "-t", "x", "ls")[0] == 64


def test_exec_can_leave_the_command_running(fake: Fake, crab: Crab) -> None:
    assert crab("exec", "-d", "--name", "server", "x", "serve") == (0, "server\n", "")
    assert fake.service.programs[0].exit is None


# ---------------------------------------------------------------- the table of verbs, the references


def test_the_table_knows_the_first_line_of_every_verb() -> None:
    context = click.Context(cli)
    for section in SECTIONS.values():
        for name, (_, line) in section.items():
            command = cli.get_command(context, name)
            if command is not None:
                assert (command.help or "").strip().splitlines()[0] == line, name
                assert command.name == name


def test_every_option_says_what_it_does() -> None:
    def check(command: click.Command, path: str) -> None:
        assert command.help, path
        for option in command.params:
            if isinstance(option, click.Option):
                assert option.help, f"{path} {option.name}"
        if isinstance(command, click.Group):
            for name in command.list_commands(click.Context(command)):
                below = command.get_command(click.Context(command), name)
                assert below is not None
                check(below, f"{path} {name}")

    check(cli, "crab")


def test_help_and_version(crab: Crab) -> None:
    status, out, _ = crab("--help")
    assert status == 0
    assert all(name in out for name in app.VERBS if name != "replay")
    status, out, _ = crab("--version")
    assert (status, out.split()[0]) == (0, "crab")
    assert crab("turns", "-h")[0] == 0


def test_a_verb_whose_module_is_not_installed_is_not_offered(monkeypatch: pytest.MonkeyPatch, crab: Crab) -> None:
    monkeypatch.setitem(app.VERBS, "replay", "crab.nowhere.cli:replay")
    assert "replay" not in cli.list_commands(click.Context(cli))
    assert crab("replay")[0] == 64


def test_ls_loads_no_more_than_it_needs() -> None:
    """What each of these costs at a start: asyncio 60 ms, rich 50, httpx 200, aiohttp 200, the service 150."""
    program = (
        "import sys; from crab.cli.app import run; assert run(['--socket', '/nowhere.sock', 'ls']) == 69;"
        "print(*[m for m in ('asyncio', 'rich', 'httpx', 'aiohttp', 'http.client', 'crab.daemon.service',"
        " 'crab.daemon.server', 'crab.replay', 'crab.host') if m in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    assert said.stdout.strip() == ""


def test_the_references_in_docs_are_what_the_code_says() -> None:
    assert reference.main(["--check"]) == 0, "run python -m crab.cli.reference"


def test_the_references_can_be_written_and_are_noticed_when_old(tmp_path: Path) -> None:
    assert reference.main([str(tmp_path)]) == 0
    assert reference.main(["--check", str(tmp_path)]) == 0
    (tmp_path / "errors.md").write_text("old")
    assert reference.main(["--check", str(tmp_path)]) == 1


def test_every_error_is_in_the_reference() -> None:
    for kind in all_errors():
        assert f"`{kind.__name__}` | {kind.exit_status} | {kind.http_status} |" in reference.errors_text()


def test_doctor_looks_at_this_machine_if_no_daemon_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status = run(["--socket", str(tmp_path / "none.sock"), "doctor", "--json"])
    rows = msgspec.json.decode(capsys.readouterr().out, type=list[model.Probe])
    assert {row.name for row in rows} >= {"kernel", "criu", "btrfs"}
    assert status == (69 if any(row.health == "missing" for row in rows) else 0)


def test_doctor_says_what_is_lost_and_what_helps(crab: Crab, fake: Fake) -> None:
    fake.service.answers[ask.Doctor] = (
        model.Probe(name="kernel", health="ok", found="6.18"),
        model.Probe(name="criu", health="missing", found="none", remedy="crab doctor --fix"),
        model.Probe(name="btf", health="degraded", found="none", loses="it is slower", remedy="another kernel"),
    )
    status, out, _ = crab("doctor")
    assert status == 69
    assert out == (
        "ok        kernel  6.18\nmissing   criu    none\ndegraded  btf     none\n"
        "criu: crab doctor --fix\nbtf: it is slower. another kernel\n"
    )


def test_stopping_a_daemon_that_does_not_run_is_no_error(crab: Crab, tmp_path: Path) -> None:
    assert crab("--socket", str(tmp_path / "none.sock"), "daemon", "stop") == (0, "no daemon runs\n", "")
    assert crab("--socket", str(tmp_path / "none.sock"), "daemon", "status")[0] == 69
