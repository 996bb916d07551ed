"""`python -m crab.replay.demo`: two stories of an agent at work, and an agent itself, killed on the way and brought back.

Each story is run undisturbed, then killed and recovered by Crab, then killed and continued from the conversation alone. The
end states are compared with the undisturbed one. Ends with 0 only if what Crab brought back is equal each time and the work
was done. Uses the state directory `$CRAB_STATE` (or /var/lib/crab), in this process or through the daemon that owns it;
nothing but the image and the fetched sources stays in it.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from pathlib import Path

import click
import msgspec

from crab.errors import Busy, CrabError, DaemonUnavailable, NotFound
from crab.model import Struct
from crab.replay import agent, kills, trajectory
from crab.replay.policy import POLICIES, policy
from crab.replay.runner import replay
from crab.replay.sdist import Sdist, fetch
from crab.replay.show import NAMES, Outcome, Progress, table
from crab.replay.state import Observation, compare
from crab.replay.trajectory import Trajectory
from crab.sdk.steps import told
from crab.sdk.sync import Host, connect
from crab.sdk.transport import default_state_dir

STORIES = Path(__file__).parents[3] / "examples" / "stories"
"""In a checkout; an installed package has none."""

AGENT, AGENT_KILLS = STORIES.parent / "agents" / "loop.py", (2, 5)
"""The program, and after how many answers its sandbox is killed."""

IMAGE, SOURCE = "debian", "debian:bookworm"
PATIENCE = 60.0
"""Seconds for a turn: the longest takes half of one."""


class Story(Struct, kw_only=True):
    """A trajectory of `examples/stories`, and where it is killed."""

    name: str
    kills: str
    sdist: Sdist | None = None
    """Put into /root of the sandbox."""


ALL = (
    Story(name="terminal", kills="5,9m,13"),
    Story(
        name="repair",
        kills="6,10m,13",
        sdist=Sdist(
            name="cachetools",
            version="5.3.3",
            sha256="ba29e2dfa0b8b556606f097407ed1aa62080ee108ab0dc5ec9d6a723a007d105",
        ),
    ),
)


def owner_or_daemon() -> Host:
    """This process as the owner of the state directory, or the daemon that owns it. Raises `Busy` if another process does."""
    host = Host()
    try:
        host.open()
    except Busy as busy:
        with contextlib.suppress(DaemonUnavailable):
            daemon = connect()
            if Path(daemon.about().state_dir) == default_state_dir().resolve():
                return daemon
        raise Busy(
            busy.message,
            remedy="wait for that process, or give the demo a state directory of its own: "
            "`make demo CRAB_STATE=/var/lib/crab-demo`",
        ) from busy
    return host


def load(story: Story, folder: Path, cache: Path) -> Trajectory:
    """The trajectory of a story, with what it needs from the package index."""
    path = folder / f"{story.name}.json"
    if not path.exists():
        raise NotFound(f"there is no story {path}", remedy="run the demo in a checkout of Crab, or name its --stories")
    run = trajectory.select(trajectory.read(path), story.name)
    if story.sdist is None:
        return run
    fetched = fetch(story.sdist, cache)
    return msgspec.structs.replace(run, files=run.files | {f"/root/{story.sdist.filename}": str(fetched)})


def tell(
    host: Host, story: Trajectory, plan: str, policies: tuple[str, ...], *, image: str, seed: int, progress: Progress
) -> list[Outcome]:
    """Run a story undisturbed, then under each policy with the same kills."""
    turns = len(story.turns)
    strikes = kills.parse(plan, turns, seed)
    progress.begin(f"{story.id}, undisturbed", turns)
    wanted = replay(host, story, policy("none"), image=image, timeout=PATIENCE, watch=progress.watch)
    found: list[Outcome] = []
    for name in policies:
        progress.begin(f"{story.id}, {NAMES[name]}", turns)
        run = replay(
            host,
            story,
            policy(name),
            strikes,
            image=image,
            durations=wanted.durations(),
            timeout=PATIENCE,
            watch=progress.watch,
        )
        differences = compare(wanted.state or Observation(), run.state or Observation())
        found.append(Outcome(run=run, differences=tuple(differences)))
    progress.clear()
    return found


@click.command(help=(__doc__ or "").partition("\n\n")[2])
@click.option(
    "--story",
    "names",
    multiple=True,
    type=click.Choice([*(story.name for story in ALL), "agent"]),
    help="Only this one.",
)
@click.option("--kill", "plan", default="", help=f"Where to kill: {kills.FORMS}. Default: where each story hurts.")
@click.option("--seed", default=0, show_default=True, help="Of random kills.")
@click.option(
    "--policies", default="adaptive,always,none", show_default=True, help=f"What to compare: {', '.join(POLICIES)}."
)
@click.option("--image", default=IMAGE, show_default=True, help="Image with bash, git and a whole python3.")
@click.option("--stories", default=STORIES, type=click.Path(path_type=Path), help="Folder of the stories.")
def main(names: tuple[str, ...], plan: str, seed: int, policies: str, image: str, stories: Path) -> None:
    chosen = tuple(policies.split(","))
    for name in chosen:
        policy(name)
    progress = Progress(sys.stdout)
    equal = True
    with owner_or_daemon() as host:
        if image == IMAGE:
            progress.note(f"the image {IMAGE} (half a minute, if it has to be made)")
            told(
                lambda: host.images.add(IMAGE, SOURCE, if_missing=True),
                lambda: host.images.step(IMAGE),
                lambda step: progress.note(f"the image {IMAGE}: {step}"),
            )
        cache = Path(host.about().state_dir) / "cache" / "stories"
        for story in ALL:
            if names and story.name not in names:
                continue
            run = load(story, stories, cache)
            where = plan or story.kills
            outcomes = tell(host, run, where, chosen, image=image, seed=seed, progress=progress)
            click.echo(f"\n{run.id}: {len(run.turns)} turns, killed at {where}\n{table(outcomes)}")
            for outcome in outcomes:
                if outcome.run.policy in ("adaptive", "always") and not outcome.good:
                    equal = False
                    click.echo("\n".join(["what Crab brought back is not equal:", *(outcome.differences or ())]))
                    click.echo(outcome.run.check_output)
        if not names or "agent" in names:
            equal &= _agent(host, image, stories.parent / "agents" / AGENT.name, progress)
    if not equal:
        sys.exit(1)


def _agent(host: Host, image: str, program: Path, progress: Progress) -> bool:
    """An agent that is killed and comes back; whether what it did is what it should have done."""
    progress.begin("agent", len(agent.STEPS))
    found = [
        agent.work(host, image, program, kills, crab, lambda what: progress.note(f"agent, {what}"))
        for kills, crab in (((), True), (AGENT_KILLS, True), (AGENT_KILLS, False))
    ]
    progress.clear()
    where = ", ".join(map(str, AGENT_KILLS))
    click.echo(f"\nagent: {len(agent.STEPS)} commands, killed after answers {where}\n{agent.table(found[1:])}")
    return all(one.done for one in found[:2])


def _terminate(*_: object) -> None:
    """As Ctrl-C: sandboxes are removed on the way out."""
    sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminate)
    try:
        main(prog_name="python -m crab.replay.demo", standalone_mode=True)
    except CrabError as error:
        click.echo(f"\ncrab: {error}", err=True)
        sys.exit(error.exit_status)
