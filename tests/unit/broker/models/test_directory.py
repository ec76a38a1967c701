"""What a directory knows, offers and lists of the models whose cards come, are deleted, or vanish."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest

from headrace.broker.codec import encode
from headrace.broker.errors import UnknownModel
from headrace.broker.messages import WorkerMember
from headrace.broker.models import directory as module
from headrace.broker.models.cards import ModelCard
from headrace.broker.models.directory import ModelDirectory
from headrace.jetstream.ports import Change
from headrace.jetstream.subjects import Subjects

SUBJECTS = Subjects("hr")


class FakeMembers:
    def __init__(self) -> None:
        self.live: dict[str, WorkerMember] = {}
        self.callback: Callable[[], None] = lambda: None

    def on_change(self, callback: Callable[[], None]) -> None:
        self.callback = callback

    def workers(self, pool: str) -> dict[str, WorkerMember]:
        return {name: member for name, member in self.live.items() if member.pool == pool}

    def serving_workers(self, pool: str) -> list[WorkerMember]:
        return list(self.workers(pool).values())

    def having(self, pool: str, adapter: str | None) -> list[WorkerMember]:
        return [member for member in self.serving_workers(pool) if not adapter or adapter in member.adapters]

    def come(self, pool: str, *adapters: str) -> None:
        self.live[pool] = WorkerMember(worker=pool, pool=pool, model=pool, slots=1, adapters=list(adapters))
        self.callback()

    def go(self, pool: str) -> None:
        del self.live[pool]
        self.callback()


class FakeStore:
    """The bucket with the cards; its watch reports what a test says."""

    def __init__(self) -> None:
        self.report: Callable[[Change], None] = lambda _change: None

    def bucket(self, _name: str) -> FakeStore:
        return self

    def objects(self, _name: str) -> FakeStore:
        return self

    def watch(self, on_change: Callable[[Change], None]) -> FakeStore:
        self.report = on_change
        return self

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def ready(self, _timeout_s: float) -> None:
        pass


class Bench:
    def __init__(self) -> None:
        self.store = FakeStore()
        self.members = FakeMembers()
        self.directory = ModelDirectory(self.store, SUBJECTS, self.members)  # type: ignore[arg-type]  # stand-ins

    async def card(self, pool: str, *, aliases: tuple[str, ...] = (), adapters: tuple[str, ...] = ()) -> None:
        card = ModelCard(
            model=pool, pool=pool, context_length=64, block_size=16, aliases=list(aliases), adapters=list(adapters)
        )
        self.store.report(Change(pool, encode(card), 1))
        await self.directory.ready(5.0)

    async def gone(self, pool: str, kind: str) -> None:
        self.store.report(Change(pool, None, 2, kind))  # type: ignore[arg-type]
        await self.directory.ready(5.0)

    def knows(self, name: str) -> bool:
        try:
            return bool(self.directory.get(name))
        except UnknownModel:
            return False


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    running = asyncio.create_task(made.directory.run())
    yield made
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


async def test_a_card_that_is_deleted_is_forgotten_and_one_that_vanished_is_kept(bench: Bench) -> None:
    for pool in ("a", "b"):
        await bench.card(pool, aliases=(f"{pool}-alias",))
        bench.members.come(pool)
    await bench.gone("a", "delete")
    await bench.gone("b", "missing")
    assert (bench.knows("a"), bench.knows("a-alias")) == (False, False)
    assert (bench.knows("b"), bench.knows("b-alias")) == (True, True)
    bench.members.go("b")
    assert bench.directory.get("b").workers == 0


async def test_a_card_that_vanished_is_forgotten_if_nobody_stores_it_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOST_CHECK_S", 0.01)
    monkeypatch.setattr(module, "LATELY_S", 0.0)
    running = asyncio.create_task(bench.directory._forget_lost())
    for pool in ("lost", "served", "back"):
        await bench.card(pool)
    bench.members.come("served")
    for pool in ("lost", "served", "back"):
        await bench.gone(pool, "missing")
    await bench.card("back")
    async with asyncio.timeout(5):
        while bench.knows("lost"):
            await asyncio.sleep(0.01)
    assert (bench.knows("served"), bench.knows("back")) == (True, True)
    running.cancel()


async def test_an_unknown_name_is_told_what_is_served_and_not_what_once_was(bench: Bench) -> None:
    await bench.card("old", adapters=("law",))
    await bench.card("now")
    bench.members.come("now", "sql")
    with pytest.raises(UnknownModel, match=r"'x' is not served here; served: now, sql$"):
        bench.directory.get("x")
    bench.members.go("now")
    with pytest.raises(UnknownModel, match=r"served: now$"):  # its workers may be restarting
        bench.directory.get("x")
    assert bench.directory.get("old").workers == 0


async def test_aliases_are_listed_with_their_model_unless_another_model_has_the_name(bench: Bench) -> None:
    await bench.card("one", aliases=("gpt", "two", "one"), adapters=("law",))
    await bench.card("two")
    await bench.card("three", aliases=("unserved",))
    for pool in ("one", "two"):
        bench.members.come(pool, "sql")
    assert bench.directory.listed_names() == ["one", "two", "gpt", "sql"]
    assert (bench.directory.get("gpt").name, bench.directory.get("gpt").card.model) == ("gpt", "one")
    assert (bench.directory.get("sql").name, bench.directory.get("sql").adapter) == ("sql", "sql")
