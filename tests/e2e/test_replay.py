"""Whole runs of agents in real sandboxes, killed and brought back: the end must be that of an undisturbed run.

`$CRAB_TEST_SEEDS` is the number of random plans of kills that each story is run with (3).
"""

from __future__ import annotations

import os
import statistics
import sys
from pathlib import Path

import pytest

from crab.replay import demo, kills
from crab.replay.policy import policy
from crab.replay.runner import Run, replay
from crab.replay.show import Progress
from crab.replay.state import Observation, compare, observe
from crab.replay.trajectory import Trajectory, Turn
from crab.sdk.sync import Host

pytestmark = [pytest.mark.kernel, pytest.mark.criu, pytest.mark.slow]

SEEDS = int(os.environ.get("CRAB_TEST_SEEDS", "3"))


def typed(*commands: str) -> tuple[Turn, ...]:
    return tuple(Turn(command=command, kind="shell") for command in commands)


def run(
    host: Host, image: str, story: Trajectory, name: str = "adaptive", plan: str = "", seed: int = 0, **options
) -> Run:
    strikes = kills.parse(plan, len(story.turns), seed)
    return replay(host, story, policy(name), strikes, image=image, timeout=60.0, **options)


def differences(one: Run, other: Run) -> list[str]:
    assert one.state is not None and other.state is not None
    return compare(one.state, other.state)


@pytest.fixture(params=["terminal", pytest.param("repair", marks=pytest.mark.network)])
def story(request: pytest.FixtureRequest, state_dir: Path) -> Trajectory:
    wanted = next(one for one in demo.ALL if one.name == request.param)
    return demo.load(wanted, demo.STORIES, state_dir / "cache" / "stories")


def test_a_story_ends_as_if_nothing_had_happened_wherever_it_is_killed(
    host: Host, image: str, story: Trajectory, figures
) -> None:
    wanted = run(host, image, story)
    assert wanted.check, wanted.check_output
    assert all(record.as_recorded for record in wanted.turns)
    for seed in range(SEEDS):
        found = run(host, image, story, plan="random:3,random:2m", seed=seed, durations=wanted.durations())
        where = [str(crash.kill) for crash in found.crashes]
        assert differences(wanted, found) == [], f"killed at {where}"
        assert found.check, f"killed at {where}: {found.check_output}"
        frozen = [one.timings.frozen_ms for one in found.checkpoints]
        back = [crash.ms for crash in found.crashes]
        figures(
            f"{story.id}, killed at {','.join(where)}: frozen {statistics.median(frozen):.0f} ms (at most {max(frozen):.0f}), "
            f"back after {statistics.median(back):.0f} ms"
        )


def test_checkpoints_alone_change_nothing(host: Host, image: str, story: Trajectory) -> None:
    assert differences(run(host, image, story, "none"), run(host, image, story)) == []


def test_the_conversation_alone_does_not_bring_the_work_back(host: Host, image: str, story: Trajectory) -> None:
    wanted = run(host, image, story, "none")
    middle = len(story.turns) // 2
    found = run(host, image, story, "none", plan=str(middle))
    assert differences(wanted, found)
    assert found.check is False
    again = run(host, image, story, "restart", plan=str(middle))
    assert differences(wanted, again) == []
    assert again.check


def test_files_alone_bring_back_what_lies_in_files(host: Host, image: str) -> None:
    service = Turn(command="exec sleep 1000", kind="background")
    story = Trajectory(id="files", turns=(service, Turn(command="echo 1 > kept"), Turn(command="cat kept", rc=0)))
    wanted, found = run(host, image, story, "files"), run(host, image, story, "files", plan="2")
    assert all(record.as_recorded for record in found.turns)
    assert differences(wanted, found) == ["process sleep 1000 (in /root, uid 0) is missing"]


def test_a_shell_comes_back_with_all_that_it_had(host: Host, image: str) -> None:
    story = Trajectory(
        id="shell",
        turns=typed(
            "cd /tmp && x=1 && declare -A m=([a]='b c') && f() { echo f; } && alias g=f && set -o noclobber && umask 077",
            "sleep 1000 & sleep 1001 & sleep 0.2; kill -STOP %2; exec 9<>gone; rm gone; echo secret >&9; trap 'echo t' USR1",
            "(exit 7)",
            'echo $? $x "${m[a]}" $(f) $(umask) $(jobs -p | wc -l) $(cat /dev/fd/9); kill -USR1 $$',
        ),
    )
    wanted = run(host, image, story)
    said = "7 1 b c f 0077 2 secret\nt\n"
    assert wanted.turns[3].output.endswith(said)
    found = run(host, image, story, plan="1,2,3,4m,4")
    # before it bash may tell that its job has stopped: a stopped process that is restored tells its parent once more
    assert found.turns[3].output.endswith(said)
    assert differences(wanted, found) == []


