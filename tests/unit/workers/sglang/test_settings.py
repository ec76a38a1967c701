from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.workers.engine import EngineConfig, Role
from headrace.workers.errors import EngineStartFailed
from headrace.workers.kit import adapters_of
from headrace.workers.sglang import settings
from headrace.workers.sglang.settings import (
    CPU_KV_TOKENS,
    check_arguments,
    check_names,
    computes_on_cpu,
    kv_events_wanted,
    kv_tokens,
    lora_args,
    prepare_environment,
    read_adapter,
    server_args,
    sglang_settings,
)

KNOWN = ("model_path", "dtype", "page_size", "device")


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


@pytest.mark.parametrize(
    ("args", "said"),
    [({"pagesize": 1}, "page_size"), ({"model_path": "x"}, "--model"), ({"random_seed": 1}, "--seed")],
)
def test_a_setting_that_sglang_lacks_stops_the_start_with_a_hint(args: dict[str, Any], said: str) -> None:
    with pytest.raises(EngineStartFailed, match=said):
        check_names(args, KNOWN)


def test_known_settings_and_adapters_pass() -> None:
    check_names({"dtype": "float32", "adapters": {}}, KNOWN)


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


def adapters_config(adapters: object) -> EngineConfig:
    return EngineConfig(model="m", served_name="base", args={"adapters": adapters})


def adapter(folder: Path, rank: object = 8, **more: object) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank, "target_modules": ["q_proj"], **more}))
    return str(folder)


def test_room_is_made_for_all_adapters_at_once(tmp_path: Path) -> None:
    folders = {"a": adapter(tmp_path / "a"), "b": adapter(tmp_path / "b", 16, target_modules=["v_proj", "q_proj"])}
    assert lora_args(adapters_of(adapters_config(folders), read_adapter)) == {
        "enable_lora": True,
        "max_lora_rank": 16,
        "max_loras_per_batch": 3,
        "lora_paths": [f"a={folders['a']}", f"b={folders['b']}"],
        "lora_target_modules": ["q_proj", "v_proj"],
    }


def test_without_adapters_nothing_is_set() -> None:
    assert lora_args(adapters_of(adapters_config(None), read_adapter)) == {}


SOURCES = {
    "memory.py": """
class Memory(msgspec.Struct):
    _NS_PATH = "memory"
    page_size: A[Optional[int], "The size of a page."] = None
    derived = Derived(doc="", default=None)
""",
    "model.py": """
class Model(msgspec.Struct):
    dtype: A[str, Arg(help="The type.", choices=["auto"])] = "auto"
    context_length: A[Optional[int], "The length."] = None
    trust_remote_code: A[bool, "Trust it."] = False
""",
}


def package(folder: Path, sources: dict[str, str]) -> Path:
    (folder / "srt" / "arg_groups" / "fields").mkdir(parents=True)
    for name, text in sources.items():
        (folder / "srt" / "arg_groups" / "fields" / name).write_text(text)
    return folder


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = sglang_settings(package(tmp_path, SOURCES))
    assert found.keys() == {"page_size", "dtype", "context_length", "trust_remote_code"}
    monkeypatch.setattr(settings, "sglang_settings", lambda: found)


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"contxt_length": 1}, "SGLang has no setting 'contxt_length'; close to it: context_length"),
        ({"derived": 1}, "SGLang has no setting 'derived'"),
        ({"context_length": "4k"}, "SGLang takes a whole number as context_length, not '4k'"),
        ({"trust_remote_code": "yes"}, "SGLang takes true or false as trust_remote_code, not 'yes'"),
    ],
)
def test_a_wrong_setting_is_named_with_what_it_may_be(args: dict[str, Any], said: str) -> None:
    with pytest.raises(EngineStartFailed) as refused:
        check_arguments(args)
    assert said in str(refused.value)


@pytest.mark.usefixtures("source")
def test_what_the_source_cannot_refuse_passes() -> None:
    check_arguments({"context_length": None, "page_size": 32, "dtype": "whatever SGLang says", "adapters": {}})


@pytest.mark.parametrize("sources", [{}, {"memory.py": "def ("}, {"model.py": SOURCES["model.py"]}])
def test_a_source_that_is_not_as_expected_refuses_nothing(
    sources: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sglang_settings(package(tmp_path, sources)) == {}
    monkeypatch.setattr(settings, "sglang_settings", dict)
    check_arguments({"anything": 1})


def test_the_installed_sglang_is_read_and_not_imported() -> None:
    script = (
        "import sys; from importlib.util import find_spec; from headrace.workers.sglang.settings import sglang_settings;"
        "found = sglang_settings(); there = find_spec('sglang') is not None;"
        "assert not there or (found['context_length'], found['disable_radix_cache']) == ('Optional[int]', 'bool'), found;"
        "assert not {'sglang', 'torch'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
