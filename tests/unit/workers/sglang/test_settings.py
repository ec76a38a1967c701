from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.workers.engine import EngineConfig, Role
from headrace.workers.sglang.settings import (
    CPU_KV_TOKENS,
    computes_on_cpu,
    kv_events_wanted,
    kv_tokens,
    prepare_environment,
    server_args,
)


def config(model: str = "m", role: Role = Role.AGGREGATED, **args: Any) -> EngineConfig:
    return EngineConfig(model=model, served_name="s", role=role, args=args)


def test_settings_of_the_operator_win_over_all_defaults() -> None:
    made = server_args(config(page_size=1, log_level="error", attention_backend="x"), cpu=True)
    assert (made["page_size"], made["log_level"], made["attention_backend"]) == (1, "error", "x")


def test_the_defaults_for_the_cpu_are_not_those_of_a_gpu() -> None:
    assert server_args(config(), cpu=True)["attention_backend"] == "torch_native"
    assert not {"device", "attention_backend", "max_total_tokens"} & server_args(config(), cpu=False).keys()


def test_an_idle_engine_takes_no_core_from_engines_that_compute_on_them() -> None:
    assert server_args(config(), cpu=True)["sleep_on_idle"] is True
    assert "sleep_on_idle" not in server_args(config(), cpu=False)


def test_a_node_after_the_first_is_not_kept_in_sglangs_constructor() -> None:
    environ: dict[str, str] = {}
    prepare_environment(config(node_rank=1, nnodes=2), environ, cpu=False)
    assert environ["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] == "0"
    assert not kv_events_wanted(config(node_rank=1, nnodes=2))
    environ.clear()
    prepare_environment(config(node_rank=0, nnodes=2), environ, cpu=False)
    assert "SGLANG_BLOCK_NONZERO_RANK_CHILDREN" not in environ
    assert kv_events_wanted(config(node_rank=0, nnodes=2))


def test_an_engine_of_vectors_keeps_no_prefixes_which_would_change_them(tmp_path: Path) -> None:
    assert server_args(config(is_embedding=True), cpu=False)["disable_radix_cache"] is True
    for architecture, pools in (("BertModel", True), ("LlamaForCausalLM", False)):
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
        made = server_args(EngineConfig(model=str(tmp_path), served_name="s"), cpu=False)
        assert ("disable_radix_cache" in made) == pools


def test_lower_priorities_are_sooner_as_on_every_other_engine() -> None:
    assert server_args(config(), cpu=False)["schedule_low_priority_values_first"] is True


def test_options_that_only_sglang_knows_are_passed_on_unchanged() -> None:
    given = {
        "node_rank": 1,
        "nnodes": 2,
        "dp_size": 2,
        "dllm_algorithm": "LowConfidence",
        "encoder_only": True,
        "language_only": False,
        "hicache_ratio": 2.0,
    }
    assert given.items() <= server_args(config(**given), cpu=True).items()


def test_events_and_role_become_settings() -> None:
    made = server_args(config(), cpu=False, kv_events={"publisher": "zmq"}, rendezvous={"disaggregation_mode": "prefill"})
    assert json.loads(made["kv_events_config"]) == {"publisher": "zmq"}
    assert made["disaggregation_mode"] == "prefill"


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        ({}, True),
        ({"kv_events_config": "{}"}, False),
        ({"disable_radix_cache": True}, False),
        ({"is_embedding": True}, False),
        ({"dp_size": 2}, True),  # a cache and a socket per rank
        ({"dp_size": 2, "nnodes": 2}, False),  # some of them on another machine
    ],
)
def test_events_are_wanted_where_there_is_one_cache_to_route_by(args: dict[str, Any], wanted: bool) -> None:
    assert bool(kv_events_wanted(config(**args))) is wanted


def test_the_cache_is_sized_by_the_model(tmp_path: Path) -> None:
    model = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "max_position_embeddings": 100}
    (tmp_path / "config.json").write_text(json.dumps(model))
    per_token = 2 * 2 * 4 * 16 * 4
    assert kv_tokens(config(str(tmp_path), dtype="float32"), {"dtype": "float32"}) == (512 << 20) // per_token
    assert kv_tokens(config(str(tmp_path)), {"context_length": 10_000_000}) == 20_000_000
    assert kv_tokens(config(str(tmp_path / "none")), {}) == CPU_KV_TOKENS


def test_the_device_that_is_asked_for_decides() -> None:
    assert computes_on_cpu({}, gpu=False)
    assert not computes_on_cpu({}, gpu=True)
    assert computes_on_cpu({"device": "cpu"}, gpu=True)
    assert not computes_on_cpu({"device": "cuda"}, gpu=False)


def test_the_plug_in_for_the_cpu_is_switched_on_only_there() -> None:
    cpu: dict[str, str] = {"OMP_NUM_THREADS": "3"}
    prepare_environment(config(), cpu, cpu=True)
    assert (cpu["SGLANG_USE_CPU_ENGINE"], cpu["OMP_NUM_THREADS"]) == ("1", "3")
    gpu: dict[str, str] = {}
    prepare_environment(config(), gpu, cpu=False)
    assert "SGLANG_USE_CPU_ENGINE" not in gpu
