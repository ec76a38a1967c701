"""Two routers and workers that answer faster than the routers hear of each other, in virtual time: nobody waits for a slot."""

from __future__ import annotations

import dataclasses
import os

import pytest

from headrace.broker.settings import Timing
from headrace.router.placement.pool import Pool
from tests.simulation.protocol import deployment, engine
from tests.simulation.protocol.configs import scenario
from tests.simulation.protocol.requests import Wish
from tests.simulation.protocol.router import real_scheduler
from tests.simulation.protocol.shape import Shape
from tests.simulation.search import explain, play
from tests.simulation.virtual.machine import Machine
from tests.simulation.virtual.network import CALM, SimConfig

SEEDS = int(os.environ.get("HEADRACE_SEEDS", "5"))
STARTS_WITHIN_S = 1.5
GUARD_SEEDS = (3, 5, 6, 8)
DELAYS_S = (0.001, 0.001, 0.002, 0.05)  # of messages: an answer of one token takes less than the longest
STEPS_S = (0.002, 0.005)


def quick(machine: Machine) -> list[Wish]:
    """A request of one token each 38 ms: half of what four slots can do."""
    return [Wish(at_s=2.0 + 0.038 * n, lengths=(1,), starts_within_s=STARTS_WITHIN_S) for n in range(400)]


SHAPE = Shape(wishes=quick, workers=2, slots=2, routers=2, scheduler=real_scheduler)
CONFIG: SimConfig = dataclasses.replace(CALM, delays_s=DELAYS_S)
QUICK = scenario("two routers, quick workers", SHAPE, faults=0, config=CONFIG)


@pytest.fixture(autouse=True)
def quick_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "STEPS_S", STEPS_S)
    monkeypatch.setattr(deployment, "TIMING", dataclasses.replace(deployment.TIMING, load_gap_s=Timing().load_gap_s))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_what_has_ended_before_the_other_router_hears_of_it_takes_no_slot(seed: int) -> None:
    outcome = play(QUICK, seed, faults=())
    assert outcome.error is None, explain(outcome)


def test_where_routers_forget_what_workers_have_told_too_early_requests_wait_for_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Pool, "_note_early", lambda self, event: None)
    errors = [str(play(QUICK, seed, faults=()).error) for seed in GUARD_SEEDS]
    assert any("started late" in error for error in errors), errors
