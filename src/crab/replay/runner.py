"""Runs a trajectory turn by turn in a sandbox, with a policy for checkpoints and a plan of crashes.

A crash is a SIGKILL to everything in the sandbox. What the run goes on with afterwards is decided by `policy.resume`; this
module only does it. The agent is not run: its commands are those of the recording, whatever they come to this time.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

from crab.errors import CrabError, InvalidRequest, NotFound
from crab.model import Checkpoint, State, Struct
from crab.replay import volatile
from crab.replay.kills import Kill
from crab.replay.policy import Policy, Recovery, Resume, TurnEnd, answered, repeated, resume
from crab.replay.state import Observation, compare, observe
from crab.replay.trajectory import Trajectory, Turn, TurnKind
from crab.sandbox.shell import Feed

if TYPE_CHECKING:
    from crab.sdk.sync import Host, Sandbox, Shell

SHELL = "replay"
"""Name of the run's persistent shell."""

TIMEOUT = 600.0
"""Seconds that a turn may take; then its command is interrupted or killed, as most harnesses do."""
_KEPT = 4000  # characters of a turn's output that its record keeps: the end
_GRACE = 30.0  # seconds for a call to return whose sandbox was killed under it


class TurnRecord(Struct, kw_only=True):
    """A turn that was run to its end."""

    turn: int
    kind: TurnKind
    command: str
    exit_code: int | None
    """None: it runs in the background."""
    expected: int | None
    """As recorded; None: nothing is expected."""
    ms: float
    output: str
    """The end of it."""
    timed_out: bool = False
    repeated: bool = False
    """It had been run before the last crash."""
    checkpoint: Checkpoint | None = None
    saved_ms: float = 0.0
    """How long its checkpoint took, from the call to the answer."""

    @property
    def as_recorded(self) -> bool:
        """Whether it ended as it did in the recording."""
        return self.expected is None or self.exit_code is None or self.exit_code == self.expected


class Crash(Struct, kw_only=True):
    """A kill, and how the run went on."""

    kill: Kill
    head: int | None
    """Turn of the newest checkpoint; 0 is the end of the set-up, None: there was no checkpoint."""
    resume: Resume
    again: int
    """Number of turns that had ended and have to be run once more."""
    ms: float
    """From the kill until the next turn could begin, milliseconds."""
    differences: tuple[str, ...] | None = None
    """Between the state that was brought back and that at the end of the last whole turn before the kill; None: nobody
    looked."""


class Run(Struct, kw_only=True):
    """What became of a trajectory."""

    id: str
    policy: str
    turns: tuple[TurnRecord, ...]
    """In the order in which they were run; repeated ones stand again."""
    checkpoints: tuple[Checkpoint, ...]
    """All that were taken, that of the set-up included."""
    crashes: tuple[Crash, ...]
    check: bool | None
    """Whether the trajectory's check passed; None: it has none, or not all turns were wanted."""
    check_output: str
    state: Observation | None
    ms: float
    worked_ms: float = 0.0
    """From the beginning of the first turn to the end of the last one: commands, checkpoints, waits and recoveries, without
    the first set-up and without looking at the state."""
    skipped_ms: float = 0.0
    """Recorded waits for the model that were not waited for. What of a wait a checkpoint has filled is not among them: with
    `worked_ms` it makes the time that the run would have taken at the recorded pace."""

    def durations(self) -> dict[int, float]:
        """Milliseconds that the command of each turn took."""
        return {record.turn: record.ms for record in self.turns}


class Event(Struct, kw_only=True):
    """What a watcher of a run is told."""

    what: Literal["setup", "begin", "end", "kill", "recovered", "observe"]
    turn: int = 0
    command: str = ""
    record: TurnRecord | None = None
    crash: Crash | None = None


Watcher = Callable[[Event], None]


class Observer(Protocol):
    """What looks at the state of a sandbox, as `state.observe` does."""

    def __call__(
        self,
        sandbox: Sandbox,
        *,
        shell: Shell | None,
        commands: Iterable[str],
        left_out: Iterable[str],
        timeout: float,
    ) -> Observation: ...


