"""Stored jobs under random faults, in virtual time, with the real carriers, ingresses and workers of `broker/`.

HEADRACE_SEEDS: how many runs per deployment. HEADRACE_EVERY: every how many steps a single fault is tried (1: at each).
"""

import os
import random

import pytest

from tests.simulation.durable.configs import CONFIGS, LONG_WAIT, ROUTED, SMALL
from tests.simulation.search import Scenario, assert_holds, assert_survives_every_step, explain, play

SEEDS = int(os.environ.get("HEADRACE_SEEDS", "5"))
EVERY = int(os.environ.get("HEADRACE_EVERY", "29"))
KINDS = ("crash", "crash+", "powercut", "freeze", "cut", "gap", "outage", "drain")


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.timeout(36000 if SEEDS > 100 else 120)
def test_every_job_has_one_result_and_every_stream_its_tokens_once(name: str) -> None:
    assert assert_holds(CONFIGS[name], range(SEEDS)) > 0


def test_a_job_that_waits_for_capacity_for_longer_than_an_hour_is_run() -> None:
    outcome = play(LONG_WAIT, 0, faults=())
    assert outcome.error is None, explain(outcome)


@pytest.mark.parametrize("scenario", [SMALL, ROUTED], ids=lambda scenario: scenario.name)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.timeout(36000 if EVERY == 1 else 120)
def test_a_fault_at_any_step_is_survived(kind: str, scenario: Scenario) -> None:
    assert assert_survives_every_step(scenario, kinds=[kind], every=EVERY, offset=KINDS.index(kind) % EVERY) > 0


@pytest.mark.parametrize("scenario", [SMALL, ROUTED], ids=lambda scenario: scenario.name)
@pytest.mark.timeout(36000 if SEEDS > 100 else 120)
def test_any_two_faults_are_survived(scenario: Scenario) -> None:
    rng = random.Random("pairs")
    steps = play(scenario, 0, faults=()).steps
    for _ in range(5 * SEEDS):
        inject = {rng.randrange(1, steps): rng.choice(KINDS), rng.randrange(1, 2 * steps): rng.choice(KINDS)}
        outcome = play(scenario, 0, faults=(), inject=inject)
        assert outcome.error is None, explain(outcome)
