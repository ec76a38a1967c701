"""A process carries its own batches on, and those of processes that are gone."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from headrace.broker.batches import batch_run, owner
from headrace.broker.batches.owner import BatchOwner
from headrace.broker.batches.store import BatchView
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
    monkeypatch.setattr(owner, "ROUND_S", 0.005)
    monkeypatch.setattr(batch_run, "LOOK_S", 0.005)


async def ends(scene: Scene, leases: Leases, batch_owner: str, *, carried: bool = True) -> tuple[str, str]:
    """Status and owner of a batch without a file, which fails once it is carried on. If it is not, ten rounds are enough."""
    made = record(owner=batch_owner, expires_at=5000)
    await scene.store.create(made)
    view = BatchView(scene.messaging, SUBJECTS)  # type: ignore[arg-type]
    running = asyncio.create_task(BatchOwner(scene.parts(), view, leases, me="me").run())
    async with asyncio.timeout(5):
        for _ in range(10**6 if carried else 10):
            await asyncio.sleep(owner.ROUND_S)
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
