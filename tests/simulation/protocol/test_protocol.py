"""The job protocol under random faults, in virtual time, with the real sessions of `broker/`.

HEADRACE_SEEDS: how many runs per deployment. HEADRACE_EVERY: every how many steps a single fault is tried (1: at each).
"""

import os
import random

import pytest

from headrace.broker import metrics
from tests.simulation.protocol.configs import CONFIGS, PREEMPTED, PREEMPTED_BY_ROUTER, SMALL
from tests.simulation.search import assert_holds, assert_survives_every_step, explain, play

SEEDS = int(os.environ.get("HEADRACE_SEEDS", "5"))
EVERY = int(os.environ.get("HEADRACE_EVERY", "29"))
KINDS = ("crash", "crash+", "powercut", "freeze", "cut", "gap", "outage", "drain", "engine", "flaky", "cancel", "redeliver")
FAR_SEEDS = (28, 32, 34, 46, 48, 49)  # never settled while calls had a fixed limit, shorter than such an answer takes


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.timeout(36000 if SEEDS > 100 else 120)
def test_every_request_ends_exactly_once_with_exactly_its_tokens(name: str) -> None:
    assert assert_holds(CONFIGS[name], range(SEEDS)) > 0


@pytest.mark.parametrize("seed", FAR_SEEDS)
def test_a_server_that_takes_almost_a_second_to_answer_delays_requests_and_loses_none(seed: int) -> None:
    assert assert_holds(CONFIGS["far"], [seed]) > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.timeout(36000 if EVERY == 1 else 120)
def test_a_fault_at_any_step_is_survived(kind: str) -> None:
    assert assert_survives_every_step(SMALL, kinds=[kind], every=EVERY, offset=KINDS.index(kind) % EVERY) > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.timeout(36000 if EVERY == 1 else 120)
def test_a_fault_at_any_step_of_a_preemption_is_survived(kind: str) -> None:
    before = metrics.PREEMPTED._value.get()
    for scenario, every in ((PREEMPTED, EVERY), (PREEMPTED_BY_ROUTER, EVERY if EVERY == 1 else 4 * EVERY)):
        assert assert_survives_every_step(scenario, kinds=[kind], every=every, offset=KINDS.index(kind) % every) > 0
    assert metrics.PREEMPTED._value.get() > before


@pytest.mark.timeout(36000 if SEEDS > 100 else 120)
def test_any_two_faults_are_survived() -> None:
    rng = random.Random("pairs")
    steps = play(SMALL, 0, faults=()).steps
    for _ in range(5 * SEEDS):
        inject = {rng.randrange(1, steps): rng.choice(KINDS), rng.randrange(1, 2 * steps): rng.choice(KINDS)}
        outcome = play(SMALL, 0, faults=(), inject=inject)
        assert outcome.error is None, explain(outcome)
