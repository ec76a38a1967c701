"""Whose turn it is: shares by weight, no credit, no flood that holds up others; and what a tenant is charged."""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.router.errors import SettingsInvalid
from headrace.router.placement.fair_queue import FairQueue
from headrace.router.placement.settings import FairClass, FairnessSettings
from headrace.router.placement.types import Waiting
from tests.support.garbage import left_to_the_collector
from tests.support.router.fair_queues import first, queue, waiting

_numbers = itertools.count()

# -- shares ----------------------------------------------------------------------------------------------------------


def serve(fair: FairQueue, *, seed: int, tokens: float, refill, output=lambda tenant: 100, hold: int = 50) -> Counter[str]:
    """Place whatever is offered first, by any choice, until so many tokens were computed; returns what each tenant really had.

    `refill(tenant)` is the next request of a tenant whose queue has just become shorter. Jobs end `hold` placements later.
    """
    rng = random.Random(seed)
    had: Counter[str] = Counter()
    running: deque[tuple[Waiting, int, int]] = deque()

    def end() -> None:
        request, uncached, out = running.popleft()
        fair.settle(request.id, uncached=uncached, output=out)
        had[request.tenant] += uncached + out

    while had.total() < tokens:
        request = rng.choice(fair.groups(64, 0.0)[0].requests)
        uncached = rng.randint(0, request.tokens)
        fair.place(request.id, uncached=rng.randint(0, request.tokens) if rng.random() < 0.2 else uncached)
        running.append((request, uncached, output(request.tenant)))
        fair.add(refill(request.tenant))
        if len(running) > hold:
            end()
    while running:
        end()
    return had


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    weights=st.lists(st.floats(0.5, 4.0), min_size=10, max_size=10),
    backlogs=st.lists(st.integers(1, 60), min_size=10, max_size=10),  # of a single one nothing waits once it is placed
    sizes=st.lists(st.integers(500, 4000), min_size=10, max_size=10),
    outputs=st.lists(st.integers(1, 400), min_size=10, max_size=10),
    seed=st.integers(0, 1000),
)
def test_backlogged_tenants_get_their_weight_whatever_they_offer(weights, backlogs, sizes, outputs, seed) -> None:
    names = [f"t{n}" for n in range(10)]
    share = dict(zip(names, weights, strict=True))
    size = dict(zip(names, sizes, strict=True))
    fair = queue(weights=share, slack_tokens=1000.0)

    def refill(tenant: str) -> Waiting:
        return Waiting(id=f"{tenant}-{next(_numbers)}", tokens=size[tenant], tenant=tenant)

    for name, backlog in zip(names, backlogs, strict=True):
        for _ in range(backlog):
            fair.add(refill(name))
    had = serve(fair, seed=seed, tokens=3e6, refill=refill, output=dict(zip(names, outputs, strict=True)).__getitem__)
    for name in names:
        assert had[name] / had.total() == pytest.approx(share[name] / sum(weights), rel=0.10)


def test_the_shares_of_ten_tenants_in_three_classes_follow_their_weights() -> None:
    names = [f"t{n}" for n in range(10)]
    weight = {name: 1.0 + (n % 3) for n, name in enumerate(names)}
    fair = queue(weights=weight)
    rng = random.Random(7)
    had: Counter[str] = Counter()
    now = 0.0
    hi = iter(range(10**9))
    for name in names:  # skewed: t9 has 100 times the backlog of t0; all of them always have some
        for _ in range(2 + 20 * names.index(name)):
            fair.add(waiting(name, tokens=rng.randint(100, 4000), request_class=rng.choice(["std", "batch"])))
    while had.total() < 3e6:
        if next(hi) % 5 == 0:  # a fifth of the requests, from three tenants, are urgent
            fair.add(waiting(rng.choice(names[:3]), tokens=500, request_class="hi", arrived_s=now))
        request = rng.choice(fair.groups(64, now)[0].requests)
        fair.place(request.id, uncached=request.tokens)
        fair.settle(request.id, output=100)
        had[request.tenant] += request.tokens + 1  # max_tokens is 1
        now += request.tokens / 100_000
        if request.request_class != "hi":
            tokens = rng.randint(100, 4000)
            fair.add(waiting(request.tenant, tokens=tokens, request_class=request.request_class, arrived_s=now))
    for name in names:
        assert had[name] / had.total() == pytest.approx(weight[name] / sum(weight.values()), rel=0.10)


