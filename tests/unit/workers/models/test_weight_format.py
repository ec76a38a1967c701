"""The format in which an engine reads weights: nothing that can hold code, unless the operator says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.workers.errors import EngineStartFailed
from headrace.workers.models.weight_format import weight_format

SAFE = {"load_format": "safetensors"}


def folder(path: Path, *names: str) -> str:
    for name in ("config.json", *names):
        (path / name).write_bytes(b"")
    return str(path)


@pytest.mark.parametrize("pickle", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt", "model.pth", "x.ckpt"])
def test_a_folder_of_pickles_is_refused(tmp_path: Path, pickle: str) -> None:
    model = folder(tmp_path, pickle)
    with pytest.raises(EngineStartFailed, match=f"pickles .{pickle}.*load_format=auto"):
        weight_format(model, {})
    assert weight_format(model, {"load_format": "auto"}) == {}


def test_pickles_beside_safetensors_are_not_read(tmp_path: Path) -> None:
    assert weight_format(folder(tmp_path, "model.safetensors", "pytorch_model.bin"), {}) == SAFE


def test_an_engine_fetches_safetensors_only_from_a_hub() -> None:
    assert weight_format("Qwen/Qwen3-0.6B", {}) == SAFE
    assert weight_format("Qwen/Qwen3-0.6B", {"load_format": None}) == SAFE
    assert weight_format("Qwen/Qwen3-0.6B", {"load_format": "dummy"}) == {}


def test_mistrals_own_files_are_read_as_such(tmp_path: Path) -> None:
    assert weight_format(folder(tmp_path, "consolidated.safetensors"), {}) == {"load_format": "mistral"}


def test_gguf_is_left_to_the_engine(tmp_path: Path) -> None:
    assert weight_format(folder(tmp_path, "model.gguf"), {}) == {}
    assert weight_format(str(tmp_path / "model.gguf"), {}) == {}
    assert weight_format("org/model:Q4_K_M", {}) == {}
    assert weight_format("s3://bucket/model", {}) == {}


def test_a_folder_without_weights_is_left_to_the_engine_which_names_what_is_missing(tmp_path: Path) -> None:
    assert weight_format(folder(tmp_path), {}) == SAFE
