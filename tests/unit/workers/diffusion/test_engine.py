"""The engine contract as far as it is not about text, and the pictures of the stand-in."""

from __future__ import annotations

import asyncio
import struct
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headrace.broker.messages import Picture
from headrace.frontend.videos import measures
from headrace.workers.diffusion.engine import DiffusionEngine
from headrace.workers.diffusion.stand_in import COMMENT, paint
from headrace.workers.diffusion.support import SUPPORT
from headrace.workers.engine import Engine, EngineConfig, PoolItem, Role
from headrace.workers.errors import EngineDead, EngineStartFailed, RequestInvalid, UnsupportedByEngine
from tests.engine_contract.generating import DescriptionContract
from tests.engine_contract.life import HealthContract
from tests.engine_contract.operations import OperationsContract
from tests.engine_contract.subject import Means, Subject, started
from tests.support.pipelines import pipeline


async def kill(engine: Engine) -> None:
    assert isinstance(engine, DiffusionEngine)
    engine.die("killed by a test")


def config(folder: Path, **args: Any) -> EngineConfig:
    return EngineConfig(model=str(pipeline(folder)), served_name="pictures", args={"step_s": 0, **args})


@pytest_asyncio.fixture
async def subject(tmp_path: Path) -> AsyncIterator[Subject]:
    async with started(DiffusionEngine, config(tmp_path), SUPPORT, Means(kill=kill)) as made:
        yield made


class TestDiffusion(DescriptionContract, OperationsContract, HealthContract):
    """The stand-in."""


def test_nothing_else_is_declared() -> None:
    assert SUPPORT.words == {"kind image", "kind video", "role aggregated"}


def item(number: int = 0, **options: Any) -> PoolItem:
    return PoolItem(id=f"p{number}", task="image", token_ids=[1, 2], picture=Picture(**({"prompt": "a river"} | options)))


def size_of(file: bytes) -> tuple[int, int]:
    """The size of a PNG file whose parts and pixels are whole."""
    assert file[:8] == b"\x89PNG\r\n\x1a\n"
    at, parts = 8, {}
    while at < len(file):
        (length,) = struct.unpack_from(">I", file, at)
        kind, data = file[at + 4 : at + 8], file[at + 8 : at + 8 + length]
        assert struct.unpack_from(">I", file, at + 8 + length) == (zlib.crc32(kind + data),)
        parts[kind] = data
        at += length + 12
    width, height = struct.unpack_from(">2I", parts[b"IHDR"])
    assert len(zlib.decompress(parts[b"IDAT"])) == height * (3 * width + 1)
    assert COMMENT.encode() in parts[b"tEXt"], "a test picture says what it is"
    return width, height


async def test_a_picture_is_a_function_of_what_was_asked_for(subject: Subject) -> None:
    first = (await subject.engine.pool(item())).vector
    assert size_of(first) == (128, 128), "the pipeline's own size"
    assert (await subject.engine.pool(item(1))).vector == first
    for change in ({"prompt": "a sea"}, {"seed": 1}, {"negative_prompt": "a boat"}, {"steps": 2}, {"guidance": 3.0}):
        assert (await subject.engine.pool(item(2, **change))).vector != first
    assert size_of((await subject.engine.pool(item(3, width=64, height=96))).vector) == (64, 96)


@pytest.mark.parametrize(
    ("options", "param"),
    [({"width": 4096, "height": 4096}, "size"), ({"steps": 201}, "num_inference_steps"), ({"steps": 0}, "num_inference_steps")],
)
async def test_what_is_too_much_is_refused_by_name(subject: Subject, options: dict[str, int], param: str) -> None:
    with pytest.raises(RequestInvalid) as caught:
        await subject.engine.pool(item(**options))
    assert caught.value.param == param


async def test_vectors_text_and_cache_events_are_refused(subject: Subject) -> None:
    with pytest.raises(UnsupportedByEngine):
        await subject.engine.pool(PoolItem(id="v", task="embed", token_ids=[1]))
    with pytest.raises(UnsupportedByEngine):
        await subject.submit([1, 2, 3])
    with pytest.raises(UnsupportedByEngine):
        await anext(subject.engine.kv_events())


