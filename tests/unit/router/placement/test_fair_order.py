"""In which order what waits is offered: classes, ageing, priorities and deadlines; and what is counted meanwhile."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.router.placement.fair_queue import ExpiryHeap
from headrace.router.placement.settings import FairClass
from headrace.router.placement.types import Waiting
from tests.support.router.fair_queues import CLASSES, first, queue, waiting

# -- classes -------------------------------------------------------------------------------------------------------------


def test_classes_come_in_order_and_moved_work_always_first() -> None:
    fair = queue()
    fair.charge("a", 10**6)  # a class goes before any counter
    for request_class in ("batch", "std", "hi", "re"):
        fair.add(waiting("a", request_class=request_class, name=request_class))
        fair.add(waiting("b", request_class=request_class, name=f"b-{request_class}"))
    groups = [[r.id for r in group.requests] for group in fair.groups(64, 0.0)]
    assert [group[0].removeprefix("b-") for group in groups] == ["re", "hi", "std", "batch"]
    assert fair.heads(64, 1e6)[0].request_class == "re"


@pytest.mark.parametrize(("request_class", "ageing_s"), [("std", 30.0), ("batch", 300.0)])
def test_a_lower_class_is_served_once_it_has_aged(request_class: str, ageing_s: float) -> None:
    fair = queue(slack_tokens=32_768.0)
    fair.add(waiting("b", name="patient", request_class=request_class, arrived_s=0.0))
    now = 0.0
    while "patient" in fair:
        while len(fair) < 200:  # at 10,000 tokens/s there is always something better
            fair.add(waiting("b", request_class="hi", arrived_s=now))
        group = fair.groups(64, now)[0].requests
        request = next((one for one in group if one.id != "patient"), group[0])
        fair.place(request.id, uncached=1000)
        now += 0.1
        assert now < 2 * ageing_s
    assert ageing_s <= now


def test_a_low_priority_of_the_same_tenant_ages_too() -> None:
    fair = queue()
    fair.add(waiting("a", name="patient", priority=9, arrived_s=0.0))
    now = 0.0
    while "patient" in fair:
        while len(fair) < 100:
            fair.add(waiting("a", priority=0, arrived_s=now))
        fair.place(fair.heads(64, now)[0].id, uncached=1000)
        now += 0.1
        assert now < 32


def test_aged_work_never_takes_more_than_its_share_from_a_better_class() -> None:
    fair = queue(slack_tokens=32_768.0, aged_share=0.25)
    for _ in range(3000):
        fair.add(waiting("b", request_class="batch", arrived_s=-1000.0))
    had: Counter[str] = Counter()
    for _ in range(2000):
        if fair.counts().get(("hi", "b"), 0) < 20:
            fair.add(waiting("b", request_class="hi"))
        request = fair.place(fair.heads(64, 0.0)[0].id, uncached=1000)
        had[request.request_class] += 1
    assert had["batch"] / 2000 == pytest.approx(0.25, rel=0.02)


def test_a_flood_in_a_better_class_takes_nothing_from_another_tenants_share() -> None:
    fair = queue(slack_tokens=5_000.0)
    had: Counter[str] = Counter()
    for n in range(4000):
        while fair.counts().get(("hi", "flood"), 0) < 20:
            fair.add(waiting("flood", request_class="hi"))
        while fair.counts().get(("batch", "quiet"), 0) < 20:
            fair.add(waiting("quiet", request_class="batch"))
        had[fair.place(fair.heads(64, n / 10)[0].id, uncached=1000).tenant] += 1
    assert had["quiet"] / 4000 == pytest.approx(0.5, rel=0.05)


def test_without_a_better_class_aged_requests_just_come_in_order() -> None:
    fair = queue()
    for n in range(200):
        fair.add(waiting("a", name=f"r{n}", arrived_s=n / 10))
    served = [fair.place(fair.heads(64, 500.0)[0].id, uncached=1000).id for _ in range(200)]
    assert served == [f"r{n}" for n in range(200)]
    # … and leave no debt behind that would keep the aged from their share later.
    fair.add(waiting("a", request_class="hi", arrived_s=500.0))
    fair.add(waiting("b", name="old", arrived_s=0.0))
    fair.place(fair.heads(64, 500.0)[0].id, uncached=1000)
    assert "old" not in fair or first(fair, 500.0)[0] == "old"


def test_an_unknown_class_is_served_as_the_last_and_counted() -> None:
    fair = queue()
    fair.add(waiting(request_class="odd", name="odd"))
    fair.add(waiting(request_class="batch", name="batch", arrived_s=1.0))
    assert first(fair) == ["odd", "batch"]
    assert fair.unknown_classes == {"odd": 1}
    assert fair.counts() == {("batch", "a"): 2}


# -- inside a tenant -----------------------------------------------------------------------------------------------------


def test_inside_a_tenant_priority_then_a_tight_deadline_then_arrival() -> None:
    fair = queue(tight_s=30.0)
    fair.add(waiting(name="late", arrived_s=40.0, deadline_s=640.0))
    fair.add(waiting(name="tight", arrived_s=41.0, deadline_s=46.0))  # as though it had come at 16
    fair.add(waiting(name="early", arrived_s=15.0, deadline_s=615.0))
    fair.add(waiting(name="middle", arrived_s=20.0, deadline_s=620.0))
    fair.add(waiting(name="prior", priority=-1, arrived_s=50.0))
    assert first(fair) == ["prior", "early", "tight", "middle", "late"]


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
def test_times_that_are_no_times_do_not_spoil_the_order(odd: float) -> None:
    fair = queue()
    fair.add(waiting(name="odd", arrived_s=odd, deadline_s=odd))
    for n in range(50):
        fair.add(waiting(name=f"r{n}", arrived_s=10.0 + n))
    assert [name for name in first(fair, 1.0) if name != "odd"] == [f"r{n}" for n in range(50)]
    assert fair.remove("odd") is not None
    assert len(fair) == len(first(fair, 1.0)) == 50


def test_held_requests_are_counted_but_not_offered() -> None:
    fair = queue()
    fair.add(waiting("a", name="x", arrived_s=0.0, deadline_s=50.0))
    fair.add(waiting("a", name="y", arrived_s=1.0))
    fair.hold("x")
    fair.hold("x")
    assert first(fair) == ["y"]
    assert fair.counts() == {("std", "a"): 2}
    fair.release("x")
    fair.release("x")
    assert first(fair) == ["x", "y"]
    fair.hold("x")
    assert first(fair, 31.5) == ["y"]  # it ages meanwhile
    fair.release("x")
    assert first(fair, 31.5) == ["x", "y"]
    fair.hold("x")
    assert [request.id for request in fair.expired(50.0)] == ["x"]
    assert fair.place("y", uncached=1).id == "y"
    assert not fair


def test_expired_requests_are_taken_out_once() -> None:
    fair = queue()
    for n in (3, 1, 2):
        fair.add(waiting(name=f"r{n}", deadline_s=float(n)))
    assert fair.next_deadline_s() == 1.0
    assert [request.id for request in fair.expired(2.0)] == ["r1", "r2"]
    assert fair.expired(2.0) == []
    assert fair.next_deadline_s() == 3.0
    assert fair.accounts.counter("a") == 0
    assert first(fair) == ["r3"]


def test_a_request_offered_again_replaces_itself() -> None:
    fair = queue()
    fair.add(waiting(name="r", tokens=10))
    fair.add(waiting(name="r", tokens=20, request_class="re"))
    assert len(fair) == 1
    assert fair.backlog.total == (1, 20)
    assert [r.request_class for r in fair.heads(9, 0.0)] == ["re"]


# -- what waits ------------------------------------------------------------------------------------------------------------


def test_ahead_is_what_will_be_placed_before() -> None:
    fair = queue(slack_tokens=0.0, weights={"c": 3.0})
    for _ in range(100):
        fair.add(waiting("flood"))
    for _ in range(4):
        fair.add(waiting("b"))
    fair.add(waiting("b", request_class="hi", tokens=500))
    fair.add(waiting("b", request_class="batch", tokens=7))
    newcomer = waiting("n")
    assert fair.ahead(newcomer) == 500
    assert fair.ahead_at_most("std") == 104_500
    assert fair.ahead(waiting("b")) == 500 + 4000 + 4000  # its own four, and as much of the flood
    assert fair.ahead(waiting("flood")) == 104_500
    for _ in range(6):
        fair.add(waiting("c"))
    assert fair.ahead(waiting("c")) == pytest.approx(500 + 6000 + 2 * 2000)  # three times the weight
    assert fair.ahead(waiting("n", request_class="hi")) == 0
    fair.heads(1, 30.0)  # std has aged: a third of as much goes beside the better class
    assert fair.ahead_at_most("hi") == pytest.approx(500 * 4 / 3)


def test_ahead_never_exceeds_its_bound() -> None:
    rng = random.Random(1)
    fair = queue()
    for _ in range(300):
        tenant = f"t{rng.randrange(12)}"
        fair.add(waiting(tenant, tokens=rng.randint(1, 5000), request_class=rng.choice(["re", "hi", "std", "batch"])))
        fair.charge(tenant, rng.randint(0, 9000))
    for request_class in ("re", "hi", "std", "batch"):
        for n in range(14):
            assert fair.ahead(waiting(f"t{n}", request_class=request_class)) <= fair.ahead_at_most(request_class) + 1e-6


def test_what_has_gone_leaves_no_fraction_of_a_token_behind() -> None:
    fair = queue()
    for name, tokens in (("x", 0.1), ("y", 0.2)):
        fair.add(waiting(name=name), tokens=tokens)
    fair.update("x", 0.3)
    fair.add(waiting(name="z"), tokens=0.7)
    for name in "yxz":
        fair.remove(name)
    assert fair.backlog.total == (0, 0.0)
    assert fair.backlog.tenants("std") == {}


def test_the_backlog_tells_whether_other_tenants_wait() -> None:
    backlog = queue().backlog
    assert not backlog.has_others("a")
    backlog.add("std", "a", requests=1, tokens=5)
    assert (backlog.has_others("a"), backlog.has_others("b")) == (False, True)
    backlog.add("hi", "b", requests=1, tokens=5)
    assert backlog.has_others("a")
    assert backlog.tokens_of(("std", "re", "hi")) == 10
    backlog.add("hi", "b", requests=-1, tokens=-5)
    assert not backlog.has_others("a")


def test_what_has_gone_before_it_was_due_takes_no_room() -> None:
    class Item:
        waiting = True

    heap: ExpiryHeap[Item] = ExpiryHeap()
    stays = Item()
    heap.add(5.0, stays)
    for n in range(5000):
        item = Item()
        heap.add(1000.0 + n, item)
        item.waiting = False
        heap.removed()
        assert len(heap) < 1000
    assert list(heap.pop_due(9999.0)) == [stays]


operations = st.lists(
    st.tuples(
        st.sampled_from(
            ["add", "remove", "place", "settle", "unplace", "hold", "release", "update", "charge", "heads", "expired"]
        ),
        st.integers(0, 11),
        st.integers(0, 5000),
    ),
    min_size=10,
    max_size=80,
)


@settings(max_examples=150, deadline=None)
@given(operations)
def test_sums_and_offers_agree_with_what_waits(steps) -> None:
    fair = queue(idle_tenants=2, open_charges=4, classes=(*CLASSES, FairClass(name="std2", rank=2, ageing_s=5)))
    model: dict[str, tuple[Waiting, float]] = {}
    held: set[str] = set()
    now = 0.0
    for operation, n, tokens in steps:
        name, now = f"r{n}", now + tokens / 500
        if operation == "add":
            tenant, request_class = f"t{n % 5}", ["re", "hi", "std", "batch", "std2"][tokens % 5]
            request = waiting(tenant, name=name, tokens=tokens, request_class=request_class, arrived_s=now, deadline_s=now + 90)
            fair.add(request)
            model[name] = (request, tokens)
            held.discard(name)
        elif operation == "remove":
            assert (fair.remove(name) is not None) == (model.pop(name, None) is not None)
        elif operation == "place" and name in model:
            request, _ = model.pop(name)
            assert fair.place(name, uncached=tokens) is request
        elif operation == "unplace" and name not in model:
            model[name] = (waiting(f"t{n % 5}", name=name, tokens=tokens, arrived_s=now, deadline_s=now + 90), tokens)
            fair.unplace(model[name][0])
            held.discard(name)
        elif operation == "settle":
            fair.settle(name, uncached=tokens, output=tokens)
        elif operation in ("hold", "release"):
            getattr(fair, operation)(name)
            if name in model:
                (held.add if operation == "hold" else held.discard)(name)
        elif operation == "update" and name in model:
            fair.update(name, tokens)
            model[name] = (model[name][0], tokens)
        elif operation == "charge":
            fair.charge(f"t{n}", tokens - 100)
        elif operation == "expired":
            gone = {request.id for request in fair.expired(now)}
            assert gone == {key for key, (request, _) in model.items() if request.deadline_s <= now}
            model = {key: value for key, value in model.items() if key not in gone}
        offered = first(fair, now, 1000)
        assert sorted(offered) == sorted(set(model) - held)
        assert first(fair, now, 3) == offered[:3]
        assert fair.backlog.total.requests == len(fair) == len(model)
        assert fair.backlog.total.tokens == pytest.approx(sum(tokens for _, tokens in model.values()))
        assert fair.counts() == Counter((request.request_class, request.tenant) for request, _ in model.values())
        assert fair.accounts.open <= 4
