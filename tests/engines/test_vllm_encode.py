"""Images encoded by another real vLLM than the one that answers: the answers are those of one vLLM that does both.

The embeddings of this model have 4 KiB; they are read over NIXL out of the encode worker's memory, since that lends from 1 KiB
on. Who cannot read gets them by the object store. The encode worker is a process of its own, so that it can be stopped and
killed. The tests run in their order: the last ones do that.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from prometheus_client import REGISTRY

from headrace.broker.codec import decode, encode
from headrace.broker.messages.requests import EncodeMedia, Generation, MediaEncoded
from headrace.broker.models.card_store import pool_workers
from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.subjects import pool_id
from headrace.jetstream.topology import EMBEDDINGS
from headrace.workers.encoding.server import object_name, seal, unseal
from tests.engine_contract.life import descendants
from tests.engines.support.media_world import ARGS, LONG, World, media_world, said, text
from tests.engines.support.tiny_vision import write_vision_model
from tests.engines.test_vllm_media import image, png

pytestmark = [
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),  # vLLM and torch warn about themselves
]

MODEL = "sees-apart"
START_S = 300.0
WAIT_S = 20.0


@dataclass
class Apart:
    world: World
    encoder: subprocess.Popen[bytes]
    connection: Connection
    word: str = ""
    encoding: str = ""  # the encode worker

    @property
    def store(self) -> Any:
        return self.connection.objects(self.world.subjects.pool_bucket(EMBEDDINGS, pool_id(MODEL, "default")))

    def name_of(self, data: bytes) -> str:
        return object_name(self.word, None, "image", data)

    async def embeddings_of(self, data: bytes) -> bytes:
        """Get an image's embeddings like a worker without NIXL."""
        item = {"kind": "image", "data": data, "type": "image/png"}
        job = EncodeMedia(id="r1", name=self.name_of(data), payload=encode(Generation(token_ids=b"", media=[item])))
        subject = self.world.subjects.peer(pool_id(MODEL, "default"), self.encoding)
        answer = decode(MediaEncoded, await self.connection.request(subject, encode(job), timeout_s=WAIT_S))
        assert (answer.ok, answer.lent) == (True, None), answer
        return unseal(job.name, await self.store.get(job.name))


@contextmanager
def encode_worker(folder: Path, log: Path, server: EmbeddedServer, prefix: str) -> Iterator[subprocess.Popen[bytes]]:
    flags = [word for name, value in ARGS.items() for word in ("--engine-arg", f"{name}={value}")]
    named = ("--model", str(folder), "--served-name", MODEL, "--nats", server.url, "--prefix", prefix, "--name", "e1")
    lends = ("--encode-nixl-from", "1024")
    command = [sys.executable, "-P", "-m", "headrace", "worker", "--engine", "vllm", "--role", "encode", *named, *lends, *flags]
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=log.parent, stdout=out, stderr=out, start_new_session=True)
    try:
        yield process
    finally:
        for pid in (process.pid, *descendants(process.pid)):
            with_signal(pid, signal.SIGKILL)
        process.wait(60)


def with_signal(pid: int, what: signal.Signals) -> None:
    try:
        os.kill(pid, what)
    except ProcessLookupError:
        return


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def apart(tmp_path_factory: pytest.TempPathFactory, model_dir: Path, nats_server: EmbeddedServer) -> AsyncIterator[Apart]:
    place = tmp_path_factory.mktemp("apart")
    folder = write_vision_model(place / "model", model_dir)
    async with media_world(folder, MODEL, nats_server, {**ARGS, "encoders": True}, encode_wait_s=WAIT_S) as world:
        log = place / "encoder.log"
        with encode_worker(folder, log, nats_server, world.subjects.prefix) as process:
            options = ConnectOptions(servers=(nats_server.url,), name="test")
            async with await Connection.connect(options, subjects=world.subjects) as connection:
                made = Apart(world, process, connection)
                await until_it_encodes(made, log)
                workers = await pool_workers(connection, world.subjects, "*")
                (made.word,) = {worker.encoder for worker in workers if worker.model == MODEL}  # both have the same
                (made.encoding,) = [worker.worker for worker in workers if worker.role == "encode"]
                yield made


async def until_it_encodes(apart: Apart, log: Path) -> None:
    async with asyncio.timeout(START_S):
        while b"worker.ready" not in log.read_bytes():
            assert apart.encoder.poll() is None, log.read_text()[-4000:]
            await asyncio.sleep(0.1)
        number = 1000
        while count("embeddings", source="nixl") == 0:  # until the worker that answers has seen its lease
            await apart.world.ask(image(png(number)), text("Hello?"))
            number += 1


def count(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"headrace_worker_{name}_total", labels) or 0.0


