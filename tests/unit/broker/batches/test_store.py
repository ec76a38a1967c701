"""Records belong to a tenant and change only at the revision that was read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from headrace.broker.batches.record import BatchUnknown, InputGone, move
from headrace.broker.batches.store import BatchView, StoredFiles, batch_key
from headrace.broker.files.errors import FileUnknown
from headrace.broker.files.store import FileDraft
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


class Store:
    """The part of the store of files that batches use."""

    def __init__(self) -> None:
        self.drafts: list[FileDraft] = []
        self.deleted: list[str] = []

    async def get(self, file_id: str, tenant: str) -> Any:
        if (file_id, tenant) != ("file-1", "a"):
            raise FileUnknown(file_id)
        return SimpleNamespace(id=file_id, bytes=6, purpose="batch")

    async def read(self, record: Any, *, offset: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        yield b"abcdef"[offset : None if length is None else offset + length]

    async def create(self, draft: FileDraft, data: AsyncIterator[bytes]) -> None:
        self.drafts.append(draft)
        assert b"".join([piece async for piece in data]) == b"xy"

    async def delete(self, file_id: str, tenant: str) -> None:
        await self.get(file_id, tenant)
        self.deleted.append(file_id)


async def pieces() -> AsyncIterator[bytes]:
    yield b"x"
    yield b"y"


def files(store: Store, **options: Any) -> StoredFiles:
    return StoredFiles(store, **options)  # type: ignore[arg-type]


async def test_a_file_and_a_part_of_it_are_read() -> None:
    stored = files(Store())
    assert (await stored.facts("a", "file-1")).size == 6
    assert [piece async for piece in stored.read("a", "file-1", offset=2, length=3)] == [b"cde"]


async def test_a_file_of_another_tenant_is_gone() -> None:
    stored = files(Store())
    with pytest.raises(InputGone, match="file-1"):
        await stored.facts("b", "file-1")
    with pytest.raises(InputGone):
        [piece async for piece in stored.read("b", "file-1")]
    await stored.delete("b", "file-1")


@pytest.mark.parametrize(("asked", "life_s"), [(None, 7200), (3600, 3600)])
async def test_a_result_file_has_the_id_of_its_try_and_the_life_that_was_asked_for(asked: int | None, life_s: int) -> None:
    store = Store()
    batch = record(tenant="a", output_expires_s=asked)
    await files(store, output_ttl_s=7200.0).write(batch, "file-9", "out.jsonl", pieces())
    [draft] = store.drafts
    assert (draft.file_id, draft.tenant, draft.purpose, draft.life_s) == ("file-9", "a", "batch_output", life_s)
    assert draft.origin == batch.id
