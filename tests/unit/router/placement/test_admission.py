"""Who is let in, who is refused with which words, and that refusals end by themselves."""

from __future__ import annotations

import itertools
from math import inf, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.router.errors import SettingsInvalid
from headrace.router.placement.admission import Admission
from headrace.router.placement.fair_queue import FairQueue
from headrace.router.placement.pool import PoolSpeed
from headrace.router.placement.settings import AdmissionSettings, FairnessSettings
from headrace.router.placement.types import Decision, Shed, Waiting
from tests.support.router.placement_pool import Pool

_numbers = itertools.count()
SPEED = PoolSpeed(1000.0)


def waiting(tenant: str = "a", *, tokens: int = 1000, request_class: str = "std", name: str = "", **options) -> Waiting:
    return Waiting(
        id=name or f"{tenant}-{next(_numbers)}", tokens=tokens, request_class=request_class, tenant=tenant, **options
    )


def filled(*requests: Waiting) -> FairQueue:
    fair = FairQueue(FairnessSettings(slack_tokens=0.0))
    for request in requests:
        fair.add(request)
    return fair


def admit(fair: FairQueue, request: Waiting, *, pool: PoolSpeed = SPEED, now_s=0.0, service_s=0.0, **options) -> Shed | None:
    limits = Admission(AdmissionSettings(**{"jitter": 0.0, "tenant_share": 1.0, "class_share": {}, **options}))
    return limits.admit(request, uncached=request.tokens, queue=fair, pool=pool, now_s=now_s, service_s=service_s)


def many(count: int, tenant: str = "a", **options) -> list[Waiting]:
    return [waiting(tenant, **options) for _ in range(count)]


# -- limits ------------------------------------------------------------------------------------------------------------------


def test_the_window_has_an_end() -> None:
    fair = filled(*many(9))
    assert admit(fair, waiting("b"), window=10) is None
    fair.add(waiting())
    shed = admit(fair, waiting("b"), window=10)
    assert shed is not None
    assert (shed.code, shed.message) == ("queue_full", "10 requests wait, of at most 10")
    assert shed.retry_after_s == pytest.approx(2.5)  # a quarter of 10,000 tokens at 1,000 tokens/s


def test_a_tenant_has_so_many_requests() -> None:
    fair = filled(*many(4), *many(4, "b"))
    shed = admit(fair, waiting("a"), tenant_requests=4)
    assert shed is not None
    assert (shed.code, shed.message) == ("tenant_limit", "tenant 'a' has 4 requests waiting, of at most 4")
    assert shed.retry_after_s == pytest.approx(2.0)  # a quarter of its own and as much of b's
    assert admit(fair, waiting("c"), tenant_requests=4) is None
    assert admit(fair, waiting("a"), tenant_requests=4, tenant_requests_of={"a": 5}) is None
    assert admit(fair, waiting("a"), tenant_requests=0) is None
    assert admit(fair, waiting("a"), tenant_requests=4, tenant_requests_of={"a": 0}) is None
    assert admit(fair, waiting("b"), tenant_requests=0, tenant_requests_of={"b": 4}).code == "tenant_limit"


def test_a_tenant_has_so_many_uncached_tokens() -> None:
    fair = filled(*many(3))
    assert admit(fair, waiting(tokens=1000), tenant_tokens=4000) is None
    shed = admit(fair, waiting(tokens=1001), tenant_tokens=4000)
    assert shed is not None
    assert shed.code == "tenant_limit"
    assert shed.message == "tenant 'a' has 3000 uncached tokens waiting, which with 1001 more exceeds 4000"
    assert admit(fair, waiting(tokens=1001), tenant_tokens=4000, tenant_tokens_of={"a": 4001}) is None
    fair.update(next(iter(fair)).id, 10)  # more of it is cached by now
    assert admit(fair, waiting(tokens=1001), tenant_tokens=4000) is None


def test_a_class_has_so_many_requests_and_tokens() -> None:
    fair = filled(*many(4), *many(2, "b", request_class="hi"))
    shed = admit(fair, waiting("c"), class_requests={"std": 4})
    assert shed is not None
    assert (shed.code, shed.message) == ("class_limit", "class 'std' has 4 requests waiting, of at most 4")
    assert shed.retry_after_s == pytest.approx(1.5)  # of 6,000 tokens: the better class goes first
    assert admit(fair, waiting("c", request_class="hi"), class_requests={"std": 4}) is None
    shed = admit(fair, waiting("c"), class_tokens={"std": 4500})
    assert shed is not None
    assert shed.message == "class 'std' has 4000 uncached tokens waiting, which with 1000 more exceeds 4500"


