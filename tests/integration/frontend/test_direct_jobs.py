"""Jobs of publishers that speak nothing but the text protocol of NATS: a socket, PUB, and the result."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlparse

import msgspec
import pytest
import pytest_asyncio

from headrace.broker.codec import encode, pack_u32
from headrace.broker.messages.requests import Envelope, Generation, Sampling
from headrace.jetstream.client import ConnectOptions, connect_patiently
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.subjects import Subjects
from tests.support.local_deployment import Serving, serving, sim

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = "sim"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hello?"}], "temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def names() -> Subjects:
    return Subjects(f"raw{os.getpid()}")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(nats_server: EmbeddedServer, names: Subjects) -> AsyncIterator[Serving]:
    async with serving(nats_server, names, sim(MODEL)) as running:
        yield running


class Shell:
    """A plain connection, as a shell script has one."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._sids = 0

    def line(self, text: str) -> None:
        self._writer.write(text.encode() + b"\r\n")

    def listen(self, subject: str) -> None:
        self._sids += 1
        self.line(f"SUB {subject} {self._sids}")

    def publish(self, subject: str, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        if not headers:
            self._writer.write(b"PUB %b ack %d\r\n%b\r\n" % (subject.encode(), len(body), body))
            return
        head = "NATS/1.0\r\n" + "".join(f"{name}: {value}\r\n" for name, value in headers.items()) + "\r\n"
        size = len(head.encode())
        self.line(f"HPUB {subject} ack {size} {size + len(body)}")
        self._writer.write(head.encode() + body + b"\r\n")

    async def next(self, prefix: str) -> tuple[str, Any]:
        """The next message whose subject begins so, as JSON; others are passed over."""
        async with asyncio.timeout(30):
            while True:
                words = (await self._reader.readline()).decode().split()
                if words[:1] == ["PING"]:
                    self.line("PONG")
                elif words[:1] in (["MSG"], ["HMSG"]):
                    body = (await self._reader.readexactly(int(words[-1]) + 2))[:-2]
                    if words[0] == "HMSG":
                        body = body[int(words[-2]) :]
                    if words[1].startswith(prefix):
                        return words[1], json.loads(body)


@asynccontextmanager
async def shell(server: EmbeddedServer) -> AsyncIterator[Shell]:
    address = urlparse(server.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        one = Shell(reader, writer)
        one.line('CONNECT {"verbose": false, "headers": true}')
        one.listen("ack")
        yield one
    finally:
        writer.close()


async def ask(server: EmbeddedServer, names: Subjects, job: str, body: bytes, **headers: str) -> Any:
    """Publish a job and return its result."""
    async with shell(server) as one:
        one.listen(f"{names.prefix}.result._.>")
        one.publish(names.job(MODEL), body, {"Hr-Job": job, **{k.replace("_", "-"): v for k, v in headers.items()}})
        _, ack = await one.next("ack")
        assert "error" not in ack, ack
        subject, result = await one.next(names.result("_", job))
        assert subject == names.result("_", job)
        return result


def text(result: Any) -> str:
    return str(result["response"]["body"]["choices"][0]["message"]["content"])


async def stored(server: EmbeddedServer, subject_of: Any) -> int:
    async with await connect_patiently(
        ConnectOptions(servers=(server.url,), name="look"), subjects=subject_of[0], timeout_s=5
    ) as connection:
        counts = await connection.subject_counts(subject_of[0].stream(subject_of[1]), subject_of[2])
    return sum(counts.values())


@pytest.mark.slow
async def test_a_shell_publishes_json_and_gets_its_answer(nats_server: EmbeddedServer, names: Subjects, site: Serving) -> None:
    async with shell(nats_server) as one:
        one.listen(f"{names.prefix}.result._.*")
        one.publish(names.job(MODEL), json.dumps(CHAT).encode())
        _, ack = await one.next("ack")
        subject, result = await one.next(f"{names.prefix}.result._.seq-")
    assert subject == names.result("_", f"seq-{ack['seq']}")
    assert (result["status"], result["response"]["status_code"]) == ("done", 200)
    assert text(result)
    assert result["tokens"]["completion"] == 8


@pytest.mark.slow
async def test_json_msgpack_and_a_line_of_a_batch_file_are_the_same_request(
    nats_server: EmbeddedServer, names: Subjects, site: Serving
) -> None:
    line = {"custom_id": "line-1", "method": "POST", "url": "/v1/chat/completions", "body": CHAT}
    forms = {
        "as-json": json.dumps(CHAT).encode(),
        "as-msgpack": msgspec.msgpack.encode(CHAT),
        "as-line": json.dumps(line).encode(),
    }
    results = [await ask(nats_server, names, job, body) for job, body in forms.items()]
    assert len({text(result) for result in results}) == 1
    assert results[2]["custom_id"] == "line-1"


@pytest.mark.slow
async def test_token_ids_are_answered_with_token_ids(nats_server: EmbeddedServer, names: Subjects, site: Serving) -> None:
    generation = Generation(token_ids=pack_u32([5, 6, 7]), sampling=Sampling(max_tokens=4, temperature=0.0))
    envelope = Envelope(
        id="x", pool="p", model=MODEL, judge="", deadline=0.0, created=0.0, tokens=3, payload=encode(generation)
    )
    result = await ask(nats_server, names, "ids", encode(envelope))
    (choice,) = result["response"]["body"]["choices"]
    assert len(choice["token_ids"]) == 4


@pytest.mark.slow
async def test_a_refused_body_is_a_failed_result_with_the_error_of_its_route(
    nats_server: EmbeddedServer, names: Subjects, site: Serving
) -> None:
    result = await ask(nats_server, names, "wrong", json.dumps({**CHAT, "temperature": 9}).encode())
    assert (result["status"], result["response"]["status_code"]) == ("failed", 400)
    assert result["response"]["body"]["error"]["param"] == "temperature"
    assert "error" not in result


@pytest.mark.slow
async def test_what_is_no_job_gets_a_result_that_says_so_and_is_not_tried_again(
    nats_server: EmbeddedServer, names: Subjects, site: Serving
) -> None:
    result = await ask(nats_server, names, "rubbish", b"\xc1 no job")
    assert result["status"] == "malformed"
    assert "msgpack" in result["error"]["message"]
    async with asyncio.timeout(10):
        while await stored(nats_server, (names, "DLQ", f"{names.prefix}.dlq.>")) != 1:
            await asyncio.sleep(0.05)
        while await stored(nats_server, (names, "JOB", f"{names.prefix}.job.>")):
            await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_the_same_id_twice_is_one_job_with_one_result(
    nats_server: EmbeddedServer, names: Subjects, site: Serving
) -> None:
    results = [await ask(nats_server, names, "twice", json.dumps(CHAT).encode())]
    async with shell(nats_server) as one:
        one.listen("copies")
        body = json.dumps({**CHAT, "max_tokens": 3}).encode()
        one.publish(names.job(MODEL), body, {"Hr-Job": "twice", "Hr-Reply": "copies"})
        _, copy = await one.next("copies")
        results.append(copy)
    assert results[0] == results[1]
    assert await stored(nats_server, (names, "RESULT", names.result("_", "twice"))) == 1


@pytest.mark.slow
async def test_a_subject_that_a_publisher_names_gets_a_copy(
    nats_server: EmbeddedServer, names: Subjects, site: Serving
) -> None:
    async with shell(nats_server) as one:
        one.listen("my.answers")
        one.publish(names.job(MODEL), json.dumps(CHAT).encode(), {"Hr-Job": "copied", "Hr-Reply": "my.answers"})
        _, copy = await one.next("my.answers")
    assert (copy["id"], copy["status"]) == ("copied", "done")


@pytest.mark.slow
async def test_a_large_result_lies_in_the_object_store(nats_server: EmbeddedServer, names: Subjects, site: Serving) -> None:
    large = {
        "model": MODEL,
        "prompt": "Hello?",
        "max_tokens": 400,
        "n": 32,
        "temperature": 0,
        "return_token_ids": True,
        "logprobs": 5,
    }
    result = await ask(nats_server, names, "large", json.dumps(large).encode(), Hr_Endpoint="/v1/completions")
    assert result["status"] == "done"
    assert "response" not in result
    async with await connect_patiently(
        ConnectOptions(servers=(nats_server.url,), name="look"), subjects=names, timeout_s=5
    ) as connection:
        body = json.loads(await connection.objects(names.bucket("results")).get(result["object"]["name"]))
    assert body["status_code"] == 200
    assert len(body["body"]["choices"]) == 32