@pytest.mark.parametrize(
    ("content", "images"),
    [
        ([image(png(1)), text("What is this?")], 1),
        ([text("First"), image(png(2, (300, 40))), text("then"), image(png(3, (20, 90))), text("and why?")], 2),
        ([image(png(4)), image(png(4)), text("Are they the same?")], 2),
        ([text(LONG), image(png(5))], 1),
    ],
    ids=["one", "two between texts", "one twice", "after a long text"],
)
async def test_the_answer_is_that_of_a_vllm_that_encodes_itself(
    apart: Apart, content: list[dict[str, Any]], images: int
) -> None:
    before = {source: count("embeddings", source=source) for source in ("nixl", "kept", "here")}
    ours = await apart.world.ask(*content)
    took = {source: count("embeddings", source=source) - before[source] for source in before}
    assert took["here"] == 0
    assert took["nixl"] + took["kept"] == images
    assert took["nixl"] >= 1
    prompt, ids, words = await apart.world.directly(*content)
    assert ours["prompt_token_ids"] == prompt
    assert (ours["choices"][0]["token_ids"], said(ours)) == (ids, words)


async def test_what_lies_in_the_store_is_what_the_model_sees(apart: Apart) -> None:
    """So the engine that answers has not encoded the image a second time by itself."""
    one, other = png(20), png(21)
    await apart.world.ask(image(other), text("Shown once."))
    embeddings = await apart.embeddings_of(other)
    await apart.store.put(apart.name_of(one), seal(apart.name_of(one), embeddings))
    told = await apart.world.ask(image(one), text("What do you see?"))
    ids = [(await apart.world.directly(image(data), text("What do you see?")))[1] for data in (one, other)]
    assert told["choices"][0]["token_ids"] == ids[1] != ids[0]


async def test_choices_of_one_request_share_what_was_encoded(apart: Apart) -> None:
    before = count("embeddings", source="nixl")
    told = await apart.world.ask(image(png(25)), text("Twice, please."), n=2)
    first, second = (choice["token_ids"] for choice in told["choices"])
    assert first == second == (await apart.world.directly(image(png(25)), text("Twice, please.")))[1]
    assert count("embeddings", source="nixl") == before + 1


@pytest.mark.parametrize("damage", ["of a wrong size", "no embeddings", "a damaged record"])
async def test_embeddings_that_do_not_fit_cost_time_and_no_answer(apart: Apart, damage: str) -> None:
    data, words = png(30 + len(damage)), text("And now?")
    name = apart.name_of(data)
    good = await apart.embeddings_of(png(20))
    record = {"of a wrong size": seal(name, good[:-64]), "no embeddings": seal(name, b"?" * 99), "a damaged record": b"?" * 99}
    await apart.store.put(name, record[damage])
    told = await apart.world.ask(image(data), words)
    assert told["choices"][0]["token_ids"] == (await apart.world.directly(image(data), words))[1]


async def test_an_image_that_cannot_be_read_is_a_400_that_names_the_part(apart: Apart) -> None:
    answer = await apart.world.post([text("Look."), image(png(50)[:400])])
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "messages[0].content[1].image_url.url"


@pytest.mark.fault
async def test_an_encode_worker_that_stands_still_costs_the_wait_and_no_answer(apart: Apart) -> None:
    stopped = [apart.encoder.pid, *descendants(apart.encoder.pid)]
    for pid in stopped:
        with_signal(pid, signal.SIGSTOP)
    try:
        told = await apart.world.ask(image(png(60)), text("Are you there?"))
    finally:
        for pid in stopped:
            with_signal(pid, signal.SIGCONT)
    assert told["choices"][0]["token_ids"] == (await apart.world.directly(image(png(60)), text("Are you there?")))[1]


@pytest.mark.fault
async def test_answers_go_on_when_the_encode_worker_is_killed(apart: Apart) -> None:
    shown = [image(png(70 + n)) for n in range(6)]
    asked = [asyncio.create_task(apart.world.ask(one, text(f"Number {n}?"))) for n, one in enumerate(shown)]
    await asyncio.sleep(0)
    for pid in (apart.encoder.pid, *descendants(apart.encoder.pid)):
        with_signal(pid, signal.SIGKILL)
    answers = [answer["choices"][0]["token_ids"] for answer in await asyncio.gather(*asked)]
    before = count("embeddings", source="here")
    later = await apart.world.ask(image(png(80)), text("And later?"))
    assert count("embeddings", source="here") == before + 1
    wanted = [(await apart.world.directly(one, text(f"Number {n}?")))[1] for n, one in enumerate(shown)]
    assert answers == wanted
    assert later["choices"][0]["token_ids"] == (await apart.world.directly(image(png(80)), text("And later?")))[1]
