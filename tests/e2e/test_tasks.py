"""Tasks of the benchmark as runs of the product: killed under `adaptive`, and as if nothing had happened.

They run in the image of the tests, which holds what these two need, so that theirs (bench/tasks/image.py) is not built here.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from bench.tasks import image as recipe
from bench.tasks.catalogue import tasks
from bench.written import Looker

from crab.replay import kills
from crab.replay.policy import policy
from crab.replay.runner import Run, replay
from crab.replay.sdist import fetch
from crab.replay.state import compare, observe
from crab.replay.trajectory import Trajectory, Turn
from crab.sdk.sync import Host

pytestmark = [pytest.mark.kernel, pytest.mark.criu, pytest.mark.slow]


@pytest.fixture(params=["redis-leaderboard", pytest.param("xmltodict-cdata", marks=pytest.mark.network)])
def task(request: pytest.FixtureRequest, state_dir: Path) -> Trajectory:
    run = next(task.run for task in tasks() if task.id == request.param)
    files = {"/usr/local/bin/edit": str(recipe.EDIT)}
    for sdist in recipe.SDISTS:
        if sdist.filename in run.setup[0]:
            files[f"/opt/{sdist.filename}"] = str(fetch(sdist, state_dir / "cache" / "sdists"))
    return msgspec.structs.replace(
        run,
        files=files,
        setup=(recipe.CONFIGURE, "mkdir /opt/sdists && cp /opt/*.tar.gz /opt/sdists || true", *run.setup),
    )


def test_a_task_that_is_killed_ends_as_if_nothing_had_happened(
    host: Host, image: str, state_dir: Path, task: Trajectory
) -> None:
    look = Looker(state_dir, host.images.show(image))

    def played(name: str, *strikes: kills.Kill, **options) -> Run:
        return replay(host, task, policy(name), strikes, image=image, timeout=60.0, observer=look, **options)

    wanted = played("none")
    assert wanted.check, wanted.check_output
    assert wanted.state is not None
    assert [record.command for record in wanted.turns if not record.as_recorded] == []
    kill = kills.Kill(len(task.turns) * 2 // 3, False)
    found = played("adaptive", kill, around=True, durations=wanted.durations())
    assert found.state is not None
    assert found.crashes[0].differences == ()
    assert compare(wanted.state, found.state) == []
    assert found.check, found.check_output
    found = played("none", kills.Kill(len(task.turns) - 1), around=True)
    assert found.crashes[0].differences, "a fresh sandbox is not what was lost"
    assert found.check is False, "a check that passes although the work is lost"


def test_what_is_above_the_image_is_all_that_differs_between_two_states(
    host: Host, image: str, state_dir: Path
) -> None:
    """The short look finds what the long one finds."""
    look = Looker(state_dir, host.images.show(image))
    paths = ("/etc/services", "/etc/issue", "/usr/games", "/new", "/srv/perl5", "/usr/share/perl5")
    change = "echo x >>/etc/services; rm /etc/issue; chmod 700 /usr/games; mkdir /new; echo y >/new/file; mv /usr/share/perl5 /srv/"
    with host.create(image=image, hostname="same") as one, host.create(image=image, hostname="same") as other:
        assert compare(look(one), look(other)) == []
        one.run("touch /etc/hostname /etc/services", check=True)  # copied up, not changed
        assert compare(look(one), look(other)) == []
        one.run(change, check=True)
        short, long = compare(look(other), look(one)), compare(observe(other, roots=paths), observe(one, roots=paths))
        for path in paths:
            assert any(path in said for said in short), (path, short)
            assert any(path in said for said in long), (path, long)
        other.run(change, check=True)
        assert compare(look(other), look(one)) == []


def test_the_time_of_a_run_is_told_apart_from_the_waits_that_were_left_out(host: Host, image: str) -> None:
    story = Trajectory(id="waits", turns=tuple(Turn(command="sleep 0.2", wait_s=0.3) for _ in range(3)))
    skipped = replay(host, story, policy("adaptive"), image=image, look=False)
    waited = replay(host, story, policy("adaptive"), image=image, look=False, pace=1.0)
    assert 0 < skipped.skipped_ms <= 900
    assert waited.skipped_ms == 0
    assert waited.worked_ms >= 1500
    assert abs(skipped.worked_ms + skipped.skipped_ms - waited.worked_ms) < 400
    assert all(record.saved_ms > 0 for record in skipped.turns)


def test_an_answer_that_is_known_is_not_waited_for_again(host: Host, image: str) -> None:
    story = Trajectory(id="known", turns=(Turn(command="sleep 0.2", wait_s=0.1), Turn(command="sleep 0.2", wait_s=2.0)))
    cut = kills.Kill(2, False)
    found = replay(host, story, policy("adaptive"), [cut], image=image, look=False, pace=0.0, durations={2: 200.0})
    assert found.skipped_ms <= 2100
    again = replay(host, story, policy("restart"), [cut], image=image, look=False, pace=0.0, durations={2: 200.0})
    assert again.skipped_ms > 4000
