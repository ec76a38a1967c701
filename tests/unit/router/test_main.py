"""The session of one pool is made again after each failure, ever later, and never once the router leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec
import pytest
from structlog.testing import capture_logs

from headrace.broker.codec import encode
from headrace.broker.models.cards import ModelCard
from headrace.jetstream.ports import Change
from headrace.jetstream.subjects import Subjects, pool_id
from headrace.router import main
from headrace.router.main import PoolSession
from headrace.router.session.session import RouterSession

CARD = ModelCard(model="m", pool="p", context_length=1, block_size=16)


class FakeSession:
    """Fails after so many seconds, or ends in peace where the error is None."""

    ready = False

    def __init__(self, after_s: float, error: Exception | None) -> None:
        self.after_s, self.error = after_s, error
        self.abandoned = False

    async def run(self) -> None:
        await asyncio.sleep(self.after_s)
        if self.error is not None:
            raise self.error

    async def abandon(self) -> None:
        self.abandoned = True
        raise OSError("not even that works")

    async def drain(self, grace_s: float) -> None: ...

    def standing(self) -> dict[str, Any]:
        return {"ready": self.ready}


def kept(sessions: Sequence[FakeSession | Exception]) -> PoolSession:
    left = iter(sessions)

    def build() -> RouterSession:
        made = next(left)
        if isinstance(made, Exception):
            raise made
        return cast("RouterSession", made)

    return PoolSession(CARD, build)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("FIRST_WAIT_S", 0.01), ("MOST_WAIT_S", 0.04), ("STEADY_S", 0.05)):
        monkeypatch.setattr(main, name, value)


async def waits_of(run: Callable[[], Any]) -> list[float]:
    with capture_logs() as said:
        async with asyncio.timeout(10):
            await run()
    return [line["again_in_s"] for line in said if line["event"] == "session.failed"]


async def test_each_failure_waits_twice_as_long_up_to_a_bound_and_a_long_run_begins_anew() -> None:
    boom = ExceptionGroup("of the tasks", [ExceptionGroup("inner", [KeyError("block")])])
    failing = [FakeSession(0.0, boom) for _ in range(4)]
    steady, last = FakeSession(0.06, boom), FakeSession(0.0, None)
    pool = kept([*failing, steady, last])
    assert await waits_of(pool.run) == [0.01, 0.02, 0.04, 0.04, 0.01]
    assert all(session.abandoned for session in (*failing, steady))
    assert pool.standing()["failures"] == 5


async def test_a_session_that_cannot_even_be_made_is_tried_again() -> None:
    pool = kept([ValueError("bad card"), FakeSession(0.0, None)])
    assert await waits_of(pool.run) == [0.01]
    assert pool.standing()["failure"] == "ValueError: bad card"


async def test_a_router_that_leaves_starts_none_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "FIRST_WAIT_S", 60.0)
    pool = kept([ValueError("bad card")])
    running = asyncio.create_task(pool.run())
    await asyncio.sleep(0.01)
    assert pool.failing
    await pool.drain(1.0)
    async with asyncio.timeout(5):
        await running


class Draining(FakeSession):
    """Ends in peace once it is drained."""

    def __init__(self) -> None:
        super().__init__(0.0, None)
        self.drained = asyncio.Event()

    async def run(self) -> None:
        await self.drained.wait()

    async def abandon(self) -> None:
        self.abandoned = True

    async def drain(self, grace_s: float) -> None:
        self.drained.set()


async def test_a_pool_whose_block_size_has_changed_goes_on_with_a_new_session() -> None:
    class Cards:
        def bucket(self, name: str) -> Cards:
            return self

        def watch(self, on_change: Callable[[Change], None]) -> None:
            self.report = on_change

    cards, found = Cards(), list[int]()
    main.Pools(cast("Any", cards), Subjects("hr"), lambda card: found.append(card.block_size))
    key = pool_id("m", "default")
    for size, slots in ((16, 1), (16, 2), (32, 2)):
        card = msgspec.structs.replace(CARD, pool=key, block_size=size, context_length=slots)
        cards.report(Change(key, encode(card), 1))
    assert found == [16, 32]

    first, second = Draining(), Draining()
    pool = kept([first])
    running = asyncio.create_task(pool.run())
    await asyncio.sleep(0)
    await pool.renew(lambda: cast("RouterSession", second))
    async with asyncio.timeout(5):
        while pool.session is not cast("Any", second):
            await asyncio.sleep(0)
    assert first.abandoned, "it holds nothing any more"
    await pool.drain(1.0)
    async with asyncio.timeout(5):
        await running
    assert pool.standing()["failures"] == 0


async def test_a_cancellation_is_no_failure() -> None:
    pool = kept([FakeSession(60.0, None)])
    running = asyncio.create_task(pool.run())
    await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert pool.standing()["failures"] == 0
