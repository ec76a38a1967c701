"""Quotas over several frontends and a real nats-server: one sum, whoever counts."""

from __future__ import annotations

import asyncio
import contextlib
import time

from headrace.broker.keys import Limits
from headrace.frontend.auth.caller import Caller
from headrace.frontend.auth.quotas import SHARE_S, Quotas, QuotaShare
from headrace.frontend.errors import QuotaExceeded
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology
from tests.conftest import Connect

FRONTENDS = 3


def caller(limits: Limits) -> Caller:
    one = Caller("abcdefgh", "acme", ["generate"])
    one.limits = limits
    return one


async def test_three_frontends_admit_together_what_one_may_and_at_most_a_rounds_worth_more(
    connect: Connect, subjects: Subjects
) -> None:
    """Each tries 20 requests a round against 60 a minute: 60 fit, and what two others admit in a round may come on top."""
    at = time.time() // 60 * 60 + 1.0
    limits = Limits(requests_per_minute=60, concurrent=0)
    connections = [await connect(topology=Topology(subjects)) for _ in range(FRONTENDS)]
    frontends = [Quotas(wall=lambda: at) for _ in connections]
    shares = [
        QuotaShare(quotas, connection, subjects, me=f"i-{n}", wall=lambda: at)
        for n, (quotas, connection) in enumerate(zip(frontends, connections, strict=True))
    ]
    admitted = 0
    for _ in range(6):
        for quotas in frontends:
            for _ in range(10):
                with contextlib.suppress(QuotaExceeded):
                    quotas.enter(caller(limits), "acme")
                    admitted += 1
        for share in shares:
            await share.round()
    assert 60 <= admitted <= 60 + (FRONTENDS - 1) * 10
    for share in shares:
        await share.round()
    late = Quotas(wall=lambda: at)  # a frontend that has just started knows nothing until its first round
    with contextlib.suppress(QuotaExceeded):
        late.enter(caller(limits), "acme")
    await QuotaShare(late, connections[0], subjects, me="i-late", wall=lambda: at).round()
    (meter,) = late.meters()
    assert meter.requests.used(at) == admitted + 1


async def test_requests_at_once_are_told_around_and_forgotten_with_their_frontend(connect: Connect, subjects: Subjects) -> None:
    limits = Limits(concurrent=2)
    one, two = Quotas(), Quotas()
    holds = [one.enter(caller(limits), "acme") for _ in range(2)]
    connections = [await connect(topology=Topology(subjects)) for _ in range(2)]
    first, second = (
        QuotaShare(quotas, connection, subjects, me=name)
        for quotas, connection, name in zip((one, two), connections, ("i-1", "i-2"), strict=True)
    )
    two.enter(caller(Limits(concurrent=9)), "acme")
    (meter,) = two.meters()
    meter.open = 0
    tasks = [asyncio.create_task(share.run()) for share in (first, second)]
    try:
        async with asyncio.timeout(10):
            while meter.elsewhere != 2:
                await asyncio.sleep(SHARE_S / 5)
            try:
                two.enter(caller(limits), "acme")
                raise AssertionError("a third request was admitted")
            except QuotaExceeded:
                pass
            for hold in holds:
                assert hold is not None
                hold.leave()
            while meter.elsewhere:
                await asyncio.sleep(SHARE_S / 5)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
