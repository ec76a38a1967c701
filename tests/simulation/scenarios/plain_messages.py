"""Messages that no stream keeps."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from headrace.jetstream.errors import NoResponder, RequestTimeout
from headrace.jetstream.ports import Message
from tests.simulation.scenarios.bed import POOL, Bed, note


async def requests_are_answered_refused_or_time_out(bed: Bed) -> None:
    def answer(message: Message) -> None:
        bed.b.send(message.reply, message.data.upper())

    subscription = await bed.b.subscribe(bed.subjects.control("c1"), answer)
    await bed.b.subscribe(bed.subjects.control("silent"), lambda _: None)
    await asyncio.sleep(0.1)
    assert await bed.a.request(bed.subjects.control("c1"), b"hi", timeout_s=2.0) == b"HI"
    with pytest.raises(NoResponder):
        await bed.a.request(bed.subjects.control("c2"), b"hi", timeout_s=2.0)
    with pytest.raises(RequestTimeout):
        await bed.a.request(bed.subjects.control("silent"), b"hi", timeout_s=0.2)
    await subscription.unsubscribe()
    await asyncio.sleep(0.1)
    with pytest.raises(NoResponder):
        await bed.a.request(bed.subjects.control("c1"), b"hi", timeout_s=2.0)


async def broadcasts_reach_all_and_a_queue_group_one(bed: Bed) -> None:
    seen: list[str] = []
    subject = bed.subjects.cancel(POOL)
    for name, messaging in (("a", bed.a), ("b", bed.b)):
        await messaging.subscribe(subject, partial(note, seen, name))
        await messaging.subscribe(subject, lambda _: seen.append("group"), queue="q")
    await asyncio.sleep(0.1)
    bed.a.send(subject, b"")
    await asyncio.sleep(0.2)
    assert sorted(seen) == ["a", "b", "group"]
