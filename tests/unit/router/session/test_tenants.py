"""Whether the limits of one tenant protect another is counted by interactive requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.jetstream.errors import NotConnected
from headrace.jetstream.subjects import Subjects
from headrace.router.session.tenants import CROWDED, TenantCount
from tests.support.router.router_parts import router_deps, router_state

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
    state = router_state(scheduler)
    state.window.counts.update(held)
    return TenantCount(router_deps(streams), state), scheduler


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
