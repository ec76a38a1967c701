"""Pictures and videos by tiny pipelines of diffusers with random weights: the engine alone, and served over HTTP."""

from __future__ import annotations

import asyncio
import base64
import io
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from headrace.broker.messages.requests import Picture
from headrace.frontend.videos import measures
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.subjects import Subjects
from headrace.workers.diffusion import SUPPORT, DiffusionEngine
from headrace.workers.engine import Engine, EngineConfig, PoolItem
from headrace.workers.errors import EngineDead, EngineStartFailed, RequestInvalid
from headrace.workers.settings import WorkerSettings
from tests.engine_contract.generating import DescriptionContract
from tests.engine_contract.life import HealthContract
from tests.engine_contract.operations import OperationsContract
from tests.engine_contract.subject import Means, Subject, started
from tests.support.local_deployment import serving

diffusers = pytest.importorskip("diffusers", reason="make test installs it")

from tests.support.pipelines import tiny_pictures, tiny_videos  # noqa: E402

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),  # torch and transformers warn about themselves
    pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning"),  # of OpenAI's own servers
]


async def kill(engine: Engine) -> None:
    assert isinstance(engine, DiffusionEngine)
    engine._die("killed by a test")


def config(folder: Path, **args: Any) -> EngineConfig:
    return EngineConfig(model=str(folder), served_name="m", args={"device": "cpu", "steps": 2, **args})


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_pictures(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_videos(tmp_path_factory.mktemp("videos"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def painter(pictures: Path) -> AsyncIterator[Subject]:
    async with started(DiffusionEngine, config(pictures), SUPPORT, Means(kill=kill, start_s=240.0)) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def studio(videos: Path) -> AsyncIterator[Subject]:
    async with started(DiffusionEngine, config(videos, fps=6), SUPPORT, Means(kill=kill, start_s=240.0)) as made:
        yield made


class TestPictures(DescriptionContract, OperationsContract, HealthContract):
    """With a Stable Diffusion."""

    @pytest.fixture
    def subject(self, painter: Subject) -> Subject:
        return painter


class TestVideos(DescriptionContract, OperationsContract, HealthContract):
    """With a Wan."""

    @pytest.fixture
    def subject(self, studio: Subject) -> Subject:
        return studio


def item(task: Any = "image", **options: Any) -> PoolItem:
    return PoolItem(id="p", task=task, token_ids=[1, 2], picture=Picture(**({"prompt": "a river"} | options)))


def pixels(file: bytes) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(file))


async def test_a_picture_is_a_function_of_what_was_asked_for(painter: Subject) -> None:
    first = (await painter.engine.pool(item())).vector
    assert (pixels(first).format, pixels(first).size) == ("PNG", (64, 64)), "the pipeline's own size"
    assert (await painter.engine.pool(item())).vector == first
    for change in ({"prompt": "a sea"}, {"seed": 1}, {"negative_prompt": "a boat"}, {"steps": 3}, {"guidance": 3.0}):
        assert (await painter.engine.pool(item(**change))).vector != first, change
    assert pixels((await painter.engine.pool(item(width=32, height=48))).vector).size == (32, 48)


async def test_a_video_is_a_function_of_what_was_asked_for(studio: Subject) -> None:
    import av

    asked = {"width": 64, "height": 48, "seconds": 1}
    first = (await studio.engine.pool(item("video", **asked))).vector
    assert measures(first) == (64, 48, 1.0)
    assert (await studio.engine.pool(item("video", **asked))).vector == first
    assert (await studio.engine.pool(item("video", **asked, seed=1))).vector != first
    with av.open(io.BytesIO(first)) as file:
        assert len(list(file.decode(video=0))) == 6, "a second of six frames, though Wan makes one more than a multiple of 4"


async def test_a_size_that_the_pipeline_refuses_is_the_requests_fault(studio: Subject) -> None:
    with pytest.raises(RequestInvalid, match=r"WanPipeline: .*divisible by 16"):
        await studio.engine.pool(item("video", width=64, height=56, seconds=1))


async def test_the_prompt_has_room_for_what_the_tokenizer_takes(painter: Subject, studio: Subject) -> None:
    assert (painter.info.context_length, studio.info.context_length) == (78, 513)
    assert Path(painter.info.tokenizer_dir).name == "tokenizer"


async def test_the_event_loop_goes_on_and_a_cancelled_picture_ends_between_two_steps(
    painter: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, turns = painter.engine, 0
    assert isinstance(engine, DiffusionEngine)
    scheduler = engine._pipe.scheduler
    step = mock.Mock(wraps=scheduler.step)
    monkeypatch.setattr(scheduler, "step", step)
    call = asyncio.create_task(engine.pool(item(steps=200)))
    while not step.call_count:
        await asyncio.sleep(0.002)
        turns += 1
    assert turns > 1
    call.cancel()
    await engine.pool(item(steps=1))  # takes its turn once the thread has ended
    assert step.call_count < 200
    assert call.cancelled()


async def test_weights_in_pickles_are_not_read(tmp_path: Path) -> None:
    import torch

    folder = tiny_pictures(tmp_path)
    (folder / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    torch.save({}, folder / "unet" / "diffusion_pytorch_model.bin")
    with pytest.raises(EngineStartFailed, match="diffusers could not load"):
        await DiffusionEngine().start(config(folder), lambda _: None)


async def test_clients_get_pictures_and_videos(nats_server: EmbeddedServer, pictures: Path, videos: Path) -> None:
    def worker(folder: Path, name: str) -> WorkerSettings:
        return WorkerSettings(
            engine="diffusion",
            model=str(folder),
            served_name=name,
            engine_args={"device": "cpu", "steps": 2, "fps": 5},
            drain_grace_s=0.0,
            tool_parser="none",
            reasoning_parser="none",
        )

    both = worker(pictures, "pictures"), worker(videos, "videos")
    async with (
        serving(nats_server, Subjects(f"dif{os.getpid()}"), *both) as running,
        AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client,
    ):
        answer = await client.images.generate(model="pictures", prompt="a river", n=2, extra_body={"seed": 5})
        files = [base64.b64decode(one.b64_json or "") for one in answer.data or ()]
        assert [pixels(file).size for file in files] == [(64, 64)] * 2
        assert files[0] != files[1], "each has a seed of its own"
        video = await client.videos.create(model="videos", prompt="a river", seconds="1", size="64x64")  # type: ignore[arg-type]
        async with asyncio.timeout(60):
            while (seen := await client.videos.retrieve(video.id)).status in ("queued", "in_progress"):
                await asyncio.sleep(0.05)
        assert (seen.status, seen.size, seen.seconds) == ("completed", "64x64", "1")
        assert measures((await client.videos.download_content(video.id)).content) == (64, 64, 1.0)


async def test_an_engine_that_dies_ends_what_it_makes(pictures: Path) -> None:
    async with started(DiffusionEngine, config(pictures), SUPPORT) as subject:
        call = asyncio.create_task(subject.engine.pool(item(steps=200)))
        await asyncio.sleep(0.1)
        await kill(subject.engine)
        with pytest.raises(EngineDead, match="killed by a test"):
            await call
