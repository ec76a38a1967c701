"""Hundreds of workers that are drained while they serve, one after the other and several at once, with the real sessions.

HEADRACE_SEEDS: how many runs, of 60 drains each; with 23 it is a thousand.
"""

from __future__ import annotations

import dataclasses
import os
import random

import pytest

from headrace.broker.worker.service import Service
from tests.simulation.protocol.configs import plain, scenario
from tests.simulation.protocol.deployment import Deployment
from tests.simulation.protocol.router import real_scheduler
from tests.simulation.protocol.shape import Shape
from tests.simulation.search import explain, play
from tests.simulation.virtual.faults import Fault
from tests.simulation.virtual.network import CALM
from tests.simulation.virtual.world import World

pytestmark = [pytest.mark.deep, pytest.mark.timeout(900)]

SEEDS = int(os.environ.get("HEADRACE_SEEDS", "5"))
WORKERS = 6
REQUESTS = 40
DRAINS = 60  # in each play
LASTS_S = 45.0


def test_no_request_fails_over_hundreds_of_scale_downs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: whoever is drained finishes within its grace period or hands over, and every request is answered in full.

    None is refused either: while all workers leave at once, requests wait for the next one.
    """
    begun: list[float | None] = []
    drain = Service.begin_drain

    def counted(self: Service, grace_s: float | None) -> None:
        begun.append(grace_s)
        drain(self, grace_s)

    monkeypatch.setattr(Service, "begin_drain", counted)
    shape = Shape(
        wishes=plain(REQUESTS, spread_s=LASTS_S),
        workers=WORKERS,
        routers=2,
        scheduler=real_scheduler,
        innocents_live=True,
        no_worker_wait_s=30.0,
    )
    made = scenario("scale-downs", shape, faults=0, config=CALM)
    answered = moved = 0
    for seed in range(SEEDS):
        built: list[Deployment] = []

        def build(world: World, into: list[Deployment] = built) -> Deployment:
            deployment = made.build(world)
            assert isinstance(deployment, Deployment)
            into.append(deployment)
            return deployment

        rng = random.Random(f"scale-downs {seed}")
        drains = [Fault(rng.uniform(3.0, LASTS_S), "drain", f"W{rng.randrange(WORKERS)}") for _ in range(DRAINS)]
        outcome = play(dataclasses.replace(made, build=build, until_s=150.0), seed, faults=drains)
        assert outcome.error is None, explain(outcome)
        requests = list(built[0].requests.values())
        assert [request.outcome for request in requests] == ["answered"] * REQUESTS
        answered += len(requests)
        moved += len(built[0].runs) - len(requests)
    print(f"{len(begun)} scale-downs, {answered} requests answered, {moved} moves to another worker")
    assert len(begun) >= SEEDS * DRAINS // 2, "most who should have left had left already"
    assert moved >= len(begun) // 10, "most who left had nothing to hand over"
