"""The search for the sustainable load, and the comparison."""

from dataclasses import replace

import msgspec
import pytest

import headrace.tools.replay_bench.replay as replays
from headrace.tools.replay_bench.classic import ClassicWeights
from headrace.tools.replay_bench.engine import EngineModel
from headrace.tools.replay_bench.policies import Policy
from headrace.tools.replay_bench.replay import ReplayPool, find_classic_knee, find_knee, replay
from headrace.tools.replay_bench.report import AROUND_KNEE, Comparison, ReplayReport, facts, render
from headrace.tools.replay_bench.trace import SAMPLE, assign, read_trace
from tests.support.router.replay_stand_ins import Late, PlainView, RoundRobin

SWEEP = (ClassicWeights(scale=1.0), ClassicWeights(scale=4.0))
PLAIN = Policy(name="round-robin", make_scheduler=RoundRobin, make_view=PlainView)
LATE = Policy(name="kv", make_scheduler=Late, make_view=PlainView)
CLASSIC = Policy(name="classic", make_view=PlainView)


@pytest.fixture(scope="module")
def pool():
    return ReplayPool(trace=read_trace(SAMPLE, limit=120), workers=4, model=EngineModel(blocks=500))


@pytest.fixture
def bent(monkeypatch):
    """Replays that are good up to the rate given for the policy's scale; returns the rates that were tried."""
    tried = []

    def make(knees):
        def fake(pool, policy, *, rate, limit):
            tried.append((policy.weights.scale, rate))
            done = real(pool, policy, rate=1.0, limit=limit)
            p90 = 2.9 if rate <= knees[policy.weights.scale] else 3.1
            ttft = msgspec.structs.replace(done.summary.ttft_s, p90=p90)
            return replace(done, summary=msgspec.structs.replace(done.summary, rate=rate, ttft_s=ttft))

        monkeypatch.setattr(replays, "replay", fake)
        return tried

    real = replays.replay
    return make


@pytest.mark.parametrize("knee", [0.02, 0.7, 4.0, 5.3, 63.0])
def test_the_knee_is_found_within_a_percent(pool, bent, knee):
    small = replace(pool, trace=read_trace(SAMPLE, limit=3))
    tried = bent({1.0: knee})
    found = find_knee(small, PLAIN, limit=small.ceiling())
    assert knee / 1.0101 < found.rate <= knee
    assert found.summary.rate == found.rate
    assert found.replays == len(tried) < 25


def test_no_knee_where_nothing_is_borne(pool, bent):
    bent({1.0: 0.0})
    small = replace(pool, trace=read_trace(SAMPLE, limit=3))
    assert find_knee(small, PLAIN, limit=small.ceiling()) is None


def test_classic_is_reported_with_its_best_weights(pool, bent):
    small = replace(pool, trace=read_trace(SAMPLE, limit=3))
    sweep = [ClassicWeights(scale=s) for s in (1.0, 2.0, 4.0, 8.0)]
    tried = bent({1.0: 3.0, 2.0: 5.0, 4.0: 4.0, 8.0: 5.01})
    found = find_classic_knee(small, CLASSIC, limit=small.ceiling(), sweep=sweep)
    assert (found.policy.weights.scale, found.rate) == (2.0, pytest.approx(5.0, rel=0.0102))
    assert [scale for scale, _ in tried].count(4.0) == 1  # one look was enough


@pytest.mark.slow
def test_a_real_knee(pool):
    limit = pool.ceiling()
    found = find_knee(pool, LATE, limit=limit)
    assert found.summary.ttft_s.p90 <= 3.0
    assert found.summary == msgspec.structs.replace(
        replay(pool, LATE, rate=found.rate, limit=limit).summary, cpu_s=found.summary.cpu_s
    )
    assert find_knee(pool, PLAIN, limit=limit).rate < found.rate


@pytest.mark.slow
def test_the_report_of_a_search(pool):
    told = []
    comparison = Comparison(pool=pool, policies=[LATE, CLASSIC, PLAIN], sweep=SWEEP, progress=told.append)
    scenario = comparison.knees()
    ours, classic, plain = scenario.knees
    assert classic.to_classic == plain.to_round_robin == 1.0
    assert ours.to_classic == pytest.approx(ours.rate / classic.rate)
    assert ours.to_round_robin > 1.0 > plain.to_classic
    assert ours.requests_per_s == pytest.approx(ours.rate * pool.trace.rate)
    rates = [run.summary.rate / classic.rate for run in scenario.around_knee]
    assert rates == pytest.approx([part for part in AROUND_KNEE for _ in range(3)])
    assert {run.summary.policy for run in scenario.around_knee} == {ours.policy, classic.policy, plain.policy}
    assert len(told) == 3 + 9
    text = render(ReplayReport(trace=facts(pool.trace), seed=0, scenarios=[scenario]))
    assert "sustainable load" in text
    assert "at 0.5, 0.8, 1.1 × the sustainable load of classic" in text


def test_a_search_without_classic_compares_nothing_around_its_knee(pool):
    scenario = Comparison(pool=pool, policies=[PLAIN]).knees()
    assert (scenario.around_knee, scenario.knees[0].to_classic) == ([], None)
    assert "round-robin" in render(ReplayReport(trace=facts(pool.trace), seed=0, scenarios=[scenario]))


def test_tenants_and_classes_are_reported(pool):
    several = replace(pool, trace=assign(pool.trace, classes={"hi": 1, "std": 2}, tenants=3))
    scenario = Comparison(pool=several, policies=[LATE], tenant_weights={"t1": 2.0}).in_time([30.0])
    (run,) = scenario.runs
    assert [(t.tenant, t.weight) for t in run.tenants] == [("t0", 1.0), ("t1", 2.0), ("t2", 1.0)]
    assert set(run.summary.classes) == {"hi", "std"}
    text = render(ReplayReport(trace=facts(several.trace), seed=0, scenarios=[scenario]))
    assert "tenants under kv" in text
    assert "by class: hi" in text


def test_one_after_the_other(pool):
    scenario = Comparison(pool=pool, policies=[PLAIN, CLASSIC]).sequential()
    assert [s.policy for s in scenario.sequential] == ["round-robin", "classic (scale 1, credit 1)"]
    assert "one after the other" in render(ReplayReport(trace=facts(pool.trace), seed=0, scenarios=[scenario]))
