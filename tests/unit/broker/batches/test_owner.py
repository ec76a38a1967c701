"""A process carries its own batches on, and those of processes that are gone."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import msgspec
import pytest

from headrace.broker.batches import results, service
from headrace.broker.batches.record import BatchRecord
from headrace.broker.batches.service import BatchOwner
from headrace.broker.batches.store import BatchView, StoredBatch
from tests.support.batch_fakes import SUBJECTS, Scene
from tests.unit.broker.batches.test_states import record


@dataclass
class Leases:
    held: bool = True
    live: set[str] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)

    def ingress_live(self, ingress: str) -> bool:
        return ingress in self.live

    async def ingress_gone(self, ingress: str) -> bool:
        return ingress in self.gone


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "ROUND_S", 0.005)
    monkeypatch.setattr(results, "LOOK_S", 0.005)


async def ends(scene: Scene, leases: Leases, batch_owner: str, *, carried: bool = True) -> tuple[str, str]:
    """Status and owner of a batch without a file, which fails once it is carried on. If it is not, ten rounds are enough."""
    made = record(owner=batch_owner, expires_at=5000)
    await scene.store.create(made)
    view = BatchView(scene.messaging, SUBJECTS)  # type: ignore[arg-type]
    running = asyncio.create_task(BatchOwner(scene.parts(), view, leases, me="me").run())
    async with asyncio.timeout(5):
        for _ in range(10**6 if carried else 10):
            await asyncio.sleep(service.ROUND_S)
            found = (await scene.store.read("_", made.id)).record
            if found.final:
                break
    running.cancel()
    return found.status, found.owner


async def test_its_own_batches_are_carried_on() -> None:
    assert await ends(Scene(), Leases(), "me") == ("failed", "me")


async def test_batches_of_a_process_that_is_gone_are_taken_over() -> None:
    assert await ends(Scene(), Leases(gone={"other"}), "other") == ("failed", "me")


async def test_batches_of_a_process_that_may_live_are_left_alone() -> None:
    assert await ends(Scene(), Leases(), "other", carried=False) == ("validating", "other")
    assert await ends(Scene(), Leases(live={"other"}, gone={"other"}), "other", carried=False) == ("validating", "other")


async def test_without_a_lease_nothing_is_carried_on_or_taken() -> None:
    assert await ends(Scene(), Leases(held=False, gone={"other"}), "other", carried=False) == ("validating", "other")
    assert await ends(Scene(), Leases(held=False), "me", carried=False) == ("validating", "me")


async def test_a_lapse_stops_what_runs() -> None:
    scene, leases = Scene(), Leases()
    scene.files.stored["_", "file-1"] = b""
    blocked = asyncio.Event()

    async def facts(*_: object, **__: object) -> object:
        blocked.set()
        return await asyncio.Future()

    scene.store.replace = facts  # type: ignore[method-assign, assignment]
    await scene.store.create(record(owner="me", expires_at=5000))
    view = BatchView(scene.messaging, SUBJECTS)  # type: ignore[arg-type]
    carrying = BatchOwner(scene.parts(), view, leases, me="me")
    running = asyncio.create_task(carrying.run())
    await blocked.wait()
    assert len(carrying._runs) == 1
    leases.held = False
    await asyncio.sleep(0.05)
    assert not carrying._runs
    running.cancel()


async def test_a_batch_that_was_given_up_is_taken_without_a_look_at_leases() -> None:
    assert await ends(Scene(), Leases(live={""}), "") == ("failed", "me")


class Blocking:
    """An owner whose runs never get on; `cancelled` counts them once they were stopped."""

    def __init__(self, scene: Scene, *batches: BatchRecord) -> None:
        self.scene, self.batches, self.began, self.cancelled = scene, batches, 0, 0
        scene.store.read, self._read = self.read, scene.store.read  # type: ignore[method-assign]
        self.owner = BatchOwner(scene.parts(), BatchView(scene.messaging, SUBJECTS), Leases(), me="me")  # type: ignore[arg-type]

    async def read(self, tenant: str, batch_id: str) -> StoredBatch:
        if asyncio.current_task() is not self.reader:
            self.began += 1
            try:
                await asyncio.Future()
            finally:
                self.cancelled += 1
        return await self._read(tenant, batch_id)

    async def drained(self) -> list[str]:
        """Drain once all own batches are carried, and return the owners of all batches."""
        self.reader = asyncio.current_task()
        for batch in self.batches:
            await self.scene.store.create(batch)
        running = asyncio.create_task(self.owner.run())
        async with asyncio.timeout(5):
            while self.began < sum(batch.owner == "me" and not batch.final for batch in self.batches):
                await asyncio.sleep(0.001)
            await self.owner.drain(5)
            for _ in range(10):  # none of them is taken again
                await asyncio.sleep(service.ROUND_S)
        running.cancel()
        return [(await self._read(batch.tenant, batch.id)).record.owner for batch in self.batches]


async def test_a_drain_gives_up_what_is_carried_at_once_and_takes_nothing_more() -> None:
    one, two = record("in_progress", owner="me"), record(owner="me")
    blocking = Blocking(Scene(), one, two, record(owner="other"), record("completed", owner="me"))
    assert await blocking.drained() == ["", "", "other", "me"]
    assert blocking.cancelled == 2


async def test_a_drain_leaves_a_batch_that_another_process_has_taken_meanwhile() -> None:
    scene, made = Scene(), record("in_progress", owner="me")
    blocking = Blocking(scene, made)
    read, replaced = blocking._read, scene.store.replace
    tries = 0

    async def raced(stored: StoredBatch, changed: BatchRecord) -> StoredBatch:
        nonlocal tries
        tries += 1
        if tries == 1:
            taken = await read(made.tenant, made.id)
            await replaced(taken, msgspec.structs.replace(taken.record, owner="other"))
        return await replaced(stored, changed)

    scene.store.replace = raced  # type: ignore[method-assign]
    assert await blocking.drained() == ["other"]
    assert tries == 1
