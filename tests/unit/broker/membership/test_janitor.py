"""What a janitor clears away behind workers that are gone."""

from __future__ import annotations

import asyncio
from typing import Any

from headrace.broker.membership.janitor import Janitor
from headrace.broker.settings import Timing
from headrace.jetstream.subjects import Subjects

NAMES = Subjects()


class World:
    """Members, server and mover as a janitor sees them."""

    def __init__(self, *workers: str) -> None:
        self.live = set(workers)
        self.unsure: set[str] = set()  # not live, but nobody can say yet that they are gone
        self.placed: set[str] = set()
        self.consumers: dict[str, str] = {}  # name → the subject that it reads
        self.deleted: list[str] = []
        self.moved: list[str] = []
        self.acts = True
        self.janitor = Janitor(
            self,
            NAMES,
            self,
            self,
            pool="p",
            timing=Timing(janitor_s=0.001),  # type: ignore[arg-type]
        )

    def workers(self, _pool: str) -> dict[str, Any]:
        return dict.fromkeys(self.live)

    def worker_live(self, _pool: str, worker: str) -> bool:
        return worker in self.live

    async def worker_gone(self, _pool: str, worker: str) -> bool:
        return worker not in self.live | self.unsure

    async def subject_counts(self, _stream: str, _pattern: str) -> dict[str, int]:
        return dict.fromkeys((NAMES.work("p", worker) for worker in self.placed), 1)

    async def consumer_subjects(self, _stream: str) -> dict[str, tuple[str, ...]]:
        return {name: (subject,) for name, subject in self.consumers.items()}

    async def delete_consumer(self, _stream: str, name: str) -> None:
        self.deleted.append(name)

    async def move_all(self, worker: str, **_why: object) -> int:
        self.moved.append(worker)
        return len(self.placed & {worker})

    async def rounds(self) -> None:
        running = asyncio.create_task(self.janitor.run(lambda: self.acts))
        for _ in range(20):
            await asyncio.sleep(0.002)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_worker_that_died_with_nothing_to_do_leaves_no_consumer() -> None:
    world = World("a", "b")
    await world.rounds()
    assert world.deleted == []
    world.live.discard("a")
    await world.rounds()
    assert world.deleted == ["W_a", "P_a_own"], "once, however many rounds there are"


async def test_the_one_that_takes_over_clears_away_behind_the_janitor_before_it() -> None:
    world = World("a", "b")
    world.acts = False
    await world.rounds()
    world.live.discard("a")
    world.acts = True
    await world.rounds()
    assert world.deleted == ["W_a", "P_a_own"]


async def test_nothing_is_cleared_away_behind_one_that_may_be_back() -> None:
    world = World("a", "b")
    await world.rounds()
    world.live.discard("a")
    world.unsure.add("a")
    await world.rounds()
    assert world.deleted == []
    world.unsure.discard("a")
    await world.rounds()
    assert world.deleted == ["W_a", "P_a_own"]


async def test_consumers_of_workers_that_died_before_it_began_are_found() -> None:
    """The whole deployment was killed at once and started again: nobody has seen these workers alive."""
    world = World("b")
    world.consumers = {
        "W_a": NAMES.work("p", "a"),
        "W_b": NAMES.work("p", "b"),
        "W_other": NAMES.work("q", "other"),
        "foreign": "x.y",
    }
    world.unsure.add("a")
    await world.rounds()
    assert world.deleted == [], "its lease may come back"
    world.unsure.discard("a")
    await world.rounds()
    assert world.deleted == ["W_a", "P_a_own"]
