"""The simulator of large hosts: what it must say of loads whose answer is plain."""

from __future__ import annotations

from bench.simulation import ADAPTIVE, TOOLS, Kind, Simulation
from bench.waiting import drawn


def test_a_host_with_room_keeps_nobody_waiting() -> None:
    found = Simulation(20, 16, ADAPTIVE).run(60)
    assert found["exposed_wait_ms_p99"] < 50 and found["turns_per_s"] > 0.5
    assert 0 < found["interpreter"] < 0.1 and found["slots_busy"] < 0.1


def test_what_is_done_one_after_the_other_is_the_limit() -> None:
    found = Simulation(400, 64, {"slow": Kind(share=1, interpreter=0.1, rest=0.0)}).run(60)
    assert found["interpreter"] > 0.99 and found["turns_per_s"] <= 10.5
    assert found["exposed_wait_ms_p50"] > 1000


def test_slots_are_the_limit_of_long_work() -> None:
    found = Simulation(100, 2, {"long": Kind(share=1, interpreter=0.0, rest=1.0, spread=0.0)}).run(60)
    assert found["slots_busy"] > 0.99 and 1.8 <= found["turns_per_s"] <= 2.2


def test_the_same_seed_gives_the_same_figures() -> None:
    assert Simulation(10, 2, ADAPTIVE, seed=5).run(30) == Simulation(10, 2, ADAPTIVE, seed=5).run(30)


def test_draws_follow_the_quantiles() -> None:
    assert drawn(TOOLS, 0.5) == 0.03 and drawn(TOOLS, 0.9) == 20.0 and drawn(TOOLS, 1.0) == 30.0
    assert 0.03 < drawn(TOOLS, 0.6) < 0.65
