"""The routes over uploads, without a socket."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.frontend.fakes import Call
from tests.unit.frontend.files.test_file_routes import TYPE, Bed


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


@pytest.mark.parametrize("path", ["/parts", "/complete", "/cancel"])
async def test_an_upload_of_another_tenant_is_a_404(path: str) -> None:
    bed = Bed()
    name = (await send(bed, "", NEW)).json()["id"]
    for upload in (name, "upload_never"):
        call = (
            await add(bed, upload, b"abc", tenant="other")
            if path == "/parts"
            else await send(bed, f"/{upload}{path}", {"part_ids": ["part_1"]}, tenant="other")
        )
        assert (call.status, call.error["code"]) == (404, "upload_not_found")


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
