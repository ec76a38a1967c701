import pytest

from headrace.router.errors import ReplayStalled
from headrace.router.placement.types import Shed
from headrace.tools.replay_bench.engine import EngineModel
from headrace.tools.replay_bench.policies import Policy
from headrace.tools.replay_bench.replay import ReplayPool, replay_sequential
from headrace.tools.replay_bench.trace import SAMPLE, Trace, TraceRequest, read_trace
from tests.support.router.replay_stand_ins import PlainView, RoundRobin


def trace(*chains):
    """All at once: times do not matter."""
    return Trace("t", tuple(TraceRequest(at_s=0.0, tokens=512 * len(c), output=3, chain=tuple(c)) for c in chains))


def pool(trace, *, workers=2, blocks=100, routers=1, seed=0):
    return ReplayPool(trace=trace, workers=workers, model=EngineModel(blocks=blocks), routers=routers, seed=seed)


def replay(pool, scheduler, view=PlainView, **more):
    policy = Policy(name="round-robin", make_scheduler=scheduler, make_view=view)
    return replay_sequential(pool, policy, limit=pool.ceiling(), **more)


def test_by_hand():
    # worker-1: [1 2] and [1 2 4]; worker-0: [1 2 3] and [5]
    done = replay(pool(trace([1, 2], [1, 2, 3], [1, 2, 4], [5])), RoundRobin)
    assert done.hit_rate == pytest.approx(2 / 9)
    assert done.of_infinite == pytest.approx(2 / 4)
    assert done.balance_requests == 1.0
    assert done.balance_uncached == pytest.approx((4 * 512) / ((3 * 512 + 4 * 512) / 2))


def test_everything_else_is_known_before_the_next_request():
    told = []

    class Listening(RoundRobin):
        def on_event(self, event, now_s):
            told.append((self.name, event.kind, event.id))

        def place(self, request, now_s):
            told.append((self.name, "place", request.id))
            return super().place(request, now_s)

    replay(pool(trace([1], [2]), routers=2, seed=1), Listening)
    by = dict.fromkeys("01")
    for name, kind, one in told:
        if kind == "place":
            by[one] = name
    for one in "01":
        other = {"router-0": "router-1", "router-1": "router-0"}[by[one]]
        start = told.index((by[one], "place", one))
        assert told[start + 1] == (other, "placed", one)
        kinds = [entry[1] for entry in told[start + 2 :] if entry[2] == one]
        assert kinds == [kind for kind in ("started", "prefilled", "settled") for _ in range(2)]
    assert told.index((by["1"], "place", "1")) > max(n for n, entry in enumerate(told) if entry[2] == "0")


def test_one_worker_reaches_the_pooled_cache_exactly():
    sample = read_trace(SAMPLE)
    done = replay(pool(sample, workers=1, blocks=1600), RoundRobin)
    assert done.of_pooled == 1.0


def test_what_is_shed_is_counted_and_nothing_else():
    class Refusing(RoundRobin):
        def offer(self, request, now_s):
            return Shed(request=request, code="class_limit", message="") if request.id == "1" else super().offer(request, now_s)

    done = replay(pool(trace([1], [1], [1])), Refusing)
    assert (done.shed, done.requests) == ({"class_limit": 1}, 3)


def test_a_request_may_be_placed_later_but_not_never():
    class Slow(RoundRobin):
        def decide(self, now_s):
            return super().decide(now_s) if now_s >= self.until_s else []

        def next_wake_s(self, now_s):
            return self.until_s

    Slow.until_s = 5.0
    assert replay(pool(trace([1])), Slow).requests == 1
    Slow.until_s = 500.0
    with pytest.raises(ReplayStalled, match="request 0 of t is not placed"):
        replay(pool(trace([1])), Slow)


@pytest.mark.parametrize("routers", [1, 2, 4])
@pytest.mark.slow
def test_the_real_router_keeps_the_hits_of_the_pooled_cache_and_the_balance(routers):
    """On the whole synthetic trace, of which this is a tenth, it must be 0.995 at 1.1; see docs/performance.md."""
    shared = pool(read_trace(SAMPLE), workers=8, blocks=2000, routers=routers)
    done = replay_sequential(shared, Policy(name="kv"), limit=shared.ceiling())
    assert done.of_pooled > 0.98
    assert done.balance_requests < 1.6
    assert done.shed == {}
    random = replay_sequential(shared, Policy(name="random"), limit=shared.ceiling())
    assert random.of_pooled < 0.5
