"""The world moves as it says, the same way every time."""

import dataclasses
from itertools import pairwise

import pytest

from headrace.router.errors import ReplayStalled
from headrace.router.placement.types import Shed
from headrace.tools.replay_bench.engine import EngineModel, ReplayFleet
from headrace.tools.replay_bench.policies import ALL, Policy
from headrace.tools.replay_bench.trace import SAMPLE, Trace, TraceRequest, accelerate, read_trace
from headrace.tools.replay_bench.world import Delays, World
from tests.support.router.replay_stand_ins import Late, PlainView, RoundRobin

MODEL = EngineModel(blocks=8, slots=2, step_tokens=1024, prefill_rate=1024.0, base_s=0.5, decode_s=0.25)
DELAYS = Delays(place_s=0.125, event_s=0.0625, kv_s=0.03125, report_s=0.5, heartbeat_s=4.0)


def fleet(workers, model):
    return (ReplayFleet(workers=workers, model=model),)


class Listening(RoundRobin):
    """Writes down what it is told and when."""

    def __init__(self, view, name, seed):
        super().__init__(view, name, seed)
        self.told = []
        made.append(self)

    def offer(self, request, now_s):
        self.told.append((now_s, "offer", request.id))
        return super().offer(request, now_s)

    def on_event(self, event, now_s):
        self.told.append((now_s, event.kind, event.id, event.worker, event.tokens, event.uncached, event.blocks, event.by))

    def on_report(self, report, now_s):
        self.told.append((now_s, "report", report.worker, report.running, report.waiting, report.queued_prefill_tokens))


class ListeningView(PlainView):
    """Writes down the changes of the caches."""

    def apply(self, worker, *, cleared=False, removed, stored, now_s):
        super().apply(worker, cleared=cleared, removed=removed, stored=stored, now_s=now_s)
        changes.append((now_s, worker, removed, stored))


made, changes = [], []


@pytest.fixture(autouse=True)
def _forget():
    made.clear()
    changes.clear()


def trace(*requests):
    return Trace(
        "t", tuple(TraceRequest(at_s=at, tokens=tokens, output=out, chain=chain) for at, tokens, out, chain in requests)
    )


def world(trace, *, scheduler=Listening, view=ListeningView, workers=1, routers=1, **more):
    policy = Policy(name="round-robin", make_scheduler=scheduler, make_view=view)
    return World(trace=trace, fleets=fleet(workers, MODEL), make_router=policy.router, routers=routers, delays=DELAYS, **more)


def test_everything_arrives_after_its_delay():
    (outcome,) = world(trace((1.0, 700, 2, (5, 6)))).run()
    job, first_s = outcome.job, 1.125 + 0.5 + 700 / 1024 + 0.25
    end_s = first_s + 0.75
    assert (outcome.placed_s, job.arrived_s, job.first_s, job.end_s) == (1.0, 1.125, first_s, end_s)
    told = [entry for entry in made[0].told if entry[1] != "report"]
    assert told == [
        (1.0, "offer", "0"),
        (1.125 + 0.0625, "started", "0", "worker-0", 700, 700, 2, ""),
        (first_s + 0.0625, "prefilled", "0", "worker-0", 700, 700, 2, ""),
    ]
    ((at_s, worker, removed, stored),) = changes
    assert (at_s, worker, removed, sorted(stored["device"])) == (first_s + 0.03125, "worker-0", {}, [5, 6])


def test_reports_follow_changes_with_a_pause_and_the_heartbeat_else():
    world(trace((0.0, 1024, 1, (5, 6)), (0.0, 1024, 40, (7, 8)), (50.0, 512, 1, (9,)))).run()
    times = [entry[0] - 0.0625 for entry in made[0].told if entry[1] == "report"]
    gaps = [b - a for a, b in pairwise(times)]
    assert all(0.5 <= gap <= 4.0 for gap in gaps)
    assert times[:2] == [0.0, 0.5]  # the first heartbeat, and the arrivals at 0.125 not sooner than half a second later
    assert made[0].told[2][1:] == ("report", "worker-0", 0, 0, 0)
    # At 0.5 the step of the first prompt has run for 0.375 of its 1.75 s: what is left of it counts, and all of the second one.
    left = round(1024 * (1.0 - 0.375 / 1.75)) + 1024
    assert next(entry for entry in made[0].told if entry[0] == 0.5625)[1:] == ("report", "worker-0", 2, 1, left)


