"""Events of batches are posted once a call, signed, with an id that stays the same."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from headrace.broker.batches.record import BatchRecord
from headrace.frontend.batches import webhooks
from headrace.frontend.batches.webhooks import BatchWebhook, event_of, key_of, signature

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


async def test_without_a_secret_nothing_is_signed() -> None:
    async with receiver(b"HTTP/1.0 200 OK\r\n\r\n") as (url, got):
        assert await BatchWebhook(url).send(ENDED)
    assert b"webhook-signature" not in got[0]


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 500 No\r\n\r\n", b"HTTP/1.1 302 No\r\n\r\n", b"nonsense\r\n", b"HTTP/1.1 x y\r\n", b""]
)
async def test_another_answer_is_no_success(answer: bytes) -> None:
    async with receiver(answer) as (url, _):
        assert not await BatchWebhook(url).send(ENDED)


async def test_a_receiver_that_is_silent_or_gone_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhooks, "CALL_S", 0.05)
    async with receiver(None) as (url, _):
        assert not await BatchWebhook(url).send(ENDED)
    assert not await BatchWebhook(url).send(ENDED)


def test_an_event_has_one_id_per_end() -> None:
    assert event_of(ENDED).id == event_of(ENDED).id


def test_a_secret_is_read_as_standard_webhooks_has_it() -> None:
    assert key_of("whsec_" + base64.b64encode(b"k").decode()) == b"k"
    assert key_of("plain") == b"plain"
    with pytest.raises(ValueError, match="not base64"):
        key_of("whsec_?")


def test_the_signature_is_that_of_the_published_example() -> None:
    """The example that the specification gives."""
    key = key_of("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    body = b'{"test": 2432232314}'
    made = signature(key, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, body)
    assert made == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