def test_a_flood_delays_another_tenant_by_no_more_than_the_slack() -> None:
    fair = queue(slack_tokens=5000.0)
    for n in range(10_000):
        fair.add(waiting("flood", tokens=1000, name=f"f{n}"))
    for _ in range(500):  # it has had a lot already
        fair.place(fair.heads(64, 0.0)[0].id, uncached=1000)
    fair.add(waiting("other", name="mine", arrived_s=9.0))
    before = 0
    while True:
        group = fair.groups(64, 9.0)[0].requests
        flood = [request for request in group if request.tenant == "flood"]
        if not flood:
            break
        before += fair.place(flood[0].id, uncached=1000).tokens  # the worst a scheduler can choose
    assert [request.id for request in group] == ["mine"]
    assert before <= 5000 + 1001 + 1000


def test_everything_within_the_slack_is_eligible_and_interleaved() -> None:
    fair = queue(slack_tokens=1000.0, weights={"c": 2.0})
    for tenant in "abc":
        for n in range(3):
            fair.add(waiting(tenant, name=f"{tenant}{n}", arrived_s=n))
    fair.charge("a", 900)
    fair.charge("b", 1100)
    fair.charge("c", 1900)
    fair.add(waiting("d", name="d0"))  # lifted to a's 900
    assert [[r.id for r in group.requests] for group in fair.groups(64, 0.0)] == [
        ["a0", "d0", "c0", "b0", "a1", "c1", "b1", "a2", "c2", "b2"],
    ]
    fair.charge("b", 900)
    assert [[r.id for r in group.requests] for group in fair.groups(8, 0.0)] == [
        ["a0", "d0", "c0", "a1", "c1", "a2", "c2"],
        ["b0"],
    ]
    assert first(fair, limit=3) == ["a0", "d0", "c0"]


def test_an_idle_tenant_saves_no_credit() -> None:
    fair = queue(slack_tokens=0.0)
    fair.add(waiting("away"))
    fair.place(fair.heads(1, 0.0)[0].id, uncached=10)
    for _ in range(100):
        fair.add(waiting("busy"))
    for _ in range(50):
        fair.place(fair.heads(1, 0.0)[0].id, uncached=1000)
    for _ in range(100):
        fair.add(waiting("away"))
    turns = Counter(fair.place(fair.heads(1, 0.0)[0].id, uncached=1000).tenant for _ in range(20))
    assert turns == {"busy": 10, "away": 10}


def test_a_tenant_with_one_request_at_a_time_keeps_what_it_is_behind_and_gains_nothing_while_it_has_none_waiting() -> None:
    fair = queue(slack_tokens=0.0, default_output_tokens=0.0)
    fair.add(waiting("busy"))
    fair.add(waiting("one", name="first"))
    fair.charge("busy", 1000)
    fair.place("first", uncached=100)
    fair.add(waiting("one", name="second"))
    assert fair.accounts.counter("one") == 100
    fair.place("second", uncached=100)
    fair.charge("busy", 5000)
    fair.add(waiting("one", name="third"))
    assert fair.accounts.counter("one") == 6000 - 800, "as far behind as when its last request was placed"


def test_a_refund_of_what_ran_before_a_tenant_was_lifted_is_no_credit() -> None:
    fair = queue(slack_tokens=0.0, default_output_tokens=500.0)
    fair.add(Waiting(id="long-ago", tokens=10, tenant="away"))
    fair.place("long-ago", uncached=10)
    fair.add(waiting("busy"))
    fair.charge("busy", 10_000)
    fair.add(waiting("away"))
    lifted = fair.accounts.counter("away")
    assert lifted == fair.accounts.counter("busy")
    fair.settle("long-ago", output=0)
    assert fair.accounts.counter("away") == lifted


def test_more_than_predicted_before_a_lift_counts_beyond_the_lift_only() -> None:
    fair = queue(slack_tokens=0.0, default_output_tokens=0.0)
    fair.add(Waiting(id="long-ago", tokens=10, tenant="away"))
    fair.place("long-ago", uncached=0)
    fair.add(waiting("busy"))
    fair.charge("busy", 1000)
    fair.add(waiting("away"))
    assert fair.correct("long-ago", output=600)
    assert fair.accounts.counter("away") == fair.accounts.floor
    fair.settle("long-ago", output=1700)
    assert fair.accounts.counter("away") == 1700  # as if it had been known before


# -- charges -----------------------------------------------------------------------------------------------------------


def test_a_placed_request_is_charged_and_corrected_when_it_ends() -> None:
    fair = queue(default_output_tokens=300.0, weights={"a": 2.0})
    fair.add(Waiting(id="r", tokens=1000, tenant="a"))
    fair.place("r", uncached=700)
    assert fair.accounts.counter("a") == (700 + 300) / 2
    fair.correct("r", uncached=900)
    assert fair.accounts.counter("a") == (900 + 300) / 2
    assert fair.settle("r", output=40)
    assert fair.accounts.counter("a") == (900 + 40) / 2
    assert not fair.settle("r", output=40)
    assert fair.accounts.open == 0


