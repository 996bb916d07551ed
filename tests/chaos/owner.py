"""The victim of test_owner.py: owns a state directory and does one kind of operation again and again until it is killed.

Each line of its output is something that was reported to a user: it must be true whatever happens afterwards.
"""

import sys
from pathlib import Path

from crab.daemon.requests import Fork, Remove, Rewind, TakeCheckpoint, Turns
from crab.daemon.service import Service


def main(state: str, name: str, what: str) -> None:
    with Service.open(Path(state)) as service:
        print("ready", flush=True)
        while True:
            if what in ("checkpoint", "mixed"):
                print("checkpoint", service.handle(TakeCheckpoint(sandbox=name)).id, flush=True)
            if what in ("rewind", "mixed"):
                service.handle(Rewind(sandbox=name, ref="head"))
                print("rewind", flush=True)
            if what in ("fork", "mixed"):
                head = service.handle(Turns(sandbox=name))[-1]
                made = service.handle(Fork(sandbox=name, ref=head.id, count=3))
                print("fork", *(clone.name for clone in made), flush=True)
                for clone in made:
                    print("removing", clone.name, flush=True)
                    service.handle(Remove(sandbox=clone.name, force=True))
                    print("removed", clone.name, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
