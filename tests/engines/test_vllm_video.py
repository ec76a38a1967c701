"""Videos on the real vLLM, decoded by its reader and processor, through the whole of Headrace beside vLLM asked directly."""

from __future__ import annotations

import base64
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from headrace.jetstream.embedded_server import EmbeddedServer
from tests.engines.support.media_world import ARGS, World, media_world, said, text
from tests.engines.support.tiny_video import FRAME_TOKENS, write_video_model
from tests.engines.test_vllm_media import image, png

pytestmark = [
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),  # vLLM and torch warn about themselves
]

MODEL = "watches"
FRAMES, SIDE = 6, 224
SETTINGS = {**ARGS, "trust_remote_code": True, "worker_extension_cls": "tests.engines.support.core_threads.CoreThreads"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory, model_dir: Path, nats_server: EmbeddedServer) -> AsyncIterator[World]:
    folder = write_video_model(tmp_path_factory.mktemp("video") / "model", model_dir)
    async with media_world(folder, MODEL, nats_server, SETTINGS) as made:
        yield made


def mp4(folder: Path, seed: int, frames: int = FRAMES) -> bytes:
    """A film of coloured noise in large squares, which its compression keeps apart."""
    import cv2

    path = folder / f"{seed}.mp4"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), 4.0, (SIDE, SIDE))
    random = np.random.default_rng(seed)
    for _ in range(frames):
        writer.write(random.integers(0, 256, (7, 7, 3), dtype=np.uint8).repeat(32, axis=0).repeat(32, axis=1))
    writer.release()
    return path.read_bytes()


def film(data: bytes) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{base64.b64encode(data).decode()}"}}


async def test_it_takes_videos_whose_length_only_vllm_knows(world: World) -> None:
    assert world.parts.engine.capabilities.media == {"image", "video"}
    assert world.parts.engine.offer.slots["video"].tokens == 0


async def test_the_core_computes_with_all_threads_though_the_processor_before_the_fork_had_one(world: World) -> None:
    import torch

    (told,) = await world.llm.collective_rpc("computing_threads")
    assert told == [torch.get_num_threads(), int(os.environ["OMP_NUM_THREADS"])]


async def test_the_answer_is_vllms_own_and_depends_on_the_film(world: World, tmp_path: Path) -> None:
    films = [film(mp4(tmp_path, seed)) for seed in (1, 2)]
    answers = []
    for one in films:
        content = [text("First"), one, text("what happens here?")]
        prompt, ids, words = await world.directly(*content)
        ours = await world.ask(*content)
        assert (ours["choices"][0]["token_ids"], said(ours)) == (ids, words)
        assert ours["usage"]["prompt_tokens"] == len(prompt) > FRAMES * FRAME_TOKENS
        answers.append(ids)
    assert answers[0] != answers[1]


async def test_more_frames_are_more_tokens(world: World, tmp_path: Path) -> None:
    sizes = [
        (await world.ask(film(mp4(tmp_path, 3, frames)), text("How long?")))["usage"]["prompt_tokens"] for frames in (3, 6)
    ]
    assert sizes[1] - sizes[0] == 3 * FRAME_TOKENS


async def test_a_film_beside_an_image(world: World, tmp_path: Path) -> None:
    content = [image(png(5, (SIDE, SIDE))), film(mp4(tmp_path, 4)), text("Do they fit?")]
    _, ids, _ = await world.directly(*content)
    assert (await world.ask(*content))["choices"][0]["token_ids"] == ids


async def test_a_damaged_film_is_a_400_that_names_the_part(world: World, tmp_path: Path) -> None:
    answer = await world.post([text("Look."), film(mp4(tmp_path, 6)[:300])])
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "messages[0].content[1].video_url.url"
