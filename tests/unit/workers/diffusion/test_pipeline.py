"""What the folder of a diffusion pipeline says, and what is said of one that cannot be served."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.workers.diffusion.pipeline import FALLBACK_SIZE, FALLBACK_VIDEO, read_pipeline
from headrace.workers.errors import EngineStartFailed
from tests.support.pipelines import pipeline


def test_the_index_names_the_pipeline_and_its_parts_the_size(tmp_path: Path) -> None:
    found = read_pipeline(str(pipeline(tmp_path, latents=64)))
    assert (found.name, found.kind, found.version) == ("StableDiffusionPipeline", "image", "0.35.1")
    assert (found.width, found.height, found.tokenizer_dir) == (512, 512, None)
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    assert read_pipeline(str(tmp_path)).tokenizer_dir == tmp_path / "tokenizer"


@pytest.mark.parametrize("config", [{}, {"sample_size": [8, 8]}, {"sample_size": True}, {"sample_size": 10**6}])
def test_a_size_that_is_not_told_is_a_common_one(tmp_path: Path, config: dict[str, object]) -> None:
    pipeline(tmp_path)
    (tmp_path / "unet" / "config.json").write_text(json.dumps(config))
    found = read_pipeline(str(tmp_path))
    assert (found.width, found.height) == (FALLBACK_SIZE, FALLBACK_SIZE)


@pytest.mark.parametrize("name", ["WanPipeline", "LTXPipeline", "MochiPipeline", "HunyuanVideoPipeline", "CogVideoXPipeline"])
def test_a_pipeline_that_makes_videos_is_known_by_its_name(tmp_path: Path, name: str) -> None:
    pipeline(tmp_path, name=name, latents=10**6)
    found = read_pipeline(str(tmp_path))
    assert (found.kind, (found.width, found.height)) == ("video", FALLBACK_VIDEO)
    (tmp_path / "unet" / "config.json").write_text(json.dumps({"sample_width": 90, "sample_height": 60}))
    found = read_pipeline(str(tmp_path))
    assert (found.width, found.height) == (720, 480)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("WanImageToVideoPipeline", "does not make videos from text alone"),
        ("StableVideoDiffusionPipeline", "does not make videos from text alone"),
        ("CogVideoXVideoToVideoPipeline", "does not make videos from text alone"),
        ("StableDiffusionImg2ImgPipeline", "does not make pictures from text alone"),
        ("FluxControlNetPipeline", "does not make pictures from text alone"),
    ],
)
def test_a_pipeline_for_something_else_is_named(tmp_path: Path, name: str, told: str) -> None:
    with pytest.raises(EngineStartFailed, match=f"is a {name}, which {told}"):
        read_pipeline(str(pipeline(tmp_path, name=name)))


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineStartFailed, match="'acme/pictures' is no folder"):
        read_pipeline("acme/pictures")
    with pytest.raises(EngineStartFailed, match=r"model_index\.json does not exist"):
        read_pipeline(str(tmp_path))
    for text, told in (("{", "cannot be read"), ("[]", "is no JSON object"), ("{}", "names no pipeline")):
        (tmp_path / "model_index.json").write_text(text)
        with pytest.raises(EngineStartFailed, match=told):
            read_pipeline(str(tmp_path))
    pipeline(tmp_path)
    (tmp_path / "text_encoder").rmdir()
    with pytest.raises(EngineStartFailed, match="names text_encoder, of which there is no folder"):
        read_pipeline(str(tmp_path))
