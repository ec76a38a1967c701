"""Faults are drawn from a seed, every kind early, and only where they make sense; orphans are told from consumers at work."""

from __future__ import annotations

from itertools import islice

import pytest

from headrace.base.errors import CommandError
from headrace.tools.chaos.deployment import orphans
from headrace.tools.chaos.faults import PlannedFault, draw_faults, kinds_of
from headrace.tools.chaos.run import ChaosOptions, run_chaos

LASTS_S = {
    "freeze": (0.5, 8.0),
    "restart": (1.0, 10.0),
    "cut": (0.5, 12.0),
    "slow": (3.0, 8.0),
    "stutter": (2.0, 6.0),
    "repeat": (1.0, 3.0),
}


def draw(seed: int, n: int = 300, mode: str = "disagg") -> list[PlannedFault]:
    return list(islice(draw_faults(seed, kinds_of(mode)), n))


def test_the_same_seed_makes_the_same_faults() -> None:
    assert draw(7) == draw(7)
    assert draw(7) != draw(8)


def test_outages_and_freezes_last_for_a_bounded_time_and_kills_for_none() -> None:
    for fault in draw(7):
        least, most = LASTS_S.get(fault.act, (0.0, 0.0))
        assert least <= fault.duration_s <= most
        assert fault.gap_s > 0
    assert {fault.settled for fault in draw(7)} == {True, False}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (ChaosOptions(kinds=("worker sneeze",)), "'worker sneeze' is no fault in the mode aggregated"),
        (ChaosOptions(kinds=("prefill kill",)), "'prefill kill' is no fault in the mode aggregated"),
        (ChaosOptions(minutes=0), "--minutes must be above 0, got 0"),
        (ChaosOptions(clients=0), "--clients must be 1 or more, got 0"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_starts(options: ChaosOptions, words: str) -> None:
    with pytest.raises(CommandError, match=words):
        run_chaos(options, as_json=False)


def test_a_consumer_of_a_worker_that_is_gone_is_an_orphan() -> None:
    names = ["W_a-1", "W_b-1", "P_a-1_own", "P_c-1_own", "P_pool", "REQ_pool_re", "W_a-12"]
    assert orphans(names, ["a-1"]) == ["W_b-1", "P_c-1_own", "W_a-12"]
