"""What a directory knows, offers and lists of the models whose cards come, are deleted, or vanish."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable

import pytest

from headrace.broker.codec import encode
from headrace.broker.errors import BrokerUnavailable, UnknownModel
from headrace.broker.messages.members import WorkerMember
from headrace.broker.models import directory as module
from headrace.broker.models.cards import CardFile, ModelCard
from headrace.broker.models.directory import LATELY_S, ModelDirectory, ServedPools
from headrace.jetstream.errors import ObjectNotFound
from headrace.jetstream.ports import Change, StoredObject
from headrace.jetstream.subjects import Subjects, pool_id

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

    def answerable(self, pool: str, adapter: str | None = None) -> bool:
        return bool(self.having(pool, adapter))

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
        self.objects_here: dict[str, bytes] = {}

    def bucket(self, _name: str) -> FakeStore:
        return self

    def objects(self, _name: str) -> FakeStore:
        return self

    def watch(self, on_change: Callable[[Change], None]) -> FakeStore:
        self.report = on_change
        return self

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def info(self, name: str) -> StoredObject:
        if name not in self.objects_here:
            raise ObjectNotFound(name)
        return StoredObject(name, len(self.objects_here[name]), "", 0.0)

    async def get(self, name: str) -> bytes:
        return self.objects_here[name]

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


def file_of(data: bytes) -> CardFile:
    digest = hashlib.sha256(data).hexdigest()
    return CardFile(digest, digest, len(data))


def with_file(pool: str, file: CardFile, **fields: object) -> Change:
    card = ModelCard(**{"model": pool, "pool": pool, "context_length": 64, "block_size": 16, **fields}, files={"f": file})  # type: ignore[arg-type]
    return Change(pool, encode(card), 1)


async def until(met: Callable[[], bool]) -> None:
    async with asyncio.timeout(5.0):
        while not met():
            await asyncio.sleep(0.002)


async def test_a_card_whose_file_is_missing_keeps_no_other_model_from_being_known(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FETCH_RETRY_S", 0.01)
    bench.store.report(with_file("a", file_of(b"lost")))
    await bench.card("b")
    assert bench.knows("b")
    with pytest.raises(BrokerUnavailable):
        bench.directory.get("a")
    file = file_of(b"lost")
    bench.store.objects_here[file.object] = b"lost"
    await until(lambda: "a" in bench.directory.names())
    assert bench.directory.get("a").files == {"f": b"lost"}


async def test_a_card_that_is_deleted_while_its_file_is_missing_is_forgotten(bench: Bench) -> None:
    bench.store.report(with_file("a", file_of(b"lost")))
    await bench.directory.ready(5.0)
    await bench.gone("a", "delete")
    assert not bench.knows("a")


async def test_a_file_that_is_not_what_its_card_says_is_not_used(bench: Bench) -> None:
    bench.store.objects_here = {"forged": b"forged", "right": b"right"}
    right = hashlib.sha256(b"right").hexdigest()
    for n, file in enumerate(
        (
            CardFile("forged", right, 6),
            CardFile("forged", "f" * 64, 6),
            CardFile("right", right, 99),
            CardFile("right", right, 2**40),
        )
    ):
        bench.store.report(with_file(f"bad{n}", file))
    bench.store.report(with_file("good", CardFile("right", right, 5)))
    await bench.directory.ready(5.0)
    await until(lambda: bool(bench.directory.names()))
    assert bench.directory.names() == ["good"]
    assert bench.directory.get("good").files == {"f": b"right"}


async def test_a_card_under_another_key_than_its_pool_is_ignored(bench: Bench) -> None:
    file = file_of(b"there")
    bench.store.objects_here[file.object] = b"there"
    bench.store.report(Change("yy", with_file("other", file).value, 1))
    await bench.card("b")
    assert bench.directory.names() == ["b"], "not for want of its file"


async def test_a_card_of_another_pool_cannot_take_the_name_of_a_model(bench: Bench) -> None:
    mine = pool_id("sim", "default")
    card = ModelCard(model="sim", pool=mine, context_length=64, block_size=16, created=100.0)
    for pool in ("aa-rogue", "zz-rogue"):
        rogue = ModelCard(model="sim", pool=pool, context_length=64, block_size=16, aliases=["sim"], created=1.0)
        bench.store.report(Change(pool, encode(rogue), 1))
        await bench.directory.ready(5.0)
        bench.members.come(pool)
    bench.store.report(Change(mine, encode(card), 1))
    await bench.directory.ready(5.0)
    bench.members.come(mine)
    assert bench.directory.get("sim").card.pool == mine, "the rogue cards were there first, and are older"


async def test_the_name_of_a_model_without_workers_comes_after_an_alias_of_one_with_them(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.card("old")
    await bench.card("new", aliases=("old",))
    assert bench.directory.get("old").card.pool == "old", "nobody serves, so the model's name wins"
    bench.members.come("new")
    assert bench.directory.get("old").card.pool == "new"
    assert bench.directory.listed_names() == ["new", "old"]
    bench.members.come("old")
    assert bench.directory.get("old").card.pool == "old"
    bench.members.go("old")
    assert bench.directory.get("old").card.pool == "old", "its workers may be restarting"
    monkeypatch.setattr(module, "LOST_CHECK_S", 0.01)
    monkeypatch.setattr(module, "LATELY_S", 0.0)
    looking = asyncio.create_task(bench.directory._forget_lost())
    await until(lambda: bench.directory.get("old").card.pool == "new")
    looking.cancel()


async def test_of_two_namespaces_the_one_that_has_a_name_keeps_it(bench: Bench) -> None:
    first, second = pool_id("sim", "blue"), pool_id("sim", "red")
    for pool, namespace, created in ((first, "blue", 100.0), (second, "red", 1.0)):
        card = ModelCard(model="sim", pool=pool, namespace=namespace, context_length=64, block_size=16, created=created)
        bench.store.report(Change(pool, encode(card), 1))
        await bench.directory.ready(5.0)
        bench.members.come(pool)
    assert bench.directory.get("sim").card.pool == first
    await bench.gone(first, "delete")
    assert bench.directory.get("sim").card.pool == second


class ServedPoolsFakeMembers:
    def __init__(self, *serving: str) -> None:
        self.serving = set(serving)

    def serving_workers(self, pool: str) -> list[str]:
        return ["w"] if pool in self.serving else []


def test_a_pool_is_served_while_it_has_a_worker_and_a_while_after_the_last_one() -> None:
    members = ServedPoolsFakeMembers("p")
    served = ServedPools(members)  # type: ignore[arg-type]  # a stand-in with the method that is called
    served.refresh(["p", "q"], 0.0)
    assert served.lately("p", 10_000.0)  # however long ago the leases last changed
    assert not served.lately("q", 0.0)
    members.serving.clear()
    served.refresh(["p", "q"], 10_000.0)
    assert served.lately("p", 10_000.0 + LATELY_S - 1)
    assert not served.lately("p", 10_000.0 + LATELY_S)
    served.refresh(["p", "q"], 20_000.0)
    members.serving.add("p")
    served.refresh(["p", "q"], 20_001.0)
    assert served.lately("p", 99_999.0)