def _unwatched(_: Event) -> None:
    """Nobody watches."""


def replay(
    host: Host,
    trajectory: Trajectory,
    policy: Policy,
    kills: Sequence[Kill] = (),
    *,
    image: str = "debian",
    look: bool = True,
    around: bool = False,
    complete: bool = True,
    durations: Mapping[int, float] | None = None,
    pace: float = 0.0,
    timeout: float = TIMEOUT,
    watch: Watcher = _unwatched,
    observer: Observer = observe,
) -> Run:
    """Run a trajectory in a sandbox of its own, which is removed at the end, whatever happens.

    `image` is used if the trajectory names none. `look`: observe the final state. `around`: observe it before each kill and
    after each recovery, too. `complete`: the turns are the whole run, so that its check makes sense. `durations`
    (milliseconds by turn, of an earlier run) say when the middle of a command is; without them a kill in the middle strikes
    at once. `pace` is the share of the recorded waits for the model that is waited for; one whose answer is known is not
    waited for again. `observer` is what observes. Raises InvalidRequest if the set-up does not fit the image, and the errors
    of the sandbox.
    """
    with _Replay(host, trajectory, policy, image=image, timeout=timeout, watch=watch, observer=observer) as running:
        return running.run(kills, look=look, around=around, complete=complete, durations=durations or {}, pace=pace)


