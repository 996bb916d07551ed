"""The facades: which requests they make, that both twins are alike, and what they do with answers. Needs no root."""

from __future__ import annotations

import asyncio
import inspect
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from unit.standin import Handle, Program, StandIn, sample, served

import crab
from crab import errors, model
from crab.daemon import requests as ask
from crab.daemon.client import SocketTransport
from crab.errors import Busy, CommandNotFound, NotFound, SandboxGone, WrongState
from crab.model import ExecResult, ExecSpec, Limits, ModelAccess, Mount
from crab.sandbox.command import Output
from crab.sdk import aio, sync, twin
from crab.sdk.async_transport import AsyncEmbeddedTransport
from crab.sdk.transport import BUFFER, EmbeddedCommand, EmbeddedTransport, default_state_dir

BOX = sample(model.Sandbox)
CHECKPOINT = sample(model.Checkpoint)


class Recording:
    """A transport that notes requests and answers each with a sample."""

    def __init__(self) -> None:
        self.asked: list[ask.Request] = []
        self.spawned: list[tuple[str, ExecSpec]] = []
        self.closed = False

    def open(self) -> None: ...

    def close(self) -> None:
        self.closed = True

    def call(self, request: ask.Request) -> Any:
        self.asked.append(request)
        return sample(type(request).returns)

    def spawn(self, sandbox: str, spec: ExecSpec) -> Any:
        self.spawned.append((sandbox, spec))
        return Handle(Program(1, spec.name, spec))

    def attach(self, sandbox: str, name: str) -> Any:
        return Handle(Program(1, name, ExecSpec(argv=("x",))))


class AsyncRecording(Recording):
    async def open(self) -> None: ...

    async def close(self) -> None:
        super().close()

    async def call(self, request: ask.Request) -> Any:
        return super().call(request)

    async def spawn(self, sandbox: str, spec: ExecSpec) -> Any:
        return super().spawn(sandbox, spec)

    async def attach(self, sandbox: str, name: str) -> Any:
        return super().attach(sandbox, name)


