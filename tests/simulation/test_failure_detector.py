"""A worker whose process is gone is noticed at once; a broker that is gone for a while is nobody's death."""

from __future__ import annotations

import asyncio
import dataclasses
from itertools import pairwise

import pytest

from headrace.broker import metrics
from headrace.broker.membership import failure_detector
from tests.simulation.prefill import deployment as simulated
from tests.simulation.prefill.deployment import Deployment, Shape
from tests.simulation.prefill.test_prefill import scenario
from tests.simulation.search import explain, play
from tests.simulation.virtual.faults import Fault
from tests.simulation.virtual.network import CALM, SimConfig
from tests.simulation.virtual.server import SimServer

SHAPE = Shape(prefill=0, decode=3, requests=4, lengths=(20,), max_tokens=(120,), first_s=4.0)

LATE = dataclasses.replace(CALM, silent=0.5, notice_s=2.0)  # some notice later than others that the server is back


def run(*faults: Fault, config: SimConfig = CALM) -> tuple[Deployment, float]:
    """The deployment afterwards, and how many leases were taken away."""
    deployments = []
    plain = scenario("probing", SHAPE, config=config)

    def build(world):
        deployments.append(plain.build(world))
        return deployments[-1]

    before = metrics.LEASES_REVOKED._value.get()
    outcome = play(dataclasses.replace(plain, build=build), 3, faults=faults)
    assert outcome.error is None, explain(outcome)
    return deployments[-1], metrics.LEASES_REVOKED._value.get() - before


def longest_pause_s(deployment: Deployment) -> float:
    return max(later - earlier for ask in deployment.asks for earlier, later in pairwise(ask.at_s))


@pytest.mark.parametrize("worker", ["W0", "W1", "W2"])
def test_a_stream_pauses_for_less_than_a_second_when_its_worker_is_killed(worker: str) -> None:
    deployment, revoked = run(Fault(7.2, "crash", worker))
    assert revoked == 1
    assert 0.05 < longest_pause_s(deployment) < 1.0


def test_a_worker_that_is_killed_right_after_a_reconnect_is_missed_as_soon() -> None:
    """Its lease was taken away: that is a verdict in the hold-down too, which is for leases that have run out."""
    deployment, revoked = run(Fault(6.5, "outage", "", 0.2), Fault(7.6, "crash", "W0"))
    assert revoked == 1
    assert 0.05 < longest_pause_s(deployment) < 1.0


def test_without_probes_it_takes_until_the_lease_has_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_detector, "WATCHED", 0)
    deployment, revoked = run(Fault(7.2, "crash", "W0"), Fault(7.2, "crash", "W1"))
    assert revoked == 0
    assert longest_pause_s(deployment) > 1.5


@pytest.mark.parametrize("length_s", [0.3, 1.0, 8.0])
def test_a_broker_that_is_gone_for_a_while_is_nobodys_death(length_s: float) -> None:
    _, revoked = run(Fault(7.2, "outage", "", length_s), config=LATE)
    assert revoked == 0


@pytest.mark.slow
def test_right_after_a_reconnect_nobody_is_suspected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where leases outlive a server, as in a cluster, whoever has not reconnected yet has one that could be taken away."""
    add = SimServer.add_bucket
    monkeypatch.setattr(SimServer, "add_bucket", lambda server, name, **_: add(server, name, in_memory=False))
    monkeypatch.setattr(failure_detector.FailureDetector, "_may_suspect", lambda _self, _worker: True)
    revoked = sum(run(Fault(7.0 + n / 5, "outage", "", 1.0), config=LATE)[1] for n in range(5))
    assert revoked > 0


def test_whoever_watches_suspects_those_that_have_answered_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that were killed right before, and so are new, see the third one die."""
    at_s: list[float] = []
    revoke = failure_detector.FailureDetector._revoke

    async def noted(self: failure_detector.FailureDetector, worker: str) -> None:
        at_s.append(asyncio.get_running_loop().time())
        await revoke(self, worker)

    monkeypatch.setattr(failure_detector.FailureDetector, "_revoke", noted)
    run(Fault(6.0, "crash", "W1"), Fault(6.1, "crash", "W2"), Fault(9.0, "crash", "W0"))
    assert min(at for at in at_s if at > 9.0) < 10.0


def test_a_frozen_worker_is_left_to_its_lease() -> None:
    _, revoked = run(Fault(7.2, "freeze", "W0", 2.0))
    assert revoked == 0


@pytest.fixture
def at_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases last as long as in a cluster of NATS servers."""
    monkeypatch.setattr(simulated, "TIMING", simulated.TIMING.at_copies(3))


@pytest.mark.usefixtures("at_cluster")
def test_a_frozen_worker_whose_lease_outlasts_elections_is_missed_by_its_renewals() -> None:
    deployment, revoked = run(Fault(7.2, "freeze", "W0", 9.0))
    assert revoked == 1
    assert 1.5 < longest_pause_s(deployment) < 6.0


@pytest.mark.usefixtures("at_cluster")
def test_without_looking_at_renewals_it_would_be_missed_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "TIMING", dataclasses.replace(simulated.TIMING, overdue_s=0.0))
    deployment, revoked = run(Fault(7.2, "freeze", "W0", 9.0))
    assert revoked == 0
    assert longest_pause_s(deployment) > 8.0


@pytest.mark.usefixtures("at_cluster")
@pytest.mark.parametrize("length_s", [0.3, 3.0, 9.0])
def test_a_broker_that_is_gone_for_a_while_makes_nobody_overdue(length_s: float) -> None:
    _, revoked = run(Fault(7.2, "outage", "", length_s), config=LATE)
    assert revoked == 0
