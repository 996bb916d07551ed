"""How far ahead of the host's the clocks of a restored sandbox must be (hazard R10)."""

from __future__ import annotations

import os

from hypothesis import given
from hypothesis import strategies as st

from crab.host.clocks import Clocks, host_clocks, shift_for, shift_of

times = st.integers(min_value=0, max_value=2**55)
clocks = st.builds(Clocks, monotonic=times, boottime=times)


@given(clocks, clocks, clocks)
def test_after_a_reboot_the_clocks_go_on_where_they_stopped(seen: Clocks, shift: Clocks, now: Clocks) -> None:
    assert now.plus(shift_for(seen, shift, same_boot=False, now=now)) == seen


@given(clocks, clocks, times)
def test_in_the_same_boot_they_never_go_back(then: Clocks, shift: Clocks, passed: int) -> None:
    now = then.plus(Clocks(monotonic=passed, boottime=passed))
    seen = then.plus(shift)
    later = now.plus(shift_for(seen, shift, same_boot=True, now=now))
    assert later.monotonic >= seen.monotonic and later.boottime >= seen.boottime


def test_this_process_sees_the_clocks_of_the_host() -> None:
    assert shift_of(os.getpid()) == Clocks()
    assert 0 < host_clocks().monotonic <= host_clocks().boottime
