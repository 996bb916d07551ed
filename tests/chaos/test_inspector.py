"""The owner of the inspector is killed at any instant of a turn: the next one forgets no change.

`$CRAB_TEST_KILLS` is the number of kills (8).
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from crab.daemon import requests as ask
from crab.daemon.service import Service

pytestmark = [pytest.mark.kernel, pytest.mark.criu]
KILLS = int(os.environ.get("CRAB_TEST_KILLS", "8"))

TURNS = """
import sys
from crab.daemon import requests as ask
from crab.daemon.service import Service
from crab.model import ExecSpec
service = Service.open(sys.argv[1])
print("ready", flush=True)
n = 0
while True:
    n += 1
    for script in (f"echo {sys.argv[2]}.{n} > /root/n", "true"):
        service.handle(ask.Run(sandbox="turns", spec=ExecSpec(argv=("sh", "-c", script))))
        service.handle(ask.TakeCheckpoint(sandbox="turns", durable=False))
"""


def test_hazard_i05_whenever_the_owner_is_killed_the_next_one_forgets_no_change(second_state: Path, figures) -> None:
    service = Service.open(second_state)
    if not service._core.inspector.tier:
        pytest.skip(service._core.inspector.why_not)
    service.handle(ask.Create(image="small", name="turns"))
    service.handle(ask.TakeCheckpoint(sandbox="turns"))
    found: dict[str, int] = {}
    for number in range(KILLS):
        service.close()
        with subprocess.Popen(
            [sys.executable, "-c", TURNS, second_state, str(number)], stdout=subprocess.PIPE
        ) as owner:
            assert owner.stdout and owner.stdout.readline() == b"ready\n"
            time.sleep(random.uniform(0.0, 0.4))
            owner.send_signal(signal.SIGKILL)
        service = Service.open(second_state)
        changed = [c for c in service.handle(ask.Diff(sandbox="turns", ref="head")).files if c.what != ("times",)]
        decision = service.handle(ask.Explain(sandbox="turns"))
        found[decision.kind] = found.get(decision.kind, 0) + 1
        assert not changed or decision.kind in ("files", "full"), f"kill {number}: {changed}, decided {decision}"
        made = service.handle(ask.TakeCheckpoint(sandbox="turns"))
        assert made.kind == decision.kind
        assert not service.handle(ask.Diff(sandbox="turns", ref=made.id)).files
    service.close()
    figures(f"the inspector's owner killed {KILLS} times, decided then {found}")
