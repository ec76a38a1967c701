"""The `openai` client over files and uploads: a real server, two frontends, no worker."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import os
import random
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.subjects import Subjects
from tests.support.local_deployment import serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

MIB = 1024 * 1024
STALL_S = 0.5


class Bed:
    """Two frontends that share nothing but the server."""

    def __init__(self, urls: tuple[str, str], connection: Connection, subjects: Subjects) -> None:
        self.urls = urls
        self._connection = connection
        self._bucket = subjects.bucket("files")
        self.clients = [AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) for url in urls]

    def of(self, tenant: str) -> tuple[AsyncOpenAI, AsyncOpenAI]:
        one, two = (client.with_options(default_headers={"x-headrace-tenant": tenant}) for client in self.clients)
        return one, two

    async def chunks(self) -> int:
        counts = await self._connection.subject_counts(f"OBJ_{self._bucket}", f"$O.{self._bucket}.C.>")
        return sum(counts.values())

    async def records(self) -> list[str]:
        return [entry.key for entry in await self._connection.bucket(self._bucket).entries("file.>")]

    async def until_left(self, chunks: int, records: int) -> None:
        async with asyncio.timeout(10):
            while (await self.chunks(), len(await self.records())) != (chunks, records):
                await asyncio.sleep(0.02)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bed(nats_server: EmbeddedServer) -> AsyncIterator[Bed]:
    subjects = Subjects(f"oaif{os.getpid()}")
    options: dict[str, Any] = {"body_timeout_s": STALL_S, "max_body_bytes": MIB}
    async with (
        serving(nats_server, subjects, **options) as one,
        serving(nats_server, subjects, **options, tenant_files=3) as two,
        await Connection.connect(ConnectOptions(servers=(nats_server.url,)), subjects=subjects) as connection,
    ):
        made = Bed((one.url, two.url), connection, subjects)
        yield made
        for client in made.clients:
            await client.close()


async def test_files_are_uploaded_listed_read_and_deleted_through_any_frontend(bed: Bed) -> None:
    one, two = bed.of("keeping")
    data = random.Random(1).randbytes(3 * MIB + 17)  # far over the limit of other bodies
    file = await one.files.create(file=("lines é.jsonl", data), purpose="batch")
    assert (file.object, file.bytes, file.filename, file.purpose, file.status) == (
        "file",
        len(data),
        "lines é.jsonl",
        "batch",
        "processed",
    )
    assert file.expires_at == file.created_at + 30 * 86_400
    assert await two.files.retrieve(file.id) == file
    assert await two.files.wait_for_processing(file.id) == file
    other = await two.files.create(
        file=io.BytesIO(b"x"), purpose="user_data", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert other.expires_at == other.created_at + 3600
    assert [found.id async for found in one.files.list(limit=1)] == [other.id, file.id]
    assert [found.id async for found in one.files.list(purpose="batch", order="asc")] == [file.id]
    assert (await two.files.content(file.id)).content == data
    async with two.files.with_streaming_response.content(file.id, extra_headers={"range": "bytes=3145728-"}) as answer:
        assert (answer.status_code, await answer.read()) == (206, data[3 * MIB :])
    for name in (file.id, other.id):
        assert (await two.files.delete(name)).deleted
        with pytest.raises(openai.NotFoundError, match="No such File"):
            await one.files.retrieve(name)
    assert (await one.files.list()).data == []
    await bed.until_left(0, 0)


async def test_files_of_another_tenant_do_not_exist(bed: Bed) -> None:
    mine, _ = bed.of("mine")
    theirs, _ = bed.of("theirs")
    file = await mine.files.create(file=b"secret", purpose="assistants")
    for call in (theirs.files.retrieve, theirs.files.content, theirs.files.delete):
        with pytest.raises(openai.NotFoundError):
            await call(file.id)
    assert (await theirs.files.list()).data == []
    await mine.files.delete(file.id)


async def test_an_upload_in_parts_is_joined_in_the_order_given(bed: Bed) -> None:
    one, two = bed.of("parts")
    data = random.Random(2).randbytes(2 * MIB + 3)
    halves = [data[:MIB], data[MIB:]]
    upload = await one.uploads.create(bytes=len(data), filename="big.jsonl", mime_type="text/jsonl", purpose="batch")
    assert (upload.status, upload.expires_at) == ("pending", upload.created_at + 3600)
    second, first = [
        await client.uploads.parts.create(upload.id, data=half) for client, half in ((two, halves[1]), (one, halves[0]))
    ]
    with pytest.raises(openai.BadRequestError, match="announced"):
        await two.uploads.complete(upload.id, part_ids=[first.id])
    done = await two.uploads.complete(upload.id, part_ids=[first.id, second.id], md5=hashlib.md5(data).hexdigest())  # noqa: S324  # as the API has it
    assert done.status == "completed"
    assert done.file is not None
    assert (await one.files.content(done.file.id)).content == data
    with pytest.raises(openai.BadRequestError, match="completed"):
        await one.uploads.cancel(upload.id)
    await one.files.delete(done.file.id)
    gone = await one.uploads.create(bytes=3, filename="a", mime_type="text/plain", purpose="user_data")
    await one.uploads.parts.create(gone.id, data=b"abc")
    assert (await two.uploads.cancel(gone.id)).status == "cancelled"
    await bed.until_left(0, 0)


async def test_a_quota_is_an_error_that_the_client_does_not_repeat(bed: Bed) -> None:
    _, two = bed.of("full")
    kept = [(await two.files.create(file=b"x", purpose="batch")).id for _ in range(3)]
    with pytest.raises(openai.PermissionDeniedError) as caught:
        await two.with_options(max_retries=2).files.create(file=b"x", purpose="batch")
    assert caught.value.code == "file_quota_exceeded"
    with pytest.raises(openai.BadRequestError, match="purpose"):
        await two.files.create(file=b"x", purpose="batch_output")  # type: ignore[arg-type]
    for name in kept:
        await two.files.delete(name)
    await bed.until_left(0, 0)


async def test_a_batch_file_over_its_limit_is_refused(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = bed.of("large")
    with pytest.raises(openai.APIStatusError) as caught:
        await one.files.create(file=("a", Zeros(210 * MIB)), purpose="batch")  # type: ignore[arg-type]
    assert (caught.value.status_code, caught.value.code) == (413, "file_too_large")
    await bed.until_left(0, 0)


class Zeros(io.RawIOBase):
    """A file of zeros that takes no memory."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = (0, self._at, self._size)[whence] + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), self._size - self._at)
        buffer[:count] = bytes(count)
        self._at += count
        return count


