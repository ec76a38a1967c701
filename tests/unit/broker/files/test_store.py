"""Files of tenants: records, contents, limits, expiry."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headrace.broker.files import store
from headrace.broker.files.errors import FileInvalid, FileNotStored, FileQuotaExceeded, FileTooLarge, FileUnknown
from headrace.broker.files.records import DAY_S, FileLimits, is_file_id
from headrace.broker.files.store import LONGEST_WRITE_S, RESERVED_S, FileDraft
from headrace.jetstream.errors import DiskFull, NotConnected
from tests.unit.broker.files.bed import Bed, pieces


async def test_a_file_is_read_as_it_was_written_and_in_ranges() -> None:
    bed = Bed()
    record = await bed.add(b"0123456789abcdef")
    assert await bed.files.get(record.id, "t") == record
    assert (record.bytes, record.sha256) == (16, hashlib.sha256(b"0123456789abcdef").hexdigest())
    assert await bed.content(record) == b"0123456789abcdef"
    assert await bed.content(record, offset=3, length=5) == b"34567"
    await bed.files.delete(record.id, "t")
    with pytest.raises(FileUnknown, match=record.id):
        await bed.files.get(record.id, "t")
    with pytest.raises(FileUnknown):
        await bed.content(record)
    assert bed.objects.names == bed.records.keys == []


async def test_a_read_that_has_begun_goes_on_after_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "READ_AGAIN_S", 0.0)
    bed = Bed()
    record = await bed.add(b"0123456789abcdef")
    chunks, left = bed.objects.chunks, [3, 0, 0, 4]  # bytes before each outage

    async def broken(name: str, **span: Any) -> AsyncIterator[bytes]:
        async for chunk in chunks(name, **span):
            if not left:
                yield chunk
                continue
            if most := left.pop(0):
                yield chunk[:most]
            raise NotConnected("away")

    monkeypatch.setattr(bed.objects, "chunks", broken)
    assert await bed.content(record, offset=2) == b"23456789abcdef"
    left += [4, 0]
    assert await bed.content(record, offset=2, length=9) == b"23456789a"
    left += [0]
    with pytest.raises(NotConnected):  # nothing was read: its caller has its own way
        await bed.content(record)
    monkeypatch.setattr(store, "LONGEST_OUTAGE_S", -1.0)
    left += [4]
    with pytest.raises(NotConnected):
        await bed.content(record)


async def test_files_of_another_tenant_do_not_exist() -> None:
    bed = Bed()
    record = await bed.add()
    for call in (bed.files.get, bed.files.delete):
        with pytest.raises(FileUnknown):
            await call(record.id, "other")
    assert (await bed.files.page("other")).files == []
    assert await bed.files.get(record.id, "t") == record


@pytest.mark.parametrize("file_id", ["", "file-", "file-*", "file->", "upload_1", "file-a.b", "file-" + "a" * 59, "x"])
async def test_what_cannot_be_an_id_is_no_file(file_id: str) -> None:
    assert not is_file_id(file_id)
    with pytest.raises(FileUnknown):
        await Bed().files.get(file_id, "t")


async def test_a_file_that_is_left_unfinished_leaves_nothing() -> None:
    bed = Bed()
    async with bed.files.writer(FileDraft(tenant="t", filename="f", purpose="batch")) as writer:
        await writer.write(b"some")
        assert len(bed.records.keys) == 1
        assert (await bed.files.page("t")).files == []
        with pytest.raises(FileUnknown):
            await bed.files.get(writer.id, "t")
    assert bed.objects.names == bed.records.keys == []
    assert bed.objects.open_writers == 0


async def test_a_store_that_is_full_leaves_nothing() -> None:
    bed = Bed()
    bed.objects.broken = DiskFull()
    with pytest.raises(DiskFull):
        await bed.add()
    assert bed.records.keys == []


async def test_a_file_whose_reservation_was_lost_is_not_stored() -> None:
    bed = Bed()
    async with bed.files.writer(FileDraft(tenant="t", filename="f", purpose="batch")) as writer:
        await bed.records.delete(bed.records.keys[0])
        with pytest.raises(FileNotStored, match="reservation"):
            await writer.commit()
        assert len(bed.objects.names) == 1
    assert bed.objects.names == bed.records.keys == []


async def test_a_file_has_to_be_complete_within_an_hour() -> None:
    bed = Bed()
    async with bed.files.writer(FileDraft(tenant="t", filename="f", purpose="batch")) as writer:
        await writer.write(b"some")
        bed.clock.at += LONGEST_WRITE_S + 1
        with pytest.raises(FileNotStored, match="3600 s"):
            await writer.write(b"more")
        with pytest.raises(FileNotStored, match="3600 s"):
            await writer.commit()


@pytest.mark.parametrize(("purpose", "most"), [("batch", 50), ("user_data", 100), ("batch_output", None)])
async def test_a_file_may_have_as_many_bytes_as_its_purpose_allows(purpose: str, most: int | None) -> None:
    bed = Bed()
    await bed.add(bytes(most or 500), purpose=purpose)
    if most is not None:
        with pytest.raises(FileTooLarge, match=f"{most}"):
            await bed.add(bytes(most + 1), purpose=purpose)
    assert len(bed.records.keys) == len(bed.objects.names) == 1


async def test_a_purpose_that_comes_after_the_content_counts_too() -> None:
    bed = Bed()
    async with bed.files.writer(FileDraft(tenant="t", filename="f")) as writer:
        await writer.write(bytes(51))
        with pytest.raises(FileTooLarge, match="50"):
            await writer.commit(purpose="batch")
    assert bed.records.keys == []
    async with bed.files.writer(FileDraft(tenant="t", filename="f")) as writer:
        await writer.write(bytes(50))
        record = await writer.commit(purpose="batch", life_s=3600)
    assert (record.purpose, record.expires) == ("batch", record.created + 3600)


async def test_an_announced_size_is_refused_before_anything_is_stored() -> None:
    bed = Bed(FileLimits(file_bytes=10_000_000, batch_bytes=50, tenant_bytes=1_000_000))
    for purpose, announced, error in (("batch", 100_000, FileTooLarge), ("user_data", 2_000_000, FileQuotaExceeded)):
        with pytest.raises(error):
            await bed.add(purpose=purpose, announced=announced)
    assert bed.records.keys == []
    assert (await bed.add(purpose="batch", announced=100)).bytes == 4  # a form is larger than the file in it


async def test_a_tenant_has_a_number_of_files_and_of_bytes() -> None:
    bed = Bed()
    first = await bed.add(bytes(100))
    await bed.add(bytes(60))
    with pytest.raises(FileQuotaExceeded, match="200"):
        await bed.add(bytes(41))
    await bed.add(bytes(40))
    with pytest.raises(FileQuotaExceeded, match="200"):
        await bed.add(b"")
    await bed.add(bytes(100), tenant="other")
    await bed.files.delete(first.id, "t")
    for _ in range(2):
        await bed.add(b"1")
    with pytest.raises(FileQuotaExceeded, match="4 files"):
        await bed.add(b"1")
    made = await bed.add(bytes(300), purpose="batch_output")  # the server's own are never refused
    assert (await bed.files.get(made.id, "t")).bytes == 300


async def test_two_files_that_fit_only_one_at_a_time_never_both_pass() -> None:
    bed = Bed()
    outcomes = []

    async def add() -> None:
        try:
            async with bed.files.writer(FileDraft(tenant="t", filename="f", purpose="user_data", announced=90)) as writer:
                await asyncio.sleep(0)
                await writer.write(bytes(90))
                await asyncio.sleep(0)
                outcomes.append(await writer.commit())
        except FileQuotaExceeded as error:
            outcomes.append(error)

    await asyncio.gather(*(add() for _ in range(3)))
    assert sum(not isinstance(one, Exception) for one in outcomes) <= 2
    assert sum(record.bytes for record in (await bed.files.page("t")).files) <= 200


async def test_files_expire_by_their_purpose_or_as_asked() -> None:
    bed = Bed()
    batch, asked, kept = await bed.add(purpose="batch"), await bed.add(life_s=3600), await bed.add()
    assert (batch.expires, asked.expires, kept.expires) == (batch.created + 30 * DAY_S, asked.created + 3600, None)
    bed.clock.at += 3600
    assert {record.id for record in (await bed.files.page("t")).files} == {batch.id, kept.id}
    with pytest.raises(FileUnknown):
        await bed.files.get(asked.id, "t")
    bed.clock.at += 30 * DAY_S
    assert bed.objects.names == [kept.object_name]


async def test_a_list_is_ordered_filtered_and_paged() -> None:
    bed = Bed(FileLimits())
    first, second, third = [await bed.add(purpose=purpose) for purpose in ("batch", "vision", "batch")]
    newest = await bed.files.page("t")
    assert ([record.id for record in newest.files], newest.more) == ([third.id, second.id, first.id], False)
    page = await bed.files.page("t", limit=1, ascending=True, after=first.id)
    assert ([record.id for record in page.files], page.more) == ([second.id], True)
    assert [record.id for record in (await bed.files.page("t", purpose="batch")).files] == [third.id, first.id]
    with pytest.raises(FileInvalid, match="file-x") as caught:
        await bed.files.page("t", after="file-x")
    assert caught.value.param == "after"


async def test_contents_without_a_record_are_swept_once_no_write_can_own_them() -> None:
    bed = Bed()
    kept = await bed.add()
    gone = await bed.add()
    await bed.records.delete(gone.key)
    await bed.objects.put("t/upload_1/part_1", b"a part expires by itself")
    assert await bed.sweeper.sweep() == 0
    bed.clock.at += 2 * LONGEST_WRITE_S + 1
    assert await bed.sweeper.sweep() == 1
    assert bed.objects.names == sorted([kept.object_name, "t/upload_1/part_1"])
    assert bed.objects.swept == 2  # chunks, too


async def test_a_sweep_reads_the_record_before_it_removes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list may come from a server that lags behind."""
    bed = Bed()
    kept = await bed.add()
    bed.clock.at += 2 * LONGEST_WRITE_S + 1

    async def stale(pattern: str = ">") -> list[object]:
        return []

    monkeypatch.setattr(bed.records, "entries", stale)
    assert await bed.sweeper.sweep() == 0
    assert bed.objects.names == [kept.object_name]


async def test_a_stream_that_fails_leaves_nothing() -> None:
    bed = Bed()

    async def failing():  # type: ignore[no-untyped-def]
        yield os.urandom(10)
        raise LookupError

    with pytest.raises(LookupError):
        await bed.files.create(FileDraft(tenant="t", filename="f", purpose="batch"), failing())
    assert bed.objects.names == bed.records.keys == []
    assert (await bed.files.create(FileDraft(tenant="t", filename="f", purpose="batch"), pieces())).bytes == 0


async def test_a_writer_that_died_reserves_nothing_for_ever() -> None:
    bed = Bed()
    dead = bed.files.writer(FileDraft(tenant="t", filename="f", purpose="user_data", announced=200))
    await dead.__aenter__()
    with pytest.raises(FileQuotaExceeded):
        await bed.add()
    bed.clock.at += RESERVED_S
    assert (await bed.add()).bytes == 4
