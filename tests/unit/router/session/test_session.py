"""Small decisions of a router session that no other test would miss."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from prometheus_client import REGISTRY

from headrace.broker.codec import encode
from headrace.broker.errors import DeadlineExceeded, JobRefused
from headrace.broker.ingress.stream import fault_error
from headrace.broker.models.cards import ModelCard
from headrace.jetstream.ports import Change
from headrace.jetstream.subjects import Subjects
from headrace.router.placement.types import Shed, Waiting
from headrace.router.pools import Pools
from headrace.router.session.refusals import fault_of
from headrace.router.session.timers import index_ready


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
        await index_ready(FakeFeed(after=3), pool="p", longest_s=60.0)
        assert given_up() == before
        await index_ready(FakeFeed(after=10**9), pool="p", longest_s=0.03)
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
