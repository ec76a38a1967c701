"""A stream of a quarter of an hour, while every worker that has it is drained, one after the other."""

from __future__ import annotations

import dataclasses

import pytest

from tests.simulation.protocol import engine as protocol_engine
from tests.simulation.protocol.configs import scenario
from tests.simulation.protocol.deployment import Deployment
from tests.simulation.protocol.requests import Wish
from tests.simulation.protocol.shape import Shape
from tests.simulation.search import explain, play
from tests.simulation.virtual.faults import Fault
from tests.simulation.virtual.network import CALM

pytestmark = pytest.mark.deep

TOKENS = 1350  # one or two a second
QUARTER_S = 880.0
EVERY_S = 90.0


def test_a_stream_of_a_quarter_of_an_hour_outlives_every_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: a drained worker finishes within its grace period or hands over; no token is missing or comes twice."""
    monkeypatch.setattr(protocol_engine, "STEPS_S", (1.0,))
    built: list[Deployment] = []
    shape = Shape(wishes=lambda machine: [Wish(at_s=1.0, lengths=(TOKENS,), deadline_s=1800.0)], workers=2)
    plain = scenario("quarter", shape, faults=0, config=CALM)

    def build(world):  # type: ignore[no-untyped-def]
        built.append(plain.build(world))  # type: ignore[arg-type]
        return built[-1]

    drains = [Fault(40.0 + EVERY_S * n, "drain", f"W{n % 2}") for n in range(9)]
    outcome = play(dataclasses.replace(plain, build=build, until_s=1500.0), 3, faults=drains)
    assert outcome.error is None, explain(outcome)
    (request,) = built[-1].requests.values()
    assert request.outcome == "answered"
    assert built[-1].world.now > QUARTER_S
    assert len([note for note in built[-1].runs.values() if note.request_id == request.id]) >= 4, "it was hardly ever moved"
