"""Events of batches are posted once a call, signed, with an id that stays the same."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from headrace.broker.batches.record import BatchRecord, LineCounts, LineError
from headrace.broker.batches.store import batch_key
from headrace.broker.files.records import FileRecord
from headrace.broker.messages.durable import ResultTokens
from headrace.frontend import batches
from headrace.frontend.batches import BatchWebhook, key_of
from tests.support.frontend.fakes import Call, FakeIngress, frontend
from tests.support.memory_store import MemoryMessaging

ENDED = BatchRecord(
    id="batch_" + "1" * 32,
    tenant="t",
    endpoint="/v1/completions",
    input_file_id="file-1",
    completion_window="24h",
    created=1.0,
    expires_at=2,
    status="completed",
    completed_at=77,
)


@asynccontextmanager
async def receiver(answer: bytes | None) -> AsyncIterator[tuple[str, list[bytes]]]:
    """The URL of a server that keeps what it gets; without an answer it never sends one."""
    got: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in head.splitlines() if line.lower().startswith(b"content-length"))
        got.append(head + await reader.readexactly(length))
        if answer is not None:
            writer.write(answer)
        else:
            await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook?a=b", got


async def test_an_event_is_posted_and_signed() -> None:
    key = base64.b64encode(b"secret").decode()
    async with receiver(b"HTTP/1.1 204 No Content\r\n\r\n") as (url, got):
        assert await BatchWebhook(url, f"whsec_{key}", wall=lambda: 99.0).send(ENDED)
    head, _, body = got[0].partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "POST /hook?a=b HTTP/1.1"
    headers = dict(line.split(": ", 1) for line in lines[1:])
    event = json.loads(body)
    assert event == {
        "id": event["id"],
        "object": "event",
        "created_at": 77,
        "type": "batch.completed",
        "data": {"id": ENDED.id},
    }
    assert (headers["webhook-id"], headers["webhook-timestamp"]) == (event["id"], "99")
    made = hmac.new(b"secret", f"{event['id']}.99.".encode() + body, hashlib.sha256).digest()
    assert headers["webhook-signature"] == f"v1,{base64.b64encode(made).decode()}"


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 500 No\r\n\r\n", b"HTTP/1.1 302 No\r\n\r\n", b"nonsense\r\n", b"HTTP/1.1 x y\r\n", b""]
)
async def test_another_answer_is_no_success(answer: bytes) -> None:
    async with receiver(answer) as (url, _):
        assert not await BatchWebhook(url).send(ENDED)


async def test_a_receiver_that_is_silent_or_gone_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "CALL_S", 0.05)
    async with receiver(None) as (url, _):
        assert not await BatchWebhook(url).send(ENDED)
    assert not await BatchWebhook(url).send(ENDED)


def test_a_secret_is_read_as_standard_webhooks_has_it() -> None:
    assert key_of("whsec_" + base64.b64encode(b"k").decode()) == b"k"
    assert key_of("plain") == b"plain"
    with pytest.raises(ValueError, match="not base64"):
        key_of("whsec_?")


NEW = {"input_file_id": "file-in", "endpoint": "/v1/chat/completions", "completion_window": "24h"}
START = 1_800_000_000


class Bed:
    def __init__(self) -> None:
        self.messaging = MemoryMessaging()
        self.app = frontend(FakeIngress(), self.messaging).app  # type: ignore[arg-type]

    async def file(self, purpose: str = "batch", tenant: str = "t") -> None:
        record = FileRecord(id="file-in", tenant=tenant, bytes=10, created=START, filename="in.jsonl", purpose=purpose)
        await self.messaging.bucket("hr_files").put(record.key, msgspec.json.encode(record))

    async def call(self, method: str, path: str, body: Any = None, *, tenant: str = "t", query: str = "") -> Call:
        call = Call(self.app, path, body, method=method, headers={"x-headrace-tenant": tenant})
        call.scope["query_string"] = query.encode()
        return await call.run()

    async def create(self, **changes: Any) -> Call:
        self.messaging.clock.at += 1
        return await self.call("POST", "/v1/batches", {**NEW, **changes})

    async def put(self, record: BatchRecord) -> None:
        await self.messaging.bucket("hr_batches").put(batch_key("t", record.id), msgspec.json.encode(record))


async def test_a_batch_is_created_read_listed_and_cancelled() -> None:
    bed = Bed()
    await bed.file()
    made = await bed.create(metadata={"k": "v"}, output_expires_after={"anchor": "created_at", "seconds": 3600})
    batch = made.json()
    assert made.status == 200
    usage = {
        "input_tokens": 0,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 0,
    }
    times = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    assert batch == {
        "id": batch["id"],
        "object": "batch",
        "endpoint": "/v1/chat/completions",
        "model": None,
        "errors": None,
        "input_file_id": "file-in",
        "completion_window": "24h",
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": START + 1,
        "expires_at": START + 1 + 86_400,
        **{f"{time}_at": None for time in times},
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "usage": usage,
        "metadata": {"k": "v"},
    }
    assert (await bed.call("GET", f"/v1/batches/{batch['id']}")).json() == batch
    listed = (await bed.call("GET", "/v1/batches")).json()
    assert listed == {"object": "list", "data": [batch], "first_id": batch["id"], "last_id": batch["id"], "has_more": False}
    cancelled = (await bed.call("POST", f"/v1/batches/{batch['id']}/cancel")).json()
    assert (cancelled["status"], cancelled["cancelling_at"]) == ("cancelling", START + 1)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"endpoint": "/v1/images"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "8d"}, "completion_window"),
        ({"input_file_id": ""}, "input_file_id"),
        ({"input_file_id": None}, "input_file_id"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3599}}, "output_expires_after.seconds"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 2_592_001}}, "output_expires_after.seconds"),
        ({"output_expires_after": {"anchor": "x", "seconds": 3600}}, "output_expires_after.anchor"),
    ],
)
async def test_a_wrong_wish_is_named(changes: dict[str, Any], param: str) -> None:
    bed = Bed()
    await bed.file()
    call = await bed.create(**changes)
    assert call.status == 400
    assert call.error["param"].startswith(param.partition(".")[0])


async def test_a_file_that_is_none_or_has_another_purpose_is_refused() -> None:
    bed = Bed()
    call = await bed.create()
    assert (call.status, call.error["code"], call.error["param"]) == (400, "input_file_not_found", "input_file_id")
    await bed.file("user_data")
    call = await bed.create()
    assert (call.status, call.error["code"], call.error["param"]) == (400, "invalid_input_file", "input_file_id")


@pytest.mark.parametrize(("method", "tail"), [("GET", ""), ("POST", "/cancel")])
async def test_a_batch_of_another_tenant_is_a_404_as_one_that_never_was(method: str, tail: str) -> None:
    bed = Bed()
    await bed.file()
    batch = (await bed.create()).json()
    for name in (batch["id"], "batch_none", "x" * 300):
        call = await bed.call(method, f"/v1/batches/{name}{tail}", tenant="other")
        assert (call.status, call.error["code"]) == (404, "batch_not_found")
    assert (await bed.call("GET", "/v1/batches", tenant="other")).json()["data"] == []
    assert (await bed.call("GET", f"/v1/batches/{batch['id']}")).json()["status"] == "validating"


def record(**changes: Any) -> BatchRecord:
    made = BatchRecord(
        id="batch_" + "0" * 32,
        tenant="t",
        endpoint="/v1/completions",
        input_file_id="file-in",
        completion_window="2h",
        created=START + 0.5,
        expires_at=START + 7200,
    )
    return msgspec.structs.replace(made, **changes)


async def test_a_batch_that_has_ended_cannot_be_cancelled() -> None:
    bed = Bed()
    await bed.put(record(status="completed"))
    call = await bed.call("POST", f"/v1/batches/{record().id}/cancel")
    assert (call.status, call.error["code"]) == (409, "batch_has_ended")


async def test_counts_tokens_and_errors_are_shown_and_what_only_the_owner_needs_is_not() -> None:
    bed = Bed()
    wrong = LineError(code="invalid_json_line", message="no", line=3)
    counts, tokens = LineCounts(total=9, completed=4, failed=2), ResultTokens(prompt=7, cached=2, completion=5, reasoning=1)
    await bed.put(
        record(status="expiring", expiring_at=START + 9, errors=[wrong], counts=counts, tokens=tokens, model="m", owner="i-1")
    )
    shown = (await bed.call("GET", f"/v1/batches/{record().id}")).json()
    assert (shown["status"], shown["finalizing_at"], shown["model"]) == ("finalizing", START + 9, "m")
    error = {"code": "invalid_json_line", "message": "no", "line": 3, "param": None}
    assert shown["errors"] == {"object": "list", "data": [error]}
    assert shown["request_counts"] == {"total": 9, "completed": 4, "failed": 2}
    assert (shown["usage"]["total_tokens"], shown["usage"]["input_tokens_details"]["cached_tokens"]) == (12, 2)
    assert not {"owner", "cursor", "tries", "tenant", "input_digest"} & shown.keys()