async def test_pictures_beyond_the_slots_wait_and_a_cancelled_one_frees_its_slot(tmp_path: Path) -> None:
    async with started(DiffusionEngine, config(tmp_path, slots=2, step_s=30), SUPPORT) as subject:
        calls = [asyncio.create_task(subject.engine.pool(item(n))) for n in range(3)]
        await subject.until(lambda: subject.engine.load().waiting == 1)
        assert subject.engine.load().running == 2
        for call in calls[:2]:
            call.cancel()
        await asyncio.wait(calls[:2])
        assert (subject.engine.load().running, subject.engine.load().waiting) == (1, 0)
        await kill(subject.engine)
        with pytest.raises(EngineDead, match="killed by a test"):
            await calls[2]


@pytest.mark.parametrize(
    ("args", "told"),
    [({"backend": "sglang"}, "backend"), ({"stepz": 1}, "there are backend, steps"), ({"slots": 0}, "slots")],
)
async def test_a_wrong_setting_ends_the_start_and_is_named(tmp_path: Path, args: dict[str, Any], told: str) -> None:
    with pytest.raises(EngineStartFailed, match=told):
        await DiffusionEngine().start(config(tmp_path, **args), lambda _: None)
    with pytest.raises(EngineStartFailed, match="no role 'prefill'"):
        await DiffusionEngine().start(EngineConfig(model="m", served_name="m", role=Role.PREFILL), lambda _: None)


def film(number: int = 0, **options: Any) -> PoolItem:
    given: dict[str, Any] = {"prompt": "a river", "seconds": 1, **options}
    return PoolItem(id=f"f{number}", task="video", token_ids=[1, 2], picture=Picture(**given))


@pytest_asyncio.fixture
async def studio(tmp_path: Path) -> AsyncIterator[Subject]:
    """An engine that makes videos."""
    folder = pipeline(tmp_path, name="WanPipeline")
    made = EngineConfig(model=str(folder), served_name="videos", args={"step_s": 0})
    async with started(DiffusionEngine, made, SUPPORT, Means(kill=kill)) as subject:
        yield subject


class TestFilming(DescriptionContract, OperationsContract, HealthContract):
    """The stand-in with a pipeline for videos."""

    @pytest_asyncio.fixture
    async def subject(self, studio: Subject) -> Subject:
        return studio


async def test_a_video_is_a_function_of_what_was_asked_for_and_common_libraries_read_it(
    studio: Subject, tmp_path: Path
) -> None:
    first = (await studio.engine.pool(film())).vector
    assert measures(first) == (128, 128, 1.0), "the pipeline's own size"
    assert COMMENT.encode() in first, "a test video says what it is"
    assert (await studio.engine.pool(film(1))).vector == first
    for change in ({"prompt": "a sea"}, {"seed": 1}, {"negative_prompt": "a boat"}, {"seconds": 2}):
        assert (await studio.engine.pool(film(2, **change))).vector != first
    assert measures((await studio.engine.pool(film(3, width=64, height=96, seconds=None))).vector) == (64, 96, 4.0)
    cv2 = pytest.importorskip("cv2", reason="the reader of videos that vLLM brings")
    numpy = pytest.importorskip("numpy")
    (tmp_path / "x.mp4").write_bytes(first)
    video = cv2.VideoCapture(str(tmp_path / "x.mp4"))
    for number in range(8):
        read, frame = video.read()
        assert read
        picture = paint(Picture(prompt="a river", seconds=1), width=128, height=128, phase=number / 8)
        assert (frame == cv2.imdecode(numpy.frombuffer(picture, numpy.uint8), cv2.IMREAD_COLOR)).all()
    assert not video.read()[0], "a second of eight frames"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"seconds": 13}, "seconds"),
        ({"seconds": 0}, "seconds"),
        ({"seconds": 12, "width": 1024, "height": 1024}, "seconds"),
        ({"width": 2056, "height": 2048}, "size"),
        ({"steps": 201}, "num_inference_steps"),
    ],
)
async def test_what_is_too_much_of_a_video_is_refused_by_name(studio: Subject, options: dict[str, int], param: str) -> None:
    with pytest.raises(RequestInvalid) as caught:
        await studio.engine.pool(film(**options))
    assert caught.value.param == param


async def test_an_engine_of_pictures_makes_no_videos_and_one_of_videos_no_pictures(subject: Subject, studio: Subject) -> None:
    with pytest.raises(UnsupportedByEngine, match="makes images"):
        await subject.engine.pool(film())
    with pytest.raises(UnsupportedByEngine, match="makes videos"):
        await studio.engine.pool(item())
