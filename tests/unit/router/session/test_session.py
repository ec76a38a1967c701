"""Small decisions of a router session that no other test would miss."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import REGISTRY

from headrace.broker.codec import encode
from headrace.broker.errors import DeadlineExceeded, JobRefused
from headrace.broker.ingress.stream import fault_error
from headrace.broker.models.cards import ModelCard
from headrace.jetstream.errors import NotConnected
from headrace.jetstream.ports import Change
from headrace.jetstream.subjects import Subjects
from headrace.router.main import Pools
from headrace.router.placement.types import Shed, Waiting
from headrace.router.session import metrics
from headrace.router.session.placing import fault_of
from headrace.router.session.session import AGE_EVERY_S, CROWDED, SessionGauges, TenantCount, index_ready
from tests.support.router.router_parts import request_window, router_deps


def test_a_refusal_reaches_the_client_as_a_refusal_and_never_as_a_failed_engine() -> None:
    for retry_after_s, told in ((None, 1.0), (7.0, 7.0)):
        shed = Shed(request=Waiting(id="a", tokens=1), code="tenant_limit", message="too many", retry_after_s=retry_after_s)
        error = fault_error(fault_of(shed))
        assert isinstance(error, JobRefused)
        assert (error.reason, error.retry_after_s) == ("tenant_limit", told)


def test_a_deadline_that_passed_in_the_window_is_a_deadline() -> None:
    shed = Shed(request=Waiting(id="a", tokens=1), code="deadline", message="too late", retry_after_s=1.0)
    assert isinstance(fault_error(fault_of(shed)), DeadlineExceeded)


class FakeFeed:
    lag = 7

    def __init__(self, after: int) -> None:
        self.looks = 0
        self.after = after

    @property
    def ready(self) -> bool:
        self.looks += 1
        return self.looks > self.after

    async def run(self) -> None: ...

    async def release(self) -> None: ...


async def test_requests_do_not_wait_for_an_index_that_never_catches_up() -> None:
    def given_up() -> float:
        return REGISTRY.get_sample_value("headrace_router_index_not_awaited_total") or 0.0

    before = given_up()
    async with asyncio.timeout(5):
        await index_ready(cast("Any", FakeFeed(after=3)), pool="p", longest_s=60.0)
        assert given_up() == before
        await index_ready(cast("Any", FakeFeed(after=10**9)), pool="p", longest_s=0.03)
    assert given_up() == before + 1


class FakeWatch:
    def __init__(self, on_change: Callable[[Change], None]) -> None:
        self.on_change = on_change


class FakeMessaging:
    watch_: FakeWatch

    def bucket(self, name: str) -> FakeMessaging:
        return self

    def watch(self, on_change: Callable[[Change], None]) -> FakeWatch:
        self.watch_ = FakeWatch(on_change)
        return self.watch_


def card(model: str, namespace: str = "default", **more: object) -> bytes:
    made = ModelCard(model=model, pool=f"{namespace}-{model}", namespace=namespace, context_length=1, block_size=16, **more)  # type: ignore[arg-type]
    return encode(made)


@pytest.mark.parametrize(
    ("namespace", "models", "expected"),
    [
        (None, (), ["a", "b", "c"]),
        ("default", (), ["a", "b"]),
        ("other", (), ["c"]),
        ("default", ("b",), ["b"]),
        ("default", ("first",), ["a"]),
    ],
)
def test_a_router_serves_the_models_it_is_for_and_each_once(
    namespace: str | None, models: tuple[str, ...], expected: list[str]
) -> None:
    messaging = FakeMessaging()
    found: list[str] = []
    made = Pools(
        messaging,  # type: ignore[arg-type]
        Subjects(),
        lambda card: found.append(card.model),
        namespace=namespace,
        models=models,
    )
    assert isinstance(made, Pools)
    for key, value in (
        ("default-a", card("a", aliases=["first"])),
        ("default-b", card("b")),
        ("other-c", card("c", "other")),
        ("default-a", card("a", aliases=["first"])),
        ("default-x", b"\xc1 no card"),
        ("default-b", None),
    ):
        messaging.watch_.on_change(Change(key, value, 1))
    assert found == expected


SUBJECTS = Subjects()


class Streams:
    def __init__(self, *subjects: str) -> None:
        self.subjects = subjects
        self.failing = False

    async def subject_counts(self, stream: str, _subject_filter: str) -> dict[str, int]:
        if self.failing:
            raise NotConnected("away")
        assert stream == "HR_REQ"
        return dict.fromkeys(self.subjects, 1)


def counting(streams: Streams, **held: int) -> tuple[TenantCount, Any]:
    scheduler: Any = SimpleNamespace(several_tenants=False)
    window = request_window(scheduler)
    window.counts.update(held)
    return TenantCount(router_deps(streams), window), scheduler


@pytest.mark.parametrize(("other", "several"), [(SUBJECTS.req("p", "hi", "b"), True), (SUBJECTS.req("p", "batch", "b"), False)])
async def test_only_interactive_requests_of_others_count(other: str, *, several: bool) -> None:
    count, scheduler = counting(Streams(SUBJECTS.req("p", "std", "a"), other), std=CROWDED)
    await count.refresh()
    assert scheduler.several_tenants is several


async def test_a_window_with_few_interactive_requests_protects_nobody() -> None:
    streams = Streams(SUBJECTS.req("p", "std", "a"), SUBJECTS.req("p", "std", "b"))
    count, scheduler = counting(streams, std=CROWDED - 1, batch=CROWDED)
    scheduler.several_tenants = True
    await count.refresh()
    assert not scheduler.several_tenants


async def test_the_last_count_stays_while_the_broker_is_away() -> None:
    streams = Streams()
    streams.failing = True
    count, scheduler = counting(streams, std=CROWDED)
    scheduler.several_tenants = True
    await count.refresh()
    assert scheduler.several_tenants


class Scheduler:
    def queued_prefill_tokens(self, now_s: float) -> int:
        return 7


class Window:
    pool = "a pool"
    scheduler = Scheduler()
    looks = 0

    def oldest_s(self, wall_s: float) -> float:
        self.looks += 1
        return wall_s - 95.0


def test_the_oldest_request_is_looked_for_once_a_second() -> None:
    window = Window()
    gauges = SessionGauges(cast("Any", window), None, wall=lambda: 100.0)
    for tick in range(10):
        gauges.refresh(50.0 + tick / 10)
    assert window.looks == 1
    gauges.refresh(50.0 + AGE_EVERY_S)
    assert window.looks == 2
    assert metrics.OLDEST_S.labels("a pool")._value.get() == 5.0
    assert metrics.PREFILL_QUEUE.labels("a pool")._value.get() == 7
