"""The room that SGLang needs for adapters follows from their ranks and modules."""

from __future__ import annotations

import json
from pathlib import Path

from headrace.workers.engine import EngineConfig
from headrace.workers.lora_adapters import adapters_of
from headrace.workers.sglang.adapters import lora_args, read_adapter


def config(adapters: object) -> EngineConfig:
    return EngineConfig(model="m", served_name="base", args={"adapters": adapters})


def adapter(folder: Path, rank: object = 8, **more: object) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank, "target_modules": ["q_proj"], **more}))
    return str(folder)


def test_room_is_made_for_all_adapters_at_once(tmp_path: Path) -> None:
    folders = {"a": adapter(tmp_path / "a"), "b": adapter(tmp_path / "b", 16, target_modules=["v_proj", "q_proj"])}
    assert lora_args(adapters_of(config(folders), read_adapter)) == {
        "enable_lora": True,
        "max_lora_rank": 16,
        "max_loras_per_batch": 3,
        "lora_paths": [f"a={folders['a']}", f"b={folders['b']}"],
        "lora_target_modules": ["q_proj", "v_proj"],
    }


def test_without_adapters_nothing_is_set() -> None:
    assert lora_args(adapters_of(config(None), read_adapter)) == {}
