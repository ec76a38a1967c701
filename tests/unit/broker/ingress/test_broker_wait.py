"""New requests wait while the broker is away for a moment, and no longer than they may."""

from __future__ import annotations

import asyncio

import pytest

from headrace.broker.ingress import waits
from headrace.broker.ingress.waits import BrokerWait


class Broker:
    def __init__(self) -> None:
        self.away = True


async def test_a_request_goes_on_as_soon_as_the_broker_is_back() -> None:
    broker = Broker()
    wait = BrokerWait(lambda: broker.away, longest_s=60.0)
    held = asyncio.create_task(wait.hold(60.0))
    await asyncio.sleep(0)
    wait.back()  # connected, but the lease is not held yet
    await asyncio.sleep(0.01)
    assert not held.done()
    broker.away = False
    wait.back()
    await asyncio.wait_for(held, 10)


@pytest.mark.parametrize(("longest_s", "deadline_s"), [(0.02, 60.0), (60.0, 0.02), (0.0, 60.0)])
async def test_a_request_waits_no_longer_than_the_setting_and_its_deadline_say(longest_s: float, deadline_s: float) -> None:
    await asyncio.wait_for(BrokerWait(lambda: True, longest_s=longest_s).hold(deadline_s), 10)


async def test_no_request_waits_while_the_broker_is_there() -> None:
    await asyncio.wait_for(BrokerWait(lambda: False, longest_s=60.0).hold(60.0), 10)


async def test_more_requests_than_may_wait_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "MOST", 1)
    broker = Broker()
    wait = BrokerWait(lambda: broker.away, longest_s=60.0)
    held = asyncio.create_task(wait.hold(60.0))
    await asyncio.sleep(0)
    await asyncio.wait_for(wait.hold(60.0), 10)
    assert not held.done()
    held.cancel()
    with pytest.raises(asyncio.CancelledError):
        await held
    again = asyncio.create_task(wait.hold(60.0))  # the one that left has made room
    await asyncio.sleep(0)
    assert not again.done()
    broker.away = False
    wait.back()
    await asyncio.wait_for(again, 10)
