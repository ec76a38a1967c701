"""A payload that is too large for a message lives as long as its request, in a store with a cap."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.broker.errors import BrokerUnavailable, Overloaded, RequestTooLarge
from headrace.broker.ingress.spill_store import FULL_RETRY_AFTER_S, ORPHAN_S, TTL_S, SpillStore
from headrace.jetstream.errors import NotConnected, QueueFull
from headrace.jetstream.ports import StreamState
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.tasks import TaskScope
from tests.support.memory_store import MemoryMessaging

LARGEST = 1000


class Messaging(MemoryMessaging):
    """A server whose store has `most` bytes."""

    most = -1

    async def stream_state(self, stream: str, *, subject: str = "") -> StreamState:
        assert stream == "OBJ_hr_spill"
        held = sum(len(one.data) for one in self.objects("hr_spill").kept.values())
        return StreamState(1, 0, 0, "", bytes=held, max_bytes=self.most)


class Members:
    def __init__(self, *live: str) -> None:
        self.live = live

    def ingress_live(self, ingress: str) -> bool:
        return ingress in self.live

    async def ingress_gone(self, ingress: str) -> bool:
        return ingress not in self.live


def spills(messaging: Messaging, tasks: TaskScope, *live: str) -> SpillStore:
    members: Any = Members("i-1", *live)
    return SpillStore(messaging, Subjects("hr"), members, tasks, ingress="i-1", wall=messaging.clock)  # type: ignore[arg-type]


@pytest.mark.parametrize("wait_s", [10.0, 86_400.0])
async def test_a_payload_outlives_the_deadline_of_its_request(wait_s: float) -> None:
    messaging = Messaging()
    async with TaskScope() as tasks:
        spill = await spills(messaging, tasks).put("a", b"payload", largest=LARGEST, ttl_s=wait_s)
    store = messaging.objects("hr_spill")
    assert (spill.size, await store.get(spill.object)) == (7, b"payload")
    messaging.clock.at += max(wait_s - 1, TTL_S - 1)
    assert len(store.names) == 1
    messaging.clock.at += 60
    assert store.names == []


async def test_a_payload_is_deleted_when_its_request_has_ended() -> None:
    messaging = Messaging()
    async with TaskScope() as tasks:
        store = spills(messaging, tasks)
        for request_id in ("a", "b"):
            await store.put(request_id, b"payload", largest=LARGEST, ttl_s=60.0)
        store.forget("a")
        store.forget("never spilled")
        await asyncio.sleep(0)
    assert messaging.objects("hr_spill").names == ["i-1/b"]


async def test_a_payload_with_a_dead_letter_is_left_to_its_time_to_live() -> None:
    messaging = Messaging()
    async with TaskScope() as tasks:
        store = spills(messaging, tasks)
        await store.put("a", b"payload", largest=LARGEST, ttl_s=60.0)
        store.keep("a")
        store.forget("a")
    assert messaging.objects("hr_spill").names == ["i-1/a"]


async def test_a_full_store_refuses_a_request_before_anything_of_it_is_stored() -> None:
    messaging = Messaging()
    messaging.most = 100
    async with TaskScope() as tasks:
        store = spills(messaging, tasks)
        await store.put("a", b"x" * 60, largest=LARGEST, ttl_s=60.0)
        with pytest.raises(Overloaded) as caught:
            await store.put("b", b"x" * 60, largest=LARGEST, ttl_s=60.0)
        assert (caught.value.reason, caught.value.retry_after_s) == ("spill_full", FULL_RETRY_AFTER_S)
        assert messaging.objects("hr_spill").names == ["i-1/a"]
        store.forget("a")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await store.put("b", b"x" * 60, largest=LARGEST, ttl_s=60.0)


@pytest.mark.parametrize(("error", "kind"), [(QueueFull("bytes"), Overloaded), (NotConnected("gone"), BrokerUnavailable)])
async def test_a_store_that_fails_refuses_and_keeps_nothing(error: Exception, kind: type[Exception]) -> None:
    messaging = Messaging()
    messaging.objects("hr_spill").broken = error
    async with TaskScope() as tasks:
        with pytest.raises(kind):
            await spills(messaging, tasks).put("a", b"payload", largest=LARGEST, ttl_s=60.0)


async def test_a_payload_over_the_limit_of_one_is_refused() -> None:
    messaging = Messaging()
    async with TaskScope() as tasks:
        with pytest.raises(RequestTooLarge):
            await spills(messaging, tasks).put("a", b"x" * 1001, largest=LARGEST, ttl_s=60.0)


async def test_what_a_dead_frontend_has_left_is_swept_by_the_others() -> None:
    messaging = Messaging()
    store = messaging.objects("hr_spill")
    for name in ("i-1/a", "i-2/b", "i-gone/c", "i-gone/d", "a$b/e", "no-owner"):
        await store.put(name, b"payload", ttl_s=7200.0)
    async with TaskScope() as tasks:
        mine = spills(messaging, tasks, "i-2")
        assert await mine.sweep() == 0, "all are new"
        messaging.clock.at += ORPHAN_S + 1
        await store.put("i-gone/new", b"payload", ttl_s=7200.0)
        assert await mine.sweep() == 3
    assert store.names == ["i-1/a", "i-2/b", "i-gone/new", "no-owner"]