STORE: Any = {"url": f"{os.getcwd()}/s", "key_file": f"{os.getcwd()}/k"}
HOST_CALLS: dict[str, tuple[Callable[[Any], Any], ask.Request]] = {
    "about": (lambda h: h.about(), ask.About()),
    "jobs": (lambda h: h.jobs(), ask.Jobs()),
    "compact": (lambda h: h.compact(), ask.Compact()),
    "prune": (
        lambda h: h.prune(ask.Policy(last=3), "box", dry=True),
        ask.Prune(policy=ask.Policy(last=3), sandbox="box", dry=True),
    ),
    "drain": (
        lambda h: h.drain(5, pause=True, store="/s", key_file="/k"),
        ask.Drain(seconds=5, pause=True, store="/s", key_file="/k"),
    ),
    "doctor": (lambda h: h.doctor(), ask.Doctor()),
    "create": (
        lambda h: h.create(
            "n",
            "i",
            env={"A": "1"},
            workdir="/w",
            user="u",
            network="nat",
            limits=Limits(memory=1),
            mounts=[Mount(source="/s", target="/t")],
            hostname="h",
            model_access=ModelAccess(upstream="replay:answers", gate="captured"),
            exec_turns=True,
            start=False,
        ),
        ask.Create(
            name="n",
            image="i",
            env={"A": "1"},
            workdir="/w",
            user="u",
            network="nat",
            limits=Limits(memory=1),
            mounts=(Mount(source="/s", target="/t"),),
            hostname="h",
            model=ModelAccess(upstream=f"replay:{os.getcwd()}/answers", gate="captured"),
            exec_turns=True,
            start=False,
        ),
    ),
    "create-default": (lambda h: h.create(), ask.Create()),
    "sandbox": (lambda h: h.sandbox("n"), ask.Inspect(sandbox="n")),
    "sandboxes": (lambda h: h.sandboxes(), ask.SandboxList()),
    "import": (
        lambda h: h.import_archive("a.crab", "n", allow_host=True, limit=9),
        ask.Import(path=f"{os.getcwd()}/a.crab", name="n", allow_host=True, limit=9),
    ),
    "image.add": (
        lambda h: h.images.add("n", "dir:root", if_missing=True, replace=True),
        ask.ImageAdd(name="n", source=f"dir:{os.getcwd()}/root", if_missing=True, replace=True),
    ),
    "image.build": (
        lambda h: h.images.build("n", "b", "apt-get update", network="none", env={"A": "1"}),
        ask.ImageBuild(name="n", base="b", command=("sh", "-c", "apt-get update"), network="none", env={"A": "1"}),
    ),
    "image.list": (lambda h: h.images.list(), ask.ImageList()),
    "image.step": (lambda h: h.images.step("n"), ask.ImageStep(name="n")),
    "image.show": (lambda h: h.images.show("n"), ask.ImageShow(name="n")),
    "image.remove": (lambda h: h.images.remove("n"), ask.ImageRemove(name="n")),
    "store.init": (lambda h: h.store("s", "k").init(5), ask.StoreInit(**STORE, grace=5)),
    "store.put": (lambda h: h.store("s", "k").put("b", 2), ask.StorePut(**STORE, sandbox="b", ref="2")),
    "store.get": (
        lambda h: h.store("s", "k").get("b@2", "n", allow_host=True, limit=9),
        ask.StoreGet(**STORE, checkpoint="b@2", name="n", allow_host=True, limit=9),
    ),
    "store.list": (lambda h: h.store("s", "k").list(), ask.StoreList(**STORE)),
    "store.remote": (lambda h: h.store("s3://b/p").list(), ask.StoreList(url="s3://b/p")),
    "store.remove": (lambda h: h.store("s", "k").remove("b"), ask.StoreRemove(**STORE, checkpoint="b")),
    "store.check": (
        lambda h: h.store("s", "k").check(data=True, repair=True),
        ask.StoreLook(**STORE, data=True, repair=True),
    ),
    "store.stats": (lambda h: h.store("s", "k").stats(), ask.StoreFigures(**STORE)),
    "store.collect": (
        lambda h: h.store("s", "k").collect(ask.Policy(last=3)),
        ask.StoreCollect(**STORE, policy=ask.Policy(last=3)),
    ),
}
BOX_CALLS: dict[str, tuple[Callable[[Any], Any], ask.Request]] = {
    "info": (lambda b: b.info(), ask.Inspect(sandbox="text")),
    "run": (
        lambda b: b.run(
            ["a", "b"], env={"A": "1"}, cwd="/c", user="u", timeout=1.5, input=b"in", limit=7, by_agent=True
        ),
        ask.Run(
            sandbox="text",
            spec=ExecSpec(argv=("a", "b"), env={"A": "1"}, cwd="/c", user="u", timeout=1.5, stdin=True, by_agent=True),
            input=b"in",
            limit=7,
        ),
    ),
    "run-shell": (lambda b: b.run("a | b"), ask.Run(sandbox="text", spec=ExecSpec(argv=("sh", "-c", "a | b")))),
    "shell-run": (
        lambda b: b.shell("s", env={"A": "1"}, cwd="/c", user="u", by_agent=True).run("cd /", 1.5),
        ask.ShellRun(
            sandbox="text", shell="s", command="cd /", timeout=1.5, env={"A": "1"}, cwd="/c", user="u", by_agent=True
        ),
    ),
    "shell-default": (lambda b: b.shell().run("pwd"), ask.ShellRun(sandbox="text", shell="main", command="pwd")),
    "shell-interrupt": (lambda b: b.shell("s").interrupt(), ask.ShellInterrupt(sandbox="text", shell="s")),
    "shell-state": (lambda b: b.shell("s").state(), ask.ShellLook(sandbox="text", shell="s")),
    "commands": (lambda b: b.commands(), ask.CommandList(sandbox="text")),
    "processes": (lambda b: b.processes(), ask.ProcessList(sandbox="text")),
    "start": (lambda b: b.start(), ask.Start(sandbox="text")),
    "stop": (lambda b: b.stop(5), ask.Stop(sandbox="text", grace=5)),
    "kill": (lambda b: b.kill(), ask.Kill(sandbox="text")),
    "pause": (lambda b: b.pause(), ask.Pause(sandbox="text")),
    "resume": (lambda b: b.resume(), ask.Resume(sandbox="text")),
    "remove": (lambda b: b.remove(force=True), ask.Remove(sandbox="text", force=True)),
    "checkpoint": (
        lambda b: b.checkpoint("l", "files", durable=False),
        ask.TakeCheckpoint(sandbox="text", label="l", policy="files", durable=False),
    ),
    "model-address": (lambda b: b.model_address(inside=True), ask.ModelAddress(sandbox="text", inside=True)),
    "model-keys": (lambda b: b.model_keys({"openai": "k"}), ask.ModelKeys(sandbox="text", keys={"openai": "k"})),
    "exchanges": (lambda b: b.exchanges(7), ask.Exchanges(sandbox="text", limit=7)),
    "exchange": (lambda b: b.exchange(7), ask.ExchangeText(sandbox="text", number=7)),
    "explain": (lambda b: b.explain(2), ask.Explain(sandbox="text", ref="2")),
    "turns": (lambda b: b.turns(every=True), ask.Turns(sandbox="text", every=True)),
    "rewind": (lambda b: b.rewind(3, files_only=True), ask.Rewind(sandbox="text", ref="3", files_only=True)),
    "rewind-checkpoint": (lambda b: b.rewind(CHECKPOINT), ask.Rewind(sandbox="text", ref="text")),
    "recover": (lambda b: b.recover(), ask.Recover(sandbox="text")),
    "recover-stopped": (lambda b: b.recover(force=True), ask.Recover(sandbox="text", force=True)),
    "rewind-by-agent": (
        lambda b: b.rewind("r", note="n", by_agent=True),
        ask.Rewind(sandbox="text", ref="r", note="n", by_agent=True),
    ),
    "try": (
        lambda b: b.try_in_forks(["a"], "r", 2, env={"A": "b"}, cwd="/c", user="u", timeout=3.0, limit=5),
        ask.Try(
            sandbox="text",
            spec=ExecSpec(argv=("a",), env={"A": "b"}, cwd="/c", user="u", timeout=3.0),
            ref="r",
            count=2,
            limit=5,
        ),
    ),
    "fork": (lambda b: b.fork("r", 2, ["a", "b"]), ask.Fork(sandbox="text", ref="r", count=2, names=("a", "b"))),
    "fork-named": (lambda b: b.fork(names=["a", "b", "c"]), ask.Fork(sandbox="text", count=3, names=("a", "b", "c"))),
    "diff": (lambda b: b.diff("a", 2, content=True), ask.Diff(sandbox="text", ref="a", to="2", content=True)),
    "verify": (lambda b: b.verify(2), ask.Verify(sandbox="text", ref="2")),
    "label": (lambda b: b.label(2, "l"), ask.Label(sandbox="text", ref="2", label="l")),
    "rm-checkpoint": (lambda b: b.remove_checkpoint(2), ask.RemoveCheckpoint(sandbox="text", ref="2")),
    "copy-in": (
        lambda b: b.copy_in("f/", "/t"),
        ask.CopyIn(sandbox="text", source=f"{os.getcwd()}/f/", target="/t"),
    ),
    "copy-out": (
        lambda b: b.copy_out("/s", Path("f")),
        ask.CopyOut(sandbox="text", source="/s", target=f"{os.getcwd()}/f"),
    ),
    "apply": (lambda b: b.apply("/t", dry_run=True), ask.Apply(sandbox="text", target="/t", dry_run=True)),
    "export": (
        lambda b: b.export("e", 2, with_image=False),
        ask.Export(sandbox="text", ref="2", path=f"{os.getcwd()}/e", with_image=False),
    ),
    "commit": (lambda b: b.commit("n"), ask.Commit(sandbox="text", name="n")),
}


