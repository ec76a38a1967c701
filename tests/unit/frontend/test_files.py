"""Ranges of a body."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.frontend.files import RangeUnsatisfiable, Span, span_of
from tests.support.frontend.fakes import Call
from tests.unit.frontend.test_file_routes import TYPE, Bed


@pytest.mark.parametrize(
    ("header", "span"),
    [
        ("bytes=0-4", Span(0, 5, 10)),
        ("bytes=3-", Span(3, 7, 10)),
        ("bytes=-4", Span(6, 4, 10)),
        ("bytes=-40", Span(0, 10, 10)),
        ("Bytes = 2 - 99", Span(2, 8, 10)),
        ("bytes=0-0,5-6", None),
        ("bytes=5-2", None),
        ("bytes=-", None),
        ("lines=1-2", None),
        ("", None),
        (None, None),
    ],
)
def test_one_range_is_understood_and_anything_else_is_the_whole(header: str | None, span: Span | None) -> None:
    assert span_of(header, 10) == span


@pytest.mark.parametrize(
    ("header", "total"), [("bytes=10-", 10), ("bytes=10-12", 10), ("bytes=-0", 10), ("bytes=0-", 0), ("bytes=-1", 0)]
)
def test_a_range_behind_the_end_is_an_error(header: str, total: int) -> None:
    with pytest.raises(RangeUnsatisfiable):
        span_of(header, total)


@given(st.integers(0, 60), st.integers(0, 60), st.integers(1, 50))
def test_a_span_is_what_the_header_says(first: int, last: int, total: int) -> None:
    data = bytes(range(total))
    if first >= total:
        return
    span = span_of(f"bytes={first}-{last}", total)
    if last < first:
        assert span is None
        return
    assert span is not None
    assert data[span.offset : span.offset + span.length] == data[first : last + 1]
    assert span.header == f"bytes {first}-{min(last, total - 1)}/{total}"


async def send(bed: Bed, path: str, body: Any = None, *, tenant: str = "t", kind: str = "application/json") -> Call:
    bed.messaging.clock.at += 1
    headers = {"content-type": kind, "x-headrace-tenant": tenant}
    return await Call(bed.app, f"/v1/uploads{path}", body, headers=headers).run()


async def add(bed: Bed, upload: str, content: bytes, **more: Any) -> Call:
    body = b'--X\r\nContent-Disposition: form-data; name="data"; filename="p"\r\n\r\n' + content + b"\r\n--X--\r\n"
    return await send(bed, f"/{upload}/parts", body, kind=TYPE, **more)


NEW = {"bytes": 6, "filename": "a.jsonl", "mime_type": "text/jsonl", "purpose": "batch"}


async def test_an_upload_is_opened_filled_and_completed() -> None:
    bed = Bed()
    opened = (await send(bed, "", {**NEW, "expires_after": {"anchor": "created_at", "seconds": 3600}})).json()
    assert opened == {
        "id": opened["id"],
        "object": "upload",
        "bytes": 6,
        "created_at": 1_800_000_001,
        "expires_at": 1_800_003_601,
        "filename": "a.jsonl",
        "purpose": "batch",
        "status": "pending",
        "file": None,
    }
    second, first = (await add(bed, opened["id"], b"def")).json(), (await add(bed, opened["id"], b"abc")).json()
    assert second == {
        "id": second["id"],
        "object": "upload.part",
        "created_at": 1_800_000_002,
        "upload_id": opened["id"],
    }
    done = (await send(bed, f"/{opened['id']}/complete", {"part_ids": [first["id"], second["id"]]})).json()
    assert (done["status"], done["file"]["bytes"], done["file"]["filename"]) == ("completed", 6, "a.jsonl")
    assert done["file"]["expires_at"] == done["file"]["created_at"] + 3600
    assert (await bed.call("GET", f"/v1/files/{done['file']['id']}/content")).body == b"abcdef"


async def test_a_cancelled_upload_takes_no_part() -> None:
    bed = Bed()
    name = (await send(bed, "", NEW)).json()["id"]
    assert (await send(bed, f"/{name}/cancel")).json()["status"] == "cancelled"
    late = await add(bed, name, b"abc")
    assert (late.status, late.error["code"]) == (400, "upload_closed")
    assert bed.names == []


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"bytes": -1}, "bytes"),
        ({"purpose": "x"}, "purpose"),
        ({"filename": ""}, "file"),
        ({"expires_after": {"anchor": "created_at", "seconds": 1}}, "expires_after.seconds"),
        ({"mime_type": None}, "mime_type"),
    ],
)
async def test_a_wrong_parameter_is_named(change: dict[str, Any], param: str) -> None:
    bed = Bed()
    call = await send(bed, "", {**NEW, **change})
    assert (call.status, call.error["param"]) == (400, param)
    assert bed.keys == []


async def test_a_part_without_content_or_too_large_is_refused_and_not_kept() -> None:
    bed = Bed()
    name = (await send(bed, "", NEW)).json()["id"]
    missing = await send(bed, f"/{name}/parts", b"--X--\r\n", kind=TYPE)
    assert missing.status == 400
    large = await add(bed, name, bytes(13))
    assert (large.status, large.error["code"]) == (413, "file_too_large")
    assert bed.names == []
    assert len(bed.keys) == 1
