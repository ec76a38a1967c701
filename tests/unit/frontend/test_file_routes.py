"""The routes over files, without a socket."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.frontend.fakes import Call, FakeIngress, frontend
from tests.support.memory_store import MemoryMessaging

TYPE = "multipart/form-data; boundary=X"
ANCHOR = ("expires_after[anchor]", "created_at")


class Bed:
    def __init__(self, **settings: Any) -> None:
        self.messaging = MemoryMessaging()
        self.ingress = FakeIngress()
        self.made = frontend(self.ingress, self.messaging, **settings)
        self.app = self.made.app

    @property
    def names(self) -> list[str]:
        return self.messaging.objects("hr_files").names

    @property
    def keys(self) -> list[str]:
        return self.messaging.bucket("hr_files").keys

    async def upload(self, *fields: tuple[str, str], tenant: str = "t", order: str = "fields first") -> Call:
        self.messaging.clock.at += 1
        return await Call(self.app, "/v1/files", form(*fields, order=order), headers=headers(tenant)).run()

    async def call(self, method: str, path: str, *, tenant: str = "t", query: str = "", **more: str) -> Call:
        made = Call(self.app, path, method=method, headers={"x-headrace-tenant": tenant, **more})
        made.scope["query_string"] = query.encode()
        return await made.run()


def headers(tenant: str, **more: str) -> dict[str, str]:
    return {"content-type": TYPE, "x-headrace-tenant": tenant, **more}


def form(*fields: tuple[str, str], content: bytes = b"content", order: str = "fields first") -> bytes:
    plain = [f'--X\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode() for name, value in fields]
    file = b'--X\r\nContent-Disposition: form-data; name="file"; filename="a \xc3\xbc.jsonl"\r\n\r\n' + content + b"\r\n"
    parts = [*plain, file] if order == "fields first" else [file, *plain]
    return b"".join(parts) + b"--X--\r\n"


@pytest.mark.parametrize("order", ["fields first", "file first"])
async def test_a_file_is_stored_described_listed_read_and_deleted(order: str) -> None:
    bed = Bed()
    made = await bed.upload(("purpose", "batch"), order=order)
    file = made.json()
    assert made.status == 200
    assert file == {
        "id": file["id"],
        "object": "file",
        "bytes": 7,
        "created_at": 1_800_000_001,
        "expires_at": 1_800_000_001 + 2_592_000,
        "filename": "a ü.jsonl",
        "purpose": "batch",
        "status": "processed",
        "status_details": None,
    }
    assert (await bed.call("GET", f"/v1/files/{file['id']}")).json() == file
    listed = (await bed.call("GET", "/v1/files")).json()
    assert listed == {"object": "list", "data": [file], "first_id": file["id"], "last_id": file["id"], "has_more": False}
    content = await bed.call("GET", f"/v1/files/{file['id']}/content")
    assert (content.status, content.body, content.complete) == (200, b"content", True)
    assert content.headers["content-length"] == "7"
    assert content.headers["content-disposition"] == "attachment; filename=\"a _.jsonl\"; filename*=UTF-8''a%20%C3%BC.jsonl"
    gone = await bed.call("DELETE", f"/v1/files/{file['id']}")
    assert gone.json() == {"id": file["id"], "object": "file", "deleted": True}
    assert bed.names == bed.keys == []


async def test_while_nothing_is_stored_writes_are_refused_at_once_and_reads_go_on() -> None:
    bed = Bed()
    file = (await bed.upload(("purpose", "batch"))).json()
    opened = {"bytes": 1, "filename": "f", "mime_type": "text/plain", "purpose": "user_data"}
    upload = (await Call(bed.app, "/v1/uploads", opened, headers={"x-headrace-tenant": "t"}).run()).json()
    bed.ingress.ready = bed.ingress.storing = False
    refused = [
        await bed.upload(("purpose", "batch")),
        await bed.call("DELETE", f"/v1/files/{file['id']}"),
        await Call(bed.app, "/v1/uploads", opened, headers={"x-headrace-tenant": "t"}).run(),
        *[await bed.call("POST", f"/v1/uploads/{upload['id']}/{what}") for what in ("parts", "complete", "cancel")],
    ]
    for call in refused:
        assert (call.status, call.error["code"], call.headers["retry-after"]) == (503, "broker_unavailable", "1"), call.scope[
            "path"
        ]
        assert "has no connection to the broker" in call.error["message"]
    assert (await bed.call("GET", f"/v1/files/{file['id']}/content")).body == b"content"


async def test_an_expiry_is_taken_from_the_form() -> None:
    bed = Bed()
    life = (("expires_after[anchor]", "created_at"), ("expires_after[seconds]", "7200"))
    for order in ("fields first", "file first"):
        file = (await bed.upload(("purpose", "user_data"), *life, order=order)).json()
        assert file["expires_at"] == file["created_at"] + 7200
    kept = (await bed.upload(("purpose", "user_data"))).json()
    assert kept["expires_at"] is None


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_a_file_of_another_tenant_is_a_404_as_one_that_never_was(method: str) -> None:
    bed = Bed()
    file = (await bed.upload(("purpose", "batch"))).json()
    for path in (f"/v1/files/{file['id']}", "/v1/files/file-never"):
        call = await bed.call(method, path, tenant="other")
        assert (call.status, call.error["code"], call.error["param"]) == (404, "file_not_found", "id")
        assert call.error["message"] == f"No such File object: {path.rpartition('/')[2]}"
    assert (await bed.call("GET", f"/v1/files/{file['id']}/content", tenant="other")).status == 404
    assert (await bed.call("GET", "/v1/files", tenant="other")).json()["data"] == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ((), "purpose"),
        ((("purpose", "batch_output"),), "purpose"),
        ((("purpose", "batch"), ("expires_after[seconds]", "7200")), "expires_after.anchor"),
        (
            (("purpose", "batch"), ANCHOR, ("expires_after[seconds]", "x")),
            "expires_after.seconds",
        ),
        (
            (("purpose", "batch"), ANCHOR, ("expires_after[seconds]", "1")),
            "expires_after.seconds",
        ),
    ],
)
@pytest.mark.parametrize("order", ["fields first", "file first"])
async def test_a_wrong_field_is_named_and_nothing_is_stored(
    fields: tuple[tuple[str, str], ...], param: str, order: str
) -> None:
    bed = Bed()
    call = await bed.upload(*fields, order=order)
    assert (call.status, call.error["param"]) == (400, param)
    assert bed.names == bed.keys == []


async def test_limits_have_statuses_of_their_own() -> None:
    bed = Bed(file_max_bytes=6, batch_file_max_bytes=5, tenant_files=1, tenant_file_bytes=100)
    too_large = await bed.upload(("purpose", "batch"))
    assert (too_large.status, too_large.error["code"]) == (413, "file_too_large")
    bed = Bed(tenant_files=1)
    await bed.upload(("purpose", "batch"))
    full = await bed.upload(("purpose", "batch"))
    assert (full.status, full.error["code"]) == (403, "file_quota_exceeded")
    assert len(bed.names) == len(bed.keys) == 1
    body = form(("purpose", "batch"), content=bytes(70_000))
    announced = await Call(
        Bed(file_max_bytes=6).app, "/v1/files", body, headers=headers("t", **{"content-length": str(len(body))})
    ).run()
    assert (announced.status, announced.error["code"]) == (413, "body_too_large")
    assert announced.received == 0


async def test_a_client_that_leaves_or_stalls_leaves_nothing_behind() -> None:
    bed = Bed(body_timeout_s=0.1)
    whole = form(("purpose", "batch"), content=bytes(5000))
    stalled = Call(bed.app, "/v1/files", headers=headers("t"), parts=[whole[:3000], whole[3000:]])
    stalled._parts.pop()
    receive = stalled._receive

    async def unfinished() -> dict[str, Any]:
        return {**await receive(), "more_body": True} if stalled._parts else await receive()

    stalled._receive = unfinished  # type: ignore[method-assign]
    await stalled.run()
    assert (stalled.status, stalled.error["code"]) == (408, "body_timeout")
    left = Call(bed.app, "/v1/files", headers=headers("t"), parts=[whole[:3000]])
    receive_left = left._receive

    async def then_leave() -> dict[str, Any]:
        message = await receive_left() if left._parts else {"type": "http.disconnect"}
        return {**message, "more_body": True} if message["type"] == "http.request" else message

    left._receive = then_leave  # type: ignore[method-assign]
    await left.run()
    assert left.status == 499
    assert bed.made.metrics.disconnects._value.get() == 1
    await asyncio.sleep(0)
    assert bed.names == bed.keys == []
    assert bed.messaging.objects("hr_files").open_writers == 0


async def test_a_list_has_pages() -> None:
    bed = Bed()
    ids = [(await bed.upload(("purpose", purpose))).json()["id"] for purpose in ("batch", "vision", "batch")]
    page = (await bed.call("GET", "/v1/files", query=f"limit=1&after={ids[2]}")).json()
    assert ([file["id"] for file in page["data"]], page["has_more"]) == ([ids[1]], True)
    page = (await bed.call("GET", "/v1/files", query="purpose=batch&order=asc&limit=10000")).json()
    assert ([file["id"] for file in page["data"]], page["has_more"]) == ([ids[0], ids[2]], False)
    for query in ("limit=10001", "limit=0", "order=up", "after=file-x"):
        call = await bed.call("GET", "/v1/files", query=query)
        assert (call.status, call.error["param"]) == (400, query.partition("=")[0])


async def test_a_range_is_answered_and_a_broken_download_goes_on() -> None:
    bed = Bed()
    name = (await bed.upload(("purpose", "batch"))).json()["id"]
    path = f"/v1/files/{name}/content"
    part = await bed.call("GET", path, range="bytes=3-")
    assert (part.status, part.body, part.headers["content-range"]) == (206, b"tent", "bytes 3-6/7")
    tag = part.headers["etag"]
    assert (await bed.call("GET", path, range="bytes=3-", **{"if-range": tag})).status == 206
    assert (await bed.call("GET", path, range="bytes=3-", **{"if-range": '"other"'})).body == b"content"
    behind = await bed.call("GET", path, range="bytes=7-")
    assert (behind.status, behind.headers["content-range"], behind.error["code"]) == (416, "bytes */7", "range_not_satisfiable")
    head = await bed.call("HEAD", path)
    assert (head.status, head.headers["content-length"], head.body) == (200, "7", b"")


async def test_a_client_that_takes_nothing_is_cut_off() -> None:
    bed = Bed(slow_client_s=0.1)
    name = (await bed.upload(("purpose", "batch"))).json()["id"]
    call = Call(bed.app, f"/v1/files/{name}/content", method="GET", headers={"x-headrace-tenant": "t"})
    send = call._send

    async def stuck(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()
        await send(message)

    call._send = stuck  # type: ignore[method-assign]
    await call.run()
    assert not call.complete
    assert bed.made.metrics.slow_clients._value.get() == 1
