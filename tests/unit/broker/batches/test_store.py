"""Records belong to a tenant and change only at the revision that was read."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from headrace.broker.batches.errors import BatchUnknown
from headrace.broker.batches.states import move
from headrace.broker.batches.store import BatchView, batch_key
from headrace.jetstream.errors import RevisionConflict, SubjectError
from tests.support.batch_fakes import SUBJECTS, Scene
from tests.unit.broker.batches.test_states import record


async def test_a_record_is_read_as_it_was_written_by_its_tenant_alone() -> None:
    store, made = Scene().store, record(tenant="a")
    await store.create(made)
    assert (await store.read("a", made.id)).record == made
    for tenant, name in (("b", made.id), ("a", "batch_" + "0" * 32), ("a", "a.b"), ("a", "")):
        with pytest.raises(BatchUnknown):
            await store.read(tenant, name)


async def test_the_first_change_wins() -> None:
    store, made = Scene().store, record()
    await store.create(made)
    read = await store.read("_", made.id)
    await store.replace(read, move(made, "cancelling", now=1.0))
    with pytest.raises(RevisionConflict):
        await store.replace(read, move(made, "in_progress", now=1.0))


async def test_a_record_expires_only_after_its_end() -> None:
    scene, made = Scene(), record("finalizing")
    await scene.store.create(made)
    ttls = scene.messaging.bucket("hr_batches").ttls
    read = await scene.store.replace(await scene.store.read("_", made.id), made)
    assert ttls[batch_key("_", made.id)] is None
    await scene.store.replace(read, move(made, "completed", now=1.0))
    assert ttls[batch_key("_", made.id)] == 100.0


async def test_a_list_has_the_tenants_batches_the_newest_first() -> None:
    store = Scene().store
    made = [record(tenant="a", created=float(n)) for n in range(3)]
    for each in (*made, record(tenant="b")):
        await store.create(each)
    assert [r.created for r in await store.of_tenant("a")] == [2.0, 1.0, 0.0]


async def test_the_view_follows_the_bucket_and_knows_which_batches_are_being_closed() -> None:
    scene, made = Scene(), record("in_progress")
    view = BatchView(scene.messaging, SUBJECTS)  # type: ignore[arg-type]
    running = asyncio.create_task(view.run())
    await scene.store.create(made)
    await view.changed()
    assert [r.id for r in view.records()] == [made.id]
    assert view.closing(made.id) is None
    await scene.store.replace(await scene.store.read("_", made.id), move(made, "cancelling", now=1.0))
    assert view.closing(made.id) == "cancelled"
    assert view.closing("batch_other") is None
    running.cancel()


async def test_a_record_that_cannot_be_read_is_left_out_of_the_view() -> None:
    scene = Scene()
    view = BatchView(scene.messaging, SUBJECTS)  # type: ignore[arg-type]
    await scene.messaging.bucket("hr_batches").create("_.batch_x", msgspec.json.encode({"id": 7}))
    assert not list(view.records())


def test_names_that_are_no_tokens_are_no_keys() -> None:
    with pytest.raises(SubjectError):
        batch_key("a.b", "batch_1")
