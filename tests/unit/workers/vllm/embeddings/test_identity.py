"""Blocks of one model are never those of another: whatever changes a model's numbers changes its identity."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.workers.errors import EngineStartFailed
from headrace.workers.vllm.embeddings.identity import SAMPLE, model_files, model_identity, namespace, settings_identity


def weights(path: Path, **tensors: bytes) -> None:
    """Write a safetensors file."""
    head: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, data in tensors.items():
        head[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(head).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(tensors.values()))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    weights(tmp_path / "model.safetensors", first=b"1" * (2 * SAMPLE), second=b"2" * 100)
    (tmp_path / "config.json").write_text('{"rope_theta": 10000}')
    (tmp_path / "README.md").write_text("a model")
    return tmp_path


def test_the_same_files_are_the_same_model_wherever_they_lie(model: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    copy = tmp_path_factory.mktemp("copy")
    for path in model.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    assert model_identity(copy) == model_identity(model)


@pytest.mark.parametrize("change", ["first tensor", "second tensor", "config", "more weights", "other form"])
def test_what_changes_the_numbers_is_another_model(model: Path, change: str) -> None:
    before = model_identity(model)
    match change:
        case "first tensor":
            weights(model / "model.safetensors", first=b"0" + b"1" * (2 * SAMPLE - 1), second=b"2" * 100)
        case "second tensor":
            weights(model / "model.safetensors", first=b"1" * (2 * SAMPLE), second=b"2" * 99 + b"3")
        case "config":
            (model / "config.json").write_text('{"rope_theta": 10001}')
        case "more weights":
            weights(model / "model-2.safetensors", third=b"3")
        case _:
            (model / "adapter.bin").write_bytes(b"x")
    assert model_identity(model) != before


def test_a_model_may_be_a_single_file(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"weights")
    (tmp_path / "b.gguf").write_bytes(b"others")
    assert model_identity(tmp_path / "a.gguf") != model_identity(tmp_path / "b.gguf")


def test_a_model_of_a_hub_is_its_snapshot_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def cached(model: str, name: str, revision: str | None) -> str | None:
        return f"{tmp_path}/{revision}/{name}" if model == "org/there" else None

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", cached)
    assert model_files(str(tmp_path), None) == tmp_path
    assert model_files("org/there", "v1") == tmp_path / "v1"
    with pytest.raises(EngineStartFailed, match="the files of org/absent are not on this machine"):
        model_files("org/absent", None)


def test_a_readme_is_no_part_of_the_model(model: Path) -> None:
    before = model_identity(model)
    (model / "README.md").write_text("the same model")
    assert model_identity(model) == before


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(EngineStartFailed, match="has no weights"):
        model_identity(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 20, (3).to_bytes(8, "little") + b"{x}", (2).to_bytes(8, "little") + b"[]", b"\x01"]
)
def test_a_broken_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(EngineStartFailed, match=r"model\.safetensors"):
        model_identity(tmp_path)


def test_a_setting_that_may_change_embeddings_is_in_the_identity_and_one_that_cannot_is_not() -> None:
    plain = settings_identity({"dtype": "float32"})
    assert settings_identity({"dtype": "float32", "max_num_seqs": 3, "seed": 2}, without=("seed",)) == plain
    assert settings_identity({"dtype": "bfloat16"}) != plain
    assert settings_identity({"dtype": "float32", "a_setting_to_come": 1}) != plain


def test_every_part_is_in_the_namespace() -> None:
    assert namespace("a", 1) != namespace("a", 2)
    assert namespace("ab", "c") != namespace("a", "bc")
    assert len(namespace("a")) == 24
