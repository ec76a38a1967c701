from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.workers.engine import EngineConfig
from headrace.workers.errors import EngineStartFailed
from headrace.workers.sglang.adapters import adapters_of, lora_args


def config(adapters: object) -> EngineConfig:
    return EngineConfig(model="m", served_name="base", args={"adapters": adapters})


def adapter(folder: Path, rank: object = 8, **more: object) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank, "target_modules": ["q_proj"], **more}))
    return str(folder)


def test_room_is_made_for_all_adapters_at_once(tmp_path: Path) -> None:
    folders = {"a": adapter(tmp_path / "a"), "b": adapter(tmp_path / "b", 16, target_modules=["v_proj", "q_proj"])}
    assert lora_args(adapters_of(config(folders))) == {
        "enable_lora": True,
        "max_lora_rank": 16,
        "max_loras_per_batch": 3,
        "lora_paths": [f"a={folders['a']}", f"b={folders['b']}"],
        "lora_target_modules": ["q_proj", "v_proj"],
    }


def test_without_adapters_nothing_is_set() -> None:
    assert lora_args(adapters_of(config(None))) == {}


def test_a_wrong_adapter_stops_the_start_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for given, said in (
        ({"a": str(tmp_path / "empty")}, "'a'"),
        ({"a": adapter(tmp_path / "zero", 0)}, "rank 0"),
        ({"base": adapter(tmp_path / "ok")}, "the model itself"),
        ({"a": 3}, "must name a folder"),
        ("x", "must be a map"),
    ):
        with pytest.raises(EngineStartFailed, match=said):
            adapters_of(config(given))
