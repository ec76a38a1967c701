"""Batches read and write files of their tenant alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.broker.batches.errors import InputGone
from headrace.broker.batches.stored_files import StoredFiles
from headrace.broker.files.errors import FileUnknown
from headrace.broker.files.store import FileDraft
from tests.unit.broker.batches.test_states import record


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