def test_every_operation_of_the_api_has_a_method() -> None:
    asked = {type(request) for _, request in (*HOST_CALLS.values(), *BOX_CALLS.values())}
    assert asked == set(ask.CALLS.values())


def test_every_field_of_a_request_can_be_set_by_a_method() -> None:
    made = [request for _, request in (*HOST_CALLS.values(), *BOX_CALLS.values())]
    for kind in ask.CALLS.values():
        plain = kind(**{f.name: "" for f in msgspec.structs.fields(kind) if f.required})
        for field in kind.__struct_fields__:
            assert any(isinstance(r, kind) and getattr(r, field) != getattr(plain, field) for r in made), (kind, field)


@pytest.mark.parametrize("name", HOST_CALLS)
def test_a_method_of_the_host_makes_its_request(name: str) -> None:
    call, request = HOST_CALLS[name]
    transport, again = Recording(), AsyncRecording()
    result = call(sync.Host(transport=transport))
    awaited = asyncio.run(_awaited(lambda: call(aio.AsyncHost(transport=again))))
    assert transport.asked == again.asked == [request]
    assert _plain(result) == _plain(awaited)


@pytest.mark.parametrize("name", BOX_CALLS)
def test_a_method_of_a_sandbox_makes_its_request(name: str) -> None:
    call, request = BOX_CALLS[name]
    transport, again = Recording(), AsyncRecording()
    result = call(sync.Sandbox(transport, "text", "n"))
    awaited = asyncio.run(_awaited(lambda: call(aio.AsyncSandbox(again, "text", "n"))))
    assert transport.asked == again.asked == [request]
    assert _plain(result) == _plain(awaited)


