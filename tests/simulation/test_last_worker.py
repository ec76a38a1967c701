"""Two of three workers die, one after the other, in virtual time: new requests start at once on the one that is left.

Jobs that had run on both are suspects.  Their trial waits for the workers that are due back.
"""

from __future__ import annotations

import dataclasses
import os

import pytest

from headrace.router.placement.suspects.lost_workers import LostWorkers
from tests.simulation.protocol.configs import crowd, scenario
from tests.simulation.protocol.requests import Wish
from tests.simulation.protocol.router import real_scheduler
from tests.simulation.protocol.shape import Shape
from tests.simulation.search import explain, play
from tests.simulation.virtual.faults import Fault
from tests.simulation.virtual.machine import Machine
from tests.simulation.virtual.network import SimConfig

SEEDS = max(4, int(os.environ.get("HEADRACE_SEEDS", "5")) // 5)
STREAMS = 48
KILLS = (Fault(3.0, "crash", "W0"), Fault(4.3, "crash", "W1"))  # the jobs of the first have been moved to the others by then
NEW_S = tuple(6.2 + 0.1 * n for n in range(10))  # when both deaths are known and nobody is back
STARTS_WITHIN_S = 1.0


def wishes(machine: Machine) -> list[Wish]:
    streams = crowd(0, STREAMS, 250)(machine)
    return [*streams, *(Wish(at_s=at, lengths=(4,), starts_within_s=STARTS_WITHIN_S) for at in NEW_S)]


TWO_OF_THREE = dataclasses.replace(
    scenario(
        "two of three",
        Shape(wishes=wishes, workers=3, routers=1, slots=64, scheduler=real_scheduler, innocents_live=True),
        faults=0,
        config=SimConfig(noise=0.0, silent=0.0, watch_lags_s=(0.0,), restart_s=(4.8, 5.0)),
    ),
    until_s=120.0,
)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_new_requests_start_within_a_second_on_the_only_worker_that_is_left(seed: int) -> None:
    outcome = play(TWO_OF_THREE, seed, faults=KILLS)
    assert outcome.error is None, explain(outcome)


def test_without_waiting_for_lost_workers_they_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LostWorkers, "due", lambda self, now_s: 0)
    errors = [str(play(TWO_OF_THREE, seed, faults=KILLS).error) for seed in range(SEEDS)]
    assert any("started late" in error for error in errors), errors
