"""Two of three workers die, one after the other, in virtual time: new requests start at once on the one that is left.

Jobs that had run on both are suspects.  Their trial waits for workers that are due back soon, so that no stream pauses for more
than 5 s, and it holds nothing else up.
"""

from __future__ import annotations

import dataclasses
import os

import pytest

from headrace.broker.protocol import runs
from headrace.router.placement import pool
from tests.simulation.protocol.configs import crowd, scenario
from tests.simulation.protocol.requests import Wish
from tests.simulation.protocol.router import real_scheduler
from tests.simulation.protocol.shape import Shape
from tests.simulation.search import Scenario, explain, play
from tests.simulation.virtual.faults import Fault
from tests.simulation.virtual.machine import Machine
from tests.simulation.virtual.network import CALM, SimConfig

SEEDS = max(4, int(os.environ.get("HEADRACE_SEEDS", "5")) // 5)
STREAMS = 48
KILLS = (Fault(3.0, "crash", "W0"), Fault(4.3, "crash", "W1"))  # the jobs of the first have been moved to the others by then
NEW_S = tuple(6.2 + 0.1 * n for n in range(10))  # when both deaths are known and nobody is back
STARTS_WITHIN_S = 1.0
PAUSES_WITHIN_S = 5.0
STARTS_S = (0.0, 4.0, 20.0)  # what the leases say; the workers are back only when all is over
APART_S = (0.4, 0.7, 1.0)


def wishes(machine: Machine) -> list[Wish]:
    streams = crowd(0, STREAMS, 250)(machine)
    return [*streams, *(Wish(at_s=at, lengths=(4,), starts_within_s=STARTS_WITHIN_S) for at in NEW_S)]


SHAPE = Shape(wishes=wishes, workers=3, routers=1, slots=64, scheduler=real_scheduler, innocents_live=True)
CONFIG = SimConfig(noise=0.0, silent=0.0, watch_lags_s=(0.0,), restart_s=(4.8, 5.0))
TWO_OF_THREE = dataclasses.replace(scenario("two of three", SHAPE, faults=0, config=CONFIG), until_s=120.0)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_new_requests_start_within_a_second_on_the_only_worker_that_is_left(seed: int) -> None:
    outcome = play(TWO_OF_THREE, seed, faults=KILLS)
    assert outcome.error is None, explain(outcome)


def test_where_a_trial_holds_ordinary_requests_back_they_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "all_beside", lambda suspects, others: False)
    errors = [str(play(TWO_OF_THREE, seed, faults=KILLS).error) for seed in range(SEEDS)]
    assert any("started late" in error for error in errors), errors


def slowly(start_s: float, apart_s: float) -> Scenario:
    """Two of three workers that take long to start. A stream that both deaths hit at one place pauses from the first one on."""

    def patient(machine: Machine) -> list[Wish]:
        return [dataclasses.replace(wish, pauses_within_s=PAUSES_WITHIN_S + apart_s) for wish in wishes(machine)]

    shape = dataclasses.replace(SHAPE, wishes=patient, start_s=start_s)
    config = dataclasses.replace(CALM, restart_s=(60.0, 61.0))
    return dataclasses.replace(scenario(f"start {start_s:g} s", shape, faults=0, config=config), until_s=120.0)


def two_kills(apart_s: float) -> tuple[Fault, Fault]:
    return Fault(4.3 - apart_s, "crash", "W0"), Fault(4.3, "crash", "W1")


@pytest.mark.parametrize("start_s", STARTS_S)
@pytest.mark.parametrize("apart_s", APART_S)
def test_no_stream_pauses_for_more_than_five_seconds_however_long_a_start_takes(apart_s: float, start_s: float) -> None:
    for seed in range(SEEDS):
        outcome = play(slowly(start_s, apart_s), seed, faults=two_kills(apart_s))
        assert outcome.error is None, explain(outcome)


def test_with_a_longer_wait_for_lost_workers_some_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "WAIT_S", 6.0)
    errors = [str(play(slowly(0.0, apart_s), 0, faults=two_kills(apart_s)).error) for apart_s in APART_S]
    assert any("paused" in error for error in errors), errors