@pytest.mark.parametrize("flood", [("std",), ("hi",)])
def test_floods_leave_room_for_other_classes_and_tenants(flood: tuple[str, ...]) -> None:
    limits = Admission(AdmissionSettings(window=100))
    fair = filled()

    def offer(request: Waiting) -> str:
        shed = limits.admit(request, uncached=1, queue=fair, pool=SPEED, now_s=0.0)
        if shed is None:
            fair.add(request)
        return shed.code if shed else ""

    codes = {offer(waiting(tenant, request_class=name)) for _ in range(200) for name in flood for tenant in "abcdefghij"}
    assert codes == {"", "class_limit"}
    other = ({"hi", "std"} - set(flood)).pop()
    assert [offer(waiting("k", request_class=other)) for _ in range(10)] == [""] * 10

    fair = filled()
    codes = {offer(waiting("flood", request_class="hi")) for _ in range(200)}
    assert codes == {"", "tenant_limit"}
    assert offer(waiting("other", request_class="hi")) == ""


def test_a_limit_of_tokens_lets_in_what_waits_alone() -> None:
    fair = filled(waiting("b", request_class="hi"))
    assert admit(fair, waiting("a", tokens=10**6), tenant_tokens=4000, class_tokens={"std": 4000}) is None


def test_a_redelivered_request_is_not_refused_for_itself() -> None:
    fair = filled(*many(3), waiting(name="again"))
    assert admit(fair, waiting(name="again"), window=4, tenant_requests=4) is None


# -- deadlines -----------------------------------------------------------------------------------------------------------------


def test_a_deadline_that_cannot_be_met_is_refused_with_the_figures() -> None:
    fair = filled(*many(20, request_class="hi"), *many(20, "b"))
    pool = PoolSpeed(1000.0, 5000.0)
    assert admit(fair, waiting("a", request_class="hi", deadline_s=125.0, arrived_s=100.0), pool=pool, now_s=100.0) is None
    shed = admit(
        fair, waiting("a", request_class="hi", deadline_s=120.0, arrived_s=100.0), pool=pool, now_s=100.0, service_s=2.0
    )
    assert shed is not None
    assert shed.code == "deadline_hopeless"
    assert shed.message == (
        "the first token is predicted in 27.0 s, the deadline is in 20.0 s: 20000 tokens are before it and "
        "5000 at the workers, which compute 1000 tokens/s"
    )
    assert shed.retry_after_s == pytest.approx(7.0)
    assert admit(fair, waiting("a", request_class="hi", deadline_s=120.0), pool=pool, now_s=100.0, hopeless=False) is None
    assert admit(fair, waiting("a", request_class="hi", deadline_s=120.0), pool=pool, now_s=100.0, hopeless_factor=1.5) is None


def test_a_flood_of_another_tenant_makes_nobody_else_hopeless() -> None:
    fair = filled(*many(1000))
    assert admit(fair, waiting("b", deadline_s=3.0)) is None
    assert admit(fair, waiting("a", deadline_s=3.0)).code == "deadline_hopeless"


def test_a_better_class_is_not_hopeless_because_of_a_worse_one() -> None:
    fair = filled(*many(1000, request_class="batch"))
    assert admit(fair, waiting("a", request_class="hi", deadline_s=3.0)) is None


def test_without_a_known_speed_nothing_is_hopeless() -> None:
    fair = filled(*many(100))
    assert admit(fair, waiting(deadline_s=0.5), pool=PoolSpeed(0.0, 10**6)) is None
    shed = admit(fair, waiting(), pool=PoolSpeed(0.0), window=100)
    assert shed is not None
    assert shed.retry_after_s == 5.0


@pytest.mark.parametrize("request_class", ["re", "hi"])
def test_a_deadline_that_has_passed_ends_every_class(request_class: str) -> None:
    shed = admit(filled(), waiting(request_class=request_class, arrived_s=2.0, deadline_s=9.5), now_s=10.0)
    assert shed is not None
    message = "the deadline passed: the request waited 8.0 s in the queue and never started"
    assert (shed.code, shed.message) == ("deadline", message)
    assert shed.retry_after_s is None


def test_moved_work_is_refused_for_nothing_else() -> None:
    fair = filled(*many(100, request_class="re"))
    moved = waiting(request_class="re", deadline_s=0.1)
    limits = {"window": 1, "tenant_requests": 1, "tenant_tokens": 1, "class_requests": {"re": 1}}
    assert admit(fair, moved, **limits) is None
    assert admit(fair, moved, protected=frozenset(), **limits).code == "queue_full"


def test_times_that_are_no_times_are_let_in() -> None:
    assert admit(filled(*many(10)), waiting(deadline_s=nan)) is None
    assert admit(filled(*many(10)), waiting(deadline_s=inf)) is None


# -- coming back ----------------------------------------------------------------------------------------------------


