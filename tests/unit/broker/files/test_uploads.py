"""Files that are uploaded in parts."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from headrace.broker.files.errors import FileInvalid, FileQuotaExceeded, FileTooLarge, UploadClosed, UploadUnknown
from headrace.broker.files.records import UPLOAD_LIFE_S, UploadRecord
from headrace.broker.files.store import FileDraft
from tests.unit.broker.files.bed import Bed, pieces


async def opened(bed: Bed, size: int, *, tenant: str = "t", **more: Any) -> UploadRecord:
    draft = FileDraft(tenant=tenant, filename="f.jsonl", purpose="batch", **more)
    return await bed.uploads.create(draft, size=size, mime_type="text/jsonl")


async def part(bed: Bed, upload: UploadRecord, data: bytes) -> str:
    bed.clock.at += 1
    return (await bed.uploads.add_part(upload, pieces(data[:2], data[2:]))).id


async def test_parts_are_joined_in_the_order_given() -> None:
    bed = Bed()
    upload = await opened(bed, 9, life_s=7200)
    ids = [await part(bed, upload, text) for text in (b"ghi", b"unused", b"abc", b"def")]
    done, file = await bed.uploads.complete(
        upload.id,
        "t",
        [ids[2], ids[3], ids[0]],
        md5=hashlib.md5(b"abcdefghi").hexdigest().upper(),  # noqa: S324  # as the API has it
    )
    assert (done.status, done.file_id, file.bytes, file.filename) == ("completed", file.id, 9, "f.jsonl")
    assert await bed.content(await bed.files.get(file.id, "t")) == b"abcdefghi"
    assert file.expires == file.created + 7200
    assert bed.objects.names == [file.object_name]
    assert await bed.uploads.complete(upload.id, "t", ids) == (done, file)  # a client may repeat the call
    for late in (bed.uploads.cancel(upload.id, "t"), bed.uploads.open(upload.id, "t")):
        with pytest.raises(UploadClosed, match="completed"):
            await late


@pytest.mark.parametrize(
    ("parts", "more", "param"),
    [
        ((0,), {}, "part_ids"),
        ((0, 1, 1), {}, "part_ids"),
        ((), {}, "part_ids"),
        ((0, 1), {"md5": "0" * 32}, "md5"),
    ],
)
async def test_other_bytes_than_announced_complete_nothing(parts: tuple[int, ...], more: dict[str, str], param: str) -> None:
    bed = Bed()
    upload = await opened(bed, 6)
    ids = [await part(bed, upload, text) for text in (b"abc", b"def")]
    with pytest.raises(FileInvalid) as caught:
        await bed.uploads.complete(upload.id, "t", [ids[number] for number in parts], **more)
    assert caught.value.param == param
    assert (await bed.files.page("t")).files == []
    assert (await bed.uploads.complete(upload.id, "t", ids))[1].bytes == 6


@pytest.mark.parametrize("name", ["part_nope", "part_*", "", "file-1"])
async def test_an_unknown_part_is_named(name: str) -> None:
    bed = Bed()
    upload = await opened(bed, 3)
    await part(bed, upload, b"abc")
    with pytest.raises(FileInvalid, match="no part"):
        await bed.uploads.complete(upload.id, "t", [name])


async def test_uploads_and_parts_of_others_do_not_exist() -> None:
    bed = Bed()
    mine, theirs = await opened(bed, 3), await opened(bed, 3, tenant="other")
    taken = await part(bed, theirs, b"abc")
    for call in (bed.uploads.get, bed.uploads.open, bed.uploads.cancel):
        with pytest.raises(UploadUnknown):
            await call(theirs.id, "t")
    with pytest.raises(UploadUnknown):
        await bed.uploads.complete(theirs.id, "t", [taken])
    with pytest.raises(FileInvalid, match="no part"):
        await bed.uploads.complete(mine.id, "t", [taken])


async def test_a_cancelled_upload_drops_its_parts() -> None:
    bed = Bed()
    upload = await opened(bed, 3)
    taken = await part(bed, upload, b"abc")
    done = await bed.uploads.cancel(upload.id, "t")
    assert done.status == "cancelled"
    assert await bed.uploads.cancel(upload.id, "t") == done
    assert bed.objects.names == []
    with pytest.raises(UploadClosed, match="cancelled"):
        await bed.uploads.complete(upload.id, "t", [taken])


async def test_an_upload_expires_after_an_hour() -> None:
    bed = Bed()
    upload = await opened(bed, 3)
    taken = await part(bed, upload, b"abc")
    bed.clock.at = upload.created + UPLOAD_LIFE_S
    assert (await bed.uploads.get(upload.id, "t")).status_at(bed.clock()) == "expired"
    for late in (bed.uploads.open(upload.id, "t"), bed.uploads.complete(upload.id, "t", [taken])):
        with pytest.raises(UploadClosed, match="expired"):
            await late
    with pytest.raises(UploadClosed, match="expired"):
        await bed.uploads.cancel(upload.id, "t")
    bed.clock.at += UPLOAD_LIFE_S
    assert bed.objects.names == []


async def test_a_part_that_ends_after_its_upload_is_not_kept() -> None:
    bed = Bed()
    upload = await opened(bed, 6)

    async def slow():  # type: ignore[no-untyped-def]
        yield b"abc"
        await bed.uploads.cancel(upload.id, "t")

    with pytest.raises(UploadClosed):
        await bed.uploads.add_part(upload, slow())
    assert bed.objects.names == []


async def test_a_completion_that_comes_second_makes_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    bed = Bed()
    upload = await opened(bed, 3)
    taken = await part(bed, upload, b"abc")
    joined = bed.uploads._joined

    async def cancelled_meanwhile(parts: Any) -> Any:
        async for piece in joined(parts):
            yield piece
        await bed.uploads.cancel(upload.id, "t")

    monkeypatch.setattr(bed.uploads, "_joined", cancelled_meanwhile)
    with pytest.raises(UploadClosed, match="cancelled"):
        await bed.uploads.complete(upload.id, "t", [taken])
    assert (await bed.files.page("t")).files == []
    assert bed.objects.names == []


async def test_uploads_have_limits_and_reserve_their_bytes() -> None:
    bed = Bed()
    with pytest.raises(FileTooLarge):
        await opened(bed, 51)
    uploads = [await opened(bed, 50) for _ in range(4)]
    with pytest.raises(FileQuotaExceeded):
        await bed.add(b"1")
    with pytest.raises(FileQuotaExceeded):
        await opened(bed, 1)
    assert len(bed.records.keys) == 4
    with pytest.raises(FileTooLarge, match="40"):
        await part(bed, uploads[0], bytes(41))
    ids = [await part(bed, uploads[0], bytes(25)) for _ in range(4)]
    with pytest.raises(FileTooLarge, match="twice"):
        await part(bed, uploads[0], b"1")
    _, file = await bed.uploads.complete(uploads[0].id, "t", ids[:2])
    assert file.bytes == 50  # its bytes were reserved, although no others are left
    small = await opened(bed, 40, tenant="other")
    for _ in range(5):
        await part(bed, small, b"1")
    with pytest.raises(FileTooLarge, match="5 parts"):
        await part(bed, small, b"1")
