"""What a janitor clears away behind workers that are gone."""

from __future__ import annotations

import asyncio
from typing import Any

from structlog.testing import capture_logs

from headrace.broker.membership.mover import Janitor
from headrace.broker.settings import Timing
from headrace.jetstream.errors import NotConnected
from headrace.jetstream.subjects import Subjects

NAMES = Subjects()


class World:
    """Members, server and mover as a janitor sees them."""

    def __init__(self, *workers: str, every_s: float = 0.001) -> None:
        self.live = set(workers)
        self.unsure: set[str] = set()  # not live, but nobody can say yet that they are gone
        self.placed: set[str] = set()
        self.consumers: dict[str, str] = {}  # name → the subject that it reads
        self.deleted: list[str] = []
        self.moved: list[str] = []
        self.asked: list[str] = []  # workers whose leases were read
        self.counted = 0
        self.failures = 0  # reads of the server that are still to fail
        self.acts = True
        self.janitor = Janitor(
            self,
            NAMES,
            self,
            self,
            pool="p",
            timing=Timing(janitor_s=every_s),  # type: ignore[arg-type]
        )

    def workers(self, _pool: str) -> dict[str, Any]:
        return dict.fromkeys(self.live)

    def worker_live(self, _pool: str, worker: str) -> bool:
        return worker in self.live

    async def worker_gone(self, _pool: str, worker: str) -> bool:
        self.asked.append(worker)
        return worker not in self.live | self.unsure

    async def subject_counts(self, _stream: str, _pattern: str) -> dict[str, int]:
        self.counted += 1
        if self.failures:
            self.failures -= 1
            raise NotConnected
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


async def test_consumers_are_read_again_by_one_that_acts_again() -> None:
    """Another was the janitor meanwhile, and died with a worker that this one has never seen."""
    world = World("b")
    await world.rounds()
    world.acts = False
    await world.rounds()
    world.consumers = {"W_a": NAMES.work("p", "a")}
    world.acts = True
    await world.rounds()
    assert world.deleted == ["W_a", "P_a_own"]


async def test_work_of_a_worker_that_nobody_knows_is_moved_and_that_is_logged() -> None:
    world = World("b")
    world.placed = {"a", "b"}
    with capture_logs() as said:
        world.janitor.wake()
        await world.rounds()
    assert set(world.moved) == {"a"}
    assert {(line["event"], line["worker"], line["moved"]) for line in said} == {("worker.work_moved", "a", 1)}


async def test_a_worker_without_work_is_cleared_away_without_a_word() -> None:
    world = World("a", "b")
    await world.rounds()
    world.live.discard("a")
    with capture_logs() as said:
        await world.rounds()
    assert (world.moved, said) == (["a"], [])


async def test_leases_of_workers_that_are_live_are_not_read() -> None:
    world = World("b")
    world.placed = {"b"}
    await world.rounds()
    assert world.asked == []


async def test_a_round_that_fails_is_followed_by_the_next() -> None:
    world = World("b")
    world.placed, world.failures = {"a"}, 2
    with capture_logs() as said:
        await world.rounds()
    assert [line["event"] for line in said].count("janitor.failed") == 2
    assert "a" in world.moved


async def test_it_is_woken_for_one_round() -> None:
    world = World("b", every_s=60.0)
    world.janitor.wake()
    await world.rounds()
    assert world.counted == 1


async def test_a_subject_that_no_worker_can_have_keeps_the_round_from_nothing() -> None:
    world = World("a")
    world.placed = {"b"}
    real = world.subject_counts

    async def with_strange(stream: str, pattern: str) -> dict[str, int]:
        return {"hr.work.p.a$b": 3, **await real(stream, pattern)}

    world.subject_counts = with_strange  # type: ignore[method-assign]
    world.consumers = {"W_x": "hr.work.p.a$b"}
    with capture_logs() as logs:
        await world.rounds()
    assert world.moved, "the work of the dead worker is moved"
    assert [entry["event"] for entry in logs].count("work.unknown_subject") == 1, "said once, not in every round"
