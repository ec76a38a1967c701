"""The publishers of all ranks act as one for the session of their worker."""

from __future__ import annotations

import asyncio
from typing import Any

from headrace.workers.kv.rank_publishers import RankPublishers


class Publisher:
    def __init__(self, state: str = "ok", why_not: str = "") -> None:
        self.state = state
        self.calls: list[str] = []
        self._why_not = why_not

    async def run(self, lease_held: Any) -> None:
        self.calls.append("run")
        await asyncio.Event().wait()

    def lease_gained(self) -> None:
        self.calls.append("gained")

    def lease_lapsed(self) -> None:
        self.calls.append("lapsed")

    def ask_dump(self) -> str:
        self.calls.append("dump")
        return self._why_not


def made(*publishers: Publisher) -> RankPublishers:
    return RankPublishers(publishers)  # type: ignore[arg-type]


async def test_every_rank_publishes_and_learns_of_the_lease_and_of_a_dump() -> None:
    ranks = [Publisher(), Publisher()]
    whole = made(*ranks)
    running = asyncio.create_task(whole.run(lambda: True))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    whole.lease_gained()
    whole.lease_lapsed()
    assert whole.ask_dump() == ""
    running.cancel()
    await asyncio.wait([running])
    assert [rank.calls for rank in ranks] == [["run", "gained", "lapsed", "dump"]] * 2


def test_the_first_rank_in_trouble_is_told() -> None:
    assert made(Publisher(), Publisher("failing: disk full")).state == "failing: disk full"
    assert made(Publisher(), Publisher()).state == "ok"
    assert made(Publisher(), Publisher(why_not="not yet")).ask_dump() == "not yet"
