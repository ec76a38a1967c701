"""Settings reach vLLM unchanged or stop the start with a word that helps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.workers.engine import EngineConfig
from headrace.workers.errors import EngineError, EngineStartFailed, RequestInvalid, UnsupportedByEngine
from headrace.workers.kit import CONFIG, adapters_of
from headrace.workers.vllm import settings
from headrace.workers.vllm.settings import (
    KVBM_MODULE,
    Adapter,
    Adapters,
    check_connectors,
    check_names,
    computes_in_core,
    kv_events_wanted,
    load_adapters,
    lora_args,
    offload_without_gpu,
    prepare_environment,
    public_name,
    read_adapter,
)

KNOWN = ["block_size", "max_model_len", "max_num_seqs", "enforce_eager"]


def test_an_unknown_setting_is_named_with_what_is_spelt_like_it() -> None:
    with pytest.raises(EngineStartFailed, match=r"no setting 'max-model-length'; close to it: max_model_len"):
        check_names({"max-model-length": 1}, KNOWN)


def test_an_unknown_setting_like_no_other_is_named_alone() -> None:
    with pytest.raises(EngineStartFailed, match=r"no setting 'zzz'$"):
        check_names({"zzz": 1}, KNOWN)


def test_a_setting_with_an_option_of_its_own_is_refused() -> None:
    with pytest.raises(EngineStartFailed, match="give 'model' as --model"):
        check_names({"model": "x"}, [*KNOWN, "model"])


def test_known_settings_pass() -> None:
    check_names({"block_size": 64, "enforce_eager": False}, KNOWN)


def test_the_operators_environment_wins() -> None:
    environ = {"OMP_NUM_THREADS": "7", "VLLM_LOGGING_LEVEL": "DEBUG"}
    prepare_environment(EngineConfig(model="some/model", served_name="m"), environ)
    assert environ["OMP_NUM_THREADS"] == "7"
    assert environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert environ["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert environ["VLLM_NO_USAGE_STATS"] == "1"


def test_a_model_on_disk_needs_no_hub(tmp_path: Path) -> None:
    local: dict[str, str] = {}
    prepare_environment(EngineConfig(model=str(tmp_path), served_name="m"), local)
    assert local["HF_HUB_OFFLINE"] == "1"
    remote: dict[str, str] = {}
    prepare_environment(EngineConfig(model="some/model", served_name="m"), remote)
    assert "HF_HUB_OFFLINE" not in remote


@pytest.mark.parametrize(
    ("args", "bind", "ranks", "alone"),
    [
        ({}, "nobind", 1, True),
        ({}, "nobind", 2, False),
        ({}, "auto", 1, False),  # vLLM binds the threads of its processes
        ({}, "0-3", 1, False),
        ({"distributed_executor_backend": "mp"}, "nobind", 1, False),  # the operator's word
        ({"distributed_executor_backend": None}, "nobind", 1, True),
    ],
)
def test_without_a_gpu_the_core_computes_by_itself_where_nothing_is_gained_by_more_processes(
    args: dict[str, object], bind: str, ranks: int, alone: bool
) -> None:
    config = EngineConfig(model="m", served_name="m", args=args)
    assert computes_in_core(config, {"VLLM_CPU_OMP_THREADS_BIND": bind}, ranks=ranks) is alone


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        ({}, True),
        ({"enable_prefix_caching": True, "data_parallel_size": 1}, True),
        ({"kv_events_config": None}, False),  # switched off
        ({"kv_events_config": {"publisher": "zmq"}}, False),  # the operator's own
        ({"enable_prefix_caching": False}, False),
        ({"data_parallel_size": 2}, True),  # a cache and a socket per rank
        ({"data_parallel_size": 2, "data_parallel_rank": 1}, True),  # one rank of several engines: its own cache
        ({"data_parallel_size": 4, "data_parallel_rank": 0, "data_parallel_size_local": 2}, False),
        ({"data_parallel_size": 4, "data_parallel_start_rank": 2, "data_parallel_hybrid_lb": True}, False),
        ({"data_parallel_size": 4, "data_parallel_size_local": 2}, False),  # some on another machine
    ],
)
def test_cache_events_are_on_unless_the_operator_or_the_shape_of_the_engine_is_against_it(
    args: dict[str, object], wanted: bool
) -> None:
    assert kv_events_wanted(EngineConfig(model="m", served_name="m", args=args)) is wanted


@pytest.mark.parametrize(
    ("args", "level"),
    [
        ({}, "WARNING"),
        ({"disable_log_stats": True}, "WARNING"),
        ({"disable_log_stats": False}, "INFO"),
        ({"enable_log_requests": True}, "INFO"),
    ],
)
def test_vllm_may_speak_where_its_log_lines_were_asked_for(args: dict[str, object], level: str) -> None:
    environ: dict[str, str] = {}
    prepare_environment(EngineConfig(model="some/model", served_name="m", args=args), environ)
    assert environ["VLLM_LOGGING_LEVEL"] == level


def config(adapters: Any, served_name: str = "m") -> EngineConfig:
    return EngineConfig(model="folder", served_name=served_name, args={"adapters": adapters})


def folder(tmp_path: Path, name: str, config: Any) -> str:
    (tmp_path / name).mkdir()
    (tmp_path / name / CONFIG).write_text(config if isinstance(config, str) else json.dumps(config))
    return str(tmp_path / name)


def test_each_has_a_number_of_its_own_and_there_is_room_for_all(tmp_path: Path) -> None:
    found = adapters_of(config({"a": folder(tmp_path, "a", {"r": 4}), "b": folder(tmp_path, "b", {"r": 20})}), read_adapter)
    assert [(adapter.name, adapter.number, adapter.rank) for adapter in found.values()] == [("a", 1, 4), ("b", 2, 20)]
    assert lora_args(found) == {"enable_lora": True, "max_loras": 2, "max_lora_rank": 32}


def test_without_adapters_nothing_is_set() -> None:
    assert adapters_of(EngineConfig(model="folder", served_name="m"), read_adapter) == {}
    assert lora_args({}) == {}


def test_a_rank_that_vllm_does_not_support_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(EngineStartFailed, match="'a' has rank 513; 1 to 512 are possible"):
        adapters_of(config({"a": folder(tmp_path, "a", {"r": 513})}), read_adapter)


def test_an_unknown_adapter_is_refused_with_those_there_are(tmp_path: Path) -> None:
    found = adapters_of(config({"a": folder(tmp_path, "a", {"r": 8})}), read_adapter)
    running = Adapters(None, found, most_rank=8)
    assert running.request_of(None) is None
    with pytest.raises(RequestInvalid, match="no adapter 'b'; it has: a") as refused:
        running.request_of("b")
    assert refused.value.param == "model"


@pytest.mark.parametrize("answer", [False, ValueError("no such module")])
async def test_one_that_the_engine_does_not_take_stops_the_start(
    tmp_path: Path, answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Llm:
        async def add_lora(self, _request: object) -> bool:
            if isinstance(answer, Exception):
                raise answer
            return bool(answer)

    monkeypatch.setattr("headrace.workers.vllm.settings.Adapter.request", lambda self: self)
    found = adapters_of(config({"a": folder(tmp_path, "a", {"r": 8})}), read_adapter)
    with pytest.raises(EngineStartFailed, match="load the adapter 'a'"):
        await load_adapters(Llm(), found)


class Llm:
    """Notes what it is asked."""

    def __init__(self, answer: bool | Exception = True) -> None:
        self.answer = answer
        self.added: list[Adapter] = []
        self.removed: list[int] = []

    async def add_lora(self, adapter: Adapter) -> bool:
        if isinstance(self.answer, Exception):
            raise self.answer
        self.added.append(adapter)
        return self.answer

    async def remove_lora(self, number: int) -> bool:
        self.removed.append(number)
        return False  # vLLM had made room for another one


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Llm:
    monkeypatch.setattr("headrace.workers.vllm.settings.Adapter.request", lambda self: self)
    return Llm()


async def test_adapters_come_and_go_while_it_serves(tmp_path: Path, llm: Llm) -> None:
    first = adapters_of(config({"a": folder(tmp_path, "a", {"r": 4})}), read_adapter)
    running, more = Adapters(llm, first, most_rank=16), folder(tmp_path, "b", {"r": 16})
    assert running.changeable
    await running.load("b", more)
    await running.load("b", more)  # it is there
    assert (running.names, len(llm.added), llm.added[0].number) == (("a", "b"), 1, 2)
    assert running.request_of("b") is llm.added[0]
    await running.unload("b")
    await running.unload("b")
    assert (running.names, llm.removed) == (("a",), [2])
    with pytest.raises(RequestInvalid):
        running.request_of("b")


@pytest.mark.slow
async def test_one_that_comes_again_finds_no_blocks_of_the_one_before(tmp_path: Path) -> None:
    names = []

    class Core(Llm):
        async def add_lora(self, request: Any) -> bool:
            names.append((request.lora_name, request.lora_int_id))
            return True

    running = Adapters(Core(), {}, most_rank=8)
    for version in ("v1", "v2", "v3"):
        await running.load("a", folder(tmp_path, version, {"r": 8}))
        await running.unload("a")
    assert len({name for name, _ in names}) == len({number for _, number in names}) == 3
    assert {public_name(name) for name, _ in names} == {"a"}
    assert public_name(None) is None


async def test_what_cannot_be_loaded_changes_nothing(tmp_path: Path, llm: Llm) -> None:
    small, large = folder(tmp_path, "small", {"r": 8}), folder(tmp_path, "large", {"r": 64})
    running = Adapters(llm, {}, most_rank=16)
    for source, words in ((large, "rank 64; this vLLM was started with max_lora_rank=16"), ("/nowhere", "cannot read")):
        with pytest.raises(EngineError, match=words):
            await running.load("a", source)
    llm.answer = ValueError("no such module")
    with pytest.raises(EngineError, match="no such module"):
        await running.load("a", small)
    assert running.names == ()
    llm.answer = True
    await running.load("a", small)
    with pytest.raises(EngineError, match="already; unload it first"):
        await running.load("a", folder(tmp_path, "other", {"r": 8}))
    closed = Adapters(llm, {}, most_rank=None)
    assert not closed.changeable
    with pytest.raises(UnsupportedByEngine, match="enable_lora"):
        await closed.load("a", small)


KVBM = {"kv_connector": "DynamoConnector", "kv_connector_module_path": KVBM_MODULE, "kv_role": "kv_both"}
LMCACHE = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    there: set[str] = set()
    monkeypatch.setattr(settings, "find_spec", lambda name: object() if name in there else None)
    return there


def inside(wrapper: str, *configs: Any) -> dict[str, Any]:
    return {
        "kv_connector": wrapper,
        "kv_connector_module_path": "x",
        "kv_connector_extra_config": {"connectors": list(configs)},
    }


@pytest.mark.parametrize(
    ("args", "package"),
    [
        ({"kv_transfer_config": LMCACHE}, "lmcache"),
        ({"kv_transfer_config": LMCACHE | {"kv_connector": "LMCacheMPConnector"}}, "lmcache"),
        ({"kv_transfer_config": inside("MultiConnector", {"kv_connector": "NixlConnector"}, LMCACHE)}, "lmcache"),
        ({"kv_offloading_size": 4.0, "kv_offloading_backend": "lmcache"}, "lmcache"),
        ({"kv_transfer_config": KVBM}, "kvbm"),
        ({"kv_transfer_config": inside("MultiConnector", KVBM)}, "kvbm"),
        ({"kv_transfer_config": inside("PdConnector", {"kv_connector": "NixlConnector"})}, "kvbm"),
    ],
)
def test_a_connector_whose_package_is_absent_names_it(installed: set[str], args: dict[str, Any], package: str) -> None:
    with pytest.raises(EngineStartFailed, match=f"pip install {package}$"):
        check_connectors(args, cpu=False)
    installed.add(package)
    check_connectors(args, cpu=False)


def test_kvbm_without_its_path_is_told_which(installed: set[str]) -> None:
    with pytest.raises(EngineStartFailed, match=r"kv_connector_module_path='kvbm\.vllm_integration\.connector'"):
        check_connectors({"kv_transfer_config": {"kv_connector": "DynamoConnector"}}, cpu=False)


def test_lmcache_without_a_gpu_is_refused_with_what_works_there(installed: set[str]) -> None:
    installed.add("lmcache")
    with pytest.raises(EngineStartFailed, match="kv_offloading_size is for that"):
        check_connectors({"kv_transfer_config": LMCACHE}, cpu=True)
    check_connectors({"kv_transfer_config": LMCACHE | {"kv_connector": "LMCacheMPConnector"}}, cpu=True)


@pytest.mark.parametrize(
    "config", [None, "text", {}, {"kv_connector": None}, {"kv_connector": "Another"}, inside("MultiConnector", None, "text")]
)
def test_everything_else_is_left_to_vllm(installed: set[str], config: Any) -> None:
    check_connectors({"kv_transfer_config": config, "kv_offloading_size": 1.0}, cpu=True)


def offloading(**extra: Any) -> dict[str, Any]:
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


@pytest.mark.parametrize(
    ("args", "spec"),
    [
        ({"kv_offloading_size": 1.0}, "CpuHostSpec"),
        ({"kv_offloading_size": 1.0, "kv_transfer_config": None, "kv_offloading_backend": "native"}, "CpuHostSpec"),
        ({"kv_transfer_config": offloading(cpu_bytes_to_use=1)}, "CpuHostSpec"),
        ({"kv_transfer_config": offloading(spec_name="CPUOffloadingSpec")}, "CpuHostSpec"),
        ({"kv_transfer_config": offloading(spec_name="TieringOffloadingSpec", secondary_tiers=[])}, "CpuTieredSpec"),
    ],
)
def test_offloading_without_a_gpu_has_specs_that_start_there_and_all_else_as_given(args: dict[str, Any], spec: str) -> None:
    config = offload_without_gpu(args)["kv_transfer_config"]
    extra = config.pop("kv_connector_extra_config")
    assert config == {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    given = (args.get("kv_transfer_config") or {}).get("kv_connector_extra_config", {})
    assert extra == given | {"spec_name": spec, "spec_module_path": "headrace.workers.vllm.cpu_offload"}


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"kv_transfer_config": LMCACHE},
        {"kv_offloading_size": 1.0, "kv_offloading_backend": "lmcache"},
        {"kv_transfer_config": "text"},
    ],
)
def test_nothing_is_added_where_vllm_does_not_offload_itself(args: dict[str, Any]) -> None:
    assert offload_without_gpu(args) == {}


def test_a_spec_of_an_operator_stays() -> None:
    config = offloading(spec_name="Mine", spec_module_path="mine")
    assert offload_without_gpu({"kv_transfer_config": config}) == {"kv_transfer_config": config}