def test_a_command_that_is_killed_in_its_middle_leaves_nothing_of_its_first_half(host: Host, image: str) -> None:
    story = Trajectory(
        id="half", turns=(Turn(command="echo a >> log; sleep 0.6; echo b >> log"),), observe=("cat log",)
    )
    found = run(host, image, story, plan="1m", durations={1: 600.0})
    assert found.state is not None
    assert found.state.outputs == {"cat log": "exit 0\na\nb\n"}


def test_a_service_that_writes_much_does_not_stand_still_over_recoveries(host: Host, image: str) -> None:
    noise = Turn(command="while echo {1..100}; do echo >> /tmp/lines; done", kind="background")
    moves = Turn(command='was=$(wc -l < /tmp/lines); sleep 1; test "$(wc -l < /tmp/lines)" -gt "$was"', rc=0)
    story = Trajectory(id="noise", turns=(noise, Turn(command="sleep 1"), moves, moves, moves))
    found = run(host, image, story, plan="2,3,4m", look=False)
    assert all(record.as_recorded for record in found.turns)


def test_every_difference_between_two_states_is_found(host: Host, image: str) -> None:
    """The comparison is what all of the above rests on: it must see each of these by itself, and nothing when it is undone."""
    with host.create("", image) as box:
        shell = box.shell()
        box.run("echo one > /srv/a", check=True)

        def seen() -> Observation:
            return observe(box, shell=shell, commands=["cat /srv/a"], roots=("/srv",))

        def typed(command: str) -> None:
            assert shell.run(command, 20.0).exit_code == 0

        typed("cd /srv")
        base = seen()
        for act, change, undo, wanted in (
            (box.run, "touch /srv/new", "rm /srv/new", "file /srv/new is there"),
            (box.run, "mv /srv/a /srv/b", "mv /srv/b /srv/a", "observed cat /srv/a: line 1 is 'exit 1'"),
            (
                box.run,
                "echo two > /srv/a",
                "echo one > /srv/a",
                "observed cat /srv/a: line 2 is 'two', should be 'one'",
            ),
            (box.run, "ln /srv/a /srv/b", "rm /srv/b", "file /srv/a: links 2, should be 1"),
            (box.run, "chmod 700 /srv", "chmod 755 /srv", "folder /srv: mode '0700', should be '0755'"),
            (box.run, "chown 5:6 /srv", "chown 0:0 /srv", "folder /srv: owner '5:6', should be '0:0'"),
            (typed, "sleep 1000 &", "kill %1; wait", "process sleep 1000 (in /srv, uid 0) runs, but should not"),
            (
                typed,
                "cd /",
                "cd /srv; OLDPWD=/root",
                "process bash --noprofile --norc --noediting (in /srv, uid 0) is missing",
            ),
            (typed, "x=1", "unset x", "shell, variable x is there"),
            (typed, "f() { :; }", "unset -f f", "shell, function f is there"),
            (typed, "alias g=f", "unalias g", "shell, alias g is there"),
            (typed, "umask 077", "umask 022", "shell, umask: is '0077', should be '0022'"),
            (typed, "set -o noclobber", "set +o noclobber", "shell, option noclobber: is 'set -o', should be 'set +o'"),
            (typed, "trap : USR1", "trap - USR1", "shell, trap SIGUSR1 is there"),
            (typed, "exec 7</srv/a", "exec 7<&-", ", descriptor 7 is there, but should not: /srv/a at 0, flags 0"),
        ):
            act(change)
            found = compare(base, seen())
            assert any(wanted in one for one in found), (change, found)
            act(undo)
            assert compare(base, seen()) == [], undo
        server = box.spawn(["python3", "-m", "http.server", "--bind", "127.0.0.1", "7000"])
        typed("until exec 3<>/dev/tcp/127.0.0.1/7000; do sleep 0.1; done 2>/dev/null; exec 3>&-")
        assert "something listens on tcp 127.0.0.1:7000, but should not" in compare(base, seen())
        server.kill()


def test_the_demo_tells_the_same_story_and_leaves_nothing(
    host: Host, image: str, capsys: pytest.CaptureFixture[str], state_dir: Path
) -> None:
    terminal = demo.load(demo.ALL[0], demo.STORIES, state_dir)
    crab, every, chat = demo.tell(
        host, terminal, "5,9m,13", ("adaptive", "always", "none"), image=image, seed=0, progress=Progress(sys.stdout)
    )
    assert crab.good and every.good and crab.differences == ()
    assert sum(one.kind == "none" for one in crab.run.checkpoints) >= 1
    assert not chat.good and chat.differences
    lines = capsys.readouterr().out.splitlines()
    assert sum("killed" in line for line in lines) == 9
    assert isinstance(crab.run.state, Observation)