async def _awaited(call: Callable[[], Any]) -> Any:
    return await call()


def _plain(result: Any) -> Any:
    """Handles of the two twins are alike if they speak of the same sandbox."""
    if isinstance(result, list):
        return [_plain(item) for item in result]
    return (result.id, result.name) if isinstance(result, (sync.Sandbox, aio.AsyncSandbox)) else result


def test_the_twins_have_the_same_methods_with_the_same_parameters() -> None:
    for kind in ("Host", "Images", "Sandbox", "Process"):
        one, other = getattr(sync, kind), getattr(aio, f"Async{kind}")
        names = {name for name in vars(one) if not name.startswith("_")}
        assert names == {name for name in vars(other) if not name.startswith("_")}
        for name in names:
            if callable(getattr(one, name)):
                assert list(inspect.signature(getattr(one, name)).parameters) == list(
                    inspect.signature(getattr(other, name)).parameters
                )


def test_the_synchronous_module_is_the_twin_of_the_asynchronous_one() -> None:
    assert twin.main(["--check"]) == 0


def test_a_sandbox_is_removed_at_the_end_of_its_block() -> None:
    transport = Recording()
    with sync.Host(transport=transport) as host, host.create() as box:
        assert box.id == "text"
    assert transport.asked[-1] == ask.Remove(sandbox="text", force=True)
    assert transport.closed


def test_a_spawned_command_is_specified_in_full() -> None:
    transport = Recording()
    box = sync.Sandbox(transport, "s", "n")
    box.spawn(["a"], tty=True, stdin=True, name="c", rows=2, columns=3, env={"A": "1"}, cwd="/c", user="u", timeout=1)
    assert transport.spawned == [
        (
            "s",
            ExecSpec(
                argv=("a",),
                tty=True,
                stdin=True,
                name="c",
                rows=2,
                columns=3,
                env={"A": "1"},
                cwd="/c",
                user="u",
                timeout=1,
            ),
        )
    ]


