import pytest

from headrace.tools.replay_bench.engine import ReplayJob
from headrace.tools.replay_bench.measure import RunFacts, summarise
from headrace.tools.replay_bench.trace import Ceiling, TraceRequest
from headrace.tools.replay_bench.world import ReplayOutcome

LIMIT = Ceiling(infinite=0.5, pooled=0.4, pooled_blocks=10)


def outcome(index, *, at_s, worker=0, waited_s=0.0, ttft_s=1.0, cached=1, uncached=512, shed="", request_class="std"):
    request = TraceRequest(at_s=at_s, tokens=1024, output=3, chain=(1, 2), request_class=request_class)
    job = ReplayJob(index=index, request=request)
    if not shed:
        job.worker, job.cached_blocks, job.uncached = worker, cached, uncached
        job.arrived_s = job.admitted_s = at_s + waited_s
        job.first_s, job.end_s = at_s + ttft_s, at_s + ttft_s + 2.0
    return ReplayOutcome(job=job, placed_s=at_s + waited_s / 2, predicted_ttft_s=ttft_s + 0.25, shed=shed)


def test_figures_by_hand():
    s = summarise(
        [
            outcome(0, at_s=0.0, worker=0, ttft_s=1.0, cached=0, uncached=1024),
            outcome(1, at_s=1.0, worker=0, ttft_s=2.0, waited_s=1.5),
            outcome(2, at_s=2.0, worker=1, ttft_s=4.0, waited_s=3.5),
            outcome(3, at_s=4.0, worker=0, ttft_s=3.0),
        ],
        RunFacts("p", workers=2, rate=2.0),
        ceiling=LIMIT,
    )
    assert (s.hit_rate, s.of_infinite, s.of_pooled) == (3 / 8, 0.75, pytest.approx(0.9375))
    assert s.balance_requests == 3 / 2
    assert s.balance_uncached == (1024 + 512 + 512) / (2560 / 2)
    assert (s.ttft_s.p50, s.ttft_s.p90, s.ttft_s.max, s.ttft_s.mean) == (3.0, 4.0, 4.0, 2.5)
    assert s.e2e_s.max == 6.0
    assert (s.goodput, s.goodput_per_s) == (0.75, 3 / 9.0)
    assert s.requests_per_s == 3 / 4.0
    assert (s.longest_wait.request, s.longest_wait.wait_s) == (2, 3.5)
    assert s.window_wait_s.max == 1.75
    assert s.ttft_error_s.max == 0.25
    assert s.classes == {}


def test_what_was_shed_is_infinitely_late_and_no_load():
    s = summarise(
        [outcome(0, at_s=0.0), outcome(1, at_s=1.0, shed="queue_full"), outcome(2, at_s=2.0, worker=1)],
        RunFacts("p", workers=2),
        ceiling=LIMIT,
    )
    assert s.shed == {"queue_full": 1}
    assert (s.ttft_s.p50, s.ttft_s.p90, s.ttft_s.max, s.ttft_s.mean) == (1.0, None, None, None)
    assert s.goodput == 2 / 3
    assert (s.hit_rate, s.balance_requests) == (0.5, 1.0)


def test_all_shed():
    s = summarise([outcome(0, at_s=0.0, shed="x")], RunFacts("p", workers=2), ceiling=LIMIT)
    assert (s.hit_rate, s.balance_requests, s.goodput, s.longest_wait, s.window_wait_s) == (0.0, 0.0, 0.0, None, None)