def form_of(size: int) -> tuple[bytes, bytes]:
    field = b"--X\r\nContent-Disposition: form-data; name="
    head = field + b'"purpose"\r\n\r\nbatch\r\n' + field + b'"file"; filename="f"\r\n\r\n'
    return head + bytes(size), b"\r\n--X--\r\n"


HOST = ["host: localhost"]
HEADERS = {"content-type": "multipart/form-data; boundary=X", "x-headrace-tenant": "rude"}


async def test_a_body_that_stalls_is_a_408_and_leaves_nothing(bed: Bed) -> None:
    begin, _ = form_of(MIB)

    async def body() -> AsyncIterator[bytes]:
        yield begin
        await asyncio.sleep(60)

    async with httpx.AsyncClient() as client:
        answer = await stalled(client, f"{bed.urls[0]}/v1/files", body())
    assert b" 408 " in answer
    assert b"body_timeout" in answer
    await bed.until_left(0, 0)


async def stalled(client: httpx.AsyncClient, url: str, body: AsyncIterator[bytes]) -> bytes:
    """The raw answer to a request whose body does not end."""
    target = httpx.URL(url)
    reader, writer = await asyncio.open_connection(target.host, target.port)
    lines = [
        f"POST {target.path} HTTP/1.1",
        "host: localhost",
        "content-length: 9000000",
        *(f"{k}: {v}" for k, v in HEADERS.items()),
    ]
    writer.write("\r\n".join([*lines, "", ""]).encode() + await anext(body))
    try:
        return await asyncio.wait_for(reader.read(4096), 20)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def test_a_client_that_leaves_in_the_middle_leaves_nothing(bed: Bed) -> None:
    begin, _ = form_of(2 * MIB)
    target = httpx.URL(bed.urls[0])
    _, writer = await asyncio.open_connection(target.host, target.port)
    lines = [
        "POST /v1/files HTTP/1.1",
        "host: localhost",
        "content-length: 9000000",
        *(f"{k}: {v}" for k, v in HEADERS.items()),
    ]
    writer.write("\r\n".join([*lines, "", ""]).encode() + begin)
    await writer.drain()
    async with asyncio.timeout(10):
        while not await bed.chunks():
            await asyncio.sleep(0.01)
    assert len(await bed.records()) == 1  # which reserves the bytes
    writer.transport.abort()
    await bed.until_left(0, 0)


@pytest.mark.slow
async def test_a_large_file_passes_through_in_bounded_memory(bed: Bed) -> None:
    """Client, frontend and the connection to the server are all in this process."""
    size = 100 * MIB
    begin, end = form_of(0)
    piece = bytes(64 * 1024)

    async def body() -> AsyncIterator[bytes]:
        yield begin
        for _ in range(size // len(piece)):
            yield piece
        yield end

    async with httpx.AsyncClient(timeout=60) as client:
        tracemalloc.start()
        try:
            made = (await client.post(f"{bed.urls[0]}/v1/files", content=body(), headers=HEADERS)).json()
            read = 0
            async with client.stream("GET", f"{bed.urls[0]}/v1/files/{made['id']}/content", headers=HEADERS) as answer:
                async for part in answer.aiter_bytes():
                    read += len(part)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert made["bytes"] == read == size
        assert peak < 24 * MIB
        await client.delete(f"{bed.urls[0]}/v1/files/{made['id']}", headers=HEADERS)
    await bed.until_left(0, 0)