def test_an_empty_command_is_refused() -> None:
    with pytest.raises(errors.InvalidRequest, match="empty"):
        sync.Sandbox(Recording(), "s", "n").run([])


def test_a_failed_command_raises_only_if_that_is_wanted() -> None:
    failed = ExecResult(exit_code=3, stdout=b"out", stderr=b"it is broken\n")

    class Failing(Recording):
        def call(self, request: ask.Request) -> Any:
            return failed

    box = sync.Sandbox(Failing(), "s", "n")
    assert box.run("false") is failed
    with pytest.raises(crab.CommandFailed, match="'false' ended with status 3: it is broken") as caught:
        box.run("false", check=True)
    assert caught.value.result is failed


# ---------------------------------------------------------------- processes, over both kinds of transport


@pytest.fixture
def stand_in() -> StandIn:
    return StandIn()


class Embedded(EmbeddedTransport):
    """With the stand-in for the service."""

    def __init__(self, stand_in: StandIn) -> None:
        super().__init__("/nowhere")
        self._service = stand_in  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture(params=["embedded", "socket"])
def box(request: pytest.FixtureRequest, stand_in: StandIn, tmp_path: Path) -> Iterator[sync.Sandbox]:
    if request.param == "embedded":
        yield sync.Sandbox(Embedded(stand_in), "x", "x")
        return
    with served(stand_in, tmp_path / "crab.sock") as running:
        yield sync.Sandbox(SocketTransport(running.path), "x", "x")


def test_a_process_is_iterated_for_its_output(box: sync.Sandbox, stand_in: StandIn) -> None:
    def talk(program: Program) -> None:
        program.say(b"out")
        program.say(b"err", stream=2)
        program.end(5)

    stand_in.script = talk
    process = box.spawn(["work"], name="w")
    assert list(process) == [Output(1, b"out"), Output(2, b"err")]
    assert process.wait().exit_code == 5
    assert (process.name, process.pid) == ("w", 1001)


def test_a_process_without_a_name_has_its_number(box: sync.Sandbox) -> None:
    assert box.spawn(["work"]).name == "1"


def test_input_can_be_given_before_output_is_read(box: sync.Sandbox, stand_in: StandIn) -> None:
    process = box.spawn(["cat"], stdin=True)
    process.write(b"all of it")
    process.close_input()
    program = stand_in.started()
    program.say(program.input)
    program.end()
    assert b"".join(piece.data for piece in process) == b"all of it"


def test_input_that_is_not_taken_raises_the_same_everywhere(box: sync.Sandbox, stand_in: StandIn) -> None:
    process = box.spawn(["work"], stdin=True)
    stand_in.started().takes_input = False
    with pytest.raises(WrongState, match="takes no more input"):
        process.write(b"x")


def test_a_detached_process_can_be_attached_to(box: sync.Sandbox, stand_in: StandIn) -> None:
    process = box.spawn(["work"], name="w")
    program = stand_in.started()
    program.say(b"first")
    program.wait(lambda p: p.acknowledged == 1)
    process.detach()
    assert [piece.data for piece in process] == [b"first"]
    assert process.wait().running
    program.say(b"second")
    program.end()
    again = box.attach("w")
    assert [piece.data for piece in again] == [b"second"]
    assert again.wait().exit_code == 0


def test_the_death_of_the_sandbox_ends_the_iteration_with_an_error(box: sync.Sandbox, stand_in: StandIn) -> None:
    process = box.spawn(["work"])
    stand_in.started().say(b"last")
    stand_in.started().vanish("it was killed")
    stream = iter(process)
    assert next(stream).data == b"last"
    with pytest.raises(SandboxGone, match="it was killed"):
        next(stream)


def test_a_process_is_killed_at_the_end_of_its_block(box: sync.Sandbox, stand_in: StandIn) -> None:
    with box.spawn(["sleep", "100"]) as process:
        pass
    assert stand_in.started().killed
    assert process.status().exit_code == 137


