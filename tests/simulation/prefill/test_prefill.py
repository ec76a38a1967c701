"""Prompts computed by other workers, under faults in virtual time, with the real runtime and sessions.

HEADRACE_SEEDS: how many runs per deployment. HEADRACE_EVERY: every how many steps a single fault is tried (1: at each).
"""

import os

import pytest

from headrace.workers.engine import DisaggStyle
from tests.simulation.prefill.deployment import Deployment, Shape
from tests.simulation.search import Scenario, assert_holds, assert_survives_every_step, explain, play
from tests.simulation.virtual.network import SimConfig

SEEDS = int(os.environ.get("HEADRACE_SEEDS", "5"))
EVERY = int(os.environ.get("HEADRACE_EVERY", "29"))
KINDS = ("crash", "freeze", "cut", "gap", "outage", "drain", "role", "cancel", "break", "stall")
INJECTED = (*KINDS, "crash+", "powercut")


def never_full(subject: str) -> bool:
    return ".prefill." not in subject


def scenario(
    name: str,
    shape: Shape,
    *,
    config: SimConfig | None = None,
    victims: tuple[str, ...] = ("P0", "P1", "W0", "W1", "J0"),
    **options: object,
) -> Scenario:
    return Scenario(
        name=name,
        build=lambda world: Deployment(world, shape).build(),
        config=config or SimConfig(),
        victims=victims,
        horizon_s=6.0,
        until_s=90.0,
        **options,  # type: ignore[arg-type]
    )


SCENARIOS = {
    "params": scenario("params", Shape(), kinds=(*KINDS, "crash", "crash")),
    "rendezvous": scenario("rendezvous", Shape(style=DisaggStyle.RENDEZVOUS), kinds=(*KINDS, "crash", "crash")),
    "one each": scenario("one each", Shape(prefill=1, decode=1, requests=8), kinds=KINDS),
    "long prompts": scenario("long prompts", Shape(lengths=(600, 900, 1200), requests=8, budget=600), kinds=KINDS),
    "queue full": scenario("queue full", Shape(), kinds=KINDS, config=SimConfig(full=0.5, never_full=never_full)),
    "no dedupe": scenario("no dedupe", Shape(), kinds=KINDS, config=SimConfig(dedupe=False, noise=0.1)),
    "nobody takes it": scenario("nobody takes it", Shape(prefill=1, deaf=True), kinds=KINDS),
    "kept for ever": scenario("kept for ever", Shape(lease_s=10_000.0), kinds=(*KINDS, "crash", "cancel")),
    "slow transfers": scenario("slow transfers", Shape(lengths=(200,), transfer_s=1.5), kinds=("cut",), victims=("W0", "W1")),
    "roles": scenario("roles", Shape(requests=8), kinds=("role", "role", "drain", "crash"), faults=6),
}
LEAVES_WHAT_IT_PROMISED = (("roles", 103), ("roles", 205), ("long prompts", 3356))
WORKER_LEAVES_BEFORE_THE_ACK = (("no dedupe", 1539), ("params", 1146), ("roles", 1146), ("one each", 1037))
SMALL = scenario("small", Shape(prefill=1, decode=1, requests=2, lengths=(200,), first_s=1.0))
SMALL_ROOM = scenario(
    "small room", Shape(prefill=1, decode=1, requests=2, lengths=(200,), first_s=1.0, style=DisaggStyle.RENDEZVOUS)
)


@pytest.mark.parametrize("small", [SMALL, SMALL_ROOM], ids=lambda one: one.name)
def test_without_faults_long_prompts_are_computed_elsewhere(small: Scenario) -> None:
    deployments = []

    def build(world):
        deployments.append(small.build(world))
        return deployments[0]

    outcome = play(scenario("plain", Shape()), 1, faults=())
    assert outcome.error is None, explain(outcome)
    plain = Scenario(name="plain", build=build, config=SimConfig(noise=0.0), until_s=60.0)
    outcome = play(plain, 0, faults=())
    assert outcome.error is None, explain(outcome)
    cluster = deployments[0].cluster
    assert cluster.fetched == 2


@pytest.mark.parametrize(("name", "seed"), LEAVES_WHAT_IT_PROMISED)
def test_a_prefill_worker_that_leaves_keeps_the_blocks_that_it_has_just_promised(name: str, seed: int) -> None:
    assert assert_holds(SCENARIOS[name], [seed]) > 0


@pytest.mark.parametrize(("name", "seed"), WORKER_LEAVES_BEFORE_THE_ACK)
def test_a_request_whose_last_worker_leaves_while_it_is_stored_is_answered_by_the_next(name: str, seed: int) -> None:
    assert assert_holds(SCENARIOS[name], [seed]) > 0


@pytest.mark.deep
@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.timeout(36000 if SEEDS > 100 else 120)
def test_every_request_is_answered_right_and_no_block_is_kept(name: str) -> None:
    assert assert_holds(SCENARIOS[name], range(SEEDS)) > 0


@pytest.mark.deep
@pytest.mark.parametrize("kind", INJECTED)
@pytest.mark.parametrize("small", [SMALL, SMALL_ROOM], ids=lambda one: one.name)
@pytest.mark.timeout(36000 if EVERY == 1 else 120)
def test_a_fault_at_any_step_of_a_hand_over_is_survived(kind: str, small: Scenario) -> None:
    assert assert_survives_every_step(small, kinds=[kind], every=EVERY, offset=INJECTED.index(kind) % EVERY) > 0
