"""An owner of a state directory that is killed at a certain moment of an operation: it does the killing itself, since nobody
else is on time.

    python3 dying.py STATE MOMENT before|after KIND REQUEST

MOMENT is the full name of a function; KIND the name of a request (`crab.daemon.requests`), REQUEST its fields as JSON.
"""

import os
import pkgutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from crab.daemon import requests as ask
from crab.daemon.service import Service


def dies(state: Path, moment: str, side: str, request: ask.Request) -> None:
    """An owner of the state directory does that, and is killed at a moment of it."""
    words = [moment, side, type(request).__name__, msgspec.json.encode(request).decode()]
    done = subprocess.run([sys.executable, __file__, state, *words], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr


def main(state: str, moment: str, side: str, kind: str, request: str) -> None:
    home, _, name = moment.rpartition(".")
    place = pkgutil.resolve_name(home)
    real = getattr(place, name)

    def dies(*values: Any, **named: Any) -> None:
        if side == "after":
            real(*values, **named)
        os.kill(os.getpid(), signal.SIGKILL)

    with Service.open(Path(state)) as service:
        setattr(place, name, dies)
        service.handle(msgspec.json.decode(request, type=getattr(ask, kind)))


if __name__ == "__main__":
    main(*sys.argv[1:])