def test_routers_hear_of_each_others_placements_and_not_of_their_own():
    requests = [(float(n * 20), 1024, 1, (2 * n, 2 * n + 1)) for n in range(12)]
    outcomes = world(trace(*requests), workers=3, routers=2).run()
    by_router = [[str(o.job.index) for o in outcomes if o.router == n] for n in range(2)]
    assert all(by_router)
    for n, scheduler in enumerate(made):
        assert scheduler.routers == ["router-0", "router-1"]
        assert [entry[2] for entry in scheduler.told if entry[1] == "offer"] == by_router[n]
        placed = [entry for entry in scheduler.told if entry[1] == "placed"]
        assert [entry[2] for entry in placed] == by_router[1 - n]
        assert {entry[-1] for entry in placed} == {f"router-{1 - n}"}


def test_what_is_shed_is_over():
    class Refusing(RoundRobin):
        def offer(self, request, now_s):
            if int(request.id) % 2:
                return Shed(request=request, code="queue_full", message="")
            return super().offer(request, now_s)

        def decide(self, now_s):
            placed = super().decide(now_s)
            return [Shed(request=p.request, code="deadline", message="") if p.request.id == "2" else p for p in placed]

    outcomes = world(trace(*((float(n), 512, 1, (n,)) for n in range(4))), scheduler=Refusing).run()
    assert [o.shed for o in outcomes] == ["", "queue_full", "deadline", "queue_full"]
    assert outcomes[0].job.end_s > 0 > outcomes[2].job.end_s


def test_a_scheduler_is_woken_when_it_asks():
    class Sleepy(RoundRobin):
        def decide(self, now_s):
            return super().decide(now_s) if now_s >= 7.0 else []

        def next_wake_s(self, now_s):
            return 7.0

    (outcome,) = world(trace((1.0, 512, 1, (1,))), scheduler=Sleepy).run()
    assert outcome.placed_s == 7.0


def test_a_scheduler_that_never_places_is_found_out():
    class Lazy(RoundRobin):
        def decide(self, now_s):
            return []

    with pytest.raises(ReplayStalled, match="1 requests are open"):
        world(trace((1.0, 512, 1, (1,))), scheduler=Lazy).run()


def test_the_same_seed_gives_the_same_history_and_another_one_does_not():
    sample = accelerate(read_trace(SAMPLE, limit=150), 3.0)

    def history(seed):
        policy = Policy(name="kv", make_scheduler=Late, make_view=PlainView)
        outcomes = World(
            trace=sample, fleets=fleet(4, EngineModel(blocks=200)), make_router=policy.router, routers=2, seed=seed
        ).run()
        return [dataclasses.astuple(outcome) for outcome in outcomes]

    assert history(1) == history(1)
    assert history(1) != history(2)


@pytest.mark.parametrize("name", [name for name in ALL if name != "round-robin"])
def test_the_real_policies_serve_everything(name):
    sample = accelerate(read_trace(SAMPLE, limit=60), 3.0)
    outcomes = World(
        trace=sample, fleets=fleet(4, EngineModel(blocks=200)), make_router=Policy(name=name).router, routers=2, seed=1
    ).run()
    assert all(o.job.end_s > o.job.first_s - 1e-9 > o.job.arrived_s > o.placed_s >= o.job.request.at_s for o in outcomes)
    assert len({o.job.worker for o in outcomes}) == 4


@pytest.mark.slow
def test_two_fleets_of_one_model_share_a_queue_and_each_request_has_its_fleet():
    sample = accelerate(read_trace(SAMPLE, limit=200), 8.0)
    targets = dataclasses.replace
    sample = Trace(
        sample.name, tuple(targets(one, ttft_target_s=30.0 if n % 2 else 0.3) for n, one in enumerate(sample.requests))
    )
    fleets = (
        ReplayFleet(name="slow", price=1.0, workers=2, model=EngineModel(blocks=400, prefill_rate=8000.0)),
        ReplayFleet(name="quick", price=4.0, workers=2, model=EngineModel(blocks=400)),
    )
    outcomes = World(trace=sample, fleets=fleets, make_router=Policy(name="kv").router, seed=1).run()
    assert all(o.job.end_s > 0 for o in outcomes)
    assert all((o.fleet == "slow") == (o.job.worker < 2) for o in outcomes)
    strict, loose = (sum(o.fleet == "quick" for o in outcomes[n::2]) for n in (0, 1))
    assert strict > loose
