"""Pictures by the `openai` client: from HTTP to a diffusion engine without a model and back, on a real nats-server."""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from headrace.broker.messages.requests import Picture
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.subjects import Subjects
from headrace.workers.settings import WorkerSettings
from tests.support.local_deployment import Serving, serving
from tests.support.painter import Painter, png

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = "acme/pictures"


def diffusion(folder: Path, engine: str = "Painter", **args: Any) -> WorkerSettings:
    return WorkerSettings(
        engine=f"tests.support.painter:{engine}",
        model=str(folder),
        served_name=MODEL,
        engine_args=args,
        drain_grace_s=0.0,
        tool_parser="none",
        reasoning_parser="none",
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment(nats_server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Serving]:
    folder = tmp_path_factory.mktemp("pipeline")
    async with serving(nats_server, Subjects(f"img{os.getpid()}"), diffusion(folder)) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(deployment: Serving) -> AsyncIterator[AsyncOpenAI]:
    async with api(deployment) as made:
        yield made


def api(running: Serving) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)


def files(answer: Any) -> list[bytes]:
    return [base64.b64decode(one.b64_json) for one in answer.data]


def expected(seed: int, **size: int) -> bytes:
    return png(Picture(prompt="a river", seed=seed, **size))


async def test_the_client_gets_as_many_pictures_as_it_asks_for_each_with_a_seed_of_its_own(client: AsyncOpenAI) -> None:
    answer = await client.images.generate(model=MODEL, prompt="a river", n=3, extra_body={"seed": 5})
    assert files(answer) == [expected(5), expected(6), expected(7)]
    assert (answer.size, answer.output_format) == ("128x128", "png")
    assert answer.created > 1_700_000_000


async def test_a_picture_that_is_too_large_for_a_frame_comes_through_the_object_store(client: AsyncOpenAI) -> None:
    answer = await client.images.generate(model=MODEL, prompt="a river", size="1536x1024", extra_body={"seed": 1})  # type: ignore[call-overload]
    (file,) = files(answer)
    assert len(file) > 512 * 1024, "the largest frame"
    assert file == expected(1, width=1536, height=1024)


@pytest.mark.parametrize(
    ("options", "param", "words"),
    [
        ({"size": "4096x4096"}, "size", "4096x4096 is more than"),
        ({"extra_body": {"num_inference_steps": 999}}, "num_inference_steps", "this worker takes 1 to 200"),
        ({"response_format": "url"}, "response_format", "b64_json"),
    ],
)
async def test_the_client_sees_what_was_wrong(client: AsyncOpenAI, options: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        await client.images.generate(**({"model": MODEL, "prompt": "a river"} | options))
    assert caught.value.param == param


async def test_a_model_of_pictures_answers_no_chats(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=f"'{MODEL}' does not serve chat requests, only: image"):
        await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])


async def test_a_picture_whose_worker_dies_is_made_again_elsewhere_and_is_the_same_one(
    nats_server: EmbeddedServer, tmp_path: Path
) -> None:
    slow = diffusion(tmp_path, "SlowPainter", steps=3)
    Painter.made.clear()
    async with serving(nats_server, Subjects(f"imk{os.getpid()}"), slow, slow) as running, api(running) as client:
        call = asyncio.create_task(client.images.generate(model=MODEL, prompt="a river", n=2, extra_body={"seed": 3}))
        async with asyncio.timeout(20):
            while not (busy := [engine for engine in Painter.made if engine.load().running]):
                await asyncio.sleep(0.01)
        busy[0]._die("killed by a test")
        answer = await asyncio.wait_for(call, 60)
    assert files(answer) == [expected(3), expected(4)]
    assert len(answer.data or ()) == 2
