"""What an engine may read of an adapter: safetensors and a LoRA configuration; everything else is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.workers.adapter_files import safe_files
from headrace.workers.adapter_files.safe_files import check_adapter_folder
from headrace.workers.errors import AdapterFilesError
from tests.support.adapter_folders import adapter_folder, safetensors


def refused(folder: Path) -> str:
    with pytest.raises(AdapterFilesError) as told:
        check_adapter_folder(folder)
    return str(told.value)


def test_an_adapter_is_fine(tmp_path: Path) -> None:
    check_adapter_folder(adapter_folder(tmp_path / "a"))


@pytest.mark.parametrize("name", ["adapter_model.bin", "optimizer.pt", "rng_state.pth", "x.pkl", "modeling.py"])
def test_files_that_may_run_code_are_refused(tmp_path: Path, name: str) -> None:
    (adapter_folder(tmp_path) / name).write_bytes(b"")
    assert f"{name} may hold code" in refused(tmp_path)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (b"{", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"[]", "peft_type is None"),
        (b'{"peft_type": "IA3"}', "'IA3'"),
        (b" " * (safe_files.MOST_CONFIG + 1), "more than"),
    ],
)
def test_a_configuration_of_something_else_is_refused(tmp_path: Path, config: bytes, why: str) -> None:
    assert why in refused(adapter_folder(tmp_path, config=config))


@pytest.mark.parametrize(
    "weights",
    [
        b"",
        b"\x80\x04]\x94.",  # a pickle
        (2**63).to_bytes(8, "little") + b"{}",
        (9).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        safetensors(data_offsets=[0, 9]),
        safetensors(data_offsets=[-1, 8]),
        safetensors(data_offsets=[8, 0]),
        safetensors(data_offsets=None),
    ],
)
def test_weights_that_are_no_safetensors_are_refused(tmp_path: Path, weights: bytes) -> None:
    assert "is no safetensors file" in refused(adapter_folder(tmp_path, weights=weights))


@given(st.binary(max_size=64))
def test_no_bytes_are_taken_for_weights_by_accident(tmp_path_factory: pytest.TempPathFactory, weights: bytes) -> None:
    refused(adapter_folder(tmp_path_factory.mktemp("a"), weights=weights + b"x"))


def test_missing_files_are_named(tmp_path: Path) -> None:
    assert "there is no folder" in refused(tmp_path / "nothing")
    folder = adapter_folder(tmp_path / "a")
    (folder / "adapter_model.safetensors").unlink()
    assert "adapter_model.safetensors: No such file" in refused(folder)
    (folder / "adapter_config.json").unlink()
    assert "adapter_config.json: No such file" in refused(folder)
