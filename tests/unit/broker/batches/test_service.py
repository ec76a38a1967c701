"""Batches are created, read and cancelled by their own tenant."""

from __future__ import annotations

import msgspec
import pytest

from headrace.broker.batches.record import (
    BatchChangeRefused,
    BatchQuotaExceeded,
    BatchRateExceeded,
    BatchRecord,
    BatchUnknown,
    InputGone,
    InputUnfit,
)
from headrace.broker.batches.service import Batches, NewBatch, window_s
from tests.support.batch_fakes import Scene
from tests.unit.broker.batches.test_states import record

NEW = NewBatch(endpoint="/v1/completions", input_file_id="file-1", completion_window="24h", metadata={"a": "b"})


def service(**settings: int) -> tuple[Scene, Batches]:
    scene = Scene(**settings)
    scene.files.stored["_", "file-1"] = b"{}\n"
    return scene, Batches(scene.store, scene.files, scene.settings, me="i-1", wall=lambda: scene.now)


async def test_a_batch_is_stored_to_be_validated_by_its_owner() -> None:
    _, batches = service()
    made = await batches.create("_", NEW)
    assert (made.status, made.owner, made.expires_at) == ("validating", "i-1", 1000 + 86_400)
    assert await batches.get("_", made.id) == made
    assert await batches.list("_") == [made]
    assert await batches.list("other") == []
    with pytest.raises(BatchUnknown):
        await batches.get("other", made.id)


async def test_a_file_that_can_be_no_batch_is_refused_before_anything_is_stored() -> None:
    scene, batches = service(max_file_bytes=3)
    with pytest.raises(InputGone):
        await batches.create("other", NEW)
    with pytest.raises(ValueError, match="completion_window is 'soon'"):
        await batches.create("_", msgspec.structs.replace(NEW, completion_window="soon"))
    scene.files.purpose = "user_data"
    with pytest.raises(InputUnfit, match="purpose is 'user_data'; it must be 'batch'"):
        await batches.create("_", NEW)
    scene.files.purpose = "batch"
    scene.files.stored["_", "file-1"] = b"1234"
    with pytest.raises(InputUnfit, match="has 4 bytes; a batch may have 3"):
        await batches.create("_", NEW)
    assert not await batches.list("_")


async def test_a_tenant_may_have_so_many_batches() -> None:
    _, batches = service(tenant_batches=1)
    await batches.create("_", NEW)
    with pytest.raises(BatchQuotaExceeded):
        await batches.create("_", NEW)


async def test_a_tenant_may_create_so_many_batches_in_an_hour() -> None:
    scene, batches = service(tenant_batches_per_hour=1)
    made = await batches.create("_", NEW)
    await batches.cancel("_", made.id)
    with pytest.raises(BatchRateExceeded) as caught:
        await batches.create("_", NEW)
    assert caught.value.retry_after_s == 3600
    scene.now += 3600
    await batches.create("_", NEW)


async def test_a_process_that_takes_no_batches_creates_them_without_an_owner() -> None:
    _, batches = service()
    batches.disown()
    assert (await batches.create("_", NEW)).owner == ""


async def stored(scene: Scene, made: BatchRecord) -> str:
    await scene.store.create(made)
    return made.id


@pytest.mark.parametrize("status", ["validating", "in_progress"])
async def test_a_batch_that_runs_is_cancelled(status: str) -> None:
    scene, batches = service()
    name = await stored(scene, record(status))  # type: ignore[arg-type]
    assert (await batches.cancel("_", name)).cancelling_at == 1000
    assert (await batches.cancel("_", name)).status == "cancelling"


async def test_a_batch_whose_lines_all_have_results_is_let_be() -> None:
    scene, batches = service()
    assert (await batches.cancel("_", await stored(scene, record("finalizing")))).status == "finalizing"


@pytest.mark.parametrize("status", ["completed", "failed", "expired", "cancelled"])
async def test_an_end_cannot_be_cancelled(status: str) -> None:
    scene, batches = service()
    name = await stored(scene, record(status))  # type: ignore[arg-type]
    with pytest.raises(BatchChangeRefused, match=f"is {status}"):
        await batches.cancel("_", name)


async def test_a_cancel_that_meets_a_change_of_the_owner_starts_over_from_a_new_read() -> None:
    scene, batches = service()
    name = await stored(scene, record("in_progress"))
    read = scene.store.read
    first = True

    async def raced(tenant: str, batch_id: str) -> object:
        nonlocal first
        found = await read(tenant, batch_id)
        if first:
            first = False
            await scene.store.replace(found, msgspec.structs.replace(found.record, cursor=7))
        return found

    scene.store.read = raced  # type: ignore[method-assign, assignment]
    cancelled = await batches.cancel("_", name)
    assert (cancelled.status, cancelled.cursor) == ("cancelling", 7)


@pytest.mark.parametrize(("text", "seconds"), [("24h", 86_400), ("30m", 1800), ("2h", 7200), ("7d", 604_800), ("60s", 60)])
def test_a_window_is_read(text: str, seconds: int) -> None:
    assert window_s(text) == seconds


@pytest.mark.parametrize("text", ["", "24", "h", "59s", "8d", "-1h", "1.5h", "24h ", "24H", "99999999d", "²h"])
def test_another_window_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="completion_window is") as error:
        window_s(text)
    assert repr(text[:40]) in str(error.value)
