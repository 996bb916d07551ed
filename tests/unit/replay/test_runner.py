"""Running trajectories: the order of turns, crashes and recoveries, in sandboxes that are folders of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from unit.replay.standin import Host, Sandbox

from crab.errors import InvalidRequest
from crab.model import State
from crab.replay import kills, runner
from crab.replay.policy import policy
from crab.replay.runner import Event, Run, replay
from crab.replay.state import Observation
from crab.replay.trajectory import Trajectory, Turn


def trajectory(*commands: str | Turn, **fields: object) -> Trajectory:
    turns = tuple(one if isinstance(one, Turn) else Turn(command=one) for one in commands)
    return Trajectory(id="A Story/1", turns=turns, **fields)  # type: ignore[arg-type]


COUNT = trajectory(*(f"echo {number} >> seen" for number in range(1, 6)), check="test $(wc -l < seen) = 5")


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def run(host: Host, story: Trajectory, name: str = "always", plan: str = "", **options: object) -> Run:
    strikes = kills.parse(plan, len(story.turns), 1)
    return replay(host, story, policy(name), strikes, look=False, **options)  # type: ignore[arg-type]


def seen(host: Host) -> str:
    return (host.boxes[-1].root / "seen").read_text().replace("\n", "")


def test_an_undisturbed_run_runs_every_turn_once_and_its_check(host: Host) -> None:
    found = run(host, COUNT, "none")
    assert [record.turn for record in found.turns] == [1, 2, 3, 4, 5]
    assert (found.check, found.checkpoints, found.crashes) == (True, (), ())
    assert [box.removed for box in host.boxes] == [True]


def test_a_checkpoint_is_taken_of_the_set_up_and_of_every_turn(host: Host) -> None:
    found = run(host, COUNT)
    assert host.boxes[0].log == ["checkpoint always"] * 6
    assert len(found.checkpoints) == 6
    assert all(record.checkpoint for record in found.turns)


@pytest.mark.parametrize(
    ("name", "plan", "order", "file", "check"),
    [
        ("always", "3", [1, 2, 3, 4, 5], "12345", True),
        ("always", "3m", [1, 2, 3, 4, 5], "12345", True),
        ("always", "1m", [1, 2, 3, 4, 5], "12345", True),
        ("always", "5", [1, 2, 3, 4, 5], "12345", True),
        ("always", "2,3m,3,5m", [1, 2, 3, 4, 5], "12345", True),
        ("files", "1,4m", [1, 2, 3, 4, 5], "12345", True),
        ("every:3", "5", [1, 2, 3, 4, 5, 4, 5], "12345", True),
        ("every:3", "2", [1, 2, 1, 2, 3, 4, 5], "12345", True),
        ("none", "3", [1, 2, 3, 4, 5], "45", False),
        ("none", "3m", [1, 2, 3, 4, 5], "345", False),
        ("restart", "3", [1, 2, 3, 1, 2, 3, 4, 5], "12345", True),
        ("restart", "3m,3", [1, 2, 1, 2, 3, 1, 2, 3, 4, 5], "12345", True),
    ],
)
def test_after_a_crash_the_run_goes_on_as_its_policy_says(
    host: Host, name: str, plan: str, order: list[int], file: str, check: bool
) -> None:
    found = run(host, COUNT, name, plan)
    assert [record.turn for record in found.turns] == order
    assert [record.repeated for record in found.turns] == [turn in order[:at] for at, turn in enumerate(order)]
    assert seen(host) == file
    assert found.check is check
    assert [str(crash.kill) for crash in found.crashes] == plan.split(",")
    assert len(host.boxes) == (1 if name in ("always", "files") or name.startswith("every") else plan.count(",") + 2)
    assert all(box.removed for box in host.boxes)


def test_a_kill_in_the_middle_strikes_while_the_command_runs(host: Host) -> None:
    story = trajectory("echo a >> seen; sleep 30; echo b >> seen", "echo c >> seen")
    states: list[str] = []

    def watch(event: Event) -> None:
        if event.what == "kill":
            states.append((host.boxes[-1].root / "seen").read_text())

    found = run(host, trajectory("true", *story.turns), "none", "2m", durations={2: 2000.0}, watch=watch, timeout=1.0)
    assert states == ["a\n"]
    assert [record.turn for record in found.turns] == [1, 2, 3]


def test_a_shell_keeps_its_state_and_one_that_ended_is_followed_by_another(host: Host) -> None:
    def typed(command: str) -> Turn:
        return Turn(command=command, kind="shell")

    found = run(
        host,
        trajectory(
            typed("x=1"), typed("echo $x"), typed("exit 3"), typed("echo ${x-none}; (exit 2)"), typed("echo $?")
        ),
    )
    assert [(record.exit_code, record.output) for record in found.turns] == [
        (0, ""),
        (0, "1\n"),
        (3, found.turns[2].output),
        (2, "none\n"),
        (0, "2\n"),
    ]


def test_after_a_recovery_of_files_alone_there_is_a_new_shell(host: Host) -> None:
    turns = [Turn(command=command, kind="shell") for command in ("x=1; echo 1 > seen", "echo ${x-none} >> seen")]
    run(host, trajectory(*turns), "files", "1")
    assert seen(host) == "1none"


def test_background_turns_are_not_waited_for_and_start_where_they_are_told(host: Host, tmp_path: Path) -> None:
    background = Turn(command="pwd > seen; yes", kind="background", cwd=str(tmp_path))
    found = run(host, trajectory(background, f"until test -s {tmp_path}/seen; do sleep 0.01; done"))
    assert found.turns[0].exit_code is None
    assert (tmp_path / "seen").read_text() == f"{tmp_path}\n"


def test_statuses_other_than_recorded_are_known(host: Host) -> None:
    story = trajectory(Turn(command="true", rc=0), Turn(command="false", rc=0), Turn(command="false"))
    assert [record.as_recorded for record in run(host, story).turns] == [True, False, True]


def test_a_set_up_is_made_in_every_fresh_sandbox_and_files_are_copied(host: Host, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("7")
    story = trajectory("cat data begun > seen", setup=("echo x > begun",), files={"/root/data": str(tmp_path / "data")})
    run(host, story, "none", "1m")
    assert len(host.boxes) == 2
    assert seen(host) == "7x"


def test_a_set_up_that_fails_is_an_error_that_says_what_it_said(host: Host) -> None:
    with pytest.raises(InvalidRequest, match="command 2 of the set-up ended with 3: no such thing"):
        run(host, trajectory("true", setup=("true", "echo no such thing >&2; exit 3")))
    assert [box.removed for box in host.boxes] == [True]


def test_the_sandbox_is_removed_whatever_happens(host: Host) -> None:
    def watch(event: Event) -> None:
        if event.what == "begin":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(host, COUNT, watch=watch)
    assert [box.removed for box in host.boxes] == [True]


def test_a_turn_that_takes_too_long_is_ended(host: Host) -> None:
    found = run(host, trajectory("sleep 30", "true"), timeout=0.3)
    assert [(record.exit_code, record.timed_out) for record in found.turns] == [(124, True), (0, False)]


def test_recorded_waits_are_waited_for_as_far_as_wanted(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(runner.time, "sleep", waits.append)
    run(host, trajectory("true", Turn(command="true", wait_s=8.0)), pace=0.5)
    assert waits[0] == 0.0
    assert 3.0 < max(waits) <= 4.0


@pytest.mark.parametrize(("name", "seconds"), [("always", 15.0), ("none", 15.0), ("every:3", 15.0), ("restart", 20.0)])
def test_an_answer_that_is_known_is_not_waited_for_again(host: Host, name: str, seconds: float) -> None:
    story = trajectory(*(Turn(command="true", wait_s=5.0) for _ in range(3)))
    found = run(host, story, name, "2m" if name == "every:3" else "1", pace=0.0)
    assert seconds - 1 < found.skipped_ms / 1e3 <= seconds
    assert found.worked_ms < 5000


def test_what_was_brought_back_is_compared_with_what_there_was(host: Host) -> None:
    story = trajectory(*("echo >> seen" for _ in range(3)))

    def lines(sandbox: Sandbox, **_: object) -> Observation:
        file = sandbox.root / "seen"
        return Observation(outputs={"lines": str(len(file.read_text()) if file.exists() else 0)})

    kept = run(host, story, "files", "1m,2", around=True, observer=lines)
    assert [crash.differences for crash in kept.crashes] == [(), ()]
    lost = run(host, story, "none", "1m,2", around=True, observer=lines)
    assert [crash.differences for crash in lost.crashes] == [(), ("observed lines: is '0', should be '2'",)]
    assert [crash.differences for crash in run(host, story, "files", "2").crashes] == [None]


def test_a_part_of_a_run_is_not_checked(host: Host) -> None:
    assert run(host, COUNT, complete=False).check is None


def test_kills_make_a_sandbox_lost_before_it_is_recovered(host: Host) -> None:
    run(host, COUNT, plan="2,4")
    assert host.boxes[0].log.count("kill") == host.boxes[0].log.count("recover") == 2
    assert host.boxes[0].state == State.RUNNING