def test_a_process_that_was_detached_in_its_block_goes_on(box: sync.Sandbox, stand_in: StandIn) -> None:
    with box.spawn(["sleep", "100"]) as process:
        process.detach()
    assert not stand_in.started().killed


def test_errors_of_a_start_keep_their_type(box: sync.Sandbox, stand_in: StandIn) -> None:
    stand_in.refusal = CommandNotFound("'nope' was not found", remedy="check")
    with pytest.raises(CommandNotFound, match="nope"):
        box.spawn(["nope"])


def test_what_nobody_reads_waits_in_the_sandbox(stand_in: StandIn) -> None:
    pieces = 4 * BUFFER // 65536

    def talk(program: Program) -> None:
        for _ in range(pieces):
            program.say(b"x" * 65536)
        program.end()

    stand_in.script = talk
    command = EmbeddedCommand(stand_in.spawn("x", ExecSpec(argv=("yes",))))
    program = stand_in.started()
    program.wait(lambda p: p.acknowledged >= BUFFER // 65536)
    threading.Event().wait(0.1)
    assert program.acknowledged < pieces
    assert sum(len(piece.data) for piece in command.events()) == pieces * 65536


def test_the_embedded_twin_streams_the_same(stand_in: StandIn) -> None:
    async def everything() -> None:
        transport = AsyncEmbeddedTransport("/nowhere")
        transport._embedded = Embedded(stand_in)
        async with aio.AsyncHost(transport=transport) as host:
            assert (await host.about()).state_dir == "/state"
            box = aio.AsyncSandbox(transport, "x", "x")
            process = await box.spawn(["cat"], stdin=True, name="w")
            program = stand_in.started()
            program.say(b"one")
            assert await anext(aiter(process)) == Output(1, b"one")
            await process.write(b"input")
            await process.close_input()
            await process.signal(1)
            await process.resize(3, 4)
            assert (program.input, program.input_closed) == (b"input", True)
            assert (program.signals, program.sizes) == ([1], [(3, 4)])
            asyncio.get_running_loop().call_later(0.1, program.end, 3)
            assert [piece async for piece in process] == []
            assert (await process.wait()).exit_code == 3
            async with await box.spawn(["sleep"]) as other:
                pass
            assert other.status().exit_code == 137
            lost = await box.spawn(["work"])
            stand_in.started(3).vanish("gone")
            with pytest.raises(SandboxGone, match="gone"):
                await lost.wait()
            with pytest.raises(NotFound):
                await box.attach("nothing")

    asyncio.run(everything())


# ---------------------------------------------------------------- the package


def test_the_package_offers_the_facades_and_loads_them_late() -> None:
    for name in crab.__all__:
        assert getattr(crab, name) is not None
        assert name in dir(crab)
    with pytest.raises(AttributeError):
        _ = crab.Nothing  # pyright: ignore[reportAttributeAccessIssue]
    said = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, crab; print([m for m in sys.modules if m.startswith(('crab.', 'msgspec'))])",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.strip() == "[]"


def test_the_state_directory_is_chosen_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CRAB_STATE", raising=False)
    assert default_state_dir() == Path("/var/lib/crab")
    monkeypatch.setenv("CRAB_STATE", "/elsewhere")
    assert default_state_dir() == Path("/elsewhere")
    assert EmbeddedTransport().state_dir == Path("/elsewhere")


def test_connect_speaks_to_the_socket_of_the_environment(
    stand_in: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CRAB_SOCKET", str(tmp_path / "crab.sock"))
    stand_in.answers[ask.Inspect] = Busy("another operation is under way", remedy="wait")
    with served(stand_in, tmp_path / "crab.sock"), crab.connect() as host:
        assert host.about().pid == 1
        with pytest.raises(Busy, match="another operation") as caught:
            host.sandbox("x")
        assert caught.value.remedy == "wait"