def test_a_request_cancelled_after_its_placement_costs_what_it_used() -> None:
    fair = queue(default_output_tokens=300.0)
    fair.add(Waiting(id="r", tokens=1000, tenant="a"))
    fair.place("r", uncached=1000)
    fair.settle("r", uncached=0, output=0, complete=False)
    assert fair.accounts.counter("a") == 0
    assert fair.accounts.predicted_output("a", "std", float("inf")) == 300.0  # nothing was learnt from it


def test_a_placement_that_did_not_happen_costs_nothing_and_waits_in_its_old_place() -> None:
    fair = queue()
    for n in range(3):
        fair.add(waiting(name=f"r{n}", arrived_s=n))
    request = fair.place("r0", uncached=1000)
    fair.unplace(request)
    assert first(fair) == ["r0", "r1", "r2"]
    assert fair.accounts.counter("a") == 0


def test_a_moved_request_is_not_charged_twice_for_one_answer() -> None:
    fair = queue(default_output_tokens=300.0)
    fair.add(Waiting(id="r", tokens=1000, tenant="a"))
    fair.place("r", uncached=1000)
    fair.add(Waiting(id="r", tokens=1000, tenant="a", request_class="re", attempt=2))
    fair.place("r", uncached=200)
    fair.settle("r", output=50)
    assert fair.accounts.counter("a") == 1000 + 200 + 50


def test_the_length_of_answers_is_learnt_by_tenant_and_class() -> None:
    fair = queue(default_output_tokens=300.0)
    for n in range(30):
        fair.add(Waiting(id=f"r{n}", tokens=1, tenant="a", request_class="hi"))
        fair.place(f"r{n}", uncached=1)
        fair.settle(f"r{n}", output=40)
    predicted = fair.accounts.predicted_output
    assert predicted("a", "hi", float("inf")) == pytest.approx(40)
    assert predicted("new", "hi", float("inf")) == pytest.approx(40)
    assert predicted("a", "std", float("inf")) == 300
    assert predicted("a", "hi", 8.0) == 8


@pytest.mark.parametrize(("output", "charged"), [(-5, 0), (2**62, 20)])
def test_an_impossible_measurement_is_not_believed(output: int, charged: int) -> None:
    fair = queue()
    fair.add(Waiting(id="r", tokens=10, tenant="a", max_tokens=10, choices=2))
    fair.place("r", uncached=0)
    fair.settle("r", output=output)
    assert fair.accounts.counter("a") == charged


def test_memory_of_idle_tenants_and_open_charges_is_bounded() -> None:
    fair = queue(idle_tenants=10, open_charges=5)
    fair.add(waiting("debtor", name="d"))
    fair.place("d", uncached=10**6)
    for n in range(200):
        fair.add(waiting(f"t{n}", name=f"r{n}"))
        fair.remove(f"r{n}") if n % 2 else fair.place(f"r{n}", uncached=0)
    assert len(fair.accounts) <= 11
    assert fair.accounts.open == 5
    assert fair.accounts.counter("debtor") >= 10**6  # those who gain less by it were forgotten instead


# -- settings ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"aged_share": 0.0}, "aged_share must be between 0 and 1, got 0.0"),
        ({"default_weight": -1.0}, "default_weight must be above 0, got -1.0"),
        ({"weights": {"a": float("nan")}}, "weights['a'] must be above 0, got nan"),
        ({"slack_tokens": float("inf")}, "slack_tokens must be 0 or more, got inf"),
        ({"tight_s": -1.0}, "tight_s"),
        ({"output_smoothing": 2.0}, "output_smoothing"),
        ({"idle_tenants": 0}, "idle_tenants"),
        ({"classes": ()}, "classes"),
        ({"classes": (FairClass(name="a", rank=0), FairClass(name="a", rank=1))}, "classes"),
        ({"classes": (FairClass(name="a", rank=0, ageing_s=0.0),)}, r"classes['a'].ageing_s must be above 0, got 0.0"),
        ({"classes": (FairClass(name="a", rank=0), FairClass(name="b", rank=1, always_first=True))}, "always_first"),
    ],
)
def test_settings_that_cannot_be_are_named(options, named: str) -> None:
    with pytest.raises(SettingsInvalid) as caught:
        FairnessSettings(**options)
    assert named in str(caught.value)


def test_a_request_that_was_placed_is_freed_without_the_garbage_collector() -> None:
    fair = queue()

    def place() -> None:
        for number in range(50):
            fair.add(waiting(name=f"r{number}"))
            fair.groups(64, 0.0)
            fair.place(f"r{number}", uncached=1)
            fair.settle(f"r{number}", uncached=1, output=1)

    assert left_to_the_collector(place) == 0
