"""The engine contract as far as it is not about text, turns, limits and folders of the diffusion engine, without a model."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headrace.broker.messages.requests import Picture
from headrace.frontend.videos import measures
from headrace.workers.diffusion import SUPPORT, DiffusionEngine, check_folder
from headrace.workers.engine import Engine, EngineConfig, PoolItem, Role
from headrace.workers.errors import EngineDead, EngineStartFailed, RequestInvalid, UnsupportedByEngine
from tests.engine_contract.generating import DescriptionContract
from tests.engine_contract.life import HealthContract
from tests.engine_contract.operations import OperationsContract
from tests.engine_contract.subject import Means, Subject, started
from tests.support.painter import Painter, SlowPainter


async def kill(engine: Engine) -> None:
    assert isinstance(engine, DiffusionEngine)
    engine._die("killed by a test")


def config(model: str, **args: Any) -> EngineConfig:
    return EngineConfig(model=model, served_name=model, args=args)


@pytest_asyncio.fixture
async def painter() -> AsyncIterator[Subject]:
    async with started(Painter, config("pictures"), SUPPORT, Means(kill=kill)) as made:
        yield made


@pytest_asyncio.fixture
async def studio() -> AsyncIterator[Subject]:
    """An engine that makes videos."""
    async with started(Painter, config("videos", fps=8, max_video_pixels=1 << 25), SUPPORT, Means(kill=kill)) as made:
        yield made


class TestPictures(DescriptionContract, OperationsContract, HealthContract):
    """Of pictures."""

    @pytest.fixture
    def subject(self, painter: Subject) -> Subject:
        return painter


class TestVideos(DescriptionContract, OperationsContract, HealthContract):
    """Of videos."""

    @pytest.fixture
    def subject(self, studio: Subject) -> Subject:
        return studio


def test_nothing_else_is_declared() -> None:
    assert SUPPORT.words == {"kind image", "kind video", "role aggregated"}


def item(number: int = 0, **options: Any) -> PoolItem:
    return PoolItem(id=f"p{number}", task="image", token_ids=[1, 2], picture=Picture(**({"prompt": "a river"} | options)))


def film(**options: Any) -> PoolItem:
    given: dict[str, Any] = {"prompt": "a river", "seconds": 1, **options}
    return PoolItem(id="f", task="video", token_ids=[1, 2], picture=Picture(**given))


@pytest.mark.parametrize(
    ("options", "param"),
    [({"width": 4096, "height": 4096}, "size"), ({"steps": 201}, "num_inference_steps"), ({"steps": 0}, "num_inference_steps")],
)
async def test_what_is_too_much_is_refused_by_name(painter: Subject, options: dict[str, int], param: str) -> None:
    with pytest.raises(RequestInvalid) as caught:
        await painter.engine.pool(item(**options))
    assert caught.value.param == param


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


async def test_what_the_pipeline_does_not_take_is_refused_by_name(painter: Subject) -> None:
    assert isinstance(painter.engine, Painter)
    painter.engine._takes = {name: take for name, take in painter.engine._takes.items() if name != "negative_prompt"}
    with pytest.raises(RequestInvalid, match="takes no negative_prompt") as caught:
        await painter.engine.pool(item(negative_prompt="a boat"))
    assert caught.value.param == "negative_prompt"


async def test_a_video_has_the_length_that_was_asked_for_or_that_of_the_settings(studio: Subject) -> None:
    assert measures((await studio.engine.pool(film(seconds=2))).vector) == (128, 128, 2.0)
    assert measures((await studio.engine.pool(film(seconds=None))).vector) == (128, 128, 4.0)


async def test_vectors_text_cache_events_and_the_other_kind_are_refused(painter: Subject, studio: Subject) -> None:
    with pytest.raises(UnsupportedByEngine):
        await painter.engine.pool(PoolItem(id="v", task="embed", token_ids=[1]))
    with pytest.raises(UnsupportedByEngine):
        await painter.submit([1, 2, 3])
    with pytest.raises(UnsupportedByEngine):
        await anext(painter.engine.kv_events())
    with pytest.raises(UnsupportedByEngine, match="makes images"):
        await painter.engine.pool(film())
    with pytest.raises(UnsupportedByEngine, match="makes videos"):
        await studio.engine.pool(item())


async def test_pictures_take_turns_and_a_cancelled_one_gives_its_turn_away() -> None:
    async with started(SlowPainter, config("pictures"), SUPPORT) as subject:
        engine = subject.engine
        calls = [asyncio.create_task(engine.pool(item(n, steps=200))) for n in range(3)]
        await subject.until(lambda: engine.load().waiting == 2)
        assert engine.load().running == 1
        for call in calls[:2]:  # one that computes and one that waits
            call.cancel()
        await asyncio.wait(calls[:2])
        assert (engine.load().running, engine.load().waiting) == (1, 0)
        await asyncio.sleep(0.05)
        assert not calls[2].done()
        await kill(engine)
        with pytest.raises(EngineDead, match="killed by a test"):
            await calls[2]


async def test_a_turn_begins_only_when_the_thread_before_has_ended() -> None:
    async with started(SlowPainter, config("pictures"), SUPPORT) as subject:
        call = asyncio.create_task(subject.engine.pool(item(steps=200)))
        await asyncio.sleep(0.05)
        call.cancel()
        assert (await subject.engine.pool(item(1, steps=1))).vector
        with pytest.raises(asyncio.CancelledError):
            await call


@pytest.mark.parametrize(
    ("args", "told"),
    [({"device": "tpu"}, "device"), ({"stepz": 1}, "there are device, dtype, steps"), ({"fps": 0}, "fps")],
)
async def test_a_wrong_setting_ends_the_start_and_is_named(args: dict[str, Any], told: str) -> None:
    with pytest.raises(EngineStartFailed, match=told):
        await DiffusionEngine().start(config("m", **args), lambda _: None)
    with pytest.raises(EngineStartFailed, match="no role 'prefill'"):
        await DiffusionEngine().start(EngineConfig(model="m", served_name="m", role=Role.PREFILL), lambda _: None)


def pipeline(folder: Path, name: str = "StableDiffusionPipeline") -> Path:
    """Write the index of a pipeline and the folders of its parts."""
    parts = {"unet": ["diffusers", "UNet2DConditionModel"], "safety_checker": [None, None]}
    (folder / "unet").mkdir()
    (folder / "model_index.json").write_text(json.dumps({"_class_name": name, "_diffusers_version": "0.42.1", **parts}))
    return folder


@pytest.mark.parametrize(
    "name",
    [
        "WanImageToVideoPipeline",
        "StableVideoDiffusionPipeline",
        "CogVideoXVideoToVideoPipeline",
        "StableDiffusionImg2ImgPipeline",
        "FluxControlNetPipeline",
    ],
)
def test_a_pipeline_for_something_else_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(EngineStartFailed, match=f"is a {name}, which needs more than a text"):
        check_folder(str(pipeline(tmp_path, name)))


def test_what_is_missing_of_a_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineStartFailed, match="'acme/pictures' is not a folder"):
        check_folder("acme/pictures")
    with pytest.raises(EngineStartFailed, match=r"model_index\.json does not exist"):
        check_folder(str(tmp_path))
    for text, told in (("{", "cannot be read"), ("[]", "names no pipeline"), ('{"_class_name": 1}', "names no pipeline")):
        (tmp_path / "model_index.json").write_text(text)
        with pytest.raises(EngineStartFailed, match=told):
            check_folder(str(tmp_path))
    check_folder(str(pipeline(tmp_path)))
    (tmp_path / "unet").rmdir()
    with pytest.raises(EngineStartFailed, match="names unet, of which there is no folder"):
        check_folder(str(tmp_path))


async def test_without_the_package_the_start_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(EngineStartFailed, match=r"pip install 'headrace\[diffusion\]'"):
        await DiffusionEngine().start(config(str(pipeline(tmp_path))), lambda _: None)
