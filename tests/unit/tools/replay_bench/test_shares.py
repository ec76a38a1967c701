import pytest

from headrace.tools.replay_bench.engine import ReplayJob
from headrace.tools.replay_bench.shares import max_min, tenant_shares
from headrace.tools.replay_bench.trace import TraceRequest


def job(tenant, *, at_s=0.0, admitted_s, first_s, end_s, uncached=0, output=1):
    request = TraceRequest(at_s=at_s, tokens=max(uncached, 1), output=output, chain=(1,), tenant=tenant)
    return ReplayJob(index=0, request=request, worker=0, admitted_s=admitted_s, first_s=first_s, end_s=end_s, uncached=uncached)


def queue(tenant, *, rate, seconds=180.0):
    """It always has something waiting, and every second `rate` tokens of it are computed."""
    return [
        job(tenant, admitted_s=float(n), first_s=n + 1.0, end_s=n + 1.0, uncached=rate - 1, output=1)
        for n in range(int(seconds))
    ]


def test_max_min_gives_nobody_more_than_it_asks_for():
    assert max_min(90, {"a": 10, "b": 100, "c": 100}, {}) == {"a": 10, "b": 40, "c": 40}
    assert max_min(90, {"a": 100, "b": 100}, {"b": 2}) == {"a": 30, "b": 60}
    assert max_min(90, {"a": 100, "b": 20, "c": 100}, {"b": 2}) == {"b": 20, "a": 35, "c": 35}
    assert max_min(90, {"a": 10, "b": 20}, {}) == {"a": 10, "b": 20}
    assert max_min(90, {}, {}) == {}


def test_equal_service_is_fair():
    one, other = tenant_shares([*queue("a", rate=100), *queue("b", rate=100)])
    assert (one.tenant, other.tenant) == ("a", "b")
    assert one.share == pytest.approx(0.5, abs=0.01)
    assert one.fair == pytest.approx(0.5, abs=0.01)
    assert abs(one.worst) < 0.02
    assert one.short == one.windows > 5


def test_weights_say_what_is_fair():
    jobs = [*queue("a", rate=100), *queue("b", rate=300)]
    assert all(abs(share.worst) < 0.02 for share in tenant_shares(jobs, weights={"b": 3.0}))
    one, other = tenant_shares(jobs)
    assert one.worst == pytest.approx(-0.5, abs=0.01)
    assert other.worst == pytest.approx(0.5, abs=0.01)


def test_who_gets_less_than_it_asks_for_is_short_of_it():
    late = [job("b", at_s=n / 2, admitted_s=n, first_s=n + 1.0, end_s=n + 1.0, uncached=9) for n in range(180)]
    _, other = tenant_shares([*queue("a", rate=100), *late])
    assert other.short == 0  # half of what it asked for, and that is less than its part
    assert other.share < 0.6 * other.fair