class _Replay:
    """One run and its sandbox."""

    def __init__(
        self,
        host: Host,
        trajectory: Trajectory,
        policy: Policy,
        *,
        image: str,
        timeout: float,
        watch: Watcher,
        observer: Observer,
    ) -> None:
        self._host = host
        self._trajectory = trajectory
        self._policy = policy
        self._image = trajectory.image or image
        self._timeout = timeout
        self._watch = watch
        self._observer = observer
        self._sandbox: Sandbox | None = None
        self._feeds: dict[str, Feed] = {}
        self._started: dict[str, int] = {}
        """Commands that outlive their turn, by name: the turn that started them."""
        self._turn_of: dict[str, int] = {}
        """Checkpoint: its turn."""
        self._checkpoints: list[Checkpoint] = []
        self._records: list[TurnRecord] = []
        self._crashes: list[Crash] = []
        self._looked = 0.0
        """Seconds that went into looking around kills."""

    def __enter__(self) -> _Replay:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._discard()
        except CrabError:
            if kind is None:  # else what went wrong first is what matters
                raise

    @property
    def _box(self) -> Sandbox:
        if self._sandbox is None:
            raise CrabError(
                "the replay has no sandbox", remedy="report this as a bug: it is made before the first turn"
            )
        return self._sandbox

    # ------------------------------------------------------------ the whole

    def run(
        self,
        kills: Sequence[Kill],
        *,
        look: bool,
        around: bool,
        complete: bool,
        durations: Mapping[int, float],
        pace: float,
    ) -> Run:
        begin = time.monotonic()
        turns, pending, finished, known, skipped = self._trajectory.turns, set(kills), 0, 0, 0.0
        self._prepare()
        number, first = 1, time.monotonic()
        idle_since = first
        while number <= len(turns):
            turn = turns[number - 1]
            # checkpoints are taken inside this wait, as behind a model that thinks
            wait, passed = 0.0 if number <= known else turn.wait_s, time.monotonic() - idle_since
            time.sleep(max(0.0, wait * pace - passed))
            skipped += max(0.0, wait - max(wait * pace, passed))
            known = max(known, number)
            self._watch(Event(what="begin", turn=number, command=turn.command))
            if (kill := Kill(number, False)) in pending:
                pending.remove(kill)
                before = self._glance() if around else None
                self._interrupt(number, turn, durations.get(number, 0.0) / 2e3)
                number = self._recover(kill, before)
                known = answered(self._crashes[-1].resume, known)
                idle_since = time.monotonic()
                continue
            record = self._do(number, turn)
            idle_since = time.monotonic()
            checkpoint = self._capture(number, turn.kind, record.exit_code)
            saved = (time.monotonic() - idle_since) * 1e3
            record = msgspec.structs.replace(
                record, checkpoint=checkpoint, saved_ms=saved if checkpoint else 0.0, repeated=number <= finished
            )
            finished = max(finished, number)
            self._records.append(record)
            self._watch(Event(what="end", turn=number, record=record))
            if (kill := Kill(number)) in pending:
                pending.remove(kill)
                before = self._glance() if around else None
                self._kill(number)
                number = self._recover(kill, before)
                known = answered(self._crashes[-1].resume, known)
                idle_since = time.monotonic()
            else:
                number += 1
        worked = time.monotonic() - first - self._looked
        state = self._observe() if look else None
        passed, said = self._check() if complete and self._trajectory.check else (None, "")
        return Run(
            id=self._trajectory.id,
            policy=self._policy.name,
            turns=tuple(self._records),
            checkpoints=tuple(self._checkpoints),
            crashes=tuple(self._crashes),
            check=passed,
            check_output=said,
            state=state,
            ms=(time.monotonic() - begin) * 1e3,
            worked_ms=worked * 1e3,
            skipped_ms=skipped * 1e3,
        )

    # ------------------------------------------------------------ the sandbox

    def _prepare(self) -> None:
        """A fresh sandbox, as the agent found it."""
        self._watch(Event(what="setup"))
        self._discard()
        trajectory = self._trajectory
        slug = re.sub(r"[^a-z0-9]+", "-", trajectory.id.lower()).strip("-")[:40]
        self._sandbox = self._host.create(
            f"replay-{slug or 'run'}-{secrets.token_hex(2)}",
            self._image,
            env=volatile.ENVIRONMENT,
            hostname=volatile.HOSTNAME,
            workdir=trajectory.workdir,
        )
        for target, source in trajectory.files.items():
            self._box.copy_in(source, target)
        for number, command in enumerate(trajectory.setup, 1):
            done = self._box.run(["bash", "-c", command], cwd="/", timeout=self._timeout)
            if done.exit_code:
                said = _end(done.stdout + b"\n" + done.stderr).strip().rpartition("\n")[2]
                raise InvalidRequest(
                    f"{trajectory.id}: command {number} of the set-up ended with {done.exit_code}: {said}",
                    remedy=f"do what it says, or choose an image that the run fits (now: {self._image})",
                )
        self._capture(0, None, 0)

    def _discard(self) -> None:
        """Remove the sandbox and forget all that belonged to it."""
        sandbox, self._sandbox = self._sandbox, None
        self._leave()
        if sandbox is not None:
            sandbox.remove(force=True)

    def _leave(self) -> None:
        """Forget what ran in the sandbox: it is dead, or will be."""
        self._feeds.clear()

    def _capture(self, number: int, kind: TurnKind | None, exit_code: int | None) -> Checkpoint | None:
        end = TurnEnd(turn=number, turns=len(self._trajectory.turns), kind=kind, exit_code=exit_code)
        wanted = self._policy.capture(end)
        if wanted is None:
            return None
        checkpoint = self._box.checkpoint(policy=wanted)
        self._turn_of[checkpoint.id] = number
        self._checkpoints.append(checkpoint)
        return checkpoint

    def _kill(self, number: int) -> None:
        self._watch(Event(what="kill", turn=number))
        self._box.kill()
        # a run that went on in a sandbox that is alive would prove nothing
        if (state := self._box.info().state) != State.LOST:
            raise CrabError(
                f"the sandbox was killed, but it is {state}, not lost", remedy="report this as a bug of Crab"
            )

    def _recover(self, kill: Kill, before: Observation | None) -> int:
        """Bring the run back after its sandbox was killed; returns the turn that comes next. `before`: the state to find again,
        if that is of interest."""
        begin = time.monotonic()
        self._leave()
        identity = self._box.info().head
        head = None if identity is None else self._turn_of[identity]
        after = resume(self._policy.recovery, head, kill)
        if after.recovery in (Recovery.CONVERSATION, Recovery.RESTART):
            self._started.clear()
            self._prepare()
        else:
            self._box.recover()
            self._started = {
                name: turn
                for name, turn in self._started.items()
                if after.recovery == Recovery.CHECKPOINT and turn < after.turn
            }
            self._attach()
        crash = Crash(
            kill=kill,
            head=head,
            resume=after,
            again=len(repeated(after, kill)),
            ms=(time.monotonic() - begin) * 1e3,
        )
        if before is not None:
            crash = msgspec.structs.replace(crash, differences=tuple(compare(before, self._glance())))
        self._crashes.append(crash)
        self._watch(Event(what="recovered", turn=after.turn, crash=crash))
        return after.turn

    def _attach(self) -> None:
        """Take hold again of the commands that came back. (The shell is found by its name.)"""
        for name in list(self._started):
            try:
                self._feeds[name] = Feed(self._box.attach(name), name)
            except NotFound:
                del self._started[name]  # had ended before the checkpoint

    # ------------------------------------------------------------ turns

    def _do(self, number: int, turn: Turn) -> TurnRecord:
        """Run a turn to its end."""
        begin = time.monotonic()
        code: int | None = None
        output, timed_out = "", False
        match turn.kind:
            case "exec":
                done = self._box.run(["bash", "-c", turn.command], cwd=turn.cwd, timeout=self._timeout)
                code, output, timed_out = done.exit_code, _end(done.stdout + done.stderr), done.timed_out
            case "shell":
                result = self._shell.run(turn.command, self._timeout)
                code, output, timed_out = result.exit_code, result.output[-_KEPT:], result.timed_out
            case "background":
                self._start(number, turn)
        return TurnRecord(
            turn=number,
            kind=turn.kind,
            command=turn.command,
            exit_code=code,
            expected=turn.rc,
            ms=(time.monotonic() - begin) * 1e3,
            output=output,
            timed_out=timed_out,
        )

    @property
    def _shell(self) -> Shell:
        """The run's shell. One that has ended is followed by a new one."""
        return self._box.shell(SHELL)

    def _start(self, number: int, turn: Turn) -> None:
        name = f"replay-{number}"
        argv = ["bash", "-c", turn.command]
        self._feeds[name] = Feed(self._box.spawn(argv, name=name, cwd=turn.cwd), name)
        self._started[name] = number

    def _interrupt(self, number: int, turn: Turn, delay: float) -> None:
        """Kill the sandbox `delay` seconds after the turn's command began. What it said is not heard."""
        if turn.kind == "background":
            self._start(number, turn)
            time.sleep(delay)
            self._kill(number)
            return
        sandbox, shell = self._box, self._shell

        def call() -> None:
            with contextlib.suppress(CrabError):
                if turn.kind == "shell":
                    shell.run(turn.command, self._timeout)
                else:
                    sandbox.run(["bash", "-c", turn.command], cwd=turn.cwd, timeout=self._timeout)

        waiting = threading.Thread(target=call, name=f"turn {number}", daemon=True)
        waiting.start()
        waiting.join(delay)
        self._kill(number)
        waiting.join(_GRACE)

    # ------------------------------------------------------------ the end

    def _glance(self) -> Observation:
        """Look on the way; the time that it takes is not the run's."""
        begin = time.monotonic()
        try:
            return self._observe()
        finally:
            self._looked += time.monotonic() - begin

    def _observe(self) -> Observation:
        self._watch(Event(what="observe"))
        return self._observer(
            self._box,
            shell=self._shell if self._has_shell() else None,
            commands=self._trajectory.observe,
            left_out=self._trajectory.volatile,
            timeout=self._timeout,
        )

    def _has_shell(self) -> bool:
        """Whether the shell is there (a question to it does not start one)."""
        try:
            self._shell.state()
        except NotFound:
            return False
        return True

    def _check(self) -> tuple[bool, str]:
        done = self._box.run(["bash", "-c", self._trajectory.check], timeout=self._timeout)
        return done.exit_code == 0, _end(done.stdout + done.stderr)


def _end(output: bytes) -> str:
    return output.decode(errors="backslashreplace")[-_KEPT:]
