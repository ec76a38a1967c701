"""Videos by the `openai` client: from HTTP to a diffusion engine without a model and back, on a real nats-server."""

from __future__ import annotations

import asyncio
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
from tests.support.painter import Painter, mp4

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning"),  # of OpenAI's own servers
]

MODEL = "acme/videos"


def diffusion(folder: Path, engine: str = "Painter", **args: Any) -> WorkerSettings:
    return WorkerSettings(
        engine=f"tests.support.painter:{engine}",
        model=str(folder / "videos"),
        served_name=MODEL,
        engine_args={"fps": 4, **args},
        drain_grace_s=0.0,
        tool_parser="none",
        reasoning_parser="none",
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment(nats_server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Serving]:
    folder = tmp_path_factory.mktemp("pipeline")
    async with serving(nats_server, Subjects(f"vid{os.getpid()}"), diffusion(folder)) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(deployment: Serving) -> AsyncIterator[AsyncOpenAI]:
    async with api(deployment) as made:
        yield made


def api(running: Serving, **headers: str) -> AsyncOpenAI:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, default_headers=named)


async def create(client: AsyncOpenAI, *, seconds: Any = "1", size: Any = "96x64", **more: Any) -> Any:
    return await client.videos.create(model=MODEL, prompt="a river", seconds=seconds, size=size, extra_body={"seed": 5, **more})


async def ended(client: AsyncOpenAI, video: str) -> Any:
    async with asyncio.timeout(60):
        while (seen := await client.videos.retrieve(video)).status in ("queued", "in_progress"):
            await asyncio.sleep(0.02)
    return seen


def expected(seed: int, *, width: int = 96, height: int = 64, seconds: int = 1) -> bytes:
    asked = Picture(prompt="a river", seed=seed, width=width, height=height, seconds=seconds)
    return mp4(asked, seconds)


async def test_the_client_asks_for_a_video_waits_for_it_and_gets_the_file(client: AsyncOpenAI) -> None:
    video = await create(client)
    assert (video.status, video.object, video.model, video.prompt) == ("queued", "video", MODEL, "a river")
    seen = await ended(client, video.id)
    assert (seen.status, seen.progress, seen.size, seen.seconds, seen.error) == ("completed", 100, "96x64", "1", None)
    assert seen.expires_at > seen.completed_at >= seen.created_at
    assert (await client.videos.download_content(video.id)).content == expected(5)


async def test_a_file_that_is_too_large_for_a_message_comes_through_the_object_store(client: AsyncOpenAI) -> None:
    video = await create(client, size="1280x1024", seconds="2", seed=1)
    assert (await ended(client, video.id)).status == "completed"
    file = (await client.videos.download_content(video.id)).content
    assert len(file) > 1 << 20, "the largest message"
    assert file == expected(1, width=1280, height=1024, seconds=2)
    await client.videos.delete(video.id)
    with pytest.raises(openai.NotFoundError):
        await client.videos.download_content(video.id)


async def test_what_the_worker_refuses_is_a_failed_video_that_says_why(client: AsyncOpenAI) -> None:
    video = await create(client, seconds="60")
    seen = await ended(client, video.id)
    assert seen.status == "failed"
    assert "this worker takes 1 to 12" in seen.error.message
    with pytest.raises(openai.NotFoundError, match="only a completed one has a file"):
        await client.videos.download_content(video.id)


async def test_each_tenant_lists_reads_and_deletes_its_own_videos_alone(deployment: Serving) -> None:
    async with api(deployment, x_headrace_tenant="blue") as blue, api(deployment, x_headrace_tenant="red") as red:
        videos = [(await create(blue)).id for _ in range(2)]
        assert {video.id for video in (await blue.videos.list()).data} == set(videos)
        assert (await red.videos.list()).data == []
        for call in (red.videos.retrieve, red.videos.download_content, red.videos.delete):
            with pytest.raises(openai.NotFoundError):
                await call(videos[0])
        for video in videos:
            assert (await ended(blue, video)).status == "completed"
        assert (await blue.videos.delete(videos[0])).deleted
        assert [video.id for video in (await blue.videos.list()).data] == [videos[1]]


async def test_a_video_whose_worker_dies_is_made_again_elsewhere_and_is_the_same_one(
    nats_server: EmbeddedServer, tmp_path: Path
) -> None:
    slow = diffusion(tmp_path, "SlowPainter", steps=3)
    Painter.made.clear()
    async with serving(nats_server, Subjects(f"vik{os.getpid()}"), slow, slow) as running, api(running) as client:
        video = await create(client, seed=3)
        async with asyncio.timeout(20):
            while not (busy := [engine for engine in Painter.made if engine.load().running]):
                await asyncio.sleep(0.01)
        assert (await client.videos.retrieve(video.id)).status == "in_progress"
        busy[0]._die("killed by a test")
        assert (await ended(client, video.id)).status == "completed"
        assert (await client.videos.download_content(video.id)).content == expected(3)


async def test_a_video_that_is_made_is_cancelled_by_its_deletion(nats_server: EmbeddedServer, tmp_path: Path) -> None:
    Painter.made.clear()
    subjects = Subjects(f"vic{os.getpid()}")
    async with serving(nats_server, subjects, diffusion(tmp_path, "SlowPainter")) as running, api(running) as client:
        video = await create(client, num_inference_steps=200)
        async with asyncio.timeout(20):
            while not Painter.made[0].load().running:
                await asyncio.sleep(0.01)
        assert (await client.videos.delete(video.id)).deleted
        async with asyncio.timeout(20):
            while Painter.made[0].load().running:
                await asyncio.sleep(0.01)