def test_refusals_end_by_themselves_as_the_backlog_shrinks() -> None:
    limits = Admission(AdmissionSettings(window=100, tenant_requests=50, class_share={}))
    fair = filled(*many(50), *many(50, "b"))

    def code(request: Waiting) -> str:
        shed = limits.admit(request, uncached=request.tokens, queue=fair, pool=SPEED, now_s=0.0)
        return shed.code if shed else ""

    for _ in range(1000):  # however often it has refused
        assert code(waiting("c")) == "queue_full"
    fair.place(fair.heads(1, 0.0)[0].id, uncached=1000)
    assert code(waiting("c")) == ""
    tenant = "a" if fair.backlog.of_tenant("a").requests == 50 else "b"
    assert code(waiting(tenant)) == "tenant_limit"
    while fair.backlog.of_tenant(tenant).requests == 50:
        fair.place(fair.heads(1, 0.0)[0].id, uncached=1000)
    assert code(waiting(tenant)) == ""
    assert code(waiting("c", deadline_s=1.5)) == ""
    assert code(waiting(tenant, deadline_s=1.5)) == "deadline_hopeless"
    while len(fair) > 1:
        fair.place(fair.heads(1, 0.0)[0].id, uncached=1000)
    assert code(waiting(tenant, deadline_s=1.5)) == ""


@settings(deadline=None)
@given(st.text(), st.floats(0.001, 1e9), st.integers(1, 500), st.floats(0.0, 1.0))
def test_when_to_come_back_is_bounded_and_the_same_each_time(name: str, speed: float, count: int, jitter: float) -> None:
    fair = filled(*many(count))
    sheds = [admit(fair, waiting(name="x" + name), window=count, jitter=jitter, pool=PoolSpeed(speed)) for _ in range(2)]
    assert sheds[0].retry_after_s == sheds[1].retry_after_s
    assert 1.0 <= sheds[0].retry_after_s <= 60.0 * (1 + 1e-9)


def test_those_refused_together_do_not_come_back_together() -> None:
    fair = filled(*many(40))
    times = {round(admit(fair, waiting(name=f"r{n}"), window=40, jitter=0.2).retry_after_s, 3) for n in range(100)}
    assert len(times) > 80
    assert min(times) >= 10.0
    assert max(times) <= 12.0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"window": 0}, "window must be 1 or more, got 0"),
        ({"tenant_requests": -1}, "tenant_requests must be 0 or more, got -1"),
        ({"tenant_share": 0.0}, "tenant_share must be above 0 and at most 1, got 0.0"),
        ({"class_share": {"hi": 1.5}}, "class_share['hi'] must be above 0 and at most 1, got 1.5"),
        ({"tenant_tokens_of": {"a": -1}}, "tenant_tokens_of['a'] must be 0 or more, got -1"),
        ({"class_requests": {"hi": -2}}, "class_requests['hi'] must be 0 or more, got -2"),
        ({"hopeless_factor": nan}, "hopeless_factor must be above 0, got nan"),
        ({"drain_to": 1.0}, "drain_to"),
        ({"jitter": 2.0}, "jitter"),
        ({"retry_least_s": 0.0}, "retry_least_s"),
        ({"retry_most_s": 0.5}, "retry_most_s must be above retry_least_s and its jitter, got 0.5"),
        ({"retry_unknown_s": 0.0}, "retry_unknown_s"),
    ],
)
def test_settings_that_cannot_be_are_named(options, named: str) -> None:
    with pytest.raises(SettingsInvalid) as caught:
        AdmissionSettings(**options)
    assert named in str(caught.value)


def codes(decisions: list[Decision]) -> list[tuple[str, str]]:
    return [(one.request.id, one.code) for one in decisions if isinstance(one, Shed)]


def test_a_request_that_is_late_and_that_no_worker_may_take_is_refused_once() -> None:
    pool = Pool("a", no_worker_s=3.0)
    pool.offer("both", worker="gone", tokens=5, deadline_s=pool.now + 2)
    pool.offer("patient", worker="gone", tokens=5)
    pool.pass_time(3.1)
    assert codes(pool.decide()) == [("both", "deadline"), ("patient", "no_eligible_worker")]
    assert pool.scheduler.waiting == 0
    assert pool.decide() == []


def test_without_any_worker_a_request_waits_for_one_up_to_its_deadline() -> None:
    pool = Pool("", no_worker_s=3.0)
    pool.offer("hurried", tokens=5, deadline_s=pool.now + 10)
    pool.offer("patient", tokens=5)
    pool.pass_time(9.0)
    assert codes(pool.decide()) == []
    pool.pass_time(2.0)
    assert codes(pool.decide()) == [("hurried", "deadline")]
    pool.join("a")
    assert pool.placed() == {"patient": "a"}


def test_a_request_put_back_that_no_worker_may_take_by_then_is_refused_too() -> None:
    pool = Pool("a", no_worker_s=3.0)
    pool.offer("back", tokens=5)
    placed = pool.placement()
    pool.join("a", draining=True)
    pool.scheduler.unplace(placed, pool.now)
    pool.pass_time(3.1)
    assert codes(pool.decide()) == [("back", "no_eligible_worker")]
